"""Crons as job schedulers of BullMQ: declared, listed, removed. `schedules` keeps them going.

Theory of operation. BullMQ's `addJobScheduler` begins a schedule anew: it replaces the next job. So every process that
declares a cron first looks at the scheduler, and calls that script only if there is something new, and Lua in front of
it makes sure that nobody else has declared, turned or removed the scheduler since.

What BullMQ has no word for are two things. The version is an option of the scheduler's template (`cron`), which Node
keeps in the jobs and does not read; a scheduler without one is another program's. The version in which a cron was
removed is kept in `workers:removed-crons`. What Node removes is not remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.cron import find_zone, read_pattern
from workers.errors import StorageError, Unsupported
from workers.jobs import Declared, Missed, NewJob, Recurrence, Scheduled
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import BullMQJob, decode_options, encode_options
from workers.storage.bullmq.schedules import next_options
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


class JobSchedulers:
    """The part of a BullMQ storage that knows what recurs in the queue."""

    def __init__(self, queue: QueueAccess) -> None:
        self._queue = queue
        self._lua = queue.lua

    async def declare(self, cron: Recurrence) -> Declared:
        """See `TurnsCrons.declare_cron`."""
        refuse_cron(cron)
        for _ in range(RACES):
            seen = await self._look(cron.name)
            if (refusal := seen.refusal(cron)) is not None:
                return refusal
            if await self._store(cron, seen):
                return Declared.STORED
        raise StorageError(f"cron {cron.name!r} was changed by others {RACES} times meanwhile; try again")

    async def scheduled(self) -> list[Scheduled]:
        """See `TurnsCrons.scheduled`. Repeatable jobs of BullMQ 5 that have no scheduler are left out."""
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

    async def remove(self, name: str) -> bool:
        """See `TurnsCrons.remove_cron`."""
        return not await self._run(self._lua.remove_scheduler(name))

    async def job(self, name: str, suffix: str) -> NewJob | None:
        """See `TurnsCrons.cron_job`."""
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


def refuse_cron(cron: Recurrence) -> None:
    """See `TurnsCrons.refuse_cron`."""
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
