"""Traces of BullMQ's telemetry in Node and ours, in both directions."""

from __future__ import annotations

from datetime import timedelta

from opentelemetry.trace import INVALID_SPAN_CONTEXT, format_span_id, format_trace_id

from tests.interop.peer import NodePeer
from tests.workers.test_tracing import Traces
from workers import QueueOptions
from workers.metadata import TRACESTATE
from workers.queue import Queue
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import PATIENCE
from workers.worker.handlers import Job


async def test_an_attempt_of_ours_is_linked_to_nodes_enqueue(node: NodePeer, storage: BullMQStorage) -> None:
    """To the very span by which Node's queue added the job, however Node wrote what else it hands on."""
    traces = Traces()
    read: dict[str, str] = {}

    def take(job: Job) -> None:
        read.update(job.meta)

    spans = await node.trace_add({"name": "send", "data": {}, "opts": {"jobId": "traced"}})
    [added] = [span for span in spans if span["name"].startswith("add ")]
    queue = Queue(storage, options=QueueOptions(middlewares=[traces.middleware]))
    queue.execute(take)
    async with queue:
        await queue.wait_for_job_chain_completion("traced", timedelta(seconds=PATIENCE))
    [attempt] = traces.named("process ")
    [link] = attempt.links
    assert (format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)) == (
        added["traceId"],
        added["spanId"],
    )
    assert (read[TRACESTATE], link.context.trace_state.get("node")) == ("node=1", "1")
    assert "baggage" not in read


async def test_nodes_attempt_belongs_to_our_enqueue(node: NodePeer, storage: BullMQStorage) -> None:
    """Node makes it a child of the span by which our queue added the job, and keeps our metadata."""
    traces = Traces()
    queue = Queue(storage, options=QueueOptions(middlewares=[traces.middleware]))
    await queue.enqueue({"result": 1}, name="send", id="traced", meta={"tenant": "ann"})
    spans = await node.trace_work(1)
    [enqueue] = traces.named("enqueue ")
    context = enqueue.get_span_context() or INVALID_SPAN_CONTEXT
    mine = {"traceId": format_trace_id(context.trace_id), "parent": format_span_id(context.span_id)}
    assert [{name: span[name] for name in mine} for span in spans if span["name"].startswith("process ")] == [mine]
    found = await queue.get_job("traced")
    assert found is not None
    assert found.meta["tenant"] == "ann"
    assert "traceparent" in (await node.read("traced"))["opts"]["telemetry"]["metadata"]
