"""Enqueues and attempts as OpenTelemetry spans, and jobs as metrics; needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider, get_meter
from opentelemetry.trace import (
    Link,
    ProxyTracerProvider,
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer,
    get_tracer_provider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from workers.errors import Retry
from workers.jobs import NewJob
from workers.metadata import MAX_META_VALUE_BYTES, TRACE_NAMES, TRACEPARENT
from workers.middlewares.metrics import JobMeter
from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.handlers import AttemptContext, Job, Middleware, Next

_ENDED_WELL: Final = frozenset({Outcome.COMPLETED, Outcome.RELEASED, Outcome.SNOOZED, Outcome.SUSPENDED})
_W3C: Final = TraceContextTextMapPropagator()
"""Always this format, whatever the process uses for its requests: other processes read it, also Node's."""
_SYSTEM: Final = {"messaging.system": "workers"}


def trace_attempts(provider: TracerProvider | None = None) -> Middleware:
    """Make a middleware that records every enqueue and every attempt as spans of `provider` (default: the global one).

    Kinds, names and attributes follow the semantic conventions for messaging; `workers.job.*` are ours. A failure sets
    the status and records the exception's type, never its message or stack, which may quote the payload. A `Retry` that
    the handler asked for is no failure.

    A call that enqueues is one span, whose context goes with each of its jobs as the metadata `traceparent` and
    `tracestate`, unless they have one. The span of an attempt is linked to it. It is no child of it, as the conventions
    have it: a job may run hours later, and many times, when nobody waits for that trace any more.
    """
    return Tracing(provider)


class Tracing:
    """The middleware; see `trace_attempts`."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("workers", tracer_provider=provider)
        self._is_of_process = provider is None

    async def __call__(self, context: AttemptContext, proceed: Next) -> object:
        """Record the attempt, unless the process has no provider: nobody would get its span."""
        if self._is_of_process and isinstance(get_tracer_provider(), ProxyTracerProvider):
            return await proceed()
        with self._tracer.start_as_current_span(
            f"process {context.queue}",
            kind=SpanKind.CONSUMER,
            attributes=_attributes(context),
            links=links_of(context.job.meta),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            error: BaseException | None = None
            try:
                return await proceed()
            except BaseException as raised:
                error = raised
                raise
            finally:
                _note_end(span, context.job, error)

    @contextmanager
    def enqueuing(self, queue: str, jobs: list[NewJob]) -> Iterator[list[NewJob]]:
        """See `SurroundsEnqueues.enqueuing`."""
        with self._tracer.start_as_current_span(
            f"enqueue {queue}",
            kind=SpanKind.PRODUCER,
            attributes=_enqueue_attributes(queue, jobs),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            trace = current_trace()
            try:
                yield [job if TRACEPARENT in job.meta else replace(job, meta={**job.meta, **trace}) for job in jobs]
            except BaseException as error:
                _note_error(span, _type_name(error))
                raise


class JobInstruments(JobMeter):
    """Jobs by queue and name as instruments of `provider` (default: the global one), see `JobMeter`.

    The counters `workers.jobs.enqueued`, `workers.jobs.claimed`, `workers.jobs.ended` (by `workers.job.outcome`, too)
    and `workers.leases.lost`, and the histogram `workers.job.wait` in seconds.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = get_meter("workers", meter_provider=provider)
        self._enqueued = meter.create_counter("workers.jobs.enqueued", "{job}", "Jobs enqueued.")
        self._claimed = meter.create_counter("workers.jobs.claimed", "{attempt}", "Attempts begun.")
        self._ended = meter.create_counter("workers.jobs.ended", "{job}", "Jobs that are over.")
        self._lost = meter.create_counter("workers.leases.lost", "{lease}", "Leases lost.")
        tells = "How long after its enqueue a job was first claimed."
        self._waited = meter.create_histogram("workers.job.wait", "s", tells)

    def enqueued(self, queue: str, name: str, jobs: int) -> None:
        self._enqueued.add(jobs, _of(queue, name))

    def claimed(self, queue: str, name: str, waited: float | None) -> None:
        self._claimed.add(1, _of(queue, name))
        if waited is not None:
            self._waited.record(waited, _of(queue, name))

    def ended(self, queue: str, name: str, outcome: Outcome, jobs: int) -> None:
        self._ended.add(jobs, {**_of(queue, name), "workers.job.outcome": outcome.value})

    def lost(self, queue: str, name: str) -> None:
        self._lost.add(1, _of(queue, name))


def _of(queue: str, name: str) -> dict[str, str]:
    return {"messaging.destination.name": queue, "workers.job.name": name}


def current_trace() -> dict[str, str]:
    """Return the trace context of the current span as metadata; nothing outside of any span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return {name: value for name, value in carrier.items() if len(value.encode()) <= MAX_META_VALUE_BYTES}


def links_of(meta: Mapping[str, str]) -> list[Link]:
    """Return the link to the span that enqueued a job with this metadata; none for what is no trace context."""
    if TRACEPARENT not in meta:
        return []
    carrier = {name: meta[name] for name in TRACE_NAMES if name in meta}
    found = get_current_span(_W3C.extract(carrier, Context())).get_span_context()
    return [Link(found)] if found.is_valid else []


def _enqueue_attributes(queue: str, jobs: Sequence[NewJob]) -> dict[str, str | int]:
    one = {"messaging.message.id": jobs[0].id, "workers.job.name": jobs[0].name} if len(jobs) == 1 else {}
    return {
        **_SYSTEM,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        **({"messaging.batch.message_count": len(jobs)} if len(jobs) > 1 else one),
    }


def _attributes(context: AttemptContext) -> dict[str, str | int]:
    job = context.job
    return {
        **_SYSTEM,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": context.queue,
        "messaging.client.id": context.worker_id,
        "messaging.message.id": job.id,
        "workers.job.name": job.name,
        "workers.job.attempt": job.attempt,
        "workers.job.max_attempts": job.max_attempts,
    }


def _note_end(span: Span, job: Job, error: BaseException | None) -> None:
    outcome = outcome_of(job, error)
    span.set_attribute("workers.job.outcome", outcome.value)
    if outcome in _ENDED_WELL or isinstance(error, Retry):
        return
    kind = outcome.value if error is None else _type_name(error)
    _note_error(span, kind)
    if error is not None:
        span.add_event("exception", {"exception.type": kind})


def _note_error(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
