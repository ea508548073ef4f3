// Driven by JSON lines on stdin, answering on stdout: a line is the name of a call and its argument.
import { createInterface } from "node:readline";

const say = (message) => console.log(JSON.stringify(message));

// Returns when stdin ends. A call that fails answers its error, and the next one is obeyed all the same.
export async function obey(calls) {
  say({ ok: "ready" });
  for await (const line of createInterface({ input: process.stdin })) {
    const [call, argument] = JSON.parse(line);
    try {
      say({ ok: (await calls[call](argument)) ?? null });
    } catch (error) {
      say({ error: String(error) });
    }
  }
}
