"""Reading of a Bull queue, and removal of its records, in bounded steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from workers.batching import Batcher
from workers.errors import StorageError
from workers.jobs import (
    ErrorInfo,
    JobEventKind,
    JobOutcome,
    JobRecord,
    JobState,
    JobStatus,
    OutcomeKind,
    Page,
    WorkerInfo,
)
from workers.storage.bull.codec import (
    DEFAULT_NAME,
    Dialect,
    count,
    decode_error,
    decode_id,
    decode_progress,
    decode_result,
    raw_ids,
    spent,
)
from workers.storage.bull.options import read_options
from workers.storage.bull.scripts import BullScripts
from workers.storage.bull.subscribers import BullSubscribers
from workers.storage.failures import decode_failures
from workers.storage.on_redis.batches import AT_ONCE, in_steps, portions
from workers.storage.on_redis.messages import STATES, end_kind, pack, unpack
from workers.storage.on_redis.node_values import decode_bytes, moment, to_ms
from workers.storage.on_redis.storage import RESULTS_AT_ONCE, ScriptedStorage
from workers.storage.on_redis.wire import Reply
from workers.storage.rules import (
    WORKER_RECORD,
    bounded_count,
    check_cleanable,
    foreign_cursor,
    read_cursor,
    stalled_error,
)

PAGE: Final = 100
READS_PER_PAGE: Final = 10
SCANNED: Final = 500
TOKEN_END: Final = 29

_NO_REASON: Final = ErrorInfo(type="Error", message="")
_CANCELLED: Final = "workers:cancelled"
_SOURCES: Final[Mapping[JobState, Sequence[str]]] = {
    JobState.QUEUED: ("wait", "paused", "delayed"),
    JobState.SCHEDULED: ("delayed",),
    JobState.FAILING: ("delayed",),
    JobState.WAITING: (),
    JobState.PROCESSING: ("active",),
    JobState.COMPLETED: ("completed",),
    JobState.FAILED: ("failed",),
    JobState.CANCELLED: (_CANCELLED,),
}


class BullReading(ScriptedStorage):
    """The part of a Bull storage that dashboards and the reaper's sweep use."""

    _lua: BullScripts
    _dialect: Dialect

    def __init__(self, queue: str, *, allow_eviction: bool) -> None:
        super().__init__(queue, BullSubscribers(self._lua, self._ends), allow_eviction=allow_eviction)
        self._adopting = ("completed", 0)  # where the next sweep looks for jobs that Node has ended
        self._ended = Batcher(self._results, RESULTS_AT_ONCE)

    def _packed_ids(self, ids: Sequence[str]) -> bytes:
        """Return, for scripts, the ids in Redis that each of the jobs may have."""
        packed: bytes = pack([raw_ids(job_id, self._dialect) for job_id in ids])
        return packed

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        found: list[JobStatus | None] = []
        for some in portions(ids):
            answer = unpack(await self._lua.run("read", self._packed_ids(some)))
            found += [decode_status(one) if one else None for one in answer]
        return found

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        found: list[JobRecord | None] = []
        while len(found) < len(ids):  # an answer breaks off when it gets too large
            some = ids[len(found) : len(found) + AT_ONCE]
            answer = unpack(await self._lua.run("whole", self._packed_ids(some)))
            found += [decode_whole(one) if one else None for one in answer]
        return found

    async def result(self, job_id: str) -> JobOutcome | None:
        end = await self._ended.ask(job_id)
        return decode_outcome(end) if end else None

    async def _ends(self, ids: Sequence[str]) -> list[JobEventKind | None]:
        """Return how each of the jobs ended, None for one that has not."""
        return [end_kind(one[0]) if one else None for one in await self._results(ids)]

    async def _results(self, ids: Sequence[str]) -> list[Reply]:
        found: list[Reply] = []
        while len(found) < len(ids):  # an answer breaks off when it gets too large
            found += unpack(await self._lua.run("result", self._packed_ids(ids[len(found) : len(found) + AT_ONCE])))
        return found

    async def counts(self) -> dict[JobState, int]:
        """See `Storage.counts`.

        This looks at every delayed and every cancelled job, because Bull has the former in one set and takes the latter
        for failed ones.
        """
        cancelled = await self._count_cancelled()
        failing, start = 0, -1
        while True:
            answer = await self._lua.run("counts", start)
            waiting, delayed, active, completed, failed, due, failed_before, looked_at, begun = answer
            failing += failed_before
            start = begun + looked_at
            if looked_at < AT_ONCE:
                break
        return {
            JobState.QUEUED: waiting + due,
            JobState.SCHEDULED: max(0, delayed - due - failing),
            JobState.WAITING: 0,
            JobState.PROCESSING: active,
            JobState.FAILING: failing,
            JobState.COMPLETED: completed,
            JobState.FAILED: max(0, failed - cancelled),
            JobState.CANCELLED: cancelled,
        }

    async def waiting_since(self) -> datetime | None:
        since = await self._lua.run("since")
        return None if since is None else moment(float(since))

    async def _count_cancelled(self) -> int:
        cancelled = start = 0
        while True:
            found, looked_at, forgotten = map(int, await self._lua.run("cancelled", start))
            cancelled += found
            start += looked_at - forgotten
            if looked_at < AT_ONCE:
                return cancelled

    async def _ids(self, source: str, scan: int, start: int, width: int = PAGE) -> tuple[int, Sequence[bytes]]:
        """Return ids from `start` of what is at `scan`, and where to go on, -1 for the end."""
        after, raws = await self._lua.run("page", source, scan, start, width)
        return int(after), raws

    async def workers(self) -> list[WorkerInfo]:
        """See `Storage.workers`. Node's workers show while they hold jobs, by the token of their locks."""
        seen, holders, now_ms = unpack(await self._lua.run("workers", to_ms(WORKER_RECORD)))
        last_seen = {worker: count(score) for worker, score in zip(seen[::2], seen[1::2], strict=True)}
        claims = dict.fromkeys(last_seen, 0)
        for holder in holders:
            claims[holder] = claims.get(holder, 0) + 1
        return [
            WorkerInfo(
                id=worker.decode(errors="surrogateescape"), seen_at=moment(last_seen.get(worker, now_ms)), claims=held
            )
            for worker, held in claims.items()
        ]

    async def sweep(self, limit: int) -> int:
        """See `Storage.sweep`.

        Each call also looks at some records for those of jobs that Node has ended, because Node knows no retention.
        """
        line, scan = self._adopting
        after, raws = await self._ids(line, scan, 0)
        await self._lua.run("adopt", line, pack(raws))
        self._adopting = (line, after) if after >= 0 else ("failed" if line == "completed" else "completed", 0)
        return await in_steps(lambda some: self._lua.run("sweep", some, to_ms(WORKER_RECORD)), limit)

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        """See `Storage.clean`. Records are in no order, so all are looked at."""
        check_cleanable(state)
        limit, removed, scan = bounded_count(limit), 0, 0
        while removed < limit and scan >= 0:
            (source,), before = _SOURCES[state], removed
            scan, raws = await self._ids(source, scan, 0, SCANNED)
            for some in portions(raws):
                left = limit - removed
                removed += int(await self._lua.run("clean", state.value, to_ms(older_than), left, pack(some)))
            if state is JobState.CANCELLED and scan >= 0:  # those behind have moved up
                scan -= removed - before
        return removed

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """See `Storage.list`. The cursor is a place in the keys that hold the state.

        A page ends early, with a cursor, when it looked at many jobs in another state.
        """
        at, scan, start = _read_cursor(cursor)
        limit, sources = bounded_count(limit), _SOURCES[state]
        jobs: list[JobStatus] = []
        for _ in range(READS_PER_PAGE):
            if at >= len(sources) or len(jobs) >= limit:
                break
            after, raws = await self._ids(sources[at], scan, start)
            looked_at = 0
            for found in unpack(await self._lua.run("read", pack([[raw] for raw in raws]))):
                if len(jobs) == limit:
                    break
                looked_at += 1
                status = decode_status(found) if found else None
                if status is not None and status.state is state:
                    jobs.append(status)
            at, scan, start = (at, scan, start + looked_at) if looked_at < len(raws) else (at, after, 0)
            if after < 0 and start == 0:
                at, scan = at + 1, 0
        return Page(jobs=tuple(jobs), cursor=f"{at}:{scan}:{start}" if at < len(sources) else None)


def _read_cursor(cursor: str | None) -> tuple[int, int, int]:
    """Return which of the keys to go on with, where in it, and after how many of the entries there."""
    if cursor is None:
        return 0, 0, 0
    parts = cursor.split(":")
    try:
        source, scan, start = (read_cursor(part) for part in parts)
    except (StorageError, ValueError):
        raise foreign_cursor(cursor) from None
    return source, scan, start


def decode_status(found: Sequence[Reply]) -> JobStatus:
    """Return the status in what `read.lua` says of a job."""
    raw, code, due, lock, shown = found
    name, opts, timestamp, attempts, made, stalls, progress, stacks, reason, mark, facts, stall, exact, *rest = shown
    finished, idle = rest
    state, options = STATES[code], read_options(raw, opts)
    used, most = spent(name, made, stalls), max(1, count(attempts))
    ran = state is JobState.PROCESSING or (state is JobState.COMPLETED and not idle)
    exhausted = state is JobState.FAILED and used >= most
    error = decode_error(reason, stacks, facts, _stall(stall), exhausted=exhausted)
    return JobStatus(
        id=decode_id(raw),
        name=name.decode(errors="surrogateescape") if name else DEFAULT_NAME,
        state=state,
        attempt=used + ran,
        max_attempts=most,
        created_at=moment(count(timestamp)),
        priority=options.priority,
        chain_index=options.chain_index,
        next_run_at=moment(due) if state in (JobState.SCHEDULED, JobState.FAILING) else None,
        finished_at=moment(count(finished)) if state.is_final and finished else None,
        worker_id=_holder(mark, lock) if state is JobState.PROCESSING else None,
        last_error=None if state is JobState.CANCELLED else error,
        encoded_progress=decode_progress(progress, exact),
    )


def decode_whole(found: Sequence[Reply]) -> JobRecord:
    """Return the job in what `whole.lua` says of it."""
    shown, data, returnvalue, exact, failures = found
    status = decode_status(shown)
    return JobRecord(
        status=status,
        payload=decode_bytes(data.decode(errors="surrogateescape")),
        result=decode_result(returnvalue, exact) if status.state is JobState.COMPLETED else None,
        failures=decode_failures(failures.decode(errors="replace") if failures else None),
        meta=read_options(shown[0], shown[4][1]).meta,
    )


def _holder(mark: bytes | None, lock: bytes | None) -> str | None:
    """Return our worker, or the token of Node's worker."""
    ours = mark and mark[:1] == b"+" and (not lock or lock == mark[1:TOKEN_END])
    holder = mark[TOKEN_END:] if mark and ours else lock
    return holder.decode(errors="surrogateescape") if holder else None


def _stall(text: bytes | None) -> ErrorInfo | None:
    """Return why recovery gave the job up."""
    try:
        worker, *numbers = json.loads(text.decode(errors="surrogateescape")) if text else []
        attempts, most, stalls, allowed = map(int, numbers)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return stalled_error(
        worker=str(worker) or None, attempts=attempts, max_attempts=most, stalls=stalls, max_stalls=allowed
    )


def decode_outcome(found: Sequence[Reply]) -> JobOutcome:
    """Return how a job ended, from what `result.lua` says."""
    code, *rest = found
    if STATES[code] is JobState.CANCELLED:
        return JobOutcome(kind=OutcomeKind.CANCELLED)
    returnvalue, exact, reason, stacks, facts, stall, attempts, made = rest
    if STATES[code] is JobState.COMPLETED:
        return JobOutcome(kind=OutcomeKind.COMPLETED, result=decode_result(returnvalue, exact))
    exhausted = count(made) >= max(1, count(attempts))
    error = decode_error(reason, stacks, facts, _stall(stall), exhausted=exhausted)
    return JobOutcome(kind=OutcomeKind.FAILED, error=error or _NO_REASON)
