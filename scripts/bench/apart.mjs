// A producer or worker of npm `bullmq` or `bull`, told what to do by lines of JSON; see bench_apart.py.
// usage: node apart.mjs <npm package> <redis url> <concurrency>
import { createRequire } from "node:module";
import { obey } from "../../tests/interop/obey.mjs";

const [name, url, concurrency] = process.argv.slice(2);
const required = createRequire(new URL("../../tests/interop/package.json", import.meta.url))(name);
const BATCH = 500;
const DRIP_MS = 10;
const KEPT = { age: 3600 };

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const cpuSeconds = () => Object.values(process.cpuUsage()).reduce((a, b) => a + b) / 1e6;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const data = () => ({ payload: "x".repeat(1000), at: seconds() });
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];

const connection = { url, maxRetriesPerRequest: null };
const { hostname, port } = new URL(url);

// `add` and `addMany` add jobs, `work` runs `handle` for jobs until the function that it returns is called.
const bullmq = () => {
  const queue = new required.Queue("bench", { connection });
  const opts = { removeOnComplete: KEPT, removeOnFail: KEPT };
  return {
    ready: () => queue.waitUntilReady(),
    add: () => queue.add("bench", data(), opts),
    addMany: (count) => queue.addBulk(Array.from({ length: count }, () => ({ name: "bench", data: data(), opts }))),
    work: (handle) => {
      const worker = new required.Worker("bench", handle, { connection, concurrency: Number(concurrency) });
      return () => worker.close();
    },
  };
};

// Bull 1.x keeps what is completed for ever, or not at all. Its one consumer cannot be stopped and started again: between
// two measurements it holds the first jobs, as many as it may have at once.
const bull = () => {
  const queue = new required("bench", Number(port), hostname, {});
  let open;
  let gate = new Promise((resolve) => (open = resolve));
  let processing = false;
  return {
    ready: () => queue._initializing,
    add: () => queue.add(data()),
    addMany: (count) => Promise.all(Array.from({ length: count }, () => queue.add(data()))),
    work: (handle) => {
      open(handle);
      if (!processing) queue.process(Number(concurrency), async (job) => (await gate)(job));
      processing = true;
      return () => {
        gate = new Promise((resolve) => (open = resolve));
      };
    },
  };
};

const bull4 = () => {
  const queue = new required("bench", url);
  const opts = { removeOnComplete: KEPT, removeOnFail: KEPT };
  let given;
  return {
    ready: () => queue.isReady(),
    add: () => queue.add(data(), opts),
    addMany: (count) => queue.addBulk(Array.from({ length: count }, () => ({ data: data(), opts }))),
    work: (handle) => {
      if (given === undefined) queue.process(Number(concurrency), (job) => given(job));
      else queue.resume(true);
      given = handle;
      return () => queue.pause(true);
    },
  };
};

const system = { bullmq, "bullmq-6": bullmq, "bull-4": bull4, "bull-1.1.3": bull }[name]();

const calls = {
  one_by_one: async (count) => {
    const began = seconds();
    for (let added = 0; added < count; added += 1) await system.add();
    return { seconds: seconds() - began };
  },
  in_bulk: async (count) => {
    const began = seconds();
    for (let added = 0; added < count; added += BATCH) await system.addMany(Math.min(BATCH, count - added));
    return { seconds: seconds() - began };
  },
  drip: async (count) => {
    for (let added = 0; added < count; added += 1) {
      await sleep(DRIP_MS);
      await system.add();
    }
  },
  work: async (count) => {
    const waits = [];
    const cpu = cpuSeconds();
    let began;
    let ended;
    let stop;
    await new Promise((resolve) => {
      stop = system.work(async (job) => {
        ended = seconds();
        began ??= ended;
        if (waits.push((ended - job.data.at) * 1000) === count) resolve();
      });
    });
    await stop();
    return { seconds: ended - began, cpu_seconds: cpuSeconds() - cpu, median_wait_ms: median(waits) };
  },
};

await system.ready();
await obey(calls);
process.exit();
