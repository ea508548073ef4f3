// Takes activities by Fedify, on a port of loopback, into its own queue, which nobody works off: see receiving.py.
import { createRequire } from "node:module";
import { createServer } from "node:http";

const required = createRequire(new URL("../../tests/interop/activitypub/package.json", import.meta.url));
const fedify = required("@fedify/fedify");
const { Create, Person } = required("@fedify/vocab");

const federation = fedify.createFederation({
  kv: new fedify.MemoryKvStore(),
  queue: { inbox: new fedify.InProcessMessageQueue() },
  manuallyStartQueue: true,
  allowPrivateAddress: true,
});
const pair = await fedify.generateCryptoKeyPair("RSASSA-PKCS1-v1_5");
federation
  .setActorDispatcher("/users/{identifier}", (context, identifier) => new Person({ id: context.getActorUri(identifier) }))
  .setKeyPairsDispatcher(() => [pair]);
federation.setInboxListeners("/users/{identifier}/inbox", "/inbox").on(Create, () => {});

const server = createServer(async (incoming, outgoing) => {
  const { method, url, headers } = incoming;
  const body = method === "POST" ? Buffer.concat(await incoming.toArray()) : undefined;
  const asked = new Request(`http://${headers.host}${url}`, { method, headers: new Headers(headers), body });
  const answer = await federation.fetch(asked, { contextData: null });
  outgoing.writeHead(answer.status, Object.fromEntries(answer.headers));
  outgoing.end(Buffer.from(await answer.arrayBuffer()));
});
server.listen(Number(process.argv[2]), "127.0.0.1");
