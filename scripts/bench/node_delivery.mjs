// A worker that delivers what ours delivers, step by step, with what a Node programmer would take for it: bullmq, pg,
// undici and node:crypto. Told what to do by lines of JSON, and run by in_node.py; see bench_delivery.py.
//
// To be fair it has what makes such a worker fast: one statement, and so one round trip, for each of the two writes of a
// delivery, prepared once per connection; a keep-alive agent; keys that are parsed once; servers that are read once in
// five seconds. A follow that is accepted already is not written again. It leaves out what our worker does for servers
// that fail: nothing here fails, and a failure is only written down.
import { createRequire } from "node:module";
import * as crypto from "node:crypto";
import { obey } from "../../tests/interop/obey.mjs";

const require = createRequire(new URL("../../tests/interop/package.json", import.meta.url));
const { Queue, Worker } = require("bullmq-6");
const { Pool } = require("pg");
const { Agent, request } = require("undici");

const env = process.env;
const CONCURRENCY = Number(env.FEDERATION_DELIVERY_CONCURRENCY);
const OWN_URL = env.BETTER_AUTH_URL;
const ALLOWED = new Set(env.DEV_ALLOWED_HOSTNAMES.split(","));
const TIMEOUT_MS = 15_000;
const CACHED_MS = 5_000;
const CHECKED_MS = 60_000;
const LOOK_MS = 50;
const MAX_ACK_BYTES = 1024 * 1024;

// --- cryptography ---

const base64url = (text) => Buffer.from(text, "base64").toString("base64url");
const publicKey = (crv, raw) => crypto.createPublicKey({ format: "jwk", key: { kty: "OKP", crv, x: raw } });
const privateKey = (crv, x, d) => crypto.createPrivateKey({ format: "jwk", key: { kty: "OKP", crv, x, d } });

const SIGNING = privateKey(
  "Ed25519",
  base64url(env.FEDERATION_PUBLIC_KEY),
  Buffer.from(env.FEDERATION_PRIVATE_KEY, "base64").subarray(0, 32).toString("base64url"), // the seed
);
const OPENING = privateKey(
  "X25519",
  base64url(env.FEDERATION_ENCRYPTION_PUBLIC_KEY),
  base64url(env.FEDERATION_ENCRYPTION_PRIVATE_KEY),
);
const SALT = Buffer.from("sipher-federation-v1-salt");
const INFO = Buffer.from("sipher-federation-v1-aes");

// HSalsa20 of sixteen zero bytes: what NaCl makes of an X25519 point.
const SIGMA = [0x61707865, 0x3320646e, 0x79622d32, 0x6b206574];
const ROUNDS = 20;
const hsalsa20 = (point) => {
  const k = (at) => point.readInt32LE(at * 4);
  let [x0, x5, x10, x15] = SIGMA;
  let [x1, x2, x3, x4] = [k(0), k(1), k(2), k(3)];
  let [x6, x7, x8, x9] = [0, 0, 0, 0];
  let [x11, x12, x13, x14] = [k(4), k(5), k(6), k(7)];
  const turn = (a, by) => (a << by) | (a >>> (32 - by));
  for (let round = 0; round < ROUNDS; round += 2) {
    x4 ^= turn((x0 + x12) | 0, 7); x8 ^= turn((x4 + x0) | 0, 9); x12 ^= turn((x8 + x4) | 0, 13); x0 ^= turn((x12 + x8) | 0, 18);
    x9 ^= turn((x5 + x1) | 0, 7); x13 ^= turn((x9 + x5) | 0, 9); x1 ^= turn((x13 + x9) | 0, 13); x5 ^= turn((x1 + x13) | 0, 18);
    x14 ^= turn((x10 + x6) | 0, 7); x2 ^= turn((x14 + x10) | 0, 9); x6 ^= turn((x2 + x14) | 0, 13); x10 ^= turn((x6 + x2) | 0, 18);
    x3 ^= turn((x15 + x11) | 0, 7); x7 ^= turn((x3 + x15) | 0, 9); x11 ^= turn((x7 + x3) | 0, 13); x15 ^= turn((x11 + x7) | 0, 18);
    x1 ^= turn((x0 + x3) | 0, 7); x2 ^= turn((x1 + x0) | 0, 9); x3 ^= turn((x2 + x1) | 0, 13); x0 ^= turn((x3 + x2) | 0, 18);
    x6 ^= turn((x5 + x4) | 0, 7); x7 ^= turn((x6 + x5) | 0, 9); x4 ^= turn((x7 + x6) | 0, 13); x5 ^= turn((x4 + x7) | 0, 18);
    x11 ^= turn((x10 + x9) | 0, 7); x8 ^= turn((x11 + x10) | 0, 9); x9 ^= turn((x8 + x11) | 0, 13); x10 ^= turn((x9 + x8) | 0, 18);
    x12 ^= turn((x15 + x14) | 0, 7); x13 ^= turn((x12 + x15) | 0, 9); x14 ^= turn((x13 + x12) | 0, 13); x15 ^= turn((x14 + x13) | 0, 18);
  }
  const shared = Buffer.allocUnsafe(32);
  [x0, x5, x10, x15, x6, x7, x8, x9].forEach((word, at) => shared.writeInt32LE(word, at * 4));
  return shared;
};

const aesKey = (own, theirs) => {
  const point = crypto.diffieHellman({ privateKey: own, publicKey: theirs });
  return new Uint8Array(crypto.hkdfSync("sha256", hsalsa20(point), SALT, INFO, 32));
};

const seal = (text, recipient) => {
  const ephemeral = crypto.generateKeyPairSync("x25519");
  const iv = crypto.randomBytes(12);
  const cipher = crypto.createCipheriv("aes-256-gcm", aesKey(ephemeral.privateKey, recipient), iv);
  const ciphertext = Buffer.concat([cipher.update(text, "utf8"), cipher.final()]);
  return {
    ephemeralPublicKey: Buffer.from(ephemeral.publicKey.export({ format: "jwk" }).x, "base64url").toString("base64"),
    iv: iv.toString("base64"),
    ciphertext: ciphertext.toString("base64"),
    authTag: cipher.getAuthTag().toString("base64"),
  };
};

const open = (envelope) => {
  const key = aesKey(OPENING, publicKey("X25519", base64url(envelope.ephemeralPublicKey)));
  const decipher = crypto.createDecipheriv("aes-256-gcm", key, Buffer.from(envelope.iv, "base64"));
  decipher.setAuthTag(Buffer.from(envelope.authTag, "base64"));
  return decipher.update(envelope.ciphertext, "base64", "utf8") + decipher.final("utf8");
};

const sign = (text) => crypto.sign(null, Buffer.from(text), SIGNING).toString("base64");

// --- database ---

const pool = new Pool(); // ten connections, pg's default
pool.on("error", (error) => console.error(error));
const ask = async (name, text, values) => (await pool.query({ name, text, values })).rows;

const BEGIN = `
  UPDATE delivery_jobs SET attempts = attempts + 1, last_attempted_at = $3,
    first_attempted_at = coalesce(first_attempted_at, $3), sending = $4, released_at = NULL
  WHERE id = $1 AND state = 'ready' AND settled_at IS NULL AND (job_id IS NULL OR job_id = $2)
  RETURNING payload, payload_id, series`;
const ATTEMPT = `
  INSERT INTO delivery_attempts (delivery_id, job_name, method, server_url, attempt, started_at, duration_ms, outcome,
    error_code, http_status, request_bytes, response_bytes, series)
  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
  ON CONFLICT (delivery_id, series, attempt) DO NOTHING`;
const GONE = `WITH gone AS (DELETE FROM delivery_jobs WHERE id = $1) ${ATTEMPT}`;
const FOLLOWED = `
  WITH gone AS (DELETE FROM delivery_jobs WHERE id = $1), told AS (
    UPDATE follows SET accepted = accepted OR $16, acknowledged = acknowledged OR NOT $16
    WHERE follower_id = $14 AND following_id = $15 AND follower_server_url = $4
      AND NOT CASE WHEN $16 THEN accepted ELSE acknowledged END)
  ${ATTEMPT}`;
const FAILED = `
  WITH failed AS (
    UPDATE delivery_jobs SET last_error = $14, error_code = $9, sending = NULL, outcome = $15,
      state = CASE WHEN $15::text IS NULL THEN state ELSE 'failed' END,
      settled_at = CASE WHEN $15::text IS NULL THEN NULL ELSE now() AT TIME ZONE 'UTC' END
    WHERE id = $1)
  ${ATTEMPT}`;
const SERVER = `
  SELECT s.public_key, s.encryption_public_key, l.acknowledged,
    EXISTS (SELECT FROM blacklisted_servers b WHERE b.server_url = s.url) AS blacklisted
  FROM server_registry s LEFT JOIN server_links l ON l.server_url = s.url WHERE s.url = $1`;
const ACKNOWLEDGED = `
  INSERT INTO server_links (server_url, state, since, operator_hold, relayed, acknowledged, evidence, last_success_at,
    rejections, needs_canary, probes, rests, release_start, release_rate)
  VALUES ($1, 'up', $2, false, false, true, 0, $2, 0, false, 0, 0, 1, 1)
  ON CONFLICT (server_url) DO NOTHING`;
const OWED = "SELECT id FROM delivery_jobs WHERE settled_at IS NULL LIMIT 1";

// Everything that is known of a server, and its keys parsed; concurrent deliveries share one question.
const servers = new Map();
const known = (url) => {
  const cached = servers.get(url);
  if (cached !== undefined && performance.now() - cached.at < CACHED_MS) return cached.server;
  const server = ask("server", SERVER, [url]).then(([row]) => {
    if (row === undefined) throw new Error(`${url} is not registered`);
    if (row.blacklisted) throw new Error(`${url} is blacklisted`);
    return {
      url,
      signing: publicKey("Ed25519", base64url(row.public_key)),
      encryption: publicKey("X25519", base64url(row.encryption_public_key)),
      acknowledged: row.acknowledged === true,
    };
  });
  servers.set(url, { at: performance.now(), server });
  server.catch(() => servers.delete(url));
  return server;
};

// --- one delivery ---

const agent = new Agent({
  connections: CONCURRENCY,
  pipelining: 1,
  keepAliveTimeout: 4_000,
  headersTimeout: TIMEOUT_MS,
  bodyTimeout: TIMEOUT_MS,
  maxResponseSize: MAX_ACK_BYTES,
  connect: { timeout: TIMEOUT_MS },
});

const post = async (job, text, method, server) => {
  const { targetUrl, serverUrl } = job.data;
  const target = new URL(targetUrl);
  if (target.origin !== serverUrl || !ALLOWED.has(target.hostname)) throw new Error(`${targetUrl} is not allowed`);
  const body = JSON.stringify({ method, payload: seal(text, server.encryption), signature: sign(text) });
  const response = await request(target, {
    dispatcher: agent,
    method: "POST",
    headers: {
      "User-Agent": "federation-delivery",
      Accept: "*/*",
      "Accept-Encoding": "identity",
      "Content-Type": "application/json",
      Origin: OWN_URL,
      "X-Federation-Origin": OWN_URL,
      "X-Federation-Target": targetUrl,
    },
    body,
  });
  const answer = await response.body.text();
  return { status: response.statusCode, answer, sent: Buffer.byteLength(body), received: Buffer.byteLength(answer) };
};

const acknowledgment = (answer) => {
  const body = JSON.parse(answer);
  const ack = [body?.payload, body].find((candidate) => candidate?.method === "PROXY_RESPONSE");
  if (ack === undefined) throw new Error("no acknowledgment");
  return ack;
};

const proven = (ack, server) => {
  const text = open(ack.data);
  if (!crypto.verify(null, Buffer.from(text), server.signing, Buffer.from(ack.signature, "base64")))
    throw new Error("the acknowledgment is not signed by the server");
  return JSON.parse(text);
};

const followed = (ack, server) => {
  const { method, federationUrl, following } = proven(ack, server);
  if (method !== "FEDERATE" || typeof federationUrl !== "string" || typeof following?.followerId !== "string")
    throw new Error("the acknowledgment is of no follow");
  return [following.followerId, following.followingId, following.accepted === true];
};

// Of each server's acknowledgments of posts one a minute is checked, as nothing depends on them.
const checkedAt = new Map();
const check = (ack, server, text) => {
  if (performance.now() - (checkedAt.get(server.url) ?? -CHECKED_MS) < CHECKED_MS) return;
  checkedAt.set(server.url, performance.now());
  if (proven(ack, server).post.federationPostId !== JSON.parse(text).post.id) console.error("post_ack_mismatch");
};

const deliver = async (job) => {
  const { deliveryJobId: id, serverUrl } = job.data;
  const startedAt = new Date().toISOString();
  const began = performance.now();
  const attempt = job.attemptsMade + 1;
  const server = await known(serverUrl);
  const [row] = await ask("begin", BEGIN, [id, job.id, startedAt, attempt]);
  if (row === undefined) return; // it is over, or another job acts for it
  if (row.payload_id !== null) throw new Error("shared texts are not measured");
  const { method } = JSON.parse(row.payload);
  let exchange;
  const record = (outcome, code) => {
    const took = Math.round(performance.now() - began);
    const { status = null, sent = null, received = null } = exchange ?? {};
    return [
      ...[id, job.name, method, serverUrl, attempt, startedAt, took, outcome, code, status, sent, received, row.series],
    ];
  };
  try {
    exchange = await post(job, row.payload, method, server);
    if (exchange.status < 200 || exchange.status > 299) throw new Error(`the server answered ${exchange.status}`);
    const ack = acknowledgment(exchange.answer);
    if (!server.acknowledged) {
      await ask("acknowledged", ACKNOWLEDGED, [serverUrl, new Date().toISOString()]);
      server.acknowledged = true;
    }
    if (job.name === "deliver-follow") {
      const told = followed(ack, server);
      await ask("followed", FOLLOWED, [...record("delivered", null), ...told]);
    } else {
      if (job.name === "deliver-post") check(ack, server, row.payload);
      await ask("gone", GONE, record("delivered", null));
    }
  } catch (error) {
    const isLast = attempt >= job.opts.attempts;
    const values = [...record("retryable", "INTERNAL"), String(error).slice(0, 1000), isLast ? "retryable" : null];
    await ask("failed", FAILED, values);
    throw error;
  }
};

// --- what can be asked for ---

const connection = { url: env.REDIS_URL, maxRetriesPerRequest: null };
const NAME = "federation-delivery";
const queue = new Queue(NAME, { connection });
const worker = new Worker(NAME, deliver, { connection, concurrency: CONCURRENCY, autorun: false });
worker.on("error", (error) => console.error(error));
worker.on("failed", (_job, error) => console.error(error));

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const cpuSeconds = () => Object.values(process.cpuUsage()).reduce((a, b) => a + b) / 1e6;

const calls = {
  // Works until nothing is owed, and tells what that took.
  deliver: async () => {
    const [began, cpu] = [seconds(), cpuSeconds()];
    if (worker.isRunning()) await queue.resume();
    else worker.run().catch((error) => console.error(error));
    while ((await ask("owed", OWED, [])).length) await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    return {
      seconds: seconds() - began,
      cpu_seconds: cpuSeconds() - cpu,
      memory_mib: process.resourceUsage().maxRSS / 1024,
    };
  },
  // The body of a request with this text to a server with this key, for a test of the cryptography.
  sealed: async ({ text, key }) => ({
    payload: seal(text, publicKey("X25519", base64url(key))),
    signature: sign(text),
  }),
  opened: async (envelope) => open(envelope),
};

await Promise.all([queue.waitUntilReady(), worker.waitUntilReady()]);
await obey(calls);
process.exit();
