// The other side of the tests: one BullMQ queue in Node, driven by JSON lines on stdin, answering on stdout.
// usage: node peer.mjs <npm package> <redis url> <queue> [<prefix>]
import { createRequire } from "node:module";
import { setTimeout } from "node:timers/promises";
import { obey } from "./obey.mjs";
import { remembering } from "./telemetry.mjs";

const [library, url, name, prefix = "bull"] = process.argv.slice(2);
// Not `import`: of each version there are 150 files to be imported, which takes a third longer.
const { Queue, UnrecoverableError, Worker } = createRequire(import.meta.url)(library);
const connection = { url, maxRetriesPerRequest: null };
const queue = new Queue(name, { connection, prefix });
const runs = [];
let worker;
let ended = 0;
let onEnded = () => {};
let inside = 0;
let peak = 0;

// Jobs say in their data what shall happen to them.
async function processJob(job) {
  peak = Math.max(peak, ++inside);
  if (job.data.ms) await setTimeout(job.data.ms);
  inside -= 1;
  runs.push({ id: job.id, name: job.name, data: job.data, attemptsMade: job.attemptsMade, at: Date.now() });
  if (job.data.unrecoverable) throw new UnrecoverableError(job.data.unrecoverable);
  if (job.attemptsMade < (job.data.failures ?? 0)) throw new TypeError(job.data.message ?? "failed on purpose");
  return job.data.result;
}

function countEnded(job) {
  if (job.finishedOn) ended += 1;
  onEnded();
}

async function readJob(id) {
  const job = await queue.getJob(id);
  if (!job) return null;
  const { attemptsMade, data, failedReason, name, opts, priority, returnvalue, stacktrace } = job;
  const { deduplicationId, delay, parentKey, timestamp } = job;
  const facts = { deduplicationId, delay, parentKey, timestamp, state: await job.getState() };
  return { attemptsMade, data, failedReason, name, opts, priority, returnvalue, stacktrace, ...facts };
}

const calls = {
  add: async (jobs) => (await queue.addBulk(jobs)).map((job) => job.id),
  read: (ids) => Promise.all(ids.map(readJob)),
  peak: () => peak,
  workers: async () => (await queue.getWorkers()).map((worker) => worker.rawname),
  logs: async (id) => (await queue.getJobLogs(id)).logs,
  counted: async (kind) => (await queue.getMetrics(kind)).meta.count,
  retry: async (id) => void (await (await queue.getJob(id)).retry()),
  manage: ([method, ...values]) => queue[method](...values),
  // Add jobs with telemetry, and tell its spans.
  traceAdd: async (jobs) => {
    const { spans, telemetry } = remembering();
    const traced = new Queue(name, { connection, prefix, telemetry });
    for (const job of jobs) await traced.add(job.name, job.data, job.opts);
    await traced.close();
    return spans;
  },
  // Work as `work` does, with telemetry, and tell its spans.
  traceWork: async (options) => {
    const { spans, telemetry } = remembering();
    await calls.work({ ...options, telemetry });
    return spans;
  },
  // Take `count` jobs that never end.
  hold: ({ count, ...options }) =>
    new Promise((resolve) => {
      worker = new Worker(name, () => new Promise(() => {}), { connection, prefix, concurrency: count, ...options });
      worker.on("active", () => --count || resolve());
      worker.on("error", () => {});
    }),
  // Work until `count` jobs have ended for good, and tell every run.
  work: async ({ count, ...options }) => {
    worker = new Worker(name, processJob, { connection, prefix, drainDelay: 1, ...options });
    worker.on("completed", countEnded);
    worker.on("failed", countEnded);
    worker.on("error", () => {});
    await new Promise((resolve) => {
      onEnded = () => ended >= count && resolve();
    });
    await worker.close();
    return runs;
  },
};

await obey(calls);
await queue.close();
