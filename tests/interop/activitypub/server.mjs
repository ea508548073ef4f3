// A server of the fediverse by Fedify, on a port of loopback, driven by JSON lines on stdin (see ../obey.mjs).
// It notes every request to its inboxes, and every activity that it handed to its listeners.
import { createServer } from "node:http";
import { MemoryKvStore, createFederation, generateCryptoKeyPair } from "@fedify/fedify";
import { Activity, Endpoints, Person } from "@fedify/vocab";
import { obey } from "../obey.mjs";

const port = Number(process.argv[2]);
const requests = [];
const heard = [];
let refusal = null; // What every request to an inbox gets instead: `status`, and `headers` if it has any.
let kinds = ["cavage", "rfc9421"]; // The signatures that it knows; it answers 401 to others.
let stumbles = null; // The type of the activities of which each is answered by 500 the first time.
const stumbled = new Set();
let pair; // With which it asks for senders, where an activity comes to somebody's own inbox.

// Remembers for ten minutes that it could not fetch a key, as Fedify does, unless it is told to forget that.
class Memory extends MemoryKvStore {
  failures = new Map();

  async set(key, value, options) {
    if (options?.ttl != null && key.includes("publicKey")) this.failures.set(key.join(" "), key);
    await super.set(key, value, options);
  }

  async forget() {
    for (const key of this.failures.values()) await this.delete(key);
    this.failures.clear();
  }
}

const memory = new Memory();
const federation = createFederation({ kv: memory, allowPrivateAddress: true });

federation.setActorDispatcher("/users/{identifier}", (context, identifier) =>
  new Person({
    id: context.getActorUri(identifier),
    preferredUsername: identifier,
    inbox: context.getInboxUri(identifier),
    endpoints: new Endpoints({ sharedInbox: context.getInboxUri() }),
  }))
  .setKeyPairsDispatcher(async () => [await (pair ??= generateCryptoKeyPair("RSASSA-PKCS1-v1_5"))]);

federation.setInboxListeners("/users/{identifier}/inbox", "/inbox").on(Activity, (_, activity) => {
  heard.push({ id: activity.id.href, type: activity.constructor.name, object: activity.objectId?.href ?? null });
});

async function answer(incoming, body) {
  const { method, url, headers } = incoming;
  if (method !== "POST") return await federation.fetch(asked(incoming), { contextData: null });
  const kind = headers["signature-input"] == null ? "cavage" : "rfc9421";
  const { id, type } = JSON.parse(body);
  const given = refusal ?? (kinds.includes(kind) ? stumble(id, type) : { status: 401 });
  const response = given == null
    ? await federation.fetch(asked(incoming, body), { contextData: null })
    : new Response("", given);
  const key = /key[Ii]d="([^"]*)"/.exec(headers["signature-input"] ?? headers.signature)?.[1] ?? null;
  requests.push({ path: url, kind, key, status: response.status, id });
  return response;
}

function stumble(id, type) {
  if (type !== stumbles || stumbled.has(id)) return null;
  stumbled.add(id);
  return { status: 500 };
}

const asked = ({ method, url, headers }, body) =>
  new Request(`http://${headers.host}${url}`, { method, headers: new Headers(headers), body });

const server = createServer(async (incoming, outgoing) => {
  const body = Buffer.concat(await incoming.toArray());
  const response = await answer(incoming, body);
  outgoing.writeHead(response.status, Object.fromEntries(response.headers));
  outgoing.end(Buffer.from(await response.arrayBuffer()));
});

const listen = () => new Promise((done) => server.listen(port, "127.0.0.1", done));

const leave = () =>
  new Promise((done) => {
    server.close(done);
    server.closeAllConnections();
  });

await listen();
await obey({
  listen,
  leave,
  refuse: (given) => void (refusal = given),
  know: (given) => void (kinds = given),
  stumble: (given) => void (stumbles = given),
  forget: () => memory.forget(),
  requests: () => requests,
  heard: () => heard,
});
