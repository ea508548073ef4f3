"""What the doctor says, asked now and then: its checks count rows, and ask the node itself."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import structlog

from federation.admin.doctor.checks import Verdict
from federation.admin.doctor.doctor import Finding, examine_node
from workers.clock import monotonic

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(minutes=1)
SHARE: Final = 50
"""An examination is followed by a pause of at least so many times the time it took."""
NEWS: Final = timedelta(seconds=5)
"""How soon what has changed meanwhile may have the node examined anew."""
PATIENCE: Final = timedelta(seconds=3)
"""How long a page waits for the first examination, and for the first one after nobody has looked for a while."""
CLOSING: Final = timedelta(seconds=1)
CHECKS_OF_COMMANDS: Final = frozenset({"open files"})
"""Checks of the process that examines, which is not the one that delivers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, and when."""

    at: datetime
    findings: Sequence[Finding]
    picture: Hashable = None
    """What whoever had it begun saw of the node."""

    @property
    def matters(self) -> Sequence[Finding]:
        """What somebody should know, the gravest first."""
        order = (Verdict.FAILURE, Verdict.WARNING, Verdict.NOTE)
        told = [each for each in self.findings if each.verdict in order and each.check not in CHECKS_OF_COMMANDS]
        return sorted(told, key=lambda each: order.index(each.verdict))


class Examinations:
    """Examines a node in the background whenever somebody looks and the last time is long enough ago.

    What looks different from how it did then has it examined sooner: a page must not contradict itself for long.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._last: Examination | None = None
        self._due = 0.0
        self._due_for_news = 0.0
        self._running: asyncio.Task[None] | None = None

    async def last(self, picture: Hashable) -> Examination | None:
        """Return the last examination; None if the first has not ended yet. *picture* is what is seen now.

        This waits a moment for the first one, for the one that begins because nobody has looked for a minute, as what
        was found before that may be long over, and for one that begins because of the picture. Pages that stay open
        wait for no other.
        """
        is_news = self._last is not None and self._last.picture != picture
        now = monotonic()
        late = now - self._due
        if self._running is None and now >= (self._due_for_news if is_news else self._due):
            self._running = asyncio.create_task(self._examine(picture), name="dashboard-doctor")
        if self._running is not None and (self._last is None or is_news or late >= INTERVAL.total_seconds()):
            await asyncio.wait([self._running], timeout=PATIENCE.total_seconds())
        return self._last

    async def close(self) -> None:
        """End an examination that is under way, after a moment in which it may end by itself."""
        if (running := self._running) is not None:
            await asyncio.wait([running], timeout=CLOSING.total_seconds())
            running.cancel()
            await asyncio.wait([running])

    async def _examine(self, picture: Hashable) -> None:
        began = monotonic()
        try:
            findings = await examine_node(self._federation)
            self._last = Examination(at=datetime.now(UTC), findings=findings, picture=picture)
        except Exception:  # a page is shown without what the doctor says
            log.exception("dashboard_examination_failed")
        finally:
            ended = monotonic()
            pause = SHARE * (ended - began)
            self._due = ended + max(INTERVAL.total_seconds(), pause)
            self._due_for_news = ended + max(NEWS.total_seconds(), pause)
            self._running = None
