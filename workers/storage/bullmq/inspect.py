"""Reading of a BullMQ queue, and an operator's bulk work: counts, listings, workers, sweeping, draining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from workers.errors import StorageError
from workers.jobs import ErrorInfo, JobOutcome, JobRecord, JobState, JobStatus, OutcomeKind, Page, WorkerInfo
from workers.storage.bullmq.access import WORKER_RECORD_MS, QueuePart
from workers.storage.bullmq.record import (
    FIELDS,
    WHOLE_FIELDS,
    BullMQRecord,
    reading,
    record,
    whole_record,
    worker_of,
)
from workers.storage.bullmq.scripts import CANCELLED
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.node_values import DELAY_SCALE, decode_bytes, due_ms, moment, to_ms, whole
from workers.storage.on_redis.wire import Command
from workers.storage.rules import bounded_count, check_cleanable, foreign_cursor, read_cursor

PAGE: Final = 100
READS_PER_PAGE: Final = 10
WHOLE_AT_ONCE: Final = 50
"""How many jobs are read with their payloads in one transaction."""
ACTIVE_SHOWN: Final = 10_000
"""How many active jobs are looked at, at most, to see which worker has them."""

_NO_REASON: Final = ErrorInfo(type="Error", message="")


class BullMQReading(QueuePart):
    """The part of a BullMQ storage that dashboards and the reaper's sweep use."""

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return [found.status() for found in await self._queue.find(ids)]

    async def read(self, ids: Sequence[str]) -> list[JobRecord | None]:
        found: list[JobRecord | None] = []
        for start in range(0, len(ids), WHOLE_AT_ONCE):
            some = await self._queue.find(ids[start : start + WHOLE_AT_ONCE], WHOLE_FIELDS)
            found += [whole_record(one) for one in some]
        return found

    async def result(self, job_id: str) -> JobOutcome | None:
        [found] = await self._queue.find([job_id])
        if found.state is JobState.COMPLETED:
            return JobOutcome(kind=OutcomeKind.COMPLETED, result=decode_bytes(found.fields.get("returnvalue", "null")))
        if found.state is JobState.CANCELLED:
            return JobOutcome(kind=OutcomeKind.CANCELLED)
        if found.state is JobState.FAILED:
            return JobOutcome(kind=OutcomeKind.FAILED, error=found.error or _NO_REASON)
        return None

    async def counts(self) -> dict[JobState, int]:
        """See `Storage.counts`.

        This looks at every delayed and every cancelled job, because BullMQ has the former in one set and takes the
        latter for failed ones.
        """
        lists = [("LLEN", self._lua[name]) for name in ("wait", "paused", "active")]
        sets = ("prioritized", "completed", "failed", "waiting-children", "delayed")
        due = ("ZCOUNT", self._lua["delayed"], 0, self._due_score())
        wait, paused, active, prioritized, completed, failed, parents, delayed, is_due = await self._queue.ask(
            [*lists, *(("ZCARD", self._lua[name]) for name in sets), due]
        )
        failing, cancelled = await self._count_failing(is_due, delayed), await self._count_cancelled()
        return {
            JobState.QUEUED: wait + paused + prioritized + is_due,
            JobState.SCHEDULED: delayed - is_due - failing,
            JobState.WAITING: parents,
            JobState.PROCESSING: active,
            JobState.FAILING: failing,
            JobState.COMPLETED: completed,
            JobState.FAILED: max(0, failed - cancelled),
            JobState.CANCELLED: cancelled,
        }

    async def waiting_since(self) -> datetime | None:
        lines: list[Command] = [("LINDEX", self._lua[name], -1) for name in ("wait", "paused")]
        wait, paused, prioritized, delayed = await self._queue.ask(
            [*lines, ("ZRANGE", self._lua["prioritized"], 0, 0), ("ZRANGE", self._lua["delayed"], 0, 0, "WITHSCORES")]
        )
        firsts = [raw for raw in (wait, paused, *prioritized) if raw is not None]
        enqueued = await self._queue.ask([("HGET", self._lua.job(raw), "timestamp") for raw in firsts])
        since = [whole(at) for at in enqueued if at is not None]
        due = due_ms(delayed[1]) if delayed else None
        if due is not None and due <= self._queue.server_ms():
            since.append(due)
        return moment(min(since)) if since else None

    async def _count_failing(self, first: int, delayed: int) -> int:
        failing = 0
        for start in range(first, delayed, PAGE * 10):
            end = min(start + PAGE * 10, delayed) - 1
            [raws] = await self._queue.ask([("ZRANGE", self._lua["delayed"], start, end)])
            failing += sum(await self._queue.ask([("HEXISTS", self._lua.job(raw), "failedReason") for raw in raws]))
        return failing

    async def _count_cancelled(self) -> int:
        cancelled = start = 0
        while True:
            [(found, looked_at, forgotten)] = await self._queue.ask(
                [self._lua.cancelled(self._queue.server_ms(), start)]
            )
            cancelled += whole(found)
            start += whole(looked_at) - whole(forgotten)
            if not looked_at:
                return cancelled

    async def workers(self) -> list[WorkerInfo]:
        """See `Storage.workers`. Node workers show while they hold jobs."""
        now_ms = self._queue.server_ms()
        seen, raws = await self._queue.ask(
            [
                ("ZRANGEBYSCORE", self._queue.workers_key, now_ms - WORKER_RECORD_MS, "+inf", "WITHSCORES"),
                ("LRANGE", self._lua["active"], 0, ACTIVE_SHOWN - 1),
            ]
        )
        last_seen = {worker: whole(score) for worker, score in zip(seen[::2], seen[1::2], strict=True)}
        claims = dict.fromkeys(last_seen, 0)
        for token in await self._queue.ask([("GET", self._lua.lock(raw)) for raw in raws]):
            worker = worker_of(token)
            if worker is not None:
                claims[worker] = claims.get(worker, 0) + 1
        return [
            WorkerInfo(id=worker, seen_at=moment(last_seen.get(worker, now_ms)), claims=count)
            for worker, count in claims.items()
        ]

    async def farewell(self, worker_id: str) -> None:
        await self._queue.ask([self._queue.unseen(worker_id)])

    async def sweep(self, limit: int) -> int:
        """See `Storage.sweep`. This looks at the oldest records; BullMQ itself removes by age when a job finishes."""
        now_ms = self._queue.server_ms()
        removed = whole((await self._queue.ask([self._forget(self._queue.workers_key, now_ms - WORKER_RECORD_MS)]))[0])
        await self._queue.ask([self._forget(self._lua[CANCELLED], now_ms)])
        for target in ("completed", "failed"):
            while removed < limit:
                wanted = min(PAGE, limit - removed)
                expired = await self._expired(target, wanted)
                gone = await self._remove_expired(expired) if expired else 0
                removed += gone
                if gone < wanted:
                    break
        return removed

    def _forget(self, key: str, until_ms: int) -> Command:
        return "ZREMRANGEBYSCORE", key, 0, until_ms

    async def _expired(self, target: str, count: int) -> list[str]:
        """Return those of the oldest records whose retention is over."""
        now_ms = self._queue.server_ms()
        [raws] = await self._queue.ask([("ZRANGE", self._lua[target], 0, count - 1)])
        values = await self._queue.ask([("HMGET", self._lua.job(raw), *FIELDS) for raw in raws])
        found = [record(raw, (fields, target, None, None), now_ms) for raw, fields in zip(raws, values, strict=True)]
        return [one.raw for one in found if one.state is None]

    async def _remove_expired(self, raws: Sequence[str]) -> int:
        """Remove the records, except those that were enqueued again since the look; return how many."""
        return await self._remove(raws, lambda one: one.state is None and one.place in ("completed", "failed"))

    async def _remove(self, raws: Sequence[str], wanted: Callable[[BullMQRecord], bool]) -> int:
        """Remove those of the jobs that are `wanted` as they stand now; return how many."""
        now_ms = self._queue.server_ms()
        width = len(reading(self._lua, ""))

        def chosen(replies: list[Reply]) -> list[BullMQRecord]:
            parts = [replies[at * width : (at + 1) * width] for at in range(len(raws))]
            found = [record(raw, part, now_ms) for raw, part in zip(raws, parts, strict=True)]
            return [one for one in found if wanted(one)]

        replies = await self._queue.server.transact(
            [self._lua.job(raw) for raw in raws],
            [command for raw in raws for command in reading(self._lua, raw)],
            lambda replies: [command for one in chosen(replies) for command in self._lua.remove(one.raw)],
        )
        return len(chosen(replies))

    async def pause(self) -> None:
        await self._queue.ask([self._lua.pause()])

    async def resume(self) -> None:
        """See `Storage.resume`. A queue that an old BullMQ paused has its jobs in another list; they move in steps."""
        while whole((await self._queue.ask([self._lua.resume()]))[0]):
            pass

    async def is_paused(self) -> bool:
        return bool((await self._queue.ask([("HEXISTS", self._lua["meta"], "paused")]))[0])

    async def drain(self) -> int:
        """See `Storage.drain`.

        BullMQ removes parents with their last child in the same queue; one whose children are elsewhere stays.
        """
        held: list[Command] = [("ZCARD", self._lua["waiting-children"])]
        held += [("LLEN", self._lua[name]) for name in ("wait", "paused")]
        held += [("ZCARD", self._lua[name]) for name in ("delayed", "prioritized")]
        [replies] = await self._queue.server.run_atomic([[*held, self._lua.drain(), *held]], confirmed=True)
        for reply in replies:
            if isinstance(reply, StorageError):
                raise reply
        return sum(map(whole, replies[: len(held)])) - sum(map(whole, replies[-len(held) :]))

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        check_cleanable(state)
        if limit < 1:  # the script takes that for no limit
            return 0
        limit, before_ms = bounded_count(limit), self._queue.server_ms() - to_ms(older_than)
        if state is not JobState.COMPLETED and await self._count_cancelled():
            return await self._clean_apart(state, before_ms, limit)
        if state is JobState.CANCELLED:
            return 0
        [removed] = await self._queue.ask([self._lua.clean(state.value, before_ms, limit)])
        return len(removed)

    async def _clean_apart(self, state: JobState, before_ms: int, limit: int) -> int:
        """Clean as `clean`, with a look at each record, because BullMQ takes cancelled jobs for failed ones."""
        removed = start = 0
        while removed < limit:
            place = ("ZRANGEBYSCORE", self._lua["failed"], "-inf", before_ms, "LIMIT", start, PAGE)
            [raws] = await self._queue.ask([place])
            found = await self._queue.records(raws, self._queue.server_ms())
            old = [one.raw for one in found if one.state is state][: limit - removed]
            gone = await self._remove(old, lambda one: one.state is state) if old else 0
            removed += gone
            start += len(raws) - gone
            if len(raws) < PAGE:
                break
        return removed

    def _due_score(self) -> int:
        return (self._queue.server_ms() + 1) * DELAY_SCALE - 1

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        """See `Storage.list`. The cursor is a place in the structures that hold the state.

        A page ends early, with a cursor, when it looked at many jobs in another state.
        """
        sources = _SOURCES[state]
        at, start = _read_cursor(cursor)
        limit = bounded_count(limit)
        jobs: list[JobStatus] = []
        for _ in range(READS_PER_PAGE):
            if at >= len(sources) or len(jobs) >= limit:
                break
            name, command = sources[at]
            width = max(PAGE, limit - len(jobs))
            [raws] = await self._queue.ask([(command, self._lua[name], start, start + width - 1)])
            looked_at = 0
            for found in await self._queue.records(raws, self._queue.server_ms()):
                if len(jobs) == limit:
                    break
                looked_at += 1
                status = found.status()
                if status is not None and status.state is state:
                    jobs.append(status)
            at, start = (at + 1, 0) if looked_at == len(raws) < width else (at, start + looked_at)
        return Page(jobs=tuple(jobs), cursor=f"{at}:{start}" if at < len(sources) else None)


def _read_cursor(cursor: str | None) -> tuple[int, int]:
    """Return the structure to go on with, and the place in it."""
    if cursor is None:
        return 0, 0
    index, _, offset = cursor.partition(":")
    try:
        return read_cursor(index), read_cursor(offset)
    except StorageError:
        raise foreign_cursor(cursor) from None


_SOURCES: Final = {
    JobState.QUEUED: (("wait", "LRANGE"), ("paused", "LRANGE"), ("prioritized", "ZRANGE"), ("delayed", "ZRANGE")),
    JobState.SCHEDULED: (("delayed", "ZRANGE"),),
    JobState.FAILING: (("delayed", "ZRANGE"),),
    JobState.WAITING: (("waiting-children", "ZRANGE"),),
    JobState.PROCESSING: (("active", "LRANGE"),),
    JobState.COMPLETED: (("completed", "ZRANGE"),),
    JobState.FAILED: (("failed", "ZRANGE"),),
    JobState.CANCELLED: ((CANCELLED, "ZRANGE"),),
}
