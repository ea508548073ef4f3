"""How many attempts ended how, and how long they took."""

from __future__ import annotations

import time
from typing import Protocol

from workers.middlewares.outcome import Outcome, outcome_of
from workers.worker.handlers import AttemptContext, Middleware, Next


class Metrics(Protocol):
    """Whatever keeps the numbers."""

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        """An attempt at a job of this name ended; called in the event loop, must be quick."""


def measure_attempts(metrics: Metrics) -> Middleware:
    """A middleware that tells `metrics` of every attempt's end."""

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
