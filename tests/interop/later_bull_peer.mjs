// The other side of the tests: one queue of Bull 3 or 4 in Node, driven by JSON lines on stdin, answering on stdout.
// usage: node later_bull_peer.mjs <npm package> <redis url> <queue>
import { createRequire } from "node:module";
import { obey } from "./obey.mjs";

const [library, url, name] = process.argv.slice(2);
const Queue = createRequire(import.meta.url)(library);
const queue = new Queue(name, url);
queue.on("error", () => {});

const calls = {
  // With a name or without one, as its applications do.
  add: async (jobs) =>
    (await Promise.all(jobs.map(({ name, data, opts }) => (name ? queue.add(name, data, opts) : queue.add(data, opts))))).map(
      (job) => String(job.id),
    ),
  // Work until one job has completed.
  work: () =>
    new Promise((resolve) => {
      queue.on("completed", () => resolve());
      queue.process("*", async () => 1);
    }),
  counts: () => queue.getJobCounts(),
  pause: () => queue.pause(),
};

await queue.isReady();
await obey(calls);
process.exit();
