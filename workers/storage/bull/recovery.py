"""Recovery of abandoned jobs, told from jobs that merely look abandoned.

Theory of operation. A job is abandoned when it is active and nobody has its lock. Node takes a job and locks it in two
steps, and up to 1.0.0-rc3 it cannot renew a lock: the lock of a long run lapses for up to 2.5 s while the run goes on.
So one look proves nothing. A job is abandoned if it has no lock at every look during a grace, with looks less than a
second apart. The looks are this process's own, so a reaper depends on nobody's memory. A claim of ours is taken and
locked in one step and renewed in time, so it is over when its lock is. The exception is beside rc3, which takes over
jobs where they stand, and lets the locks of what it took lapse.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from workers.jobs import Recovery
from workers.storage.bull.codec import Dialect, decode_id
from workers.storage.bull.quarantine import BullQuarantine
from workers.storage.bull.scripts import BullScripts
from workers.storage.on_redis.batches import AT_ONCE
from workers.storage.on_redis.messages import pack, unpack
from workers.storage.rules import bounded_count

_LOG = logging.getLogger(__name__)

GRACES: Final[Mapping[Dialect, timedelta]] = {
    "A": timedelta(milliseconds=5_250),
    "B": timedelta(seconds=1),
    "C": timedelta(seconds=1),
}
"""How long a job must be seen without a lock: beside dialect A as long as Node's locks last, else until Node locks."""

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

    async def recover(self, limit: int, max_stalls: int) -> Recovery:
        """See `Storage.recover`; while a job of Node looks abandoned, this takes as long as the grace."""
        limit = min(bounded_count(limit), AT_ONCE)
        clock = asyncio.get_running_loop().time
        requeued: list[str] = []
        failed: list[str] = []
        first_seen: dict[bytes, float] | None = None
        restarts = 0
        while len(requeued) + len(failed) < limit:
            looked_at = clock()
            watched = first_seen or {}
            ripe = [raw for raw, since in watched.items() if looked_at - since >= self._grace]
            wanted = limit - len(requeued) - len(failed)
            back, given_up, suspects = await self._look(wanted, max_stalls, ripe)
            requeued += back
            failed += given_up
            # In a busy queue some job is always being taken: one that the first look missed is left to the next call.
            anew = first_seen is None
            first_seen = {raw: watched.get(raw, looked_at) for raw in suspects if anew or raw in watched}
            if not first_seen:
                break
            await asyncio.sleep(min(LOOK_SECONDS, self._grace) * random.uniform(0.8, 1))  # noqa: S311 - spreads load
            if clock() - looked_at > FARTHEST_LOOKS_SECONDS:
                first_seen = None
                restarts += 1
                if restarts > MOST_RESTARTS:
                    break
        return Recovery(requeued=tuple(requeued), failed=tuple(failed))

    async def _look(
        self, limit: int, max_stalls: int, ripe: Sequence[bytes]
    ) -> tuple[list[str], list[str], Sequence[bytes]]:
        answer = await self._quarantine.run("recover", limit, max_stalls, int(self._ours_at_once), pack(ripe))
        requeued, failed, dropped, suspects, told = unpack(answer)
        self._quarantine.heed(told)
        report_dropped(self._lua.queue, dropped)
        return [decode_id(raw) for raw in requeued], [decode_id(raw) for raw in failed], suspects


def report_dropped(queue: str, raws: Sequence[bytes]) -> None:
    """Log ids that were in a line without a job; they are out of the line."""
    if raws:
        shown = [decode_id(raw)[:80] for raw in raws[:10]]
        _LOG.warning("bull.job_without_record: %d ids of queue %r dropped, among them %r", len(raws), queue, shown)
