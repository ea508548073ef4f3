"""Activities on a node in a test: an actor, what is owed in its name, and what became of that."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sqlalchemy import insert, update
from sqlmodel import col

from db import (
    ActivityFollow,
    ActivityInbox,
    AttemptOutcome,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryState,
    FollowDirection,
    FollowState,
    HoldReason,
    ReceivedActivity,
    ReceivedState,
)
from federation.activitypub.activities import JOB, WIRE
from federation.activitypub.outbound import Sent
from federation.runtime.composition import Federation
from tests.federation.activitypub.sender import ALICE, follower, note

NOTE: Final = f"{ALICE}/notes/1#create"
HOSTS: Final = ("b.example", "c.example", "d.example")
B, C, D = (f"https://{host}" for host in HOSTS)


async def add_alice(node: Federation) -> None:
    assert node.activitypub is not None
    async with node.database.transaction() as session:
        await session.run_sync(node.activitypub.actors.add, ALICE)


async def send_note(node: Federation, *hosts: str, number: int = 1) -> Sent:
    """Alice's note is owed to the shared inboxes of these."""
    assert node.activitypub is not None
    senders = node.activitypub.senders
    addressed = senders.addressed(note(number), [follower(host=host) for host in hosts or HOSTS])
    async with node.outbox.transaction() as session:
        return await session.run_sync(senders.send, addressed, blacklisted=frozenset(), plan=node.outbox.plan)


async def hold_for(node: Federation, server_url: str, *, reason: HoldReason = HoldReason.SERVER) -> None:
    """What is owed to the server is held."""
    held = {"state": DeliveryState.HELD, "held_reason": reason, "held_at": node.clock.now(), "error_code": "TIMEOUT"}
    async with node.database.transaction() as session:
        await session.execute(update(DeliveryJob).where(col(DeliveryJob.server_url) == server_url).values(held))


async def fall(node: Federation, server_url: str, *, wire: str = WIRE, code: str = "TIMEOUT") -> None:
    """The link by that wire goes down."""
    await node.links.of(wire).exhausted(server_url, code, first_attempted_at=node.clock.now())


async def end(node: Federation, delivery_id: str, server_url: str, *, code: str | None = None) -> None:
    """An attempt delivered it, and its row is gone; or failed with the code, and the row as well."""
    outcome = AttemptOutcome.DELIVERED if code is None else AttemptOutcome.PERMANENT
    attempt = {"delivery_id": delivery_id, "job_name": JOB, "server_url": server_url, "series": 0, "attempt": 1}
    ended = {"outcome": outcome, "error_code": code, "started_at": node.clock.now(), "duration_ms": 20}
    async with node.database.transaction() as session:
        await session.execute(insert(DeliveryAttempt), [{**attempt, **ended, "activity_id": NOTE}])
        row = await session.get(DeliveryJob, delivery_id)
        await session.delete(row)


async def receive(node: Federation, name: str, *, state: ReceivedState, actor: str = f"{B}/users/bob") -> None:
    """An actor sent an activity of that name, and this has become of it."""
    values = {"type": "Create", "actor": actor, "received_at": node.clock.now(), "text": "{}", "state": state}
    tried = {"attempts": 5, "last_error": "ValueError: why"} if state is ReceivedState.FAILED else {}
    async with node.database.transaction() as session:
        session.add(ReceivedActivity(activity_hash=name, activity_id=f"{actor}/{name}", **values, **tried))


async def befriend(
    node: Federation,
    remote: str,
    *,
    local: str = ALICE,
    direction: FollowDirection = FollowDirection.FOLLOWER,
    state: FollowState = FollowState.ACCEPTED,
    days: int = 0,
) -> None:
    """An actor of another server follows ours, or is followed, since so many days."""
    since = node.clock.now() - timedelta(days=days)
    names = {"local_actor": local, "remote_actor": remote, "direction": direction, "follow_id": f"{remote}#follow"}
    async with node.database.transaction() as session:
        session.add(ActivityFollow(**names, inbox=f"{remote}/inbox", state=state, since=since))


async def lose_inbox(node: Federation, server_url: str, *, days: int = 0) -> None:
    """Its shared inbox is gone since then."""
    gone_at = node.clock.now() - timedelta(days=days)
    async with node.database.transaction() as session:
        inbox = f"{server_url}/inbox"
        session.add(ActivityInbox(url=inbox, server_url=server_url, gone_at=gone_at, gone_code=410, is_shared=True))
