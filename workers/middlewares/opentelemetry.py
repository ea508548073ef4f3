"""Attempts as OpenTelemetry spans; needs the extra `otel`."""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, get_tracer

from workers.errors import Retry
from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.handlers import AttemptContext, Job, Middleware, Next

_ENDED_WELL: Final = frozenset({Outcome.COMPLETED, Outcome.RELEASED, Outcome.SNOOZED, Outcome.SUSPENDED})


def trace_attempts(provider: TracerProvider | None = None) -> Middleware:
    """Make a middleware that records every attempt as a span of `provider` (default: the global one).

    Kind, name and attributes follow the semantic conventions for messaging; `workers.job.*` are ours. A failure sets
    the status and records the exception's type, never its message or stack, which may quote the payload. A `Retry` that
    the handler asked for is no failure. A job carries no trace context: every attempt begins its own trace.
    """
    tracer = get_tracer("workers", tracer_provider=provider)

    async def trace(context: AttemptContext, proceed: Next) -> object:
        with tracer.start_as_current_span(
            f"process {context.queue}",
            kind=SpanKind.CONSUMER,
            attributes=_attributes(context),
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

    return trace


def _attributes(context: AttemptContext) -> dict[str, str | int]:
    job = context.job
    return {
        "messaging.system": "workers",
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
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))
    if error is not None:
        span.add_event("exception", {"exception.type": kind})


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
