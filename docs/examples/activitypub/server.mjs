// A small server of the fediverse, by Fedify: `node server.mjs 8452`. Its user bob takes notes; `/` shows them. What he
// does to the actor `to` that is posted to `/follow`, `/reply` or `/leave` is below.
import { createServer } from "node:http";
import { createFederation, generateCryptoKeyPair, MemoryKvStore } from "@fedify/fedify";
import { Accept, Create, Endpoints, Follow, Note, Person, Undo } from "@fedify/vocab";

const port = Number(process.argv[2]);
const bob = new URL(`http://127.0.0.1:${port}/users/bob`);
const pair = await generateCryptoKeyPair("RSASSA-PKCS1-v1_5");
const notes = [];
const federation = createFederation({ kv: new MemoryKvStore(), allowPrivateAddress: true }); // this machine is private

federation.setActorDispatcher("/users/{identifier}", async (context, identifier) =>
  identifier !== "bob" ? null : new Person({
    id: context.getActorUri(identifier),
    preferredUsername: identifier,
    inbox: context.getInboxUri(identifier),
    endpoints: new Endpoints({ sharedInbox: context.getInboxUri() }),
    publicKey: (await context.getActorKeyPairs(identifier))[0].cryptographicKey,
  })).setKeyPairsDispatcher(() => [pair]);

federation.setInboxListeners("/users/{identifier}/inbox", "/inbox")
  .on(Accept, (_, accept) => show(`${accept.actorId.href} has accepted bob`))
  .on(Create, async (context, create) => {
    const note = await create.getObject(context);
    if (note instanceof Note) show(`${create.actorId.href} says: ${note.content}`);
  });

const show = (line) => (notes.push(line), console.log(line));

let followed;
const acts = {
  "/follow": (to, id) => (followed = new Follow({ id, actor: bob, object: to })),
  "/reply": (to, id) => new Create({ id, actor: bob, to, object: new Note({ attribution: bob, to, content: "hi alice" }) }),
  "/leave": (to, id) => new Undo({ id, actor: bob, object: followed }),
};

async function act(path, to) {
  const context = federation.createContext(bob, null);
  const activity = acts[path](new URL(to), new URL(`#${crypto.randomUUID()}`, bob));
  await context.sendActivity({ identifier: "bob" }, await context.lookupObject(to), activity);
  return new Response(`${to} has got it\n`);
}

const server = createServer(async (request, response) => {
  const body = request.method === "POST" ? Buffer.concat(await request.toArray()) : undefined;
  const asked = new Request(`http://${request.headers.host}${request.url}`, { ...request, headers: request.headers, body });
  const answer = request.url === "/" ? new Response(notes.map((line) => `${line}\n`).join(""))
    : request.url in acts ? await act(request.url, new URLSearchParams(`${body}`).get("to"))
    : await federation.fetch(asked, { contextData: null });
  response.writeHead(answer.status, Object.fromEntries(answer.headers));
  response.end(Buffer.from(await answer.arrayBuffer()));
});
server.listen(port, "127.0.0.1", () => console.log(`bob is ${bob}`));
