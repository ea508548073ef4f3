"""Traces from the enqueue to the attempt, on every storage that keeps metadata, and what is no trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    use_span,
)
from sqlalchemy import create_engine

from workers import QueueOptions
from workers.chains import Continuation, continue_with
from workers.errors import Retry, StorageError
from workers.flows import FlowJob
from workers.jobs import EnqueueResult, NewJob
from workers.metadata import TRACEPARENT, TRACESTATE
from workers.middlewares.opentelemetry import current_trace, links_of, trace_attempts
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage.memory import MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing import Harness
from workers.testing.steps import PATIENCE
from workers.worker.handlers import Job

PATIENT = timedelta(seconds=PATIENCE)
OTHERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NO_TRACE = (
    *("", "00", "junk", OTHERS[:-1], OTHERS.upper(), OTHERS + "-more", "ff" + OTHERS[2:], "\x00", "ü" * 100),
    *("00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", "-" * 55),
)


class Traces:
    """What is recorded while one of these lives."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("application")
        self.middleware = trace_attempts(self.provider)

    def named(self, beginning: str) -> list[ReadableSpan]:
        """The spans whose name begins so, in the order of their end."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(beginning)]


def context_of(span: ReadableSpan) -> SpanContext:
    return span.get_span_context() or INVALID_SPAN_CONTEXT


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    """The traces and spans that it is linked to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def place(span: ReadableSpan) -> tuple[int, int]:
    return context_of(span).trace_id, context_of(span).span_id


async def work(job: Job) -> object:
    """Fail once, and go on as another link, so that there are four attempts."""
    if job.attempt == 1:
        raise Retry("once more", delay=timedelta(0))
    return continue_with("second", None) if job.name == "first" else None


async def test_every_attempt_is_linked_to_the_enqueue(harness: Harness) -> None:
    """Retries and later links of the chain too; the enqueue itself is part of what the application was doing."""
    traces = Traces()
    queue = Queue(await harness.open(), options=QueueOptions(middlewares=[traces.middleware]))
    queue.execute(work)
    async with queue:
        with traces.tracer.start_as_current_span("request") as request:
            await queue.enqueue(1, name="first", id="job", meta={"tenant": "ann"})
        await queue.wait_for_job_chain_completion("job", PATIENT)
        found = await queue.get_job("job")
    [enqueue] = traces.named("enqueue ")
    assert (enqueue.kind, enqueue.parent) == (SpanKind.PRODUCER, request.get_span_context())
    attempts = traces.named("process ")
    assert [linked(each) for each in attempts] == [[place(enqueue)]] * 4
    assert {each.parent for each in attempts} == {None}
    assert found is not None
    assert found.meta["tenant"] == "ann"
    assert dict(enqueue.attributes or {}) == {
        "messaging.system": "workers",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue.storage.queue,
        "messaging.message.id": "job",
        "workers.job.name": "first",
    }


async def test_many_jobs_of_a_call_share_its_span() -> None:
    """Which says how many they are; what a handler enqueues is a child of its attempt."""
    traces = Traces()

    async def spread(job: Job) -> Continuation | None:
        if job.name == "spread":
            await queue.enqueue_many([JobSpec(payload=1, id="a"), JobSpec(payload=2, id="b")])
        return None

    queue = Queue(MemoryStorage(), options=QueueOptions(middlewares=[traces.middleware]))
    queue.execute(spread)
    async with queue:
        await queue.enqueue_and_wait(None, name="spread", timeout=PATIENT)
        for job_id in ("a", "b"):
            await queue.wait_for_job_chain_completion(job_id, PATIENT)
    many, first = traces.named("enqueue ")
    if (first.attributes or {}).get("messaging.batch.message_count"):
        many, first = first, many
    attempts = {str((each.attributes or {})["messaging.message.id"]): each for each in traces.named("process ")}
    spreading = attempts.pop(str((first.attributes or {})["messaging.message.id"]))
    assert (many.parent, (many.attributes or {})["messaging.batch.message_count"]) == (context_of(spreading), 2)
    assert linked(spreading) == [place(first)]
    assert [linked(attempts[each]) for each in ("a", "b")] == [[place(many)]] * 2


async def test_an_enqueue_in_a_transaction_is_traced(tmp_path: object) -> None:
    """Of the caller's, without an event loop too."""
    traces = Traces()
    url = f"sqlite:///{tmp_path}/jobs.db"
    storage = SqlStorage(url)
    await storage.migrate()
    queue = Queue(storage, options=QueueOptions(middlewares=[traces.middleware]))
    engine = create_engine(url)
    with engine.begin() as connection:
        queue.enqueue_on(connection, [JobSpec(payload=1, id="job")])
    engine.dispose()
    async with queue:
        found = await queue.get_job("job")
    assert found is not None
    [link] = links_of(found.meta)
    assert (link.context.trace_id, link.context.span_id) == place(traces.named("enqueue ")[0])


async def test_a_flow_is_traced(harness: Harness) -> None:
    """All its jobs come of one call."""
    traces = Traces()
    if not harness.capabilities.flows:
        return
    async with Queue(await harness.open(), options=QueueOptions(middlewares=[traces.middleware])) as queue:
        await queue.enqueue_flow(FlowJob(payload=1, id="top", children=[FlowJob(payload=2, id="part")]))
        metas = [found.meta for each in ("top", "part") if (found := await queue.get_job(each)) is not None]
    [enqueue] = traces.named("enqueue ")
    assert [[(one.context.trace_id, one.context.span_id) for one in links_of(meta)] for meta in metas] == [
        [place(enqueue)]
    ] * 2


async def test_a_trace_of_the_callers_own_stays() -> None:
    """As a request had it that this process only passes on."""
    traces = Traces()
    async with Queue(MemoryStorage(), options=QueueOptions(middlewares=[traces.middleware])) as queue:
        await queue.enqueue(1, id="job", meta={TRACEPARENT: OTHERS, TRACESTATE: "vendor=1"})
        found = await queue.get_job("job")
    assert found is not None
    assert found.meta == {TRACEPARENT: OTHERS, TRACESTATE: "vendor=1"}


class Full(MemoryStorage):
    """Takes no job."""

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        raise StorageError("payload-4711")


async def test_an_enqueue_that_fails_is_told_by_its_type() -> None:
    """Never by its message, which may quote something."""
    traces = Traces()
    queue = Queue(Full(), options=QueueOptions(middlewares=[traces.middleware]))
    with pytest.raises(StorageError):
        await queue.enqueue(1)
    [enqueue] = traces.named("enqueue ")
    assert enqueue.status.status_code is StatusCode.ERROR
    assert (enqueue.attributes or {})["error.type"] == "workers.errors.StorageError"
    assert "4711" not in enqueue.to_json()


@pytest.mark.parametrize("header", NO_TRACE)
async def test_a_header_that_is_none_is_ignored(header: str) -> None:
    """The job is taken, and its attempt begins a trace without a link."""
    traces = Traces()
    queue = Queue(MemoryStorage(), options=QueueOptions(middlewares=[traces.middleware]))
    queue.execute(lambda _: None)
    async with queue:
        await queue.enqueue_and_wait(1, meta={TRACEPARENT: header, TRACESTATE: "junk"}, timeout=PATIENT)
    [attempt] = traces.named("process ")
    assert (linked(attempt), attempt.status.status_code) == ([], StatusCode.UNSET)


@settings(deadline=None)
@given(st.text(), st.text())
def test_no_text_is_an_error(header: str, state: str) -> None:
    """Whatever somebody wrote into a job."""
    links_of({TRACEPARENT: header, TRACESTATE: state})
    assert len(links_of({TRACEPARENT: OTHERS, TRACESTATE: state})) == 1


async def test_a_state_that_is_too_long_is_left_out() -> None:
    """The trace goes on without it, and the job is taken."""
    long = {TRACEPARENT: OTHERS, TRACESTATE: ",".join(f"v{number}={'x' * 60}" for number in range(20))}
    [parent] = links_of(long)
    assert len(parent.context.trace_state) == 20
    with use_span(NonRecordingSpan(parent.context)):
        assert current_trace() == {TRACEPARENT: OTHERS}
    assert current_trace() == {}


LATE_PROVIDER = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from workers import Queue, Worker, WorkerOptions
from workers.middlewares.opentelemetry import trace_attempts
from workers.storage.memory import MemoryStorage

async def main():
    storage, exporter = MemoryStorage(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async def handle(job):
        worker.stop()
    async with Queue(storage) as queue:
        for provides in (False, True):
            if provides:
                trace.set_tracer_provider(provider)
            worker = Worker(storage, {"*": handle}, options=WorkerOptions(middlewares=[tracing]))
            await queue.enqueue(1)
            await worker.run()
    print(*(span.name for span in exporter.get_finished_spans()), sep=",")

tracing = trace_attempts()
asyncio.run(main())
"""


def test_a_provider_that_comes_late_gets_what_comes_after_it() -> None:
    """An attempt before it has no span, which nobody would get; it runs all the same."""
    done = subprocess.run([sys.executable, "-c", LATE_PROVIDER], capture_output=True, text=True)
    assert done.stdout == "process default\n", done.stderr
