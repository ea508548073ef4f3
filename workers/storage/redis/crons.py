"""What recurs in a queue on Redis; `lua/recurring.lua` has the format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.jobs import CronLook, CronRow, NewJob
from workers.storage.on_redis.messages import moment, pack, unpack
from workers.storage.on_redis.storage import ScriptedStorage
from workers.storage.on_redis.wire import Reply
from workers.storage.redis import codec
from workers.storage.redis.codec import bytes_of, text_of
from workers.storage.rules import CRONS_AT_ONCE, check_fits_redis, refuse_other_queues

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class RedisCrons(ScriptedStorage):
    """The part of a Redis storage that keeps what recurs."""

    async def crons(self, *, due: bool = False) -> CronLook:
        now, next_due, rows = unpack(await self._lua.run("crons", CRONS_AT_ONCE if due else 0))
        found = [_decoded(row) for row in rows]
        return CronLook(
            now=moment(now), rows=found if due else sorted(found, key=lambda row: row.name), next_due=_moment(next_due)
        )

    async def replace_cron(self, row: CronRow, *, jobs: Sequence[NewJob] = ()) -> bool:
        refuse_other_queues(jobs, "RedisStorage")
        for job in jobs:
            check_fits_redis(job.id, job.payload)
        due = 0 if row.due is None else (row.due - _EPOCH) // timedelta(microseconds=1)
        packed = pack((bytes_of(row.name), row.revision, due, bytes_of(row.body)))
        return bool(await self._lua.run("replace_cron", packed, pack([codec.encode_job(job) for job in jobs])))


def _decoded(packed: Sequence[Reply]) -> CronRow:
    name, revision, due, body = packed
    return CronRow(name=text_of(name), revision=int(revision), due=_moment(due), body=text_of(body))


def _moment(microseconds: Reply) -> datetime | None:
    return moment(float(microseconds)) if microseconds else None
