// A producer and worker of one BullMQ queue in Node, driven by JSON lines on stdin, answering on stdout.
// usage: node bullmq_crew.mjs <package: bullmq or bullmq-6> <redis url> <queue>
import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { obey } from "./obey.mjs";

const [name, url, queueName] = process.argv.slice(2);
const { FlowProducer, Queue, Worker } = createRequire(import.meta.url)(name);
const connection = { url, maxRetriesPerRequest: null };
const queue = new Queue(queueName, { connection });
const flows = new FlowProducer({ connection });
let ledger;

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const note = (line) => ledger && appendFileSync(ledger, JSON.stringify(line) + "\n");

// Jobs say in their data what shall happen to them.
async function processJob(job) {
  note({ what: "began", id: job.id, at: seconds(), made: job.attemptsMade });
  await sleep(job.data.ms ?? 0);
  const failed = job.attemptsMade < (job.data.failures ?? 0);
  note({ what: failed ? "failed" : "completed", id: job.id, at: seconds(), made: job.attemptsMade });
  if (failed) throw new TypeError("failed on purpose");
  return job.data.result;
}

const flow = async (tree) => {
  const { job, children } = await flows.add(tree);
  return [job.id, ...children.map((child) => child.job.id)];
};

const calls = {
  add: async (jobs) => (await queue.addBulk(jobs)).map((job) => job.id),
  flow,
  schedule: async ({ id, every, data }) => void (await queue.upsertJobScheduler(id, { every }, { name: id, data })),
  unschedule: (id) => queue.removeJobScheduler(id),
  // Returns at once; `lock` and `sweep` are milliseconds.
  process: ({ concurrency, lock, sweep, stalls }) => {
    const worker = new Worker(queueName, processJob, {
      connection,
      concurrency,
      drainDelay: 1,
      lockDuration: lock,
      maxStalledCount: stalls,
      stalledInterval: sweep,
    });
    worker.on("error", () => {});
  },
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
queue.on("error", () => {});
flows.on("error", () => {});
await obey(calls);
process.exit();
