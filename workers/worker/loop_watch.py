"""Warns, once, of an event loop that is blocked for so long that leases are in danger."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from workers.worker.log_lines import log_line

logger = logging.getLogger(__name__)

ADVICE = "run what blocks in a plain function, which gets a thread, or in asyncio.to_thread; or use a longer lease"


class LoopWatch:
    """Hears of every wake-up that was late, and of the leases that were lost in that time.

    A wake-up that is more than `bearable` seconds late was held up by something that did not await: nothing else keeps
    a task that is due from running, but a machine that stood still.
    """

    def __init__(self, bearable: float) -> None:
        self._bearable = bearable
        self._warned_of_late = self._warned_of_lost = False

    def woke(self, late: float) -> bool:
        """Note how late a wake-up was; returns whether the loop was blocked."""
        blocked = late > self._bearable
        if blocked and not self._warned_of_late:
            self._warned_of_late = True
            logger.warning(
                "the event loop was blocked for %.1f s, in which no lease was renewed: a handler that is async must not"
                " block; %s",
                late,
                ADVICE,
            )
        return blocked

    def lost(self, job_ids: Sequence[str]) -> None:
        """Note the jobs that others may have taken because the loop was blocked."""
        if job_ids and not self._warned_of_lost:
            self._warned_of_lost = True
            logger.warning(
                "the event loop was blocked for so long that leases were lost, and other workers may run the same jobs"
                " meanwhile: %s; %s",
                ", ".join(log_line(job_id) for job_id in job_ids[:10]),
                ADVICE,
            )
