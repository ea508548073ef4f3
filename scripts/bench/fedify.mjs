// Sends activities by Fedify, with its queue in the process; what and to whom is JSON on stdin, see bench_activitypub.py.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const required = createRequire(new URL("../../tests/interop/activitypub/package.json", import.meta.url));
const fedify = required("@fedify/fedify");
const { Create, Note, Person, PUBLIC_COLLECTION } = required("@fedify/vocab");

const task = JSON.parse(readFileSync(0, "utf8"));
const hanging = new Set(task.hanging.map((server) => `${server}/inbox`));

// Keeps messages until all are owed, and tells when so many have gone to servers that do not hang.
class Queue extends fedify.ParallelMessageQueue {
  kept = null;
  done = 0;
  awaited = Infinity;
  tell = () => {};

  async enqueue(message, options) {
    return this.enqueueMany([message], options);
  }

  async enqueueMany(messages, options) {
    if (this.kept === null) return super.enqueueMany(messages, options);
    this.kept.push(...messages);
  }

  listen(handler, options) {
    return super.listen(async (message) => {
      await handler(message);
      if (!hanging.has(message.inbox) && ++this.done === this.awaited) this.tell();
    }, options);
  }

  async release(limit) {
    const messages = this.kept;
    this.kept = null;
    this.done = 0;
    this.awaited = messages.filter((message) => !hanging.has(message.inbox)).length;
    const over = new Promise((resolve) => (this.tell = resolve));
    const timer = setTimeout(this.tell, limit * 1000);
    await super.enqueueMany(messages);
    await over;
    clearTimeout(timer);
    return this.done;
  }
}

const queue = new Queue(new fedify.InProcessMessageQueue(), task.concurrency);
const federation = fedify.createFederation({
  kv: new fedify.MemoryKvStore(),
  queue: { outbox: queue },
  manuallyStartQueue: true,
  allowPrivateAddress: true,
  firstKnock: "draft-cavage-http-signatures-12",
});
const pair = await fedify.generateCryptoKeyPair("RSASSA-PKCS1-v1_5");
federation
  .setActorDispatcher("/users/{identifier}", (context, identifier) => new Person({ id: context.getActorUri(identifier) }))
  .setKeyPairsDispatcher(() => [pair]);
const context = federation.createContext(new URL(task.own), undefined);

const activity = () => {
  const [actor, id] = [context.getActorUri("alice"), new URL(`/users/alice/notes/${crypto.randomUUID()}`, task.own)];
  const audience = { to: PUBLIC_COLLECTION, cc: new URL(`${actor}/followers`) };
  const note = new Note({ id, attribution: actor, ...audience, content: task.words });
  return new Create({ id: new URL(`${id}#create`), actor, ...audience, object: note });
};

const recipient = (server) => ({
  id: new URL("/users/bob", server),
  inboxId: new URL("/users/bob/inbox", server),
  endpoints: { sharedInbox: new URL("/inbox", server) },
});

const cpuSeconds = () => Object.values(process.cpuUsage()).reduce((a, b) => a + b) / 1e6;

const sent = async (servers, each) => {
  const to = servers.map(recipient);
  queue.kept = [];
  for (let number = 0; number < each; number++) {
    await context.sendActivity({ identifier: "alice" }, to, activity(), { preferSharedInbox: true, fanout: "skip" });
  }
  const [started, cpu] = [performance.now(), cpuSeconds()];
  const done = await queue.release(task.limit);
  const spent = ((cpuSeconds() - cpu) * 1000) / Math.max(done, 1);
  return {
    deliveries_per_s: (done * 1000) / (performance.now() - started),
    cpu_each_ms: spent,
    worker_cpu_each_ms: spent,
    memory_mib: process.resourceUsage().maxRSS / 1024,
  };
};

federation.startQueue(undefined, { queue: "outbox" });
await sent(task.servers.filter((server) => !task.hanging.includes(server)), task.warm);
console.log(JSON.stringify(await sent(task.servers, task.each)));
process.exit(0);
