"""A node some of whose servers are away, in the state in which the shipped code leaves them.

Their links fell some time ago, and their next probe is due when the schedule says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, insert, select, update
from sqlmodel import col

from db import DeliveryJob, DeliveryState, LinkState, Server, ServerLink
from federation.base.logs import configure_logging
from federation.base.queues.job_data import POST_JOB
from federation.base.settings.settings import Settings
from federation.cli.running import upgrade
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import post_activity
from federation.runtime.composition import Federation
from federation.servers import link_rules
from federation.servers.link_rules import Link

HOUR = timedelta(hours=1)
REASON = "CONN_REFUSED"
POSTS_AT_ONCE = 100
PAYLOAD_BYTES = 2_400
PATIENCE = timedelta(minutes=15)
"""Longer than anything here takes."""


@contextlib.asynccontextmanager
async def node(environment: Mapping[str, str]) -> AsyncIterator[Federation]:
    """Open what a producer of the node uses."""
    configure_logging("critical")
    settings = Settings.from_values(environment)
    await asyncio.to_thread(upgrade, settings)
    federation = Federation(settings)
    try:
        yield federation
    finally:
        await federation.close()


async def take_down(
    federation: Federation, urls: Sequence[str], *, for_: timedelta = HOUR, next_look: timedelta | None = None
) -> None:
    """Take the servers' links down since `for_` ago, as if all planned probes since then had failed.

    The last probe was just now, so that a return is noticed as late as possible, or the next is due in `next_look`.
    """
    now = datetime.now(UTC)
    link = _fallen(now, for_)
    if next_look is not None:
        link = replace(link, next_probe_at=now + next_look)
    values = [{**asdict(link), "server_url": url} for url in urls]
    async with federation.database.transaction() as session:
        await session.execute(delete(ServerLink).where(col(ServerLink.server_url).in_(urls)))
        await session.execute(insert(ServerLink), values)
        await session.execute(
            update(Server).where(col(Server.url).in_(urls)).values(is_healthy=False, unhealthy_reason=REASON)
        )


def _fallen(now: datetime, away: timedelta) -> Link:
    link = link_rules.fallen(Link(server_url="", since=now, acknowledged=True), now - away, REASON)
    looked = now - away
    while link.next_probe_at is not None and link.next_probe_at <= now:
        looked = link.next_probe_at
        link = link_rules.after_failed_probe(link, looked)
    shift = now - looked  # the last failed probe was just now
    assert link.next_probe_at is not None
    return replace(link, probed_at=now, next_probe_at=link.next_probe_at + shift)


async def owe_held(federation: Federation, urls: Sequence[str], count: int, payload: str) -> None:
    """Owe `count` posts, by fan-outs to all the servers, whose links are down, so that they are held."""
    posts = count // len(urls)
    for start in range(0, posts, POSTS_AT_ONCE):
        async with federation.outbox.transaction() as session:
            for _ in range(start, min(start + POSTS_AT_ONCE, posts)):
                await federation.outbox.enqueue_fanout(session, POST_JOB, POSTS_PATH, urls, payload)


def payload_of(own_url: str) -> str:
    """Return a post of 2.4 KB."""

    def activity(text: str) -> str:
        return post_activity(
            federation_url=own_url,
            post_id="post",
            content=[{"type": "text", "value": text}],
            author_id="alice",
            published=datetime.now(UTC),
            is_private=False,
        )

    return activity("x" * (PAYLOAD_BYTES - len(activity(""))))


async def states(federation: Federation) -> dict[DeliveryState, int]:
    """Count the deliveries in each state."""
    query = select(col(DeliveryJob.state), func.count()).group_by(col(DeliveryJob.state))
    return {row[0]: row[1] for row in await federation.database.rows(query)}


async def is_up(federation: Federation, url: str) -> bool:
    found = await federation.database.rows(select(col(ServerLink.state)).where(col(ServerLink.server_url) == url))
    return bool(found) and found[0][0] is LinkState.UP


async def until(condition: Callable[[], Awaitable[bool]], *, within: timedelta) -> float:
    """Wait until the condition holds, and return how many seconds it took.

    Raises:
        TimeoutError: it did not hold in time.
    """
    began = time.monotonic()
    async with asyncio.timeout(within.total_seconds()):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.1)
    return time.monotonic() - began
