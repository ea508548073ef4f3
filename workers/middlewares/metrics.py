"""Measurement of attempts: how many ended how, and how long they took."""

from __future__ import annotations

import time
from typing import Protocol

from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.handlers import AttemptContext, Middleware, Next


class Metrics(Protocol):
    """The place that keeps the numbers."""

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        """Count an ended attempt at a job of this name. Called in the event loop; must be quick."""


def measure_attempts(metrics: Metrics) -> Middleware:
    """Make a middleware that reports the end of every attempt to `metrics`."""

    async def measure(context: AttemptContext, proceed: Next) -> object:
        started = time.monotonic()
        error: BaseException | None = None
        try:
            return await proceed()
        except BaseException as raised:
            error = raised
            raise
        finally:
            metrics.observe(context.job.name, outcome_of(context.job, error), time.monotonic() - started)

    return measure
