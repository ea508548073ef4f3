"""The real processor in a real worker on the application's own database, and everything a delivery leaves behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from sqlalchemy import select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob, Follow, Server, new_id
from federation.base.queues.job_data import POST_JOB, FederationDeliveryJob
from federation.base.queues.queue import DELIVERY_QUEUE_NAME, delivery_backoff
from federation.delivery.attempt.host_limits import HostLimits
from federation.delivery.attempt.processor import DeliveryProcessor
from federation.delivery.job_origins import OtherNodesJobs
from federation.delivery.wire import DELIVERY_TIMEOUT, Wires
from federation.protocol.activities import follow_activity, post_activity
from federation.runtime.composition import Federation
from federation.runtime.workers import log_event
from federation.sealed.outbound.answers import AckChecks, Chance, one_in_some
from federation.sealed.outbound.wire import SealedWire
from federation.sealed.peers.discovery import SharedDiscovery
from federation.sealed.peers.health_checks import health_check_id
from tests.patience import PATIENCE_SECONDS
from tests.peer import POSTS_PATH, Peer, settle
from workers import JobState, JobStatus, Worker, WorkerOptions
from workers.jobs import NewJob
from workers.storage.base import ANY_NAME
from workers.worker.events import WorkerEvent, WorkerEventKind

FOLLOWER, FOLLOWED = "user-a", "user-b"
POST_TEXT = "the-plaintext-nobody-may-log"

_ENDED = frozenset({WorkerEventKind.COMPLETED, WorkerEventKind.FAILED})
_GRACE = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What is left of one delivery: its job, its row (None: deleted) and its log, oldest attempt first."""

    job: JobStatus | None
    row: DeliveryJob | None
    log: list[DeliveryAttempt]

    @property
    def state(self) -> JobState | None:
        """None: the job ended and left nothing, as those of held deliveries do."""
        return self.job.state if self.job else None

    @property
    def reason(self) -> str:
        """The failure as the queue keeps it."""
        return self.job.last_error.message if self.job and self.job.last_error else ""

    @property
    def codes(self) -> list[str | None]:
        return [attempt.error_code for attempt in self.log]


class Site:
    """One node with a worker on its delivery queue; `outcome` starts the worker and waits for a job to end.

    The worker has no row keeper: what happens to a row is the processor's doing. `timeout` is the delivery deadline,
    `discover` replaces the node's discovery, `host_limits` is shared with the test, `chance` draws acknowledgments of
    posts to be checked.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        timeout: timedelta = DELIVERY_TIMEOUT,
        discover: SharedDiscovery | None = None,
        host_limits: HostLimits | None = None,
        chance: Chance = one_in_some,
    ) -> None:
        self.federation = federation
        self.processor = DeliveryProcessor(
            wires=Wires(
                SealedWire(
                    own_url=federation.own_url,
                    keys=federation.keys,
                    registry=federation.registry,
                    links=federation.links,
                    discovery=federation.discovery,
                    discover=discover,
                    probe=federation.probe,
                    guard=federation.guard,
                    fetch=federation.fetch,
                    timeout=timeout,
                    ack_checks=AckChecks(chance),
                )
            ),
            blacklist=federation.blacklist,
            links=federation.links,
            payloads=federation.payloads,
            ledger=federation.ledger,
            attempts=federation.attempts,
            host_limits=host_limits or federation.host_limits,
            crash_suspects=federation.crash_suspects,
            database_watch=federation.database_watch,
            other_nodes_jobs=OtherNodesJobs(federation.job_origin, federation.sightings),
        )
        self.storage = federation.worker_storage(DELIVERY_QUEUE_NAME)
        self.events: list[WorkerEvent] = []
        self._ended: set[str] = set()
        self._happened = asyncio.Event()
        self._worker: Worker | None = None
        self._running: asyncio.Task[None] | None = None
        self._usual = self._options(_GRACE)  # ahead of any delivery, as in a node

    def _options(self, grace: timedelta) -> WorkerOptions:
        settings = self.federation.settings
        return WorkerOptions(
            overtime=settings.federation_overtime,
            not_ready=self.federation.database_watch.not_ready,
            grace=grace,
            retry=delivery_backoff(settings),
        )

    def start(self, *, grace: timedelta = _GRACE) -> None:
        """A worker runs on the queue; nothing happens if one does."""
        if self._worker is not None:
            return
        settings = self.federation.settings
        self._worker = Worker(
            self.storage,
            {ANY_NAME: self.processor},
            concurrency=settings.federation_delivery_concurrency,
            lease=settings.federation_lease,
            observers=[log_event, self._observe],
            options=self._usual if grace == _GRACE else self._options(grace),
        )
        self._running = asyncio.create_task(self._worker.run())

    async def stop(self, *, skip_grace: bool = False) -> None:
        """The worker has stopped; `start` runs another one."""
        if self._worker is None or self._running is None:
            return
        self._worker.stop()
        if skip_grace:
            self._worker.stop()
        await self._running
        self._worker = self._running = None

    async def __aenter__(self) -> Self:
        await self.storage.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        await self.storage.disconnect()

    async def owe_post(self, peer: Peer, *, name: str = POST_JOB) -> str:
        """A post is owed to the peer, as an application service would; the delivery's id."""
        return (await self.owe_posts(peer, 1, name=name))[0]

    async def owe_posts(self, peer: Peer, count: int, *, name: str = POST_JOB) -> list[str]:
        """So many different posts are owed to the peer, in one transaction; their deliveries' ids."""
        outbox = self.federation.outbox
        async with outbox.transaction() as session:
            return [
                await outbox.enqueue_delivery(
                    session, name, peer.url + POSTS_PATH, peer.url, post_payload(f"post-{new_id()}")
                )
                for _ in range(count)
            ]

    async def owe_follow(self, peer: Peer) -> str:
        """The peer, known already, is owed a follow that is stored here; the delivery's id."""
        await settle(self.federation, FOLLOWER)
        async with self.federation.outbox.transaction() as session:
            requested = await self.federation.producers.request_follow(
                session, follower_id=FOLLOWER, following_id=FOLLOWED, server_url=peer.url
            )
        return requested.delivery_id

    async def add_row(self, delivery_id: str, *, target_url: str, payload: str) -> None:
        """A row as a producer of the original implementation writes it."""
        async with self.federation.database.transaction() as session:
            session.add(
                DeliveryJob(id=delivery_id, target_url=target_url, payload=payload, created_at=datetime.now(UTC))
            )

    async def owe_raw(self, data: object, *, name: str = POST_JOB, row: str | None = None) -> str:
        """A job with any data at all, and the row `row` if it is given; the job's id."""
        return await self.owe_bytes(json.dumps(data).encode(), name=name, row=row)

    async def owe_bytes(self, data: bytes, *, name: str = POST_JOB, row: str | None = None) -> str:
        """As `owe_raw`, with data that need not be JSON."""
        if row is not None:
            await self.add_row(row, target_url="https://b.example/inbox", payload="{}")
        attempts = self.federation.settings.federation_delivery_attempts
        job = NewJob(id=new_id(), name=name, payload=data, max_attempts=attempts)
        await self.storage.enqueue([job])
        return job.id

    async def outcome(self, job_id: str, *, row: str | None = None) -> Fate:
        """What became of the job once it had ended; `row` is its delivery's id where that is another."""
        await self.ended(job_id)
        return await self.fate(job_id, row=row)

    async def ended(self, *job_ids: str) -> None:
        """Every one of these jobs has completed or failed."""
        self.start()
        await self.until(lambda: self._ended.issuperset(job_ids))

    async def until(self, condition: Callable[[], object]) -> None:
        """`condition()` is true, looked at after each event of the worker."""
        assert self._running is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            self._happened.clear()
            happened = asyncio.create_task(self._happened.wait())
            await asyncio.wait(
                [happened, self._running],
                timeout=max(deadline - time.monotonic(), 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not happened.done():
                happened.cancel()
                kinds = [f"{event.kind.value}: {event.error}" for event in self.events[-10:]]
                raise AssertionError(f"the worker did not get there; its last events: {kinds}")

    @property
    def failing(self) -> list[WorkerEvent]:
        """The attempts so far that failed, or were parked, and come again."""
        kinds = (WorkerEventKind.FAILING, WorkerEventKind.SNOOZED)
        return [event for event in self.events if event.kind in kinds]

    @property
    def failed(self) -> list[WorkerEvent]:
        """The attempts so far that ended their job for good."""
        return [event for event in self.events if event.kind is WorkerEventKind.FAILED]

    async def fate(self, job_id: str, *, row: str | None = None) -> Fate:
        """The job, row and log as they are now."""
        node, row = self.federation, row or job_id
        await node.attempts.close()  # writes what is buffered
        (job,) = await self.storage.status([job_id])
        async with node.database.read() as session:
            log = select(DeliveryAttempt).where(col(DeliveryAttempt.delivery_id) == row)
            return Fate(
                job=job,
                row=await session.get(DeliveryJob, row),
                log=list((await session.execute(log.order_by(col(DeliveryAttempt.id)))).scalars()),
            )

    async def follow(self) -> Follow | None:
        """The one follow stored here."""
        async with self.federation.database.read() as session:
            return (await session.execute(select(Follow))).scalar_one_or_none()

    async def server(self, url: str) -> Server | None:
        """The registry's row."""
        async with self.federation.database.read() as session:
            return (await session.execute(select(Server).where(col(Server.url) == url))).scalar_one_or_none()

    async def first_probe(self, url: str) -> JobStatus | None:
        """The scheduled health check number 0."""
        return await self.federation.health_check_queue.get_status(health_check_id(url, 0))

    def _observe(self, event: WorkerEvent) -> None:
        self.events.append(event)
        if event.kind in _ENDED and event.claim is not None:
            self._ended.add(event.claim.job_id)
        self._happened.set()


def post_payload(post_id: str, *, text: str = POST_TEXT, own_url: str = "https://a.example") -> str:
    return post_activity(
        federation_url=own_url,
        post_id=post_id,
        content=[{"type": "text", "value": text}],
        author_id=FOLLOWER,
        published=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        is_private=False,
    )


def follow_payload(follow_id: str, *, own_url: str = "https://a.example") -> str:
    return follow_activity(
        federation_url=own_url,
        follow_id=follow_id,
        created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        follower_id=FOLLOWER,
        following_id=FOLLOWED,
        follower_server_url=None,
    )


def job_data(delivery_id: str, server_url: str, *, payload: str, path: str = POSTS_PATH) -> Mapping[str, object]:
    """Job data as it lies in the queue."""
    return FederationDeliveryJob(
        delivery_job_id=delivery_id, target_url=server_url + path, server_url=server_url, payload=payload
    ).to_wire()
