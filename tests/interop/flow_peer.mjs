// The other side of the tests of flows: a FlowProducer and workers in Node, driven as peer.mjs is.
// usage: node flow_peer.mjs <npm package> <redis url>
import { createRequire } from "node:module";
import { obey } from "./obey.mjs";

const [library, url] = process.argv.slice(2);
const { FlowProducer, Queue, WaitingChildrenError, Worker } = createRequire(import.meta.url)(library);
const connection = { url, maxRetriesPerRequest: null };
const flows = new FlowProducer({ connection });
const queues = {};
const queueOf = (name) => (queues[name] ??= new Queue(name, { connection }));

// Jobs say in their data what shall happen to them. A result holds the results of the children.
async function processJob(job, token) {
  if (job.data.error) throw new TypeError(job.data.error);
  for (const child of job.data.add ?? []) {
    const parent = { id: job.id, queue: job.queueQualifiedName };
    await queueOf(child.queue).add(child.name, child.data, { jobId: child.id, parent });
  }
  if (job.data.add && (await job.moveToWaitingChildren(token))) throw new WaitingChildrenError();
  const ignored = Object.values(await job.getIgnoredChildrenFailures());
  return { own: job.data.result ?? null, children: Object.values(await job.getChildrenValues()).sort(), ignored };
}

async function readJob({ queue, id }) {
  const job = await queueOf(queue).getJob(id);
  if (!job) return null;
  const { attemptsMade, failedReason, opts, parent, parentKey, returnvalue } = job;
  return { attemptsMade, failedReason, opts, parent, parentKey, returnvalue, state: await job.getState() };
}

// Work on the queue until `count` jobs have ended for good.
async function work({ queue, count }) {
  const worker = new Worker(queue, processJob, { connection, drainDelay: 1 });
  worker.on("error", () => {});
  await new Promise((resolve) => {
    let ended = 0;
    const countEnded = (job) => job.finishedOn && (ended += 1) >= count && resolve();
    worker.on("completed", countEnded);
    worker.on("failed", countEnded);
  });
  await worker.close();
}

const calls = {
  add: async (tree) => void (await flows.add(tree)),
  read: readJob,
  work: async (each) => void (await Promise.all(each.map(work))),
  // Run one job of the queue once, whatever becomes of it.
  step: async (queue) => {
    const worker = new Worker(queue, null, { connection });
    const job = await worker.getNextJob("step");
    await processJob(job, "step").then(
      (result) => job.moveToCompleted(result, "step", false),
      (error) => error instanceof WaitingChildrenError || job.moveToFailed(error, "step", false),
    );
    await worker.close();
  },
};

await obey(calls);
await Promise.all([flows, ...Object.values(queues)].map((one) => one.close()));
