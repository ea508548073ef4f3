"""What an administrator does with the queues of a node: count jobs, pause and resume, clear out old records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from federation.base.audit import Order, Record, recorded
from federation.base.settings.reach import connect
from workers import JobState, Queue
from workers.jobs import SILENT_AFTER, RepairOutcome, SetAside

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

CLEAN_BATCH: Final = 1_000
NOBODY_DELIVERS: Final = "no process that delivers runs; `federation run`, or `federation workers run`, is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """How many jobs of a queue are in each state, and whether the queue is paused."""

    queue: str
    paused: bool
    counts: dict[JobState, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    """A worker of a queue, and how many jobs it holds. A `silent` one was not heard of for 90 s: it may have died."""

    queue: str
    id: str
    seen_at: datetime
    claims: int
    silent: bool


def all_queues(federation: Federation) -> tuple[Queue, ...]:
    """Return the queues of the node: of deliveries (one, or more by wire), health checks, discoveries, tasks."""
    return (
        *federation.delivery_queues.all,
        federation.health_check_queue,
        federation.discovery_queue,
        federation.tasks_queue,
    )


def chosen_queues(federation: Federation, name: str | None) -> tuple[Queue, ...]:
    """Return the queue *name*, which may lack the prefix common to all; for None, all queues.

    Raises:
        LookupError: there is none of that name.
    """
    queues = all_queues(federation)
    if name is None:
        return queues
    chosen = tuple(queue for queue in queues if queue.storage.queue in (name, f"federation-{name}"))
    if not chosen:
        known = ", ".join(queue.storage.queue for queue in queues)
        raise LookupError(f"there is no queue {name!r}; there are {known}")
    return chosen


async def stats(queues: Sequence[Queue]) -> list[QueueStats]:
    """Count the jobs in each state.

    Raises:
        Unreachable: a queue does not answer.
    """
    found = []
    for queue in queues:
        await connect(queue)
        paused = await queue.manage.is_paused()
        found.append(QueueStats(queue=queue.storage.queue, paused=paused, counts=await queue.counts()))
    return found


@asynccontextmanager
async def recording(federation: Federation, order: Order | None) -> AsyncIterator[Count]:
    """Note what the block does to queues, which are no part of the database's transactions; it counts what it did."""
    async with recorded(federation.database, order) as record:
        count = Count(federation, record)
        yield count


class Count:
    """Counts what an operator's action did to queues."""

    def __init__(self, federation: Federation, record: Record) -> None:
        self._database = federation.database
        self._record = record

    async def add(self, number: int) -> None:
        """Count what was just done."""
        await self._database.transact(lambda connection: self._record.add(connection, number))


async def pause(queues: Sequence[Queue]) -> None:
    """Keep all workers, in whichever process, from claiming jobs of these queues until `resume`. Running jobs go on."""
    for queue in queues:
        await connect(queue)
        await queue.manage.pause()


async def resume(queues: Sequence[Queue]) -> None:
    """Let workers claim jobs of these queues again."""
    for queue in queues:
        await connect(queue)
        await queue.manage.resume()


async def clean(queues: Sequence[Queue], state: JobState, *, older_than: timedelta) -> dict[str, int]:
    """Delete records of jobs that ended in *state*, longer ago than *older_than*. Return how many, by queue.

    Rows in the database are not touched: a failed delivery can still be retried.
    """
    removed = {}
    for queue in queues:
        await connect(queue)
        total = 0
        while gone := await queue.manage.clean(state, older_than=older_than, limit=CLEAN_BATCH):
            total += gone
        removed[queue.storage.queue] = total
    return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What became of a job that had been set aside, or of a key that blocked a queue."""

    queue: str
    id: str
    reason: str
    outcome: RepairOutcome


async def quarantined(queues: Sequence[Queue]) -> list[SetAside]:
    """Return what other programs left in these queues and no worker can run."""
    found = []
    for queue in queues:
        await connect(queue)
        found += await queue.manage.quarantine()
    return found


async def stranded(queues: Sequence[Queue]) -> list[str]:
    """Return the ids of jobs that another program has left in no line of these queues, where no worker finds them."""
    found: list[str] = []
    for queue in queues:
        await connect(queue)
        found += await queue.manage.stranded()
    return found


def set_nothing_aside(queues: Sequence[Queue]) -> bool:
    """Tell whether none of these queues ever sets anything aside, so that there can be nothing to repair."""
    return not any(queue.manage.sets_aside for queue in queues)


async def repair(queues: Sequence[Queue], *, drop: bool) -> list[Repair]:
    """Queue jobs again that were set aside or are in no line, and set aside keys that block a queue.

    With *drop* delete what cannot be repaired.
    """
    found: list[Repair] = []
    for queue in queues:
        await connect(queue)
        found += [
            Repair(queue=queue.storage.queue, id=each.id, reason=each.reason, outcome=each.outcome)
            for each in await queue.manage.repair(drop=drop)
        ]
    return found


async def workers(queues: Sequence[Queue]) -> list[SeenWorker]:
    """Return the workers of all processes, also those that died not long ago."""
    found = []
    for queue in queues:
        await connect(queue)
        found += [
            SeenWorker(
                queue=queue.storage.queue,
                id=each.id,
                seen_at=each.seen_at,
                claims=each.claims,
                silent=each.is_silent,
            )
            for each in await queue.manage.workers()
        ]
    return found


async def is_delivering(federation: Federation) -> bool:
    """Tell whether a process that delivers was heard of lately; one that was killed counts for `SILENT_AFTER`."""
    now = federation.clock.now()
    seen = await workers(federation.delivery_queues.all)
    return any(now - each.seen_at <= SILENT_AFTER for each in seen)
