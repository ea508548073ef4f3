/* The shop on BullMQ.

node old.mjs work
node old.mjs
*/

import { Queue, QueueEvents, Worker } from "bullmq";

const connection = { url: process.env.REDIS_URL ?? "redis://127.0.0.1:6379/0", maxRetriesPerRequest: null };
const queue = new Queue("shop", { connection });

const handlers = {
  send: async (job) => `sent ${job.data.text} to ${job.data.to}`,
  charge: async (job) => {
    const attempt = job.attemptsMade + 1;
    if (attempt === 1) throw new Error("the bank is busy");
    return `charged order ${job.data.order} in attempt ${attempt}`;
  },
  clean_up: async () => console.log("cleaned up"),
};

if (process.argv[2] === "work") {
  new Worker("shop", (job) => handlers[job.name](job), { connection, concurrency: 10 });
  await queue.upsertJobScheduler("clean-up", { every: 1000 }, { name: "clean_up" }); // or { pattern: "0 3 * * *" }
} else {
  const events = new QueueEvents("shop", { connection, lastEventId: "0-0" }); // "$" misses what ends as it begins
  const ended = async (name, data, options) => (await queue.add(name, data, options)).waitUntilFinished(events, 30_000);
  console.log(await ended("send", { to: "bob", text: "hello" }));
  console.log(await ended("charge", { order: 7 }, { attempts: 5, backoff: { type: "fixed", delay: 1000 } }));
  console.log(await ended("send", { to: "carol", text: "good morning" }, { delay: 1000 }));
  await events.close();
  await queue.close();
}
