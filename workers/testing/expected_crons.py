"""What should recur in a queue, and which jobs should come of it: written from the contract, for two kinds of times.

A `Cron` here has a period, or the pattern `HOURLY` in UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.crons import Cron, Missed
from workers.jobs import NewJob

HOURLY: Final = "0 * * * *"
_HOUR: Final = timedelta(hours=1)
_STILL_KEPT: Final = timedelta(minutes=1)
"""How late a time may be that counts as kept, where missed ones are skipped."""


@dataclass(slots=True, kw_only=True)
class ExpectedCron:
    """What recurs; `last` is the end of the time that ticked."""

    cron: Cron
    due: datetime | None
    revision: int = 1
    paused: bool = False
    removed: bool = False
    last: datetime | None = None


class ExpectedCrons:
    """What there should be, by name. All times are those of the storage."""

    def __init__(self) -> None:
        self.kept: dict[str, ExpectedCron] = {}

    def store(self, cron: Cron, now: datetime) -> None:
        """Keep the definition, unless there is one of its version or a higher one."""
        kept = self.kept.get(cron.name)
        if kept is None:
            self.kept[cron.name] = ExpectedCron(cron=cron, due=_first_after(cron, now))
        elif kept.cron.version < cron.version:
            as_before = not kept.removed and (kept.cron.pattern, kept.cron.every) == (cron.pattern, cron.every)
            if not as_before and not kept.paused:
                kept.due = _first_after(cron, max(now, kept.last or now))
            kept.cron, kept.removed, kept.revision = cron, False, kept.revision + 1

    def pause(self, name: str, now: datetime) -> bool:
        """Keep it from being due, and return what `pause` should answer."""
        kept = self._change(name)
        if kept is not None:
            kept.paused, kept.due = True, None
        return kept is not None

    def resume(self, name: str, now: datetime) -> bool:
        """Let it be due for the first time from now, unless it is due, and return what `resume` should answer."""
        kept = self._change(name)
        if kept is not None and (kept.paused or kept.due is None or kept.due > now):
            kept.paused, kept.due = False, _first_after(kept.cron, now)
        return kept is not None

    def remove(self, name: str, now: datetime) -> bool:
        """Keep nothing but its version, and return what `remove` should answer."""
        kept = self._change(name)
        if kept is not None:
            kept.removed, kept.paused, kept.due = True, False, None
        return kept is not None

    def _change(self, name: str) -> ExpectedCron | None:
        kept = self.kept.get(name)
        if kept is None or kept.removed:
            return None
        kept.revision += 1
        return kept

    def tick(self, now: datetime) -> list[tuple[str, list[NewJob]]]:
        """Turn what is due, the longest due first, and return the names with the jobs to be enqueued for each."""
        due = sorted((kept.due, name) for name, kept in self.kept.items() if kept.due is not None and kept.due <= now)
        return [(name, self._tick(self.kept[name], at, now)) for at, name in due]

    def _tick(self, kept: ExpectedCron, due: datetime, now: datetime) -> list[NewJob]:
        times = [due]
        while (following := _next(kept.cron, times[-1])) <= now:
            times.append(following)
        kept.due, kept.last, kept.revision = following, max(now, due), kept.revision + 1
        if kept.cron.missed is Missed.ONCE:
            times = times[:1]
        elif kept.cron.missed is Missed.SKIP:
            times = [one for one in times if now - one <= _STILL_KEPT]
        return [kept.cron.job_at(one) for one in times]


def _next(cron: Cron, moment: datetime) -> datetime:
    """Return the time after this one."""
    return moment + (_HOUR if cron.every is None else cron.every)


def _first_after(cron: Cron, moment: datetime) -> datetime:
    """Return the first time after that moment, to the millisecond."""
    whole = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    if cron.every is not None:
        return whole + cron.every
    assert cron.pattern == HOURLY
    return whole.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + _HOUR
