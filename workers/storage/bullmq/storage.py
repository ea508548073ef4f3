"""BullMQ's own queues as a storage: Node producers, Node workers and dashboards see ordinary BullMQ jobs.

Every transition is BullMQ's own Lua from the installed `bullmq` package, on BullMQ's own keys. Beside them we keep what
Node ignores: the hash fields `workers:settled`, `workers:uncounted`, `workers:cancel`, `workers:stopped`,
`workers:keep` and `workers:error` of a job; its options `chainIndex`, `workersMeta`, `workers` (it is ours) and `cron`
(see `crons`), and the members `maximum` and `multiplier` of its option `backoff`; the keys
`<prefix>:<queue>:workers:seen` (when each worker was last seen) and `<prefix>:<queue>:workers:cancel-requests` (a
stream for workers), each for an hour;
`<prefix>:<queue>:workers:cancelled` (which of the failed jobs are cancelled ones), as long as their records last;
`<prefix>:<queue>:workers:removed-crons` and `<prefix>:<queue>:workers:limits` (see `crons` and `BullMQLimits`); and
what was set aside, until `repair`, in `<prefix>:<queue>:workers:quarantine` and
`<prefix>:<queue>:workers:quarantine:<id>`.

A cancelled job is a failed one to BullMQ, with the time of its cancel in `workers:stopped`. It is cancelled as long as
that is when BullMQ says that it ended, which a retry by Node takes away.

Payloads and results are JSON on the wire. Bytes that are JSON are stored unchanged, others as `{"$base64": "..."}`. Ids
of other producers read as they are, numbers too; see `encode_id` for ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Final

from redis.asyncio import Redis

from workers.checks import check_text, check_whole
from workers.errors import Unsupported
from workers.jobs import (
    CancelResult,
    ChildrenPage,
    Claim,
    EnqueueResult,
    FlowNode,
    JobState,
    LogLine,
    Moved,
    NewJob,
    ProgressReport,
    Recovery,
    Renewal,
    Repaired,
    Retention,
    SetAside,
    Settlement,
    SettleOutcome,
)
from workers.limits import WHOLE_QUEUE, HeldBack, Limit, check_limits, read_rate
from workers.storage.abilities import Exchange, ServerFault
from workers.storage.base import Capabilities
from workers.storage.bullmq.access import Library, QueueAccess
from workers.storage.bullmq.claims import Claims, JobLogs
from workers.storage.bullmq.codec import bullmq_job
from workers.storage.bullmq.flows import ChildrenReader, Flows
from workers.storage.bullmq.inspect import BullMQReading
from workers.storage.bullmq.jobs import Jobs
from workers.storage.bullmq.listener import StreamListener
from workers.storage.bullmq.processor import as_processor
from workers.storage.bullmq.quarantine import BullMQQuarantine
from workers.storage.bullmq.schedulers import BullMQCrons
from workers.storage.bullmq.scripts import LIMITS, BullMQScripts
from workers.storage.bullmq.server import (
    METRICS_PARAMETER,
    STALLS_PARAMETER,
    BullMQServer,
    metrics_of,
    parse_url,
    server_url,
    stalls_of,
)
from workers.storage.bullmq.waiting import Presence, Waiter
from workers.storage.on_redis.examination import Care, take_eviction
from workers.storage.on_redis.node_values import moment, number, to_ms, whole
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
FOREIGN_STALLS: Final = 1
"""The default of Node's workers, which they call `maxStalledCount`."""
MOST_STALLS: Final = 1_000_000
MOST_METRICS: Final = 527_040
"""Minutes of a year: a script of BullMQ adds what is missing since the last one in one go."""
_LIMIT_FIELDS: Final = ("concurrency", "max", "duration")
_UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


class BullMQLimits(BullMQReading):
    """The part of a BullMQ storage that limits the queue, by a global concurrency and a global rate, in its `meta`.

    BullMQ's rate counts in windows: as many jobs as it says may start at once, and the next when its time is over. So a
    rate has a `burst` of its count, and no other. BullMQ limits neither names nor keys.
    """

    def refuse_limits(self, limits: Mapping[str, Limit]) -> None:
        for name, limit in limits.items():
            if name != WHOLE_QUEUE:
                raise Unsupported(f"limit {name!r}: BullMQ limits only a whole queue, which is called {WHOLE_QUEUE!r}")
            if limit.rate is not None and limit.capacity != read_rate(limit.rate)[0]:
                raise Unsupported(
                    f"limit {name!r}: BullMQ lets as many jobs start at once as the rate has; leave `burst` out"
                )

    async def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `KeepsLimits.declare_limits`. What another program limited stays, unless this says more."""
        check_limits(limits)
        self.refuse_limits(limits)
        for limit in limits.values():
            rate = None if limit.rate is None else read_rate(limit.rate)
            counts = None if rate is None else (rate[0], to_ms(rate[1]))
            await self._queue.ask([self._lua.declare_limits(limit.version, limit.concurrency, counts)])

    async def declared_limits(self) -> dict[str, Limit]:
        """See `KeepsLimits.declared_limits`; the limit may be another program's, of version 0."""
        (concurrency, most, duration), version = await self._queue.ask(
            [("HMGET", self._lua["meta"], *_LIMIT_FIELDS), ("HGET", self._lua[LIMITS], "version")]
        )
        limit = Limit(_rate(most, duration), concurrency=whole(concurrency) or None, version=whole(version))
        return {} if limit == Limit(version=limit.version) else {WHOLE_QUEUE: limit}

    async def remove_limit(self, name: str) -> bool:
        """See `KeepsLimits.remove_limit`; whoever declared it."""
        if name != WHOLE_QUEUE:
            return False
        gone, _, _ = await self._queue.ask(
            [("HDEL", self._lua["meta"], *_LIMIT_FIELDS), ("DEL", self._lua[LIMITS]), self._lua.mark()]
        )
        return bool(gone)

    async def held_back(self, ids: Sequence[str]) -> list[HeldBack | None]:
        statuses = await self.status(ids)
        (concurrency, most), active, started, left_ms = await self._queue.ask(
            [
                ("HMGET", self._lua["meta"], "concurrency", "max"),
                ("LLEN", self._lua["active"]),
                ("GET", self._lua["limiter"]),
                ("PTTL", self._lua["limiter"]),
            ]
        )
        held = None
        if most is not None and left_ms > 0 and whole(started) >= whole(most):
            held = HeldBack(WHOLE_QUEUE, "", moment(self._queue.server_ms() + left_ms))
        elif concurrency is not None and active >= whole(concurrency):
            held = HeldBack(WHOLE_QUEUE, "", None)
        return [held if one is not None and one.state is JobState.QUEUED else None for one in statuses]


def _rate(most: object, duration: object) -> str | None:
    """Return the rate in the words of `Limit`; None if there is none, or no words for it."""
    count, per_ms = number(most), whole(duration)
    for unit, length in _UNITS.items() if count and per_ms else ():
        if per_ms % length == 0:
            units = "" if per_ms == length else per_ms // length
            with suppress(ValueError):
                return Limit(f"{count}/{units}{unit}").rate
    return None


class BullMQStorage(BullMQLimits, BullMQCrons):
    """One BullMQ queue.

    `target` is a URL (`redis://`, `rediss://`, `unix://`, or as in `redis_urls`, each also with `bullmq+` in front) or
    a client with `decode_responses=True`. On a cluster the prefix has to be in braces. A client's settings are used,
    and its connections are left alone. A URL may name the queue by `?queue=`; the argument has precedence. `prefix` is
    BullMQ's, and so is its default. `timeout` is how long the server may be silent in a call; then the method raises
    `StorageUnavailable`. `metrics`, or `?metrics=` in the URL, is for how many minutes to count what completed and
    failed, as Node's `metrics: {maxDataPoints}`; by default a queue that has such counts already goes on with them.
    `allow_eviction`: as on `RedisStorage`.

    A crash is an attempt of a job that was enqueued here. To BullMQ it is none: a job of another producer runs again
    whatever its attempts, `max_foreign_stalls` times (default 1, as Node's `maxStalledCount`), and then fails as in
    Node. A URL may say `?max_foreign_stalls=`; the argument has precedence. A job that stalled too often fails at its
    next claim.

    BullMQ keeps records by age for the whole queue: mixed retentions end early, with the shortest. Released and
    recovered jobs come back in front of their priority, retried ones and next links of chains behind it.

    A job that waits for its children reads as waiting, without a time.

    A queue of Bull looks much like one of BullMQ; what is surely one is refused, see `lua/bull.lua`.

    Raises:
        StorageError: a target that is no Redis URL, a client without text replies.
        ValueError: a queue name with a colon, an impossible number of stalls or of minutes of metrics.
    """

    capabilities: Capabilities = Capabilities(
        clock="client",
        durable=None,
        works_when_full=False,
        processes="many",
        recovery_passes=2,
        recovery_interval=timedelta(seconds=4),
        bounded_recovery=False,
        name_filter=False,
        ordering_keys=False,
        lost_attempts_noted=False,
        retention_per_job=False,
        result_ttl_updates=False,
        atomic_continuation=False,
        deduplication=False,
        dependencies=False,
        urgent_priorities=False,
        cancelled_apart=False,
        flows=True,
        crons=True,
        cron_rows=False,
        farewells=True,
        outside_continuations=True,
    )

    exchanges_at_once: Final = 2

    def __init__(
        self,
        target: str | Redis,
        queue: str = DEFAULT_QUEUE,
        *,
        prefix: str = "bull",
        timeout: timedelta = timedelta(seconds=5),
        metrics: int | None = None,
        max_foreign_stalls: int | None = None,
        allow_eviction: bool = False,
    ) -> None:
        if isinstance(target, str):
            metrics = metrics_of(target) if metrics is None else metrics
            max_foreign_stalls = stalls_of(target) if max_foreign_stalls is None else max_foreign_stalls
            target, allowed = take_eviction(server_url(target))
            allow_eviction = allow_eviction or allowed
            target, named = parse_url(target)
            queue = named if named and queue == DEFAULT_QUEUE else queue
        check_text("queue name", queue)
        if ":" in queue:
            raise ValueError(f"a BullMQ queue cannot be named {queue!r}: names have no colons")
        stalls = FOREIGN_STALLS if max_foreign_stalls is None else max_foreign_stalls
        check_whole(STALLS_PARAMETER, stalls, 0, MOST_STALLS)
        if metrics is not None:
            check_whole(METRICS_PARAMETER, metrics, 1, MOST_METRICS)
        self._name = queue
        self._allow_eviction = allow_eviction
        lua, care = BullMQScripts(queue, prefix), Care(allow_eviction=allow_eviction, clients_clocks=True)
        self._server = BullMQServer(target, timeout, lua.base, care)
        access = QueueAccess(self._server, lua, max_foreign_stalls=stalls)
        super().__init__(access)
        self._library = Library(access, queue, metrics)
        self._presence = Presence(access, prefix, queue)
        self._jobs = Jobs(access)
        self._quarantine = BullMQQuarantine(access, self._jobs)
        # What a completion continues with is confirmed with the completion.
        self._claims = Claims(access, partial(self._jobs.enqueue, confirmed=False), self._quarantine)
        self._flows = Flows(access, prefix)
        self._children = ChildrenReader(access, prefix)
        self._waiter = Waiter(access, self._presence)
        self._logs = JobLogs(access)
        self._feed = StreamListener(access, access.lua["events"])
        self._cancels = StreamListener(access, access.cancels_key)

    def __repr__(self) -> str:
        return f"BullMQStorage(queue={self._name!r})"

    @property
    def queue(self) -> str:
        return self._name

    async def connect(self) -> None:
        await self._server.open()
        self.capabilities = self._server.seen.known(type(self).capabilities)
        try:
            await self._library.check()
        except BaseException:
            await self._server.close()
            raise

    def faults(self) -> list[ServerFault]:
        return self._server.seen.faults(allow_eviction=self._allow_eviction)

    async def disconnect(self) -> None:
        await self._presence.leave()
        if self._server.in_last_use:
            await self._feed.close()
            await self._cancels.close()
        await self._server.close()

    def forget_loop(self) -> None:
        self._feed.forget()
        self._cancels.forget()
        self._presence.forget()
        self._library.ownership.forget()
        self._server.forget()

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        refuse_transaction(connection, "BullMQStorage")
        refuse_deduplication(jobs, "BullMQStorage")
        refuse_dependencies(jobs, "BullMQStorage")
        await self._library.ownership.check_now_and_then()
        return await self._jobs.enqueue(jobs)

    async def enqueue_flow(self, nodes: Sequence[FlowNode], claim: Claim | None = None) -> list[EnqueueResult | None]:
        return await self._flows.add(nodes, claim) if nodes else []

    async def children(self, claim: Claim, *, limit: int, cursor: str | None) -> ChildrenPage:
        return await self._children.page(claim, limit, cursor)

    def with_node_options(self, job: NewJob, options: Mapping[str, object]) -> NewJob:
        """See `TakesNodeOptions.with_node_options`."""
        return bullmq_job(job, options)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        check_claim(worker_id, leases)
        await self._library.ownership.check_now_and_then()
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

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        """See `ExchangesJobs.settle_and_claim`. From a paused, limited or damaged queue nothing is claimed so."""
        check_claim(worker_id, leases)
        if self._library.ownership.is_foreign:
            return Exchange(outcomes=await self.settle(settlements))
        return await self._claims.settle_and_claim(settlements, worker_id, leases, limit)

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        await self._claims.progress(reports)

    async def log(self, lines: Sequence[LogLine]) -> None:
        """See `KeepsLogs.log`."""
        await self._logs.add(lines)

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        await self._server.examine()
        self.capabilities = self._server.seen.known(type(self).capabilities)
        await self._library.ownership.check_now_and_then()
        await self._library.look_for_metrics()
        return await self._claims.recover(max_stalls)

    async def cancel(self, job_id: str) -> CancelResult:
        return await self._jobs.cancel(job_id)

    async def retry(self, ids: Sequence[str]) -> Moved:
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

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        """See `ContinuesFromOutside.continue_job`; it raises what `complete` does."""
        refuse_transaction(connection, "BullMQStorage")
        return await self._jobs.continue_job(then)

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._jobs.promote(ids)

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        raise Unsupported("BullMQ keeps results by the age of the whole queue; see BullMQStorage.capabilities")

    def events(self) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._feed.subscribe(None)

    def cancel_requests(self) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._cancels.cancel_requests()

    def subscribe(self, job_id: str) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._feed.subscribe(job_id)
