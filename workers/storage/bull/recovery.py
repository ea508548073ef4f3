"""Recovery of abandoned jobs, told from jobs that merely look abandoned.

Theory of operation. A job is abandoned when it is active and nobody has its lock. Node takes a job and locks it in two
steps, and up to 1.0.0-rc3 it cannot renew a lock: the lock of a long run lapses for up to 2.5 s while the run goes on.
So one look proves nothing. A job is abandoned if it has no lock at every look during a grace, with looks less than a
second apart. The looks are this process's own, so a reaper depends on nobody's memory. A claim of ours is taken and
locked in one step and renewed in time, so it is over when its lock is. The exception is beside rc3, which takes over
jobs where they stand, and lets the locks of what it took lapse.

What the last look found is remembered for the next call. So while calls come often, a job is watched from the first
look that finds it without a lock, also one that came too late for its own call to wait for it.

A job in no line is run by nobody; Bull calls it stuck. Bull's own pauses and resumes rename lists, and lose what
another step has put into the list that they overwrite. Only the hash remains. So all hashes of the queue are looked at,
some at a time, and those that no set and no list has are suspected. While that goes on, jobs move from one list to the
next. A script therefore looks for each suspect once more, everywhere and in one step, and queues it in that step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from workers.errors import StorageError
from workers.jobs import Recovery, Repaired, RepairOutcome
from workers.storage.bull.codec import Dialect, decode_id
from workers.storage.bull.quarantine import BullQuarantine
from workers.storage.bull.scripts import BullScripts
from workers.storage.on_redis.batches import AT_ONCE, portions
from workers.storage.on_redis.messages import pack, unpack
from workers.storage.on_redis.wire import Command, Reply
from workers.storage.rules import bounded_count

REASON: Final = "it was in no line, as Bull's own pause and resume may leave a job"

SCANNED: Final = 1_000
"""How many keys, or places of a list, one command looks at."""
SUSPECTS: Final = 50_000
"""How many ids are held in memory while the lists are read."""
LOOKED_FOR: Final = 20
"""How many suspects one script looks for: each along whole lists."""

_GLOB: Final = re.compile(rb"([*?\[\]\\^])")


class StrandedJobs:
    """Finds the jobs of one queue that are in no line."""

    def __init__(self, lua: BullScripts) -> None:
        self._lua = lua

    async def find(self) -> list[str]:
        """See `Strandable.stranded`."""
        return [decode_id(raw) async for raw in self._each(requeue=False)]

    async def requeue(self) -> list[Repaired]:
        """Put them into the line again, behind all others, with the attempts they have made."""
        ids = [decode_id(raw) async for raw in self._each(requeue=True)]
        return [Repaired(id=job_id, reason=REASON, outcome=RepairOutcome.REQUEUED) for job_id in ids]

    async def _each(self, *, requeue: bool) -> AsyncIterator[bytes]:
        async for suspects in self._suspects():
            for line in (b"wait", b"paused", b"active"):
                await self._strike_out(suspects, self._lua.base + line)
            in_order = sorted(suspects, key=lambda raw: (len(raw), raw))  # numbers by their value
            for some in portions(in_order, at_once=LOOKED_FOR):
                for raw in unpack(await self._lua.run("stranded", pack(some), int(requeue))):
                    yield raw

    async def _suspects(self) -> AsyncIterator[set[bytes]]:
        """Yield the ids of hashes that are neither delayed nor over, so many at a time as memory is to hold."""
        pattern = _GLOB.sub(rb"\\\1", self._lua.base) + b"*"
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED, "TYPE", "hash")
            [[cursor, keys]] = await self._run(scan)
            found |= await self._waiting([key[len(self._lua.base) :] for key in keys])
            if cursor == b"0" or len(found) >= SUSPECTS:
                yield found
                found = set()
            if cursor == b"0":
                return

    async def _waiting(self, raws: Sequence[bytes]) -> set[bytes]:
        ours = [raw for raw in raws if not raw.startswith(b"workers:")]
        if not ours:
            return set()
        commands: list[Command] = [("SMISMEMBER", self._lua.base + line, *ours) for line in (b"completed", b"failed")]
        ended, failed, due = await self._run(*commands, ("ZMSCORE", self._lua.base + b"delayed", *ours))
        places = zip(ours, ended, failed, due, strict=True)
        return {raw for raw, *ends, score in places if not any(ends) and score is None}

    async def _strike_out(self, suspects: set[bytes], line: bytes) -> None:
        """Take out the ids that the list has; one that moves meanwhile may stay."""
        start = 0
        while suspects:
            [ids] = await self._run(("LRANGE", line, start, start + SCANNED - 1))
            suspects.difference_update(ids)
            start += SCANNED
            if len(ids) < SCANNED:
                return

    async def _run(self, *commands: Command) -> list[Reply]:
        replies = await self._lua.server.run(commands)
        for reply in replies:
            if isinstance(reply, StorageError):
                raise reply
        return replies


_LOG = logging.getLogger(__name__)

GRACES: Final[Mapping[Dialect, timedelta]] = {
    "A": timedelta(milliseconds=5_250),
    "B": timedelta(seconds=1),
    "C": timedelta(seconds=1),
}
"""How long a job must be seen without a lock: beside dialect A as long as Node's locks last, else until Node locks."""

RECOVERY_INTERVAL: Final = timedelta(milliseconds=500)
"""How often to look for abandoned jobs: after the 5 s of a dead Node worker's lock, this and the grace its job is back,
within 11 s beside dialect A, too.
"""
LOOK_SECONDS: Final = 0.5
FARTHEST_LOOKS_SECONDS: Final = 1.0
"""With more time between two looks, a lock may have come and gone."""
MOST_RESTARTS: Final = 5
"""A machine that is too slow to look in time leaves the rest to the next call."""


class Recoverer:
    """Looks for abandoned jobs of one queue."""

    def __init__(self, lua: BullScripts, quarantine: BullQuarantine, dialect: Dialect, grace: timedelta) -> None:
        self._lua = lua
        self._quarantine = quarantine
        self._ours_at_once = dialect != "A"
        self._grace = grace.total_seconds()
        self._since: dict[bytes, float] = {}  # the jobs without a lock at the last look, and from when on
        self._looked_at = -math.inf

    async def recover(self, limit: int, max_stalls: int) -> Recovery:
        """See `Storage.recover`; while a job of Node looks abandoned, this takes as long as the grace."""
        limit = min(bounded_count(limit), AT_ONCE)
        clock = asyncio.get_running_loop().time
        requeued: list[str] = []
        failed: list[str] = []
        awaited: set[bytes] | None = None
        restarts = 0
        while len(requeued) + len(failed) < limit and restarts <= MOST_RESTARTS:
            looked_at = clock()
            wanted = limit - len(requeued) - len(failed)
            back, given_up, suspects = await self._look(wanted, max_stalls, looked_at)
            requeued += back
            failed += given_up
            # In a busy queue some job is always being taken: one that the first look missed is left to the next call.
            awaited = suspects if awaited is None else awaited & suspects
            if not awaited:
                break
            ripe_in = self._grace - clock() + min(self._since.get(raw, looked_at) for raw in awaited)
            pause = LOOK_SECONDS * random.uniform(0.8, 1)  # noqa: S311 - spreads load
            await asyncio.sleep(min(pause, max(0.0, ripe_in)))
            if clock() - looked_at > FARTHEST_LOOKS_SECONDS:
                awaited = None
                restarts += 1
        return Recovery(requeued=tuple(requeued), failed=tuple(failed))

    async def _look(self, limit: int, max_stalls: int, now: float) -> tuple[list[str], list[str], set[bytes]]:
        """Recover what has been without a lock for the grace; return what has none as well."""
        if now - self._looked_at > FARTHEST_LOOKS_SECONDS:
            self._since = {}
        ripe = [raw for raw, since in self._since.items() if now - since >= self._grace]
        answer = await self._quarantine.run("recover", limit, max_stalls, int(self._ours_at_once), pack(ripe))
        requeued, failed, dropped, suspects, told = unpack(answer)
        self._quarantine.heed(told)
        report_dropped(self._lua.queue, dropped)
        self._since, self._looked_at = {raw: self._since.get(raw, now) for raw in suspects}, now
        return [decode_id(raw) for raw in requeued], [decode_id(raw) for raw in failed], set(suspects)


def report_dropped(queue: str, raws: Sequence[bytes]) -> None:
    """Log ids that were in a line without a job; they are out of the line."""
    if raws:
        shown = [decode_id(raw)[:80] for raw in raws[:10]]
        _LOG.warning("bull.job_without_record: %d ids of queue %r dropped, among them %r", len(raws), queue, shown)
