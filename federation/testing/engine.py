"""A node under test, as it is in the background loop: made as any other, and worked off by real workers on demand.

Theory of operation. The node is adopted by the process, so each event loop that asks gets another one like it, on the
same database, clock and network. Nothing runs by itself. `deliver` and `receive` run the shipped workers until nothing
is due, and `deliver` moves the clock to what is due next, as long as that lies within what it was told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select, union_all
from sqlmodel import col

from db import DeliveryJob, DeliveryPayload, DeliveryState, ReceivedActivity, ReceivedState, ServerLink
from db.url import parse_url
from federation.activitypub.received_runner import told_of
from federation.base.queues.queue import TASKS_QUEUE_NAME, delivery_backoff
from federation.base.settings.settings import Settings
from federation.delivery.rows import OPEN_STATES
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard, Target
from federation.http.messages import Response
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt
from federation.tasks import declared_tasks
from federation.testing.clock import MovableClock
from federation.testing.door import ask
from federation.testing.network import LocalClient, Network
from workers import Handler, JobState, Queue, Retry, RetryPolicy, Worker
from workers.clock import Clock
from workers.storage.base import ANY_NAME, Storage
from workers.storage.sql import SqlStorage
from workers.worker.draining import run_while
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind
from workers.worker.options import WorkerOptions

MOST_ROUNDS: Final = 1_000
MOST_MOMENTS: Final = 10_000
FAILURES: Final = (WorkerEventKind.FAILING, WorkerEventKind.FAILED, WorkerEventKind.SNOOZED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedActivity:
    """An activity that is owed to an inbox, or was given up, as `state` says: `ready`, `held`, `failed` or `expired`.

    `activity` is its JSON; `server` the origin of the inbox; `error` says why the last attempt at it failed.
    """

    activity: Mapping[str, Any]
    inbox: str
    server: str
    state: DeliveryState
    attempts: int
    error: str | None
    owed_since: datetime
    delivery_id: str

    @property
    def type(self) -> str:
        """The activity's type; on the sealed wire its method."""
        return str(self.activity.get("type") or self.activity.get("method"))


class Noted(NamedTuple):
    """A failure as the row of an activity has it."""

    number: int
    attempts: int
    error: str


class NodeUnderTest(Federation):
    """A node whose queues and times go by a clock that tests move, and that reaches this machine alone."""

    def __init__(self, settings: Settings, clock: MovableClock, network: Network) -> None:
        self._movable = clock
        self._network = network
        self._url = settings.database_url.get_secret_value()
        is_movable = settings.queue_url is None and settings.redis_url is None and self._url.startswith("sqlite")
        super().__init__(
            settings, client=self._local_client(settings), clock=clock, storage=self._queue if is_movable else None
        )

    def _local_client(self, settings: Settings) -> FederationClient:
        guard = AddressGuard(settings.dev_allowed_hostnames)
        return LocalClient(guard, self._network, own_url=settings.better_auth_url, ask=self._shown)

    def _queue(self, name: str) -> Storage:
        return SqlStorage(parse_url(self._url), name, clock=self._movable)

    @property
    def queues_join_database(self) -> bool:
        """Whether jobs can be part of its transactions: also of the queues that go by the clock of the test."""
        return self._storage is not None or super().queues_join_database

    def another(self) -> Federation:
        """Make a node like this one for another event loop."""
        return NodeUnderTest(self.settings, self._movable, self._network)

    async def _shown(self, target: Target, accept: str) -> Response:
        """Answer as others are answered who ask for one of our own URLs."""
        path, headers = target.url.raw_path.decode("ascii"), {"Accept": accept}
        answer = await ask(self, self._network.app, method="GET", target=path, headers=headers)
        return Response(status=answer.status, headers=dict(answer.headers), body=answer.body)


class Engine:
    """What `FederationNode` does, in the background loop."""

    def __init__(self, settings: Settings, clock: MovableClock, network: Network) -> None:
        self.node = NodeUnderTest(settings, clock, network)
        self._clock = clock
        self._settings = settings
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Make this the process's node."""
        adopt(self.node)

    async def deliver(self, within: timedelta = timedelta()) -> None:
        """Send what is due; see `FederationNode.deliver`."""
        async with self._lock:
            end = self._clock.now() + within
            await self._settle()
            for _ in range(MOST_MOMENTS):
                due = await self._next_due()
                if due is None or due > end or due <= self._clock.now():
                    break
                self._clock.advance_to(due)
                await self._settle()
            self._clock.advance_to(end)

    async def receive(self) -> None:
        """Handle what was received; see `FederationNode.receive`."""
        async with self._lock:
            failures: list[BaseException] = []

            def observe(event: WorkerEvent) -> None:
                cause = _cause(event)
                if cause is not None:
                    failures.append(cause)

            before = await self._failures()
            await drain(
                self.node.tasks_queue,
                self.node.worker_storage(TASKS_QUEUE_NAME),
                self._handlers(),
                clock=self._clock,
                concurrency=1,  # of one server no two actors are asked about at a time
                observers=[observe],
            )
            failures += _unseen((await self._failures()) - before, failures)
        if failures:
            raise BaseExceptionGroup("what was received, or a task, has failed", failures)

    async def owed(self) -> list[OwedActivity]:
        """Return all that is owed, or was given up, in the order in which it came to be owed."""
        return [_owed(row) for row in await self.node.database.rows(_ALL)]

    async def close(self) -> None:
        """Close what is open."""
        await self.node.close()

    def _handlers(self) -> Mapping[str, Handler]:
        own = {} if self.node.activitypub is None else self.node.activitypub.handlers
        return {**declared_tasks(self._settings.federation_tasks), **own}

    async def _settle(self) -> None:
        """Do what is due until nothing is: as the workers of a process do, and what they look at each second."""
        node = self.node
        for _ in range(MOST_ROUNDS):
            await node.held_sweeper.sweep()  # first, as it says what may be released
            moved = await node.link_probes.tick() + await node.releaser.tick()
            worked = [await self._work(queue, handler, retry) for queue, handler, retry in self._delivering()]
            if not moved + sum(worked):
                return
        raise RuntimeError(f"there is still something due after {MOST_ROUNDS} rounds")

    def _delivering(self) -> Sequence[tuple[Queue, Handler, RetryPolicy | None]]:
        node, backoff = self.node, delivery_backoff(self._settings)
        deliver, check = Handler(node.delivery_processor), Handler(node.health_check_processor)
        return [
            *((queue, deliver, backoff) for queue in node.delivery_queues.all),
            (node.health_check_queue, check, None),
        ]

    async def _work(self, queue: Queue, handler: Handler, retry: RetryPolicy | None) -> int:
        return await drain(
            queue,
            self.node.worker_storage(queue.storage.queue),
            {ANY_NAME: handler},
            clock=self._clock,
            concurrency=self._settings.federation_delivery_concurrency,
            retry=retry,
        )

    async def _next_due(self) -> datetime | None:
        """Return when something has to be done next about what is owed; None if nothing is."""
        if not (await self.node.database.rows(_IS_OWED))[0][0]:
            return None
        now, times = self._clock.now(), [row[0] for row in await self.node.database.rows(_TIMES)]
        times += [await next_due(queue) for queue, _, _ in self._delivering()]
        return min((each for each in times if each is not None and each > now), default=None)

    async def _failures(self) -> set[Noted]:
        return {Noted(*row) for row in await self.node.database.rows(_FAILED)}


def _cause(event: WorkerEvent) -> BaseException | None:
    """Return what made a handler fail; not what it does on purpose."""
    if event.kind not in FAILURES or event.error is None:
        return None
    return event.error.__cause__ if isinstance(event.error, Retry) else event.error


def _unseen(noted: Iterable[Noted], seen: Iterable[BaseException]) -> list[RuntimeError]:
    """Return those of the noted failures that no worker has seen: last attempts, and such in the run of another job."""
    left = sorted(noted)
    for error in seen:
        known = next((each for each in left if each.error == told_of(error)), None)
        if known is not None:
            left.remove(known)
    return [RuntimeError(f"{each.error} (attempt {each.attempts})") for each in left]


def _owed(row: Any) -> OwedActivity:
    return OwedActivity(
        activity=json.loads(row.shared or row.payload),
        inbox=row.target_url,
        server=row.server_url,
        state=row.state,
        attempts=row.attempts,
        error=row.last_error,
        owed_since=row.created_at,
        delivery_id=row.id,
    )


_ALL: Final = (
    select(
        *(
            getattr(DeliveryJob, name)
            for name in ("id", "payload", "target_url", "server_url", "state", "attempts", "last_error", "created_at")
        ),
        col(DeliveryPayload.payload).label("shared"),
    )
    .outerjoin(DeliveryPayload, col(DeliveryPayload.id) == col(DeliveryJob.payload_id))
    .order_by(col(DeliveryJob.created_at), col(DeliveryJob.id))
)
_IS_OWED: Final = select(func.count()).select_from(DeliveryJob).where(col(DeliveryJob.state).in_(OPEN_STATES))
_TIMES: Final = select(
    union_all(
        select(col(ServerLink.next_probe_at).label("at")),
        select(col(ServerLink.release_at)),
        select(col(DeliveryJob.next_attempt_at)).where(col(DeliveryJob.state) == DeliveryState.HELD),
    ).subquery()
)
_FAILED: Final = select(
    col(ReceivedActivity.number), col(ReceivedActivity.attempts), col(ReceivedActivity.last_error)
).where(col(ReceivedActivity.state) != ReceivedState.DONE, col(ReceivedActivity.last_error).is_not(None))


UNDER_WAY: Final = (JobState.QUEUED, JobState.PROCESSING)
LATER: Final = (JobState.FAILING, JobState.SCHEDULED)
MOST_LISTED: Final = 1_000


async def drain(
    queue: Queue,
    storage: Storage,
    handlers: Mapping[str, Handler],
    *,
    clock: Clock,
    concurrency: int,
    retry: RetryPolicy | None = None,
    observers: Sequence[Observer] = (),
) -> int:
    """Run the jobs that are due, and those that they enqueue, until none is. Return how many attempts that took."""
    await queue.start()
    if not await _is_due(queue, clock):
        return 0
    attempts, changed = 0, asyncio.Event()

    def observe(event: WorkerEvent) -> None:
        nonlocal attempts
        attempts += event.kind is WorkerEventKind.ACTIVE
        changed.set()

    worker = Worker(
        storage,
        handlers,
        concurrency=concurrency,
        observers=[observe, *observers],
        options=WorkerOptions(grace=timedelta(0), retry=retry),
    )
    await run_while(worker, partial(_is_due, queue, clock), changed)
    return attempts


async def next_due(queue: Queue) -> datetime | None:
    """Return when the first of the jobs that wait for their time is due; None if there is none."""
    await queue.start()
    counts = await queue.counts()
    pages = [await queue.manage.list(state, limit=MOST_LISTED) for state in LATER if counts[state]]
    times = [job.next_run_at for page in pages for job in page.jobs if job.next_run_at is not None]
    return min(times, default=None)


async def _is_due(queue: Queue, clock: Clock) -> bool:
    counts = await queue.counts()
    if any(counts[state] for state in UNDER_WAY):
        return True
    first = await next_due(queue)
    return first is not None and first <= clock.now()
