// A server of the fediverse by Fedify, on a port of loopback, driven by JSON lines on stdin (see ../obey.mjs).
// It notes every request to its inboxes, every activity that it handed to its listeners, and every request to others'.
// It follows and is followed. The second argument names the signature that it tries first, if not Fedify's own choice.
import { createServer } from "node:http";
import {
  InProcessMessageQueue,
  MemoryKvStore,
  createExponentialBackoffPolicy,
  createFederation,
  generateCryptoKeyPair,
} from "@fedify/fedify";
import { Accept, Activity, Create, Endpoints, Follow, Note, Person, Undo } from "@fedify/vocab";
import { obey } from "../obey.mjs";

const port = Number(process.argv[2]);
const firstKnock = process.argv[3];
const requests = [];
const heard = [];
const sent = [];
const follows = new Map(); // Those that bob sent, by their ids, as long as they are not undone.
const following = new Set();
const followers = new Set();
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
const federation = createFederation({
  kv: memory,
  queue: { outbox: new InProcessMessageQueue() },
  outboxRetryPolicy: createExponentialBackoffPolicy({
    initialDelay: { milliseconds: 200 },
    maxDelay: { milliseconds: 200 },
    maxAttempts: 10_000,
  }),
  circuitBreaker: false, // It comes back at once to whoever has been away.
  allowPrivateAddress: true,
  firstKnock,
});

federation.setActorDispatcher("/users/{identifier}", async (context, identifier) =>
  new Person({
    id: context.getActorUri(identifier),
    preferredUsername: identifier,
    inbox: context.getInboxUri(identifier),
    endpoints: new Endpoints({ sharedInbox: context.getInboxUri() }),
    publicKey: (await context.getActorKeyPairs(identifier))[0].cryptographicKey,
  }))
  .setKeyPairsDispatcher(async () => [await (pair ??= generateCryptoKeyPair("RSASSA-PKCS1-v1_5"))]);
federation.setFollowingDispatcher("/users/{identifier}/following", () => ({ items: [...following].map(url) }));
federation.setFollowersDispatcher("/users/{identifier}/followers", () => ({
  items: [...followers].map((id) => ({ id: url(id), inboxId: null })),
}));

federation.setInboxListeners("/users/{identifier}/inbox", "/inbox").on(Activity, async (context, activity) => {
  const [actor, object] = [activity.actorId.href, activity.objectId?.href ?? null];
  heard.push({ id: activity.id.href, type: activity.constructor.name, object });
  if (activity instanceof Accept && follows.get(object) === actor) following.add(actor);
  if (activity instanceof Undo) followers.delete(actor);
  if (!(activity instanceof Follow)) return;
  followers.add(actor);
  await send(await activity.getActor(context), new Accept({ ...made("accepts"), object: activity }));
});

const url = (text) => new URL(text);
const bob = () => federation.createContext(new URL(`http://127.0.0.1:${port}`), null);
const send = (to, activity) => bob().sendActivity({ identifier: "bob" }, to, activity);

// The id of something new of bob's, and himself.
function made(kind, name = crypto.randomUUID()) {
  const actor = bob().getActorUri("bob");
  return { id: new URL(`${actor}/${kind}/${name}`), actor };
}

async function follow(actor) {
  const activity = new Follow({ ...made("follows"), object: url(actor) });
  follows.set(activity.id.href, actor);
  await send(await bob().lookupObject(actor), activity);
}

async function unfollow(actor) {
  const [[id]] = [...follows].filter(([, followed]) => followed === actor);
  follows.delete(id);
  following.delete(actor);
  const object = new Follow({ ...made("follows"), id: url(id), object: url(actor) });
  await send(await bob().lookupObject(actor), new Undo({ ...made("undos"), object }));
}

async function create({ to, name }) {
  const { id, actor } = made("notes", name);
  const object = new Note({ id, attribution: actor, to: url(to), content: name });
  await send(await bob().lookupObject(to), new Create({ ...made("creates", name), to: url(to), object }));
}

// Every request by which it sends something, with the bytes that others get, and what they answer.
const ask = globalThis.fetch;
globalThis.fetch = async (request, options) => {
  if (request.method !== "POST") return await ask(request, options);
  const headers = Object.fromEntries(request.headers);
  const noted = { url: request.url, headers, body: await request.clone().text(), status: null };
  sent.push(noted);
  const response = await ask(request, options);
  noted.status = response.status;
  return response;
};

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
  sent: () => sent,
  follow,
  unfollow,
  create,
});
