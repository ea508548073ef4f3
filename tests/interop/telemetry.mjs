// Telemetry for npm `bullmq`, which remembers its spans. As `bullmq-otel` does, it hands contexts on in W3C's headers.
import { AsyncLocalStorage } from "node:async_hooks";
import { randomBytes } from "node:crypto";

export function remembering() {
  const contexts = new AsyncLocalStorage();
  const spans = [];

  function startSpan(name, { kind } = {}, parent = contexts.getStore()) {
    const traceId = parent?.traceId ?? randomBytes(16).toString("hex");
    const span = { name, kind, traceId, spanId: randomBytes(8).toString("hex"), parent: parent?.spanId };
    spans.push(span);
    return {
      setSpanOnContext: () => span,
      setAttribute() {},
      setAttributes() {},
      addEvent() {},
      recordException() {},
      end() {},
    };
  }

  function fromMetadata(active, metadata) {
    const [, traceId, spanId] = JSON.parse(metadata).traceparent.split("-");
    return { traceId, spanId };
  }

  const contextManager = {
    with: (context, work) => contexts.run(context, work),
    active: () => contexts.getStore(),
    getMetadata: ({ traceId, spanId }) =>
      JSON.stringify({ traceparent: `00-${traceId}-${spanId}-01`, tracestate: "node=1", baggage: "who=ann" }),
    fromMetadata,
  };
  return { spans, telemetry: { tracer: { startSpan }, contextManager } };
}
