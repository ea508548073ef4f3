// The other side of the tests: one Bull 1.x queue in Node, driven by JSON lines on stdin, answering on stdout.
// usage: node bull_peer.mjs <bull version> <redis port> <queue>
import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { obey } from "./obey.mjs";

const [version, port, name] = process.argv.slice(2);
const Queue = createRequire(import.meta.url)(`bull-${version}`);
const queue = new Queue(name, Number(port), "127.0.0.1", {});
const runs = [];
const heard = [];
const held = new Map();
let ledger;

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const note = (line) => ledger && appendFileSync(ledger, JSON.stringify(line) + "\n");

// Jobs say in their data what shall happen to them.
async function processJob(job) {
  const run = { id: String(job.jobId), data: job.data, attemptsMade: job.attemptsMade, at: seconds(), ended: null };
  runs.push(run);
  note({ what: "began", id: run.id, at: run.at, made: run.attemptsMade });
  // Since this worker read the job, and before it took the lock, others may have written down failures.
  const written = ledger && Number(await queue.client.hgetAsync(queue.toKey(run.id), "attemptsMade"));
  for (const value of job.data.progress ?? []) await job.progress(value);
  if (job.data.ms) await sleep(job.data.ms);
  if (job.data.hold) await new Promise((resolve) => held.set(run.id, resolve));
  run.ended = seconds();
  const failed = job.attemptsMade < (job.data.failures ?? 0);
  note({ what: failed ? "failed" : "completed", id: run.id, at: run.ended, made: run.attemptsMade, written });
  if (failed) throw new TypeError(job.data.message ?? "failed on purpose");
  return job.data.result;
}

async function find(id) {
  const job = await queue.getJob(id);
  if (!job) throw new Error(`Node finds no job ${id}`);
  return job;
}

const calls = {
  add: (jobs) => Promise.all(jobs.map(async ({ data, opts }) => String((await queue.add(data, opts)).jobId))),
  read: async (id) => {
    const job = await queue.getJob(id);
    if (!job) return null;
    const { attempts, attemptsMade, data, delay, failedReason, opts, returnvalue, stacktrace } = job;
    const state = await job.getState();
    const progress = job.progress();
    return { attempts, attemptsMade, data, delay, failedReason, opts, progress, returnvalue, stacktrace, state };
  },
  // Returns at once; `lock` and `sweep` are milliseconds, each Queue object's own. With `once` the first run pauses
  // this process, whose loop then has nothing on its way.
  process: ({ concurrency, lock, sweep, stalls, once }) => {
    queue.LOCK_RENEW_TIME = lock;
    queue.STALLED_JOB_CHECK_INTERVAL = sweep;
    if (stalls) queue.MAX_STALLED_JOB_COUNT = stalls;
    queue.process(concurrency, (job) => {
      if (once) queue.pause(true, true);
      return processJob(job);
    });
  },
  runs: () => runs,
  // A held handler of this job ends.
  release: (id) => held.get(id)(),
  pause: () => queue.pause(),
  resume: () => queue.resume(),
  retry: async (id) => void (await (await find(id)).retry()),
  remove: async (id) => void (await (await find(id)).remove()),
  promote: async (id) => void (await (await find(id)).promote()),
  clean: async ({ grace, state }) => (await queue.clean(grace, state)).map(String),
  counts: async () => {
    const read = async (...names) => Promise.all(names.map((one) => queue.client.llenAsync(queue.toKey(one))));
    const [wait, paused, active] = await read("wait", "paused", "active");
    return { wait, paused, active, delayed: await queue.getDelayedCount(), completed: await queue.getCompletedCount() };
  },
  // What other processes publish on these events' channels is kept, as Bull hands it to a listener.
  listen: async (events) => {
    for (const event of events) {
      queue.on(event, (job, extra) => heard.push({ event, id: job.jobId, data: job.data, made: job.attemptsMade, extra }));
      await queue.eclient.subscribeAsync(`${event}@${name}`);
    }
    for (const event of ["paused", "resumed"]) queue.on(event, () => heard.push({ event }));
  },
  heard: () => heard,
  // Runs, and moments at which this process did not get around to renewing its locks, are written down as they happen.
  ledger: ({ path, late }) => {
    ledger = path;
    let last = seconds();
    setInterval(() => {
      const passed = seconds() - last;
      last += passed;
      if (passed > late) note({ what: "late", at: last, seconds: passed });
    }, 50);
  },
};

// As an application would: errors of a connection are no reason to end.
queue.on("error", (error) => console.error("queue error:", error));
await queue._initializing;
await obey(calls);
process.exit();
