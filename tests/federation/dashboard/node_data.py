"""What a node has that its pages show: servers, deliveries, what operators did."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import insert, select, update
from sqlmodel import col

from db import (
    ActionSource,
    AdminAction,
    AttemptOutcome,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryPayload,
    DeliveryState,
    HoldReason,
    ReceivedActivity,
    ReceivedState,
    Server,
)
from federation.runtime.composition import Federation


def now() -> datetime:
    """Of each call: a run of all tests takes longer than what pages call old."""
    return datetime.now(UTC)


PEER = "https://peer.example"
PAGES = (
    "/",
    "/servers",
    "/deliveries",
    "/live-attempts",
    "/queues",
    "/tasks",
    "/recurring",
    "/workers",
    "/scheduler",
    "/blacklist",
    "/actions",
)
HOSTILE = "<script>alert(1)</script>\u202egnp.exe\x1b[31m'\"><img src=x>" + "x" * 10_000
NOT_SHOWN = "the plaintext of a delivery"


async def know(federation: Federation, *urls: str, text: str = "TIMEOUT") -> None:
    """Servers in the registry, of which something is known to be wrong."""
    async with federation.database.transaction() as session:
        for number, url in enumerate(urls):
            keys = {"public_key": f"s{number}{text}", "encryption_public_key": f"e{number}{text}"}
            times = {"last_seen": now(), "created_at": now(), "updated_at": now()}
            health = {"is_healthy": False, "unhealthy_reason": text}
            await session.execute(insert(Server).values(id=url, url=url, **keys, **times, **health))


async def owe(
    federation: Federation, *ids: str, state: DeliveryState = DeliveryState.HELD, text: str = "TIMEOUT", url: str = PEER
) -> None:
    """Deliveries to a server, in that state, with an attempt that failed."""
    held = (
        {"held_reason": HoldReason.SERVER, "held_at": now()} if state is DeliveryState.HELD else {"settled_at": now()}
    )
    async with federation.database.transaction() as session:
        for each in ids:
            row = {"id": each, "target_url": f"{url}/{text}", "payload": NOT_SHOWN, "server_url": url, "state": state}
            error = {"error_code": text, "last_error": text, "job_name": text, "attempts": 1}
            await session.execute(insert(DeliveryJob).values(**row, **error, **held, created_at=now()))
            attempt = {"delivery_id": each, "job_name": text, "server_url": url, "attempt": 1, "duration_ms": 12}
            told = {"outcome": AttemptOutcome.PERMANENT, "error_code": text, "remote_code": text}
            await session.execute(insert(DeliveryAttempt).values(**attempt, **told, started_at=now()))


async def owe_activity(federation: Federation, *ids: str, activity: str, actor: str = "https://a.example/a") -> None:
    """Deliveries of one activity, each to an inbox of its own, with an attempt that failed."""
    text = {"payload": NOT_SHOWN, "refs": len(ids), "created_at": now(), "activity_id": activity, "actor": actor}
    await owe(federation, *ids)
    named = col(DeliveryJob.id).in_(ids), col(DeliveryAttempt.delivery_id).in_(ids)
    async with federation.database.transaction() as session:
        await session.execute(insert(DeliveryPayload).values(id=f"text of {ids[0]}", **text))
        of_text = {"payload": "", "payload_id": f"text of {ids[0]}", "wire": "activitypub"}
        await session.execute(update(DeliveryJob).where(named[0]).values(of_text))
        await session.execute(update(DeliveryAttempt).where(named[1]).values(activity_id=activity))


async def receive(
    federation: Federation, *ids: str, state: ReceivedState = ReceivedState.FAILED, error: str | None = "ValueError"
) -> None:
    """Activities that an actor of a server sent, in that state."""
    made = {"actor": f"{PEER}/users/bob", "received_at": now(), "state": state, "attempts": 5, "last_error": error}
    async with federation.database.transaction() as session:
        for each in ids:
            named = {"activity_hash": each, "activity_id": f"{PEER}/{each}", "type": "Create", "text": NOT_SHOWN}
            await session.execute(insert(ReceivedActivity).values(**named, **made))


async def actions(federation: Federation) -> list[tuple[str, ActionSource, str, int]]:
    """The audit log: who, by what way, what, how many."""
    query = select(AdminAction.actor, AdminAction.source, AdminAction.action, AdminAction.affected)
    return [tuple(row) for row in await federation.database.rows(query.order_by(AdminAction.id))]
