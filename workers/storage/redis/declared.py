"""What is declared for a queue on Redis: its limits, and what recurs. The formats are in `lua/holding.lua` and
`lua/recurring.lua`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.jobs import CronLook, CronRow, NewJob
from workers.limits import HeldBack, Limit, LimitKey, check_limits, limit_key_of
from workers.storage.on_redis.messages import duration, moment, pack, unpack
from workers.storage.on_redis.storage import ScriptedStorage
from workers.storage.on_redis.wire import Reply
from workers.storage.redis import codec
from workers.storage.redis.codec import Packed, bytes_of, text_of
from workers.storage.rules import CRONS_AT_ONCE, check_fits_redis, refuse_other_queues

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class RedisDeclared(ScriptedStorage):
    """The part of a Redis storage that keeps limits, and what recurs."""

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        check_limits(limits)
        await self._lua.run("declare", pack({name.encode(): _encoded(limit) for name, limit in limits.items()}), 0)

    async def _make_holding(self) -> None:
        """Let the queue have limit and fair keys, before its first job with one; other scripts look whether it may."""
        await self._lua.run("declare", pack({}), 0)

    async def remove_limit(self, name: str) -> bool:
        return bool(await self._lua.run("declare", pack({bytes_of(name): _encoded(Limit())}), 1))

    async def declared_limits(self) -> dict[str, Limit]:
        found = unpack(await self._lua.run("limits"))
        return {text_of(name): _decoded(limit) for name, limit in found.items()} if found else {}

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        found = unpack(await self._lua.run("held_back", self._packed_ids(ids)))
        return [_held_back(one) if one else None for one in found]

    async def crons(self, *, due: bool = False) -> CronLook:
        now, next_due, rows = unpack(await self._lua.run("crons", CRONS_AT_ONCE if due else 0))
        found = [_decoded_row(row) for row in rows]
        return CronLook(
            now=moment(now), rows=found if due else sorted(found, key=lambda row: row.name), next_due=_due(next_due)
        )

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        refuse_other_queues(jobs, "RedisStorage")
        for job in jobs:
            check_fits_redis(job.id, job.payload)
        due = 0 if row.due is None else (row.due - _EPOCH) // timedelta(microseconds=1)
        packed = pack((bytes_of(row.name), row.revision, due, bytes_of(row.body)))
        return bool(await self._lua.run("replace_cron", packed, pack([codec.encode_job(job) for job in jobs])))


def _held_back(found: Sequence[Reply]) -> HeldBack:
    key, opens = text_of(found[0]), float(found[1])
    return HeldBack(*(limit_key_of(key) or LimitKey(key)), moment(opens) if opens else None)


def _encoded(limit: Limit) -> Packed:
    interval = 0 if limit.interval is None else duration(limit.interval)
    return (
        interval,
        limit.capacity,
        limit.concurrency or 0,
        limit.version,
        (limit.rate or "").encode(),
        limit.burst or 0,
    )


def _decoded(packed: Sequence[Reply]) -> Limit:
    _, _, concurrency, version, rate, burst = packed
    return Limit(text_of(rate) or None, concurrency=concurrency or None, burst=burst or None, version=version)


def _decoded_row(packed: Sequence[Reply]) -> CronRow:
    name, revision, due, body = packed
    return CronRow(name=text_of(name), revision=int(revision), due=_due(due), body=text_of(body))


def _due(microseconds: Reply) -> datetime | None:
    return moment(float(microseconds)) if microseconds else None
