"""What happens on the node while no command runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from sqlalchemy import insert, select, update
from sqlmodel import col

from db import (
    AttemptNote,
    AttemptOutcome,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryState,
    Follow,
    HoldReason,
    Post,
    Server,
)
from federation.base.queues.job_data import POST_JOB
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from tests.federation.admin.conftest import end
from tests.federation.protocol.vectors import B
from workers.jobs import new_worker_id

T = TypeVar("T")
PEER = "https://peer.example"
PAYLOAD = '{"method":"FEDERATE_POST","federationUrl":"https://a.example","post":{"id":"p"}}'


def on_the_node(work: Callable[[Federation], Awaitable[T]]) -> T:
    """What happens elsewhere, while no command runs."""

    async def session() -> T:
        node = Federation(Settings.load())
        try:
            return await work(node)
        finally:
            await node.close()

    return asyncio.run(session())


def end_attempts(
    *deliveries: str,
    outcome: AttemptOutcome = AttemptOutcome.DELIVERED,
    code: str | None = None,
    said: str | None = None,
    note: AttemptNote | None = None,
) -> None:
    """The log has one attempt more at each of these, which need not have a row."""

    async def add(node: Federation) -> None:
        rows = [
            {
                "delivery_id": delivery,
                "job_name": "federate post",
                "server_url": PEER,
                "series": 0,
                "attempt": 1,
                "started_at": datetime.now(UTC),
                "duration_ms": 34,
                "outcome": outcome,
                "error_code": code,
                "remote_code": said,
                "note": note,
                "http_status": 500 if code else 201,
            }
            for delivery in deliveries
        ]
        async with node.database.transaction() as session:
            await session.execute(insert(DeliveryAttempt), rows)

    on_the_node(add)


async def know(node: Federation, *, reason: str | None = None) -> None:
    """The peer is registered; with a reason it is sick since two hours ago."""
    now = datetime.now(UTC)
    async with node.database.transaction() as session:
        session.add(
            Server(
                url=PEER,
                public_key=B.env["FEDERATION_PUBLIC_KEY"],
                encryption_public_key=B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
                last_seen=now - timedelta(hours=2),
                created_at=now - timedelta(days=9),
                updated_at=now - timedelta(hours=2),
                is_healthy=True,
            )
        )
    if reason is not None:
        await node.registry.mark_unhealthy(PEER, reason)


async def owe(node: Federation, number: int) -> list[str]:
    async with node.outbox.transaction() as session:
        return [
            await node.outbox.enqueue_delivery(session, POST_JOB, f"{PEER}/posts", PEER, PAYLOAD) for _ in range(number)
        ]


async def at_work(node: Federation) -> None:
    """A process that delivers is heard of, which takes no job."""
    await node.delivery_queue.start()
    await node.delivery_queue.storage.claim(new_worker_id(), leases={"of-no-job": timedelta(minutes=1)}, limit=1)


async def give_up(
    node: Federation,
    ids: list[str],
    code: str,
    *,
    state: DeliveryState = DeliveryState.FAILED,
    reason: HoldReason | None = None,
) -> None:
    """An attempt at each failed, and that was the last; or they are held."""
    for each in ids:
        await end(node, each, each, state=state, reason=reason, code=code, error="it \x1b[31mfailed")


async def put_on_hold(node: Federation, ids: list[str], reason: HoldReason = HoldReason.SERVER) -> None:
    await give_up(node, ids, "CONN_REFUSED", state=DeliveryState.HELD, reason=reason)


async def expire(node: Federation, ids: list[str]) -> None:
    """They were held until they were too old."""
    async with node.database.transaction() as session:
        gone = update(DeliveryJob).where(col(DeliveryJob.id).in_(ids))
        await session.execute(gone.values(state=DeliveryState.EXPIRED, settled_at=datetime.now(UTC)))


async def fall(node: Federation, code: str) -> None:
    """The link to the peer goes down."""
    await node.links.exhausted(PEER, code, first_attempted_at=datetime.now(UTC))


def live_without_a_host(command: Callable[..., object]) -> None:
    """A local user carol, whom somebody of the peer follows, and a post that came from there."""
    command("db", "upgrade", "--host-tables")
    command("users", "add", "carol")
    now = datetime.now(UTC)

    async def add(node: Federation) -> None:
        async with node.database.transaction() as session:
            session.add(
                Follow(
                    follower_id="bob", following_id="carol", following_server_url=PEER, accepted=True, created_at=now
                )
            )
            session.add(received_post("of bob", now))

    on_the_node(add)


def received_post(text: str, at: datetime, *more: dict[str, object]) -> Post:
    return Post(
        id=text,
        content=[{"type": "text", "value": text}, *more],  # type: ignore[list-item] # JSON
        federated_author_id="bob",
        published=at,
        created_at=at,
        federation_url=PEER,
        federation_post_id=f"their {text}",
    )


async def rows_of(node: Federation) -> dict[str, DeliveryJob]:
    async with node.database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}
