"""Jobs of a Bull queue that are in no line, so that nobody ever runs them; Bull calls them stuck.

Theory of operation. Bull's own pauses and resumes rename lists, and lose what another step has put into the list that
they overwrite. Only the hash remains. So all hashes of the queue are looked at, some at a time, and those that no set
and no list has are suspected. While that goes on, jobs move from one list to the next. A script therefore looks for
each suspect once more, everywhere and in one step, and queues it in that step.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from workers.errors import StorageError
from workers.jobs import Repaired, RepairOutcome
from workers.storage.bull.codec import decode_id
from workers.storage.bull.scripts import BullScripts
from workers.storage.on_redis.batches import portions
from workers.storage.on_redis.messages import pack, unpack
from workers.storage.on_redis.wire import Command, Reply

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
