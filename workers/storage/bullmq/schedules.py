"""Job schedulers of BullMQ, which live on only if each worker that takes one of their jobs adds the next.

Theory of operation. A scheduler has one current job, `repeat:<scheduler>:<when>`, whose `when` is the scheduler's score
in BullMQ's set `repeat`. Whoever claims it adds the job that follows and moves the score on, in one script of BullMQ's.
A job that was claimed before (a retry, a stalled one) or whose scheduler was changed or removed meanwhile is not the
current one, and adds nothing. If a worker dies between the claim and that script, the job is still the current one for
whoever gets it when the lease is over.

A job whose successor cannot be added is not run either, because the schedule would end with it. It is given back, due a
moment later, so that a worker of Node may take it, and is told once. That moment is short at first, because a worker of
Node that is idle takes the job then, and longer each time that we get it nevertheless.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from workers.cron import UnreadablePattern, find_zone, read_pattern
from workers.errors import StorageError, WorkersError
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.record import BullMQClaim
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.node_values import json_object, number, whole
from workers.storage.on_redis.wire import Command

_LOG = logging.getLogger(__name__)

SCHEDULER_FIELD: Final = "rjk"
FIRST_GIVEN_BACK_MS: Final = 20
GIVEN_BACK_MS: Final = 10_000
"""How long a job that was given back is not due at last. Shorter, and idle workers would spin on it."""
COMPLAINTS_KNOWN: Final = 1_000
GIVEN_BACK_KNOWN: Final = 1_000
OPTIONS_OF_ONE_VERSION: Final = ("iterator", "nthDayOfWeek", "strict", "utc")
"""Members of `repeat` by which one of Node's versions reads a pattern differently, and the other does not."""


class ScheduleEnded(Exception):
    """The job is its scheduler's last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A claimed job of a scheduler; `data` (JSON text) and `options` are its own, as written."""

    claim: BullMQClaim
    scheduler: str
    data: str
    options: Mapping[str, object]


def iterations(claims: Sequence[BullMQClaim], replies: Sequence[Reply]) -> list[Iteration]:
    """Return those claims that are jobs of schedulers; `replies` are those of `moveToActive`."""
    found: list[Iteration] = []
    taken = [reply[0] for reply in replies if isinstance(reply, list) and isinstance(reply[0], list)]
    for claim, flat in zip(claims, taken, strict=True):
        if SCHEDULER_FIELD in flat:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            if scheduler := fields.get(SCHEDULER_FIELD):
                options = json_object(fields.get("opts"))
                data = fields.get("data", "{}")
                found.append(Iteration(claim=claim, scheduler=scheduler, data=data, options=options))
    return found


class Schedules:
    """Keeps the job schedulers of one queue going."""

    def __init__(self, queue: QueueAccess) -> None:
        self._queue = queue
        self._lua = queue.lua
        self._told: set[tuple[str, str]] = set()
        self._untold: list[str] = []
        self._given_back: dict[str, int] = {}  # how long each job was not due the last time

    @property
    def has_news(self) -> bool:
        """Whether `tell` has something to tell."""
        return bool(self._untold)

    def tell(self) -> None:
        """Log and raise an error about the schedules of the last claim that cannot go on here; each is told once."""
        untold, self._untold = self._untold, []
        if untold:
            others = f" (and {len(untold) - 1} more such jobs)" if len(untold) > 1 else ""
            error = StorageError(f"{untold[0]}{others}")
            _LOG.error("%s", error)
            raise error

    async def go_on(self, claims: list[BullMQClaim], replies: Sequence[Reply]) -> list[BullMQClaim]:
        """Add the jobs that follow those of schedulers; return the claims that may run.

        `replies` are those of `moveToActive`. What may not run has been given back.
        """
        scheduled = iterations(claims, replies)
        if not scheduled:
            return claims
        stuck = await self._add_next(scheduled)
        return [claim for claim in claims if claim.token not in stuck]

    async def _add_next(self, scheduled: Sequence[Iteration]) -> frozenset[str]:
        """Add the next jobs; return the tokens of those that may not run."""
        now_ms = self._queue.now_ms()
        asked = [(one, command) for one in scheduled if (command := self._following(one, now_ms)) is not None]
        try:
            replies = await self._queue.server.run([command for _, command in asked])
        except WorkersError:  # some may have been added; whoever gets the others adds them
            return await self._give_back((one, 0) for one, _ in asked)
        stuck = [(one, reply) for (one, _), reply in zip(asked, replies, strict=True) if not _is_done(reply)]
        for one, reply in stuck:
            self._note(one, str(reply if isinstance(reply, StorageError) else reply[0]))
        return await self._give_back((one, self._pause(one.claim.raw)) for one, _ in stuck)

    def _following(self, one: Iteration, now_ms: int) -> Command | None:
        """Return the command that adds the next job, or, if we cannot, asks whether anybody must; None at the end."""
        command = partial(self._lua.schedule, one.scheduler, one.claim.raw, one.data, now_ms=now_ms)
        try:
            next_ms = next_time(one.options, now_ms)
            return command(next_options(one.options, one.scheduler, now_ms, next_ms), next_ms=next_ms, why_not="")
        except ScheduleEnded:
            return None
        except (StorageError, ValueError, OverflowError) as error:  # what MessagePack cannot hold is the last two
            return command({}, next_ms=None, why_not=str(error))

    def _pause(self, raw: str) -> int:
        """Return for how many milliseconds the job is not due: twice as long each time."""
        pause = min(2 * self._given_back.pop(raw, FIRST_GIVEN_BACK_MS // 2), GIVEN_BACK_MS)
        self._given_back[raw] = pause
        if len(self._given_back) > GIVEN_BACK_KNOWN:
            del self._given_back[next(iter(self._given_back))]
        return pause

    async def _give_back(self, those: Iterable[tuple[Iteration, int]]) -> frozenset[str]:
        now_ms, pauses = self._queue.now_ms(), [(one.claim, pause) for one, pause in those]
        commands = [
            self._lua.delay(claim.raw, claim.token, delay_ms=pause, counted=False, fields={}, now_ms=now_ms)
            for claim, pause in pauses
        ]
        with contextlib.suppress(WorkersError):  # the leases will run out
            await self._queue.server.run(commands)
        return frozenset(claim.token for claim, _ in pauses)

    def _note(self, one: Iteration, why: str) -> None:
        if (one.scheduler, why) in self._told:
            return
        if len(self._told) >= COMPLAINTS_KNOWN:
            self._told.clear()
        self._told.add((one.scheduler, why))
        names = f"job {one.claim.job_id[:200]!r} of the job scheduler {one.scheduler[:200]!r}"
        self._untold.append(f"{names} is left to workers of Node, because we cannot tell what follows: {why}")


def next_time(options: Mapping[str, object], now_ms: int) -> int | None:
    """Return when the next job of a cron pattern is due; None for a period, by which BullMQ's script knows.

    Raises:
        ScheduleEnded: there is no next job.
        StorageError: the schedule cannot be read.
    """
    repeat = options.get("repeat")
    if not isinstance(repeat, dict):
        raise StorageError("it does not say how it recurs")
    pattern, end_ms, limit = repeat.get("pattern"), _moment_ms(repeat, "endDate"), repeat.get("limit")
    if bool(pattern) is bool(repeat.get("every")):
        raise StorageError("it has both a pattern and a period, or neither")
    if limit is not None and whole(repeat.get("count")) + 1 > _count(limit):
        raise ScheduleEnded
    if end_ms is not None and now_ms > end_ms:
        raise ScheduleEnded
    if not pattern:
        return None
    for name in OPTIONS_OF_ONE_VERSION:
        if repeat.get(name):
            raise UnreadablePattern(f"Node's versions differ about {name!r}")
    begin = max(now_ms, whole(options.get("prevMillis")), _moment_ms(repeat, "startDate") or 0)
    found = read_pattern(str(pattern)).next_after(begin, find_zone(repeat.get("tz")))
    if found is None or (end_ms is not None and found > end_ms):
        raise ScheduleEnded
    return found


def next_options(options: Mapping[str, object], scheduler: str, now_ms: int, next_ms: int | None) -> dict[str, object]:
    """Return the options of the job that follows, as Node writes them; BullMQ's script adds its id and its delay."""
    repeat = options["repeat"]
    assert isinstance(repeat, dict)
    dates = {name: _moment_ms(repeat, name) for name in ("startDate", "endDate")}
    offset = repeat.get("offset") if repeat.get("every") else None
    following = {
        **{name: value for name, value in repeat.items() if name != "immediately"},
        **dates,
        "offset": offset or None,
        "count": whole(repeat.get("count")) + 1,
    }
    return {
        **options,
        "timestamp": now_ms,
        "prevMillis": next_ms,
        "repeatJobKey": scheduler,
        "repeat": {name: value for name, value in following.items() if value is not None},
    }


def _is_done(reply: Reply) -> bool:
    return reply is None or isinstance(reply, str)


def _count(limit: object) -> float:
    found = number(limit)
    if found is None:
        raise StorageError("its limit is no number")
    return found


def _moment_ms(repeat: Mapping[str, object], name: str) -> int | None:
    """Return a date as BullMQ keeps it, in milliseconds; 0 is none.

    Raises:
        StorageError: it is no date.
    """
    value = repeat.get(name)
    if not value:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            # Without a zone, Node takes it for local time, or not.
            if (found := datetime.fromisoformat(value)).tzinfo is not None:
                return int(found.timestamp() * 1_000)
    elif (milliseconds := number(value)) is not None:
        return int(milliseconds)
    raise StorageError(f"its {name} is no date")
