// Measures npm `bull` 1.x as peer_process.py does other queues: run by peers.py.
// usage: node node_bull.mjs <version> <redis url> <concurrency> <jobs>
// 500 adds in flight, a handler that does nothing, and, where Bull can, nothing kept of completed jobs.
import { createRequire } from "node:module";

const [version, url, concurrency, jobs] = process.argv.slice(2);
const { hostname, port } = new URL(url);
const INSTALLED = new URL("../../tests/interop/package.json", import.meta.url);
const Queue = createRequire(INSTALLED)(`bull-${version}`);
const BATCH = 500;
const PAYLOAD = "x".repeat(1000);

const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const cpuMicroseconds = () => Object.values(process.cpuUsage()).reduce((a, b) => a + b);

const queue = new Queue("bench", Number(port), hostname, {});
await queue._initializing;

const began = seconds();
for (let added = 0; added < jobs; added += BATCH) {
  const size = Math.min(BATCH, jobs - added);
  await Promise.all(Array.from({ length: size }, () => queue.add({ payload: PAYLOAD }, { removeOnComplete: true })));
}
const enqueued = seconds();

const [started, cpu] = [seconds(), cpuMicroseconds()];
await new Promise((resolve) => {
  let done = 0;
  queue.process(Number(concurrency), () => {
    done += 1;
    if (done === Number(jobs)) resolve();
    return Promise.resolve();
  });
});
const measured = {
  enqueued_per_s: jobs / (enqueued - began),
  processed_per_s: jobs / (seconds() - started),
  cpu_per_job_us: (cpuMicroseconds() - cpu) / jobs,
};
console.log(JSON.stringify(measured));
process.exit();
