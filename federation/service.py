"""The calls for application services: one `Federation` per process, made from the environment on first use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncSession

from federation.admin.deliveries.bulk_jobs import INTERVAL, BulkJobs
from federation.base.errors import ConfigurationError
from federation.base.queues.queue import JobQueue
from federation.delivery.errors import PermanentFailure
from federation.http.client import DEFAULT_TIMEOUT, NO_HEADERS, Fetched
from federation.protocol.acks import Ack
from federation.runtime.nodes import get_federation, release
from federation.runtime.workers import FederationWorkers, RunningWorker
from federation.sealed.outbound.activities import Content, PublishedPost, RequestedFollow
from federation.sealed.outbound.follows import read_follow_ack
from federation.sealed.peers.registry import KnownServer
from federation.tasks import declared_tasks
from workers import Job

if TYPE_CHECKING:
    import redis.asyncio


class _ServiceProcess:
    """What this process runs; `start_federation_worker` and `close_federation` write it."""

    workers: FederationWorkers | None = None


async def start_federation_worker() -> tuple[RunningWorker, RunningWorker]:
    """Start this process's delivery worker and health-check worker. A second call returns the same pair.

    A further worker runs the tasks declared so far, and those of the modules that FEDERATION_TASKS names.

    Raises:
        ConfigurationError: lists every malformed setting, or the modules that cannot be imported.
    """
    if _ServiceProcess.workers is None:
        federation = get_federation()
        tasks = declared_tasks(federation.settings.federation_tasks)
        _ServiceProcess.workers = FederationWorkers(
            federation, tasks=tasks, ticks={BulkJobs(federation).tick: INTERVAL}
        )
    return _ServiceProcess.workers.start()


async def close_federation() -> None:
    """Stop this process's workers and close its connections. The next use starts afresh."""
    running, _ServiceProcess.workers = _ServiceProcess.workers, None
    try:
        if running is not None:
            await running.stop()
    finally:
        federation = release()
        if federation is not None:
            await federation.close()


def get_redis_connection() -> redis.asyncio.Redis:
    """Return the process's Redis client for producers.

    A command without an answer fails after 5 s; nothing limits how often its caller asks again.

    Raises:
        ConfigurationError: REDIS_URL is not set.
    """
    return _required(get_federation().redis)


def get_redis_worker_connection() -> redis.asyncio.Redis:
    """Return the process's Redis client for workers, which is another one than the producers'.

    Its commands may block: an answer is given up after 15 s. A stock `bullmq.Worker` may have it as its `connection`,
    and closes it at its end.

    Raises:
        ConfigurationError: REDIS_URL is not set.
    """
    return _required(get_federation().worker_redis)


def _required(client: redis.asyncio.Redis | None) -> redis.asyncio.Redis:
    if client is None:
        raise ConfigurationError(["REDIS_URL: not set, as redis://[user:password@]host:port[/db]"])
    return client


def get_federation_queue() -> JobQueue:
    """Return the delivery queue: 5 attempts, 5, 10, 20 and 40 s apart, completed jobs kept 24 h, failed ones 7 days."""
    return get_federation().delivery_queue


def get_health_check_queue() -> JobQueue:
    """Return the health-check queue."""
    return get_federation().health_check_queue


async def schedule_health_check(server_url: str, attempt: int) -> None:
    """Schedule probe `attempt` (from 0) of the server in 5 + 10 * attempt minutes. Scheduling it again does nothing."""
    await get_federation().schedule_health_check(server_url, attempt)


async def process_federation_delivery(job: Job) -> None:
    """Make one attempt at a delivery; see `DeliveryProcessor`.

    For a stock `bullmq.Worker`, wrap it in `as_processor`.
    """
    await get_federation().delivery_processor(job)


async def process_health_check(job: Job) -> None:
    """Make one probe; see `HealthCheckProcessor`."""
    await get_federation().health_check_processor(job)


async def handle_follow_ack(
    ack: Ack, server_url: str, cached_public_key: str | None, delivery_job_id: str, job_id: str | None = None
) -> bool:
    """Update the follow as its acknowledgment says, and delete the delivery's row.

    Return False if no such follow is known. `job_id` is only for the log.

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
    return await federation.ledger.gone(delivery_job_id, effect=answer)


def transaction() -> AbstractAsyncContextManager[AsyncSession]:
    """Begin a transaction: `async with transaction() as session:` commits, then adds every delivery enqueued in it."""
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
    """Owe a delivery from the moment `session` commits, and return its id. See `Outbox.enqueue_delivery`.

    For posts and follows of local users call `publish_post` and `request_follow`, which write the payload, and address
    it. A payload of your own is JSON text with `method` and `federationUrl`, this node's own URL. That of a post,
    `FEDERATE_POST`, goes to `/api/auth/social/posts` on its server, and has a `post` with all of these, or its server
    refuses it for good, with `INVALID_FEDERATED_POST_PAYLOAD`:

    - `id` and `authorId`: text; a server takes each id of ours once;
    - `published`: a time in ISO 8601; `isPrivate`: true or false;
    - `content`: at least one block, each with its `type` and what that requires: `text` a `value` that is not empty;
      `link` a `url`; `audio` a `url` and a `size`; `image` and `video` a `url`, a `size` and an `index`.
    """
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
    """Owe one payload to `path` on every server, and return the deliveries' ids. See `Outbox.enqueue_fanout`."""
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
    """Store a follow and owe its request; see `Producers.request_follow`."""
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
    """Remove a follow and owe the news of it to the other server; see `Producers.request_unfollow`."""
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
    """Store a post and owe it to every server that is to have it; see `Producers.publish_post`."""
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
    """Fetch a response from another server, guarded and bounded; see `FederationFetch`."""
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
    """Register the server here, and ask it to register us; see `Discovery`."""
    return await get_federation().discovery(server_url)


async def mark_server_healthy(server_url: str, *, reason: str = "operator") -> None:
    """Mark the server as healthy."""
    await get_federation().registry.mark_healthy(server_url, reason=reason)


async def mark_server_unhealthy(server_url: str, code: str) -> None:
    """Mark the server as unhealthy because of `code`, and schedule its first probe."""
    await get_federation().registry.mark_unhealthy(server_url, code)
