"""What application services call: one `Federation` per process, made from the environment on first use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncSession

from federation.base.errors import ConfigurationError
from federation.base.job_queue import JobQueue
from federation.delivery.errors import PermanentFailure
from federation.delivery.follow_ack import read_follow_ack
from federation.delivery.producers import Content, PublishedPost, RequestedFollow
from federation.http.client import DEFAULT_TIMEOUT, NO_HEADERS
from federation.http.gates import Fetched
from federation.node_workers import FederationWorkers, RunningWorker
from federation.process import get_federation, release
from federation.protocol.acks import Ack
from federation.servers.registry import KnownServer
from federation.tasks import declared_tasks
from workers import Job

if TYPE_CHECKING:
    import redis.asyncio


class _ServiceProcess:
    """What this process runs; written by `start_federation_worker` and `close_federation`."""

    workers: FederationWorkers | None = None


async def start_federation_worker() -> tuple[RunningWorker, RunningWorker]:
    """The delivery worker and the health-check worker of this process run; a second call returns the same pair.

    Beside them run the tasks declared so far, and those of the modules that FEDERATION_TASKS names.

    Raises:
        ConfigurationError: lists every malformed setting, or the modules that cannot be imported.
    """
    if _ServiceProcess.workers is None:
        federation = get_federation()
        tasks = declared_tasks(federation.settings.federation_tasks)
        _ServiceProcess.workers = FederationWorkers(federation, tasks=tasks)
    return _ServiceProcess.workers.start()


async def close_federation() -> None:
    """This process's workers have stopped and its connections are closed; the next use starts afresh."""
    running, _ServiceProcess.workers = _ServiceProcess.workers, None
    try:
        if running is not None:
            await running.stop()
    finally:
        federation = release()
        if federation is not None:
            await federation.close()


def get_redis_connection() -> redis.asyncio.Redis:
    """The process's Redis client for producers.

    A command without an answer fails after 5 s; nothing caps how often its caller asks again.

    Raises:
        ConfigurationError: REDIS_URL is not set.
    """
    return _required(get_federation().redis)


def get_redis_worker_connection() -> redis.asyncio.Redis:
    """The process's Redis client for workers, another one than the producers'.

    Raises:
        ConfigurationError: REDIS_URL is not set.
    """
    return _required(get_federation().worker_redis)


def _required(client: redis.asyncio.Redis | None) -> redis.asyncio.Redis:
    if client is None:
        raise ConfigurationError(["REDIS_URL: not set, as redis://[user:password@]host:port[/db]"])
    return client


def get_federation_queue() -> JobQueue:
    """The delivery queue: 5 attempts, 5, 10, 20 and 40 s apart, completed jobs kept 24 h, failed ones 7 days."""
    return get_federation().delivery_queue


def get_health_check_queue() -> JobQueue:
    """The health-check queue."""
    return get_federation().health_check_queue


async def schedule_health_check(server_url: str, attempt: int) -> None:
    """Probe `attempt` (from 0) of the server is due in 5 + 10 * attempt minutes; scheduling it again does nothing."""
    await get_federation().schedule_health_check(server_url, attempt)


async def process_federation_delivery(job: Job) -> None:
    """One attempt at a delivery; see `DeliveryProcessor`. Under a stock `bullmq.Worker` wrap it in `as_processor`."""
    await get_federation().delivery_processor(job)


async def process_health_check(job: Job) -> None:
    """One probe; see `HealthCheckProcessor`."""
    await get_federation().health_check_processor(job)


async def handle_follow_ack(
    ack: Ack, server_url: str, cached_public_key: str | None, delivery_job_id: str, job_id: str | None = None
) -> bool:
    """The follow says what its acknowledgment says, and the delivery's row is gone. False: no such follow is known.

    `job_id` is for the log alone.

    Raises:
        PermanentFailure: the acknowledgment is not that server's; the row is gone all the same.
        ConfigurationError: this node has no keys to open it with.
    """
    federation = get_federation()
    if federation.keys is None:
        raise ConfigurationError(["FEDERATION_ENCRYPTION_PRIVATE_KEY: not set; it opens acknowledgments"])

    async def find_public_key() -> str | None:
        server = await federation.registry.find(server_url)
        return server.public_key if server else None

    try:
        answer = await read_follow_ack(
            ack,
            server_url,
            keys=federation.keys,
            cached_public_key=cached_public_key,
            find_public_key=find_public_key,
        )
    except PermanentFailure:
        await federation.ledger.gone(delivery_job_id)
        raise
    return await federation.ledger.gone(delivery_job_id, follow=answer)


def transaction() -> AbstractAsyncContextManager[AsyncSession]:
    """`async with transaction() as session:` commits, then every delivery enqueued in it is in the queue."""
    return get_federation().outbox.transaction()


async def enqueue_delivery(
    session: AsyncSession,
    name: str,
    target_url: str,
    server_url: str,
    payload: str,
    *,
    ordering_key: str | None = None,
) -> str:
    """A delivery is owed from the moment `session` commits; returns its id. See `Outbox.enqueue_delivery`."""
    return await get_federation().outbox.enqueue_delivery(
        session, name, target_url, server_url, payload, ordering_key=ordering_key
    )


async def enqueue_fanout(
    session: AsyncSession,
    name: str,
    path: str,
    server_urls: Iterable[str],
    payload: str,
    *,
    ordering_key: str | None = None,
) -> tuple[str, ...]:
    """One payload is owed to `path` on every server; returns the deliveries' ids. See `Outbox.enqueue_fanout`."""
    return await get_federation().outbox.enqueue_fanout(
        session, name, path, server_urls, payload, ordering_key=ordering_key
    )


async def request_follow(
    session: AsyncSession,
    *,
    follower_id: str,
    following_id: str,
    server_url: str,
    requester_signature: str | None = None,
) -> RequestedFollow:
    """A follow is stored and its request owed; see `Producers.request_follow`."""
    return await get_federation().producers.request_follow(
        session,
        follower_id=follower_id,
        following_id=following_id,
        server_url=server_url,
        requester_signature=requester_signature,
    )


async def request_unfollow(
    session: AsyncSession, *, follower_id: str, following_id: str, server_url: str
) -> str | None:
    """A follow is removed and the other server will hear of it; see `Producers.request_unfollow`."""
    return await get_federation().producers.request_unfollow(
        session, follower_id=follower_id, following_id=following_id, server_url=server_url
    )


async def publish_post(
    session: AsyncSession,
    *,
    author_id: str,
    content: Content,
    published: datetime | None = None,
    is_private: bool | None = None,
    post_id: str | None = None,
    author_signature: str | None = None,
) -> PublishedPost:
    """A post is stored and owed to every server that shall have it; see `Producers.publish_post`."""
    return await get_federation().producers.publish_post(
        session,
        author_id=author_id,
        content=content,
        published=published,
        is_private=is_private,
        post_id=post_id,
        author_signature=author_signature,
    )


async def federation_fetch(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = NO_HEADERS,
    body: bytes | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    proxy_fallback: bool = False,
    server_url: str | None = None,
    skip_health_update: bool = False,
) -> Fetched:
    """A response from another server, guarded and bounded; see `FederationFetch`."""
    return await get_federation().fetch(
        url,
        method=method,
        headers=headers,
        body=body,
        timeout=timeout,
        proxy_fallback=proxy_fallback,
        server_url=server_url,
        skip_health_update=skip_health_update,
    )


async def discover_and_register(server_url: str) -> KnownServer:
    """The server is registered here, and was asked to register us; see `Discovery`."""
    return await get_federation().discovery(server_url)


async def mark_server_healthy(server_url: str, *, reason: str = "operator") -> None:
    """The server counts as healthy."""
    await get_federation().registry.mark_healthy(server_url, reason=reason)


async def mark_server_unhealthy(server_url: str, code: str) -> None:
    """The server counts as unhealthy because of `code`, and its first probe is scheduled."""
    await get_federation().registry.mark_unhealthy(server_url, code)
