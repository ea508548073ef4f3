"""The ticks of what recurs: which jobs are enqueued now, and when it is due again.

Theory of operation. A row says when it is due. Any worker that finds it so decides here what is enqueued, and replaces
the row of that revision by the next; the storage enqueues in the same step. So of all workers one enqueues for a time,
and it makes no difference what becomes of the job. A row's due time only grows: a clock that steps back reaches it
later, and enqueues nothing twice. `last` keeps that so when the definition changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from workers.crons.definition import Cron, KeptCron, as_milliseconds, as_moment
from workers.jobs import CronRow, Missed, NewJob

_LOG = logging.getLogger(__name__)

LATE: Final = timedelta(minutes=1)
"""How late a time may be and still count as kept, where missed ones are skipped."""
CLOCK_CHANGE: Final = timedelta(hours=3)
"""No change of the clocks makes an hour come again later than this."""
MOST_MISSED: Final = 100
"""How many jobs stand for missed times at most."""
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CronTick:
    """What `KeepsCrons.replace_cron` is called with."""

    row: CronRow
    jobs: Sequence[NewJob]


def tick(row: CronRow, now: datetime) -> CronTick:
    """Return the tick of a row that is due at `now`.

    Raises:
        StorageError: the row is not as this version writes it.
    """
    assert row.due is not None
    kept = KeptCron.decoded(row.name, row.body)
    times = _times(kept.cron, row.due, now)
    following = _following(kept.cron, row.due, now)
    # All that is over by now has ticked, also what was skipped.
    body = replace(kept, last=max(now, row.due)).encoded()
    following_row = CronRow(name=row.name, revision=row.revision + 1, due=following, body=body)
    return CronTick(row=following_row, jobs=[kept.cron.job_at(one) for one in times])


def first_due(cron: Cron, after: datetime) -> datetime | None:
    """Return when a definition is due for the first time after `after`, to the millisecond."""
    return cron.next_after(as_moment(as_milliseconds(after)))


def _times(cron: Cron, due: datetime, now: datetime) -> list[datetime]:
    """Return the times up to `now` that have a job."""
    match cron.missed:
        case Missed.ONCE:
            return [due]
        case Missed.SKIP:
            kept = due if due >= now - LATE else _following(cron, due, now - LATE - _MICROSECOND)
            return [kept] if kept is not None and kept <= now else []
        case Missed.ALL:
            return _all(cron, due, now)


def _all(cron: Cron, due: datetime, now: datetime) -> list[datetime]:
    times: list[datetime] = []
    following: datetime | None = due
    while following is not None and following <= now:
        if len(times) == MOST_MISSED:
            _LOG.warning(
                "cron %r missed more than %d times: those from %s on are skipped", cron.name, len(times), following
            )
            break
        times.append(following)
        following = cron.next_after(following)
    return times


def _following(cron: Cron, due: datetime, now: datetime) -> datetime | None:
    """Return the first time after `now`; those of a period are counted from `due`."""
    if cron.every is not None:
        return due + ((now - due) // cron.every + 1) * cron.every
    following = first_due(cron, _walk_from(cron, due, max(now, due)))
    while following is not None and following <= now:
        following = first_due(cron, following)
    return following


def _walk_from(cron: Cron, due: datetime, now: datetime) -> datetime:
    """Return `now`, or a time before a change of the clocks that has just been: a walk from within knows nothing of it.

    Else an hour that comes twice would have two jobs, if the first was late.
    """
    before = max(due, now - CLOCK_CHANGE)
    return before if cron.offset_at(before) != cron.offset_at(now) else now
