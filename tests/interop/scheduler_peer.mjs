// The other side of the tests of job schedulers: one BullMQ queue in Node, driven by JSON lines on stdin.
// usage: node scheduler_peer.mjs <npm package> <redis url> <queue>
import { createRequire } from "node:module";
import { obey } from "./obey.mjs";

const [module, url, name] = process.argv.slice(2);
const { Queue, Worker } = createRequire(import.meta.url)(module);
const theirs = createRequire(import.meta.resolve(module));
const cron = theirs("cron-parser");
const parse = cron.parseExpression ?? cron.CronExpressionParser.parse.bind(cron.CronExpressionParser);
const connection = { url, maxRetriesPerRequest: null };
const queue = new Queue(name, { connection });

// As BullMQ's own strategy does it, for each occurrence anew. What cannot be read is null, what never comes ends the list.
function occurrences(pattern, tz, at, count) {
  const found = [];
  try {
    while (found.length < count) {
      const interval = parse(pattern, { tz, currentDate: new Date(found.at(-1) ?? at) });
      try {
        found.push(interval.next().getTime());
      } catch {
        break;
      }
    }
  } catch {
    return null;
  }
  return found;
}

const calls = {
  add: async ([job, data, opts]) => (await queue.add(job, data, opts)).id,
  upsert: async ([id, repeat, template]) => (await queue.upsertJobScheduler(id, repeat, template))?.id,
  remove: (id) => queue.removeJobScheduler(id),
  scheduler: (id) => queue.getJobScheduler(id),
  schedulers: () => queue.getJobSchedulers(),
  options: async (id) => (await queue.getJob(id)).opts,
  promote: async (id) => (await queue.getJob(id)).promote(),
  occurrences: ([cases, count]) => cases.map(([pattern, tz, at]) => occurrences(pattern, tz, at, count)),
  // Work until `count` jobs have completed, and tell them.
  work: async (count) => {
    const done = [];
    const worker = new Worker(name, async () => {}, { connection, drainDelay: 1 });
    worker.on("error", () => {});
    await new Promise((resolve) => {
      worker.on("completed", (job) => done.push({ id: job.id, name: job.name, data: job.data }) === count && resolve());
    });
    await worker.close();
    return done;
  },
};

await obey(calls);
await queue.close();
