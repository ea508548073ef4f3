"""BullMQ's own queues as a storage: Node producers, Node workers and dashboards see ordinary BullMQ jobs.

Every transition is BullMQ's own Lua from the installed `bullmq` package, on BullMQ's own keys. Beside them we keep what
Node ignores: the hash fields `workers:settled`, `workers:uncounted`, `workers:cancel`, `workers:stopped`,
`workers:keep` and `workers:error` of a job; its option `chainIndex`, and the members `maximum` and `multiplier` of its
option `backoff`; the keys `<prefix>:<queue>:workers:seen` (when each worker was last seen) and
`<prefix>:<queue>:workers:cancel-requests` (a stream for workers), each for an hour;
`<prefix>:<queue>:workers:cancelled` (which of the failed jobs are cancelled ones), as long as their records last; and
what was set aside, until `repair`, in `<prefix>:<queue>:workers:quarantine` and
`<prefix>:<queue>:workers:quarantine:<id>`.

A cancelled job is a failed one to BullMQ, with the time of its cancel in `workers:stopped`. It is cancelled as long as
that is when BullMQ says that it ended, which a retry by Node takes away.

Payloads and results are JSON on the wire. Bytes that are JSON are stored unchanged, others as `{"$base64": "..."}`. Ids
of other producers read as they are, numbers too; see `encode_id` for ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from redis.asyncio import Redis

from workers.checks import check_text
from workers.errors import Unsupported
from workers.jobs import (
    CancelResult,
    Claim,
    EnqueueResult,
    JobOutcome,
    JobState,
    JobStatus,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Renewal,
    Repaired,
    Retention,
    SetAside,
    Settlement,
    SettleOutcome,
    WorkerInfo,
)
from workers.storage.base import Limits
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.claims import Claims
from workers.storage.bullmq.inspect import BullMQInspector
from workers.storage.bullmq.jobs import Jobs
from workers.storage.bullmq.listener import StreamListener
from workers.storage.bullmq.processor import as_processor
from workers.storage.bullmq.quarantine import BullMQQuarantine
from workers.storage.bullmq.scripts import BullMQScripts
from workers.storage.bullmq.server import BullMQServer, parse_url
from workers.storage.bullmq.wait import Waiter
from workers.storage.rules import (
    check_claim,
    check_fits_redis,
    refuse_deduplication,
    refuse_dependencies,
    refuse_transaction,
)
from workers.storage.subscribers import BufferedSubscription

__all__ = ["BullMQStorage", "as_processor"]

DEFAULT_QUEUE: Final = "default"


class BullMQStorage:
    """One BullMQ queue.

    `target` is a URL (`redis://`, `rediss://`, `unix://`, each also with `bullmq+` in front) or a client with
    `decode_responses=True`. A client's settings are used, and its connections are left alone. A URL may name the queue
    by `?queue=`; the argument has precedence. `prefix` is BullMQ's, and so is its default. `timeout` bounds each call
    to the server; when it is over, the method raises `StorageUnavailable`.

    BullMQ keeps records by age for the whole queue: mixed retentions end early, with the shortest. It counts a job's
    stalls and its failed attempts together, as we do, and reports only at the next claim that they are too many.
    Released and recovered jobs come back in front of their priority, retried ones and next links of chains behind it.

    Raises:
        StorageError: a target that is no Redis URL, a client without text replies.
    """

    limits: Final = Limits(
        clock="client",
        durable=True,
        processes="many",
        recovery_passes=2,
        bounded_recovery=False,
        name_filter=False,
        ordering_keys=False,
        retention_per_job=False,
        result_ttl_updates=False,
        atomic_continuation=False,
        deduplication=False,
        dependencies=False,
        cancelled_apart=False,
    )

    def __init__(
        self,
        target: str | Redis,
        queue: str = DEFAULT_QUEUE,
        *,
        prefix: str = "bull",
        timeout: timedelta = timedelta(seconds=5),
    ) -> None:
        if isinstance(target, str):
            target, named = parse_url(target)
            queue = named if named and queue == DEFAULT_QUEUE else queue
        check_text("queue name", queue)
        if ":" in queue:
            raise ValueError(f"a BullMQ queue cannot be named {queue!r}: names have no colons")
        self._name = queue
        self._server = BullMQServer(target, timeout)
        access = QueueAccess(self._server, BullMQScripts(queue, prefix))
        self._jobs = Jobs(access)
        self._quarantine = BullMQQuarantine(access, self._jobs)
        self._claims = Claims(access, self._jobs.enqueue, self._quarantine)
        self._inspector = BullMQInspector(access)
        self._waiter = Waiter(access)
        self._feed = StreamListener(access, access.lua["events"])
        self._cancels = StreamListener(access, access.cancels_key)

    def __repr__(self) -> str:
        return f"BullMQStorage(queue={self._name!r})"

    @property
    def queue(self) -> str:
        return self._name

    async def connect(self) -> None:
        await self._server.open()

    async def disconnect(self) -> None:
        if self._server.in_last_use:
            await self._feed.close()
            await self._cancels.close()
        await self._server.close()

    def forget_loop(self) -> None:
        self._feed.forget()
        self._cancels.forget()
        self._server.forget()

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        refuse_transaction(connection, "BullMQStorage")
        refuse_deduplication(jobs, "BullMQStorage")
        refuse_dependencies(jobs, "BullMQStorage")
        return await self._jobs.enqueue(jobs)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        check_claim(worker_id, leases)
        return await self._claims.claim(worker_id, leases, limit) if leases and limit > 0 else []

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        await self._waiter.wait(timeout.total_seconds())

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        return await self._claims.renew(claims)

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        refuse_transaction(connection, "BullMQStorage")
        return await self._claims.settle(settlements)

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        await self._claims.progress(reports)

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        return await self._claims.recover(max_stalls)

    async def sweep(self, limit: int) -> int:
        return await self._inspector.sweep(limit)

    async def cancel(self, job_id: str) -> CancelResult:
        return await self._jobs.cancel(job_id)

    async def status(self, ids: Sequence[str]) -> list[JobStatus | None]:
        return await self._inspector.status(ids)

    async def result(self, job_id: str) -> JobOutcome | None:
        return await self._inspector.result(job_id)

    async def counts(self) -> dict[JobState, int]:
        return await self._inspector.counts()

    async def workers(self) -> list[WorkerInfo]:
        return await self._inspector.workers()

    async def pause(self) -> None:
        await self._inspector.pause()

    async def resume(self) -> None:
        await self._inspector.resume()

    async def is_paused(self) -> bool:
        return await self._inspector.is_paused()

    async def retry(self, ids: Sequence[str]) -> int:
        return await self._jobs.retry(ids)

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        refuse_transaction(connection, "BullMQStorage")
        return await self._jobs.remove(ids, running=running)

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        """See `Storage.complete`.

        Raises:
            StorageError: a job of Node waits for its children in a flow, or belongs to a job scheduler.
        """
        refuse_transaction(connection, "BullMQStorage")
        check_fits_redis(job_id, result)
        return await self._jobs.complete(job_id, result, keep)

    def news(self) -> list[SetAside]:
        return self._quarantine.news()

    async def quarantine(self) -> list[SetAside]:
        return await self._quarantine.entries()

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        return await self._quarantine.repair(drop=drop)

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._jobs.promote(ids)

    async def drain(self) -> int:
        return await self._inspector.drain()

    async def clean(self, state: JobState, *, older_than: timedelta, limit: int = 1_000) -> int:
        return await self._inspector.clean(state, older_than, limit)

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        raise Unsupported("BullMQ keeps results by the age of the whole queue; see BullMQStorage.limits")

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        async with self._feed.subscribe(None) as subscription:
            yield subscription

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        async with self._cancels.cancel_requests() as subscription:
            yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        async with self._feed.subscribe(job_id) as subscription:
            yield subscription

    # Last, because from here on `list` is this method and no longer the type.
    async def list(self, state: JobState, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self._inspector.page(state, cursor, limit)
