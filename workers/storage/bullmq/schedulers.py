"""Crons as job schedulers of BullMQ: declared, listed, removed, and kept going from job to job.

Theory of operation. A cron is declared by BullMQ's `addJobScheduler`, which begins a schedule anew: it replaces the
next job. So every process that declares one first looks at the scheduler, and calls that script only if there is
something new, and Lua in front of it makes sure that nobody else has declared, turned or removed the scheduler since.
BullMQ has no word for versions: a cron's is an option of the scheduler's template (`cron`), which Node keeps in the
jobs and does not read; a scheduler without one is another program's. The version in which a cron was removed is kept in
`workers:removed-crons`. What Node removes is not remembered.

A scheduler has one current job, `repeat:<scheduler>:<when>`, whose `when` is the scheduler's score in BullMQ's set
`repeat`. Whoever claims it adds the job that follows and moves the score on, in one script of BullMQ's. A job that was
claimed before (a retry, a stalled one) or whose scheduler was changed or removed meanwhile is not the current one, and
adds nothing. If a worker dies between the two, the job is still the current one for whoever gets it when the lease is
over.

A job whose successor cannot be added is not run either, because the schedule would end with it. It is given back, due a
moment later, so that a worker of Node may take it, and is told once. That moment is short at first, because a worker of
Node that is idle takes the job then, and longer each time that we get it nevertheless.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from workers.cron import UnreadablePattern, find_zone, read_pattern
from workers.errors import StorageError, Unsupported, WorkersError
from workers.jobs import Declared, Missed, NewJob, Recurrence, Scheduled
from workers.storage.bullmq.access import QueueAccess, QueuePart
from workers.storage.bullmq.codec import BullMQJob, decode_options, encode_options
from workers.storage.bullmq.record import BullMQClaim
from workers.storage.bullmq.scripts import REMOVED_CRONS
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.node_values import (
    decode_bytes,
    encode_bytes,
    from_ms,
    json_object,
    moment,
    number,
    to_ms,
    whole,
)
from workers.storage.on_redis.wire import Command
from workers.storage.rules import check_fits_redis

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


class Schedules(QueuePart):
    """Keeps the job schedulers of one queue going."""

    def __init__(self, queue: QueueAccess) -> None:
        super().__init__(queue)
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
        stuck = [
            (one, reply) for (one, _), reply in zip(asked, replies, strict=True) if not isinstance(reply, str | None)
        ]
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


RACES: Final = 20
"""How often a declaration is tried again because the scheduler was changed meanwhile."""
READ_TOGETHER: Final = 500
CRON_OPTION: Final = "cron"
"""In the options of a template, and of its jobs: what only we know of the cron, `{"version": n}`."""

_OF_EACH_JOB: Final = frozenset(
    ("jobId", "delay", "timestamp", "prevMillis", "repeat", "repeatJobKey", "parent", "de", CRON_OPTION)
)
"""Options that a job made by hand does not take from a template."""
_LIKE_A_JOB: Final = re.compile(r":\d+\Z", re.ASCII)
_WAITING: Final = frozenset(("waiting", "prioritized", "delayed"))
_OVER: Final = frozenset(("unknown", "completed", "failed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A scheduler as it was: when its next job is due, its fields, and the next job's state in BullMQ's words."""

    name: str
    due: str = ""
    fields: Mapping[str, str]
    removed: str = ""
    place: str = "unknown"

    @property
    def due_ms(self) -> int | None:
        """When the next job is due; None if there is no scheduler."""
        return whole(self.due) if self.due else None

    @property
    def state(self) -> tuple[str, str, str]:
        """What must not have changed when the scheduler is stored."""
        return self.due, self.fields.get("opts", ""), self.removed

    def refusal(self, cron: Recurrence) -> Declared | None:
        """Return why the definition is not to be stored; None if it is."""
        if not self.due:
            return Declared.REMOVED if whole(self.removed) >= cron.version else None
        found = decoded(self.name, self.fields)
        if not found.version:
            return Declared.FOREIGN
        if found.version != cron.version:
            return Declared.KEPT if found.version > cron.version else None
        if found != decoded(cron.name, encoded(cron)):
            return Declared.DIFFERENT
        return None if self.place in _OVER else Declared.KEPT


class BullMQCrons(QueuePart):
    """The part of a BullMQ storage that knows what recurs in the queue."""

    def refuse_cron(self, cron: Recurrence) -> None:
        why = None
        if cron.missed is not Missed.ONCE:
            why = "BullMQ lets one job stand for all times that were missed: leave `missed` out"
        elif cron.ordering_key is not None:
            why = "BullMQ has no ordering keys"
        elif cron.priority < 0:
            why = "BullMQ has no priority above 0: a lower number goes first, and 0 is the lowest"
        elif _LIKE_A_JOB.search(cron.name):
            why = "BullMQ takes a name that ends with a colon and a number for one of a cron's jobs"
        if why is not None:
            raise Unsupported(f"cron {cron.name!r}: {why}")
        check_fits_redis(cron.name, cron.payload)

    async def declare_cron(self, cron: Recurrence) -> Declared:
        self.refuse_cron(cron)
        for _ in range(RACES):
            seen = await self._look(cron.name)
            if (refusal := seen.refusal(cron)) is not None:
                return refusal
            if await self._store(cron, seen):
                return Declared.STORED
        raise StorageError(f"cron {cron.name!r} was changed by others {RACES} times meanwhile; try again")

    async def scheduled(self) -> list[Scheduled]:
        """See `RepeatsJobs.scheduled`. Repeatable jobs of BullMQ 5 that have no scheduler are left out."""
        [found] = await self._queue.ask([("ZRANGE", self._lua["repeat"], 0, -1, "WITHSCORES")])
        due = sorted(zip(found[::2], found[1::2], strict=True))
        hashes: list[Reply] = []
        for start in range(0, len(due), READ_TOGETHER):
            names = [name for name, _ in due[start : start + READ_TOGETHER]]
            hashes += await self._queue.ask([("HGETALL", self._key(name)) for name in names])
        return [
            Scheduled(cron=decoded(name, _pairs(fields)), due=moment(whole(at)))
            for (name, at), fields in zip(due, hashes, strict=True)
            if fields
        ]

    async def remove_cron(self, name: str) -> bool:
        return not await self._run(self._lua.remove_scheduler(name))

    async def cron_job(self, name: str, suffix: str) -> NewJob | None:
        seen = await self._look(name)
        if not seen.due or not seen.fields:
            return None
        found, options = decoded(name, seen.fields), json_object(seen.fields.get("opts"))
        template = {name: value for name, value in options.items() if name not in _OF_EACH_JOB}
        return BullMQJob(
            id=f"cron:{name}:{suffix}",
            name=found.job,
            payload=found.payload,
            keep_completed=found.keep_completed,
            keep_failed=found.keep_failed,
            options={**template, "attempts": found.max_attempts},
            ours=decode_options(options).ours,
        )

    async def _look(self, name: str) -> Seen:
        looks: list[Command] = [("ZSCORE", self._lua["repeat"], name), ("HGETALL", self._key(name))]
        looks.append(("HGET", self._lua[REMOVED_CRONS], name))
        [(due, fields, removed)] = await self._queue.server.run_atomic([looks])
        for reply in (due, fields, removed):
            if isinstance(reply, StorageError):
                raise reply
        seen = Seen(name=name, fields=_pairs(fields), removed=removed or "")
        if due is None:
            return seen
        [state] = await self._queue.ask([self._lua.state(f"repeat:{name}:{whole(due)}")])
        return Seen(name=name, due=str(due), fields=seen.fields, removed=seen.removed, place=str(state))

    async def _store(self, cron: Recurrence, seen: Seen) -> bool:
        """Store the definition; False if somebody changed the scheduler since it was seen, or claims its job."""
        now_ms = self._queue.now_ms()
        next_ms = _next_ms(cron, seen, now_ms)
        recurs = _recurs(cron, seen, now_ms)
        template = _template(cron)
        repeat = {name: value for name, value in recurs.items() if name != "name"}
        command = self._lua.add_scheduler(
            cron.name,
            encode_bytes(cron.payload),
            template,
            recurs,
            next_options({**template, "repeat": repeat}, cron.name, now_ms, None if cron.every else next_ms),
            next_ms=next_ms,
            now_ms=now_ms,
            seen=seen.state,
        )
        return isinstance(await self._run(command), list)

    async def _run(self, command: Command) -> Reply:
        [reply] = await self._queue.server.run([command], confirmed=True)
        if isinstance(reply, StorageError):
            raise reply
        return reply

    def _key(self, name: str) -> str:
        return f"{self._lua['repeat']}:{name}"


def encoded(cron: Recurrence) -> dict[str, str]:
    """Return the fields of a scheduler that `decoded` reads, as BullMQ's script writes them."""
    every = {} if cron.every is None else {"every": str(to_ms(cron.every))}
    pattern = {} if cron.pattern is None else {"pattern": cron.pattern, "tz": cron.timezone}
    data = encode_bytes(cron.payload).decode()
    return {"name": cron.job, **every, **pattern, "data": data, "opts": json.dumps(_template(cron))}


def decoded(name: str, fields: Mapping[str, str]) -> Recurrence:
    """Return what a scheduler's fields say, whoever wrote them."""
    written = json_object(fields.get("opts"))
    options, own = decode_options(written), written.get(CRON_OPTION)
    every = number(fields.get("every"))
    return Recurrence(
        name=name,
        job=fields.get("name") or name,
        pattern=fields.get("pattern") or None,
        every=from_ms(every) if every else None,
        timezone=fields.get("tz", "UTC" if every else ""),
        version=whole(own.get("version")) if isinstance(own, dict) else 0,
        payload=decode_bytes(fields.get("data", "{}")),
        max_attempts=options.max_attempts,
        priority=whole(written.get("priority")),
        keep_completed=options.keep_completed,
        keep_failed=options.keep_failed,
    )


def _template(cron: Recurrence) -> dict[str, object]:
    """Return the options of each of its jobs."""
    options = encode_options(cron.job_called(""), "")
    return {
        **{name: value for name, value in options.items() if name != "jobId"},
        CRON_OPTION: {"version": cron.version},
    }


def _recurs(cron: Recurrence, seen: Seen, now_ms: int) -> dict[str, object]:
    """Return what a scheduler says of its times, and the name of its jobs.

    The times of a period are those at `offset` after multiples of it: as before, or as many as the period from now.
    """
    if cron.every is None:
        return {"name": cron.job, "tz": cron.timezone, "pattern": cron.pattern}
    every = to_ms(cron.every)
    kept = whole(seen.fields.get("offset")) if _recurs_as_before(cron, seen) else 0
    return {"name": cron.job, "every": every, "offset": kept or now_ms % every or every}


def _next_ms(cron: Recurrence, seen: Seen, now_ms: int) -> int:
    """Return when the next job of a pattern is due; for a period BullMQ's script knows better."""
    if cron.pattern is None:
        return now_ms
    waits = seen.place in _WAITING
    if seen.due_ms is not None and waits and _recurs_as_before(cron, seen):
        return seen.due_ms
    # The time of a job that has begun has no second one, not even if the clock was set back since.
    begin = now_ms if seen.due_ms is None or waits else max(now_ms, seen.due_ms)
    found = read_pattern(cron.pattern).next_after(begin, find_zone(cron.timezone))
    if found is None:
        raise StorageError(f"cron {cron.name!r}: the pattern {cron.pattern!r} never comes")
    return found


def _recurs_as_before(cron: Recurrence, seen: Seen) -> bool:
    return bool(seen.due) and decoded(cron.name, encoded(cron)).recurs_as(decoded(seen.name, seen.fields))


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
