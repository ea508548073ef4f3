"""A fresh node that owes deliveries to peers, for benchmarks of how it delivers them."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from redis.asyncio import Redis
from sqlalchemy import select
from sqlmodel import col

from bench.node import fresh_places
from bench.peer_servers import FOLLOWED, FOLLOWER, OWN_URL
from db import DeliveryJob, Follow
from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB
from federation.protocol.activities import follow_activity, post_activity
from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.runtime.composition import Federation

ENQUEUE_BATCH: Final = 500

_OWED: Final = select(col(DeliveryJob.id)).where(col(DeliveryJob.settled_at).is_(None)).limit(1)
"""Made once: it is asked often, by the process that is measured."""


@contextlib.contextmanager
def node_environment(queue: str) -> Iterator[dict[str, str]]:
    """Yield settings for a fresh node, and run the servers that it needs."""
    with fresh_places(queue) as places:
        yield {
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", ""),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "BETTER_AUTH_URL": OWN_URL,
            "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
            **generate_own_keys().to_env(),
            **places,
        }


def own_keys(environment: Mapping[str, str]) -> OwnKeys:
    """Return the node's keys from its settings."""
    return OwnKeys.from_base64(
        signing_public=environment["FEDERATION_PUBLIC_KEY"],
        signing_secret=environment["FEDERATION_PRIVATE_KEY"],
        encryption_public=environment["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
        encryption_secret=environment["FEDERATION_ENCRYPTION_PRIVATE_KEY"],
    )


def make_tables() -> None:
    """Make the tables of this environment's node, in a process of their own: the worker's memory is without Alembic."""
    subprocess.run([sys.executable, "-m", "federation", "upgrade"], check=True, stdout=subprocess.DEVNULL)


async def register(federation: Federation, peers: Sequence[Mapping[str, str]]) -> None:
    """Register every peer with the node, with a follow of somebody there by somebody here."""
    for peer in peers:
        await federation.registry.register(
            url=peer["url"], public_key=peer["public"], encryption_public_key=peer["encryption"]
        )
    async with federation.database.transaction() as session:
        for peer in peers:
            session.add(
                Follow(
                    follower_id=FOLLOWER,
                    following_id=FOLLOWED,
                    created_at=datetime.now(UTC),
                    follower_server_url=peer["url"],
                )
            )


async def enqueue(
    federation: Federation, urls: Sequence[str], deliveries: int, *, follows: bool = True, words: str = "words " * 220
) -> None:
    """Owe `deliveries` to these servers in turn, of about 1.5 KB each: half of them follows, half posts.

    Without `follows` all are posts, as nobody on an unknown server can be followed.
    """
    now = datetime.now(UTC)
    assert federation.own_url is not None
    post = post_activity(
        federation_url=federation.own_url,
        post_id="post",
        content=[{"type": "text", "value": words}],
        author_id=FOLLOWER,
        published=now,
        is_private=False,
    )
    follow = follow_activity(
        federation_url=federation.own_url,
        follow_id="row",
        created_at=now,
        follower_id=FOLLOWER,
        following_id=FOLLOWED,
        follower_server_url=urls[0],
        requester_signature="x" * 1000,
    )
    kinds = [(FOLLOW_JOB, "follows", follow), (POST_JOB, "posts", post)][0 if follows else 1 :]
    for start in range(0, deliveries, ENQUEUE_BATCH):
        async with federation.outbox.transaction() as session:
            for number in range(start, min(start + ENQUEUE_BATCH, deliveries)):
                name, path, payload = kinds[number % len(kinds)]
                url = urls[number // len(kinds) % len(urls)]
                await federation.outbox.enqueue_delivery(session, name, f"{url}/api/auth/social/{path}", url, payload)


@contextlib.asynccontextmanager
async def redis_of(federation: Federation) -> AsyncIterator[Redis | None]:
    """Open a new connection to the node's Redis, if it has one."""
    url = federation.settings.redis_url
    if url is None:
        yield None
        return
    async with Redis.from_url(url.get_secret_value()) as redis:
        yield redis


async def is_owed(federation: Federation) -> bool:
    """Tell whether a delivery is not over: this counts rows, not the queue's jobs, as a held delivery has none."""
    return bool(await federation.database.rows(_OWED))


def cpu_seconds() -> float:
    """Return the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
