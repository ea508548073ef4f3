"""Reading of a Redis queue, and removal of its records, in bounded steps."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

from workers.batching import Batcher
from workers.errors import StorageError
from workers.jobs import JobOutcome, JobRecord, JobRef, JobState, JobStatus, OutcomeKind, Page, WorkerInfo
from workers.storage.on_redis.batches import AT_ONCE, portions
from workers.storage.on_redis.messages import STATES, duration, moment, pack, unpack
from workers.storage.on_redis.storage import RESULTS_AT_ONCE, ScriptedStorage
from workers.storage.on_redis.subscribers import ChannelSubscribers
from workers.storage.on_redis.wire import Reply
from workers.storage.redis.codec import bytes_of, decode_error, decode_status, decode_whole, text_of
from workers.storage.redis.scripts import RedisScripts
from workers.storage.rules import bounded_count, check_cleanable, foreign_cursor, read_cursor

Part: TypeAlias = tuple[str, str]

_LENGTH: Final = struct.Struct(">H")
_COPIED: Final = b"1"
_TOLD_AT_ONCE: Final = 100

PARTS: Final[Mapping[JobState, Sequence[Part]]] = {
    JobState.QUEUED: (("ready", "all"), ("held", "all"), ("scheduled", "due"), ("failing", "due")),
    JobState.SCHEDULED: (("scheduled", "later"),),
    JobState.WAITING: (("waiting", "all"),),
    JobState.PROCESSING: (("leases", "all"),),
    JobState.FAILING: (("failing", "later"),),
    JobState.COMPLETED: (("completed", "later"),),
    JobState.FAILED: (("failed", "later"),),
    JobState.CANCELLED: (("cancelled", "later"),),
}
"""The sets that hold the jobs of a state. Scores are times; a finished job that is `due` has expired."""


class RedisReading(ScriptedStorage):
    """The part of a Redis storage that dashboards use, and waiters for results."""

    _lua: RedisScripts

    def __init__(self, queue: str, subscribers: ChannelSubscribers, *, allow_eviction: bool) -> None:
        super().__init__(queue, subscribers, allow_eviction=allow_eviction)
        self._results = Batcher(partial(ends, self._lua), RESULTS_AT_ONCE)

    def _packed_ids(self, ids: Sequence[str]) -> bytes:
        packed: bytes = pack([bytes_of(job_id) for job_id in ids])
        return packed

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        found: list[JobStatus | None] = []
        for some in portions(ids):
            answer = unpack(await self._lua.run("read", self._packed_ids(some)))
            found += [decode_status(job_id, one) if one else None for job_id, one in zip(some, answer, strict=True)]
        return found

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        found: list[JobRecord | None] = []
        while len(found) < len(ids):  # an answer breaks off when it gets too large
            some = ids[len(found) : len(found) + AT_ONCE]
            answer = unpack(await self._lua.run("whole", self._packed_ids(some)))
            found += [decode_whole(job_id, one) if one else None for job_id, one in zip(some, answer, strict=False)]
        return found

    async def result(self, job_id: str) -> JobOutcome | None:
        answer = await self._results.ask(bytes_of(job_id))
        if not answer:
            return None
        code, error, result = answer
        match STATES[code]:
            case JobState.COMPLETED:
                return JobOutcome(kind=OutcomeKind.COMPLETED, result=result)
            case JobState.CANCELLED:
                return JobOutcome(kind=OutcomeKind.CANCELLED)
            case _:
                return JobOutcome(kind=OutcomeKind.FAILED, error=decode_error(error))

    async def counts(self) -> dict[JobState, int]:
        answer: Reply = await self._lua.run("counts")
        return dict(zip(JobState, answer, strict=True))

    async def waiting_since(self) -> datetime | None:
        place = await self._lua.run("since")
        return None if place is None else moment(float(place))

    async def workers(self) -> list[WorkerInfo]:
        answer = iter(unpack(await self._lua.run("workers")))
        return [
            WorkerInfo(id=text_of(worker), seen_at=moment(float(seen)), claims=claims)
            for worker, seen, claims in zip(answer, answer, answer, strict=True)
        ]

    async def followed(self, job_id: str) -> list[JobRef]:
        return self._refs(await self._lua.run("followed", bytes_of(job_id)))

    async def followers(self, job_id: str, *, limit: int = 1_000) -> list[JobRef]:
        return self._refs(await self._lua.run("followers", bytes_of(job_id), bounded_count(limit)))

    def _refs(self, ids: Sequence[bytes]) -> list[JobRef]:
        return [JobRef(self.queue, text_of(raw)) for raw in ids]

    async def outcomes(self, job_id: str) -> dict[JobRef, JobOutcome | None]:
        found: dict[JobRef, JobOutcome | None] = {}
        last = b""
        while True:
            some: list[bytes] = await self._lua.run("outcomes", bytes_of(job_id), last, _TOLD_AT_ONCE)
            for one in some:
                last, outcome = _told(one)
                found[JobRef(self.queue, text_of(last))] = outcome
            if len(some) < _TOLD_AT_ONCE:
                return found

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        """See `Storage.clean`. Records are ordered by their expiry, so the young among them are skipped."""
        check_cleanable(state)
        removed = passed = 0
        while removed < limit:
            wanted = ("clean", state.value, passed, AT_ONCE, limit - removed, duration(older_than))
            looked_at, gone = await self._lua.run(*wanted)
            removed += gone
            passed += looked_at - gone
            if looked_at < AT_ONCE:
                break
        return removed

    async def _has_more(self, state: JobState, at: int, behind: tuple[bytes, ...]) -> bool:
        """Tell whether there is anything in the parts from here on, because a full page can be the last."""
        if behind:
            return True
        for line, part in PARTS[state][at:]:
            if len(unpack(await self._lua.run("page", line, part, 1))) > 1:
                return True
        return False

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """See `Storage.list`. The cursor is the part of the state, and where in it the last page ended."""
        at, behind = _decode_cursor(cursor)
        jobs: list[JobStatus] = []
        while at < len(PARTS[state]) and len(jobs) < limit:
            line, part = PARTS[state][at]
            answer = unpack(await self._lua.run("page", line, part, limit - len(jobs), *behind))
            after, *found = answer
            jobs += [decode_status(text_of(job_id), one) for job_id, one in zip(found[::2], found[1::2], strict=True)]
            at, behind = (at, tuple(after)) if after else (at + 1, ())
        more = at < len(PARTS[state]) and await self._has_more(state, at, behind)
        return Page(jobs=tuple(jobs), cursor=_encode_cursor(at, behind) if more else None)


async def ends(lua: RedisScripts, ids: Sequence[bytes]) -> list[Reply]:
    """Return how each job ended: state, error and result, packed as they are; 0 for one that has not, or is unknown."""
    found: list[Reply] = []
    while len(found) < len(ids):  # an answer breaks off when it gets too large
        found += unpack(await lua.run("result", pack(ids[len(found) : len(found) + AT_ONCE])))
    return found


def _told(value: bytes) -> tuple[bytes, JobOutcome | None]:
    """Return the id of a job that another came after, and how it ended, in what `queue.lua` describes."""
    end = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    other, rest = value[_LENGTH.size : end], value[end + 1 :]
    match STATES.get(value[end]):
        case JobState.COMPLETED:
            result = rest[1:] if rest[:1] == _COPIED else None
            return other, JobOutcome(kind=OutcomeKind.COMPLETED, result=result)
        case JobState.FAILED:
            return other, JobOutcome(kind=OutcomeKind.FAILED, error=decode_error(rest))
        case JobState.CANCELLED:
            return other, JobOutcome(kind=OutcomeKind.CANCELLED)
    return other, None


def _encode_cursor(at: int, behind: tuple[bytes, ...]) -> str:
    return ":".join((str(at), *(one.hex() for one in behind)))


def _decode_cursor(cursor: str | None) -> tuple[int, tuple[bytes, ...]]:
    if cursor is None:
        return 0, ()
    at, *behind = cursor.split(":")
    try:
        return read_cursor(at), tuple(bytes.fromhex(one) for one in behind)
    except (ValueError, StorageError):
        raise foreign_cursor(cursor) from None
