// A small server of the fediverse, by Fedify: `node server.mjs 8452`. Its user bob takes notes; `/` shows them.
import { createServer } from "node:http";
import { createFederation, MemoryKvStore } from "@fedify/fedify";
import { Create, Endpoints, Note, Person } from "@fedify/vocab";

const port = Number(process.argv[2]);
const notes = [];
const federation = createFederation({ kv: new MemoryKvStore(), allowPrivateAddress: true }); // this machine is private

federation.setActorDispatcher("/users/{identifier}", (context, identifier) =>
  identifier !== "bob" ? null : new Person({
    id: context.getActorUri(identifier),
    preferredUsername: identifier,
    inbox: context.getInboxUri(identifier),
    endpoints: new Endpoints({ sharedInbox: context.getInboxUri() }),
  }));

federation.setInboxListeners("/users/{identifier}/inbox", "/inbox").on(Create, async (context, create) => {
  const note = await create.getObject(context);
  if (!(note instanceof Note)) return;
  notes.push(`${create.actorId.href} says: ${note.content}`);
  console.log(notes.at(-1));
});

const server = createServer(async (request, response) => {
  const body = request.method === "POST" ? Buffer.concat(await request.toArray()) : undefined;
  const asked = new Request(`http://${request.headers.host}${request.url}`, { ...request, headers: request.headers, body });
  const answer = request.url === "/" ? new Response(notes.join("\n")) : await federation.fetch(asked, { contextData: null });
  response.writeHead(answer.status, Object.fromEntries(answer.headers));
  response.end(Buffer.from(await answer.arrayBuffer()));
});
server.listen(port, "127.0.0.1", () => console.log(`bob is http://127.0.0.1:${port}/users/bob`));
