"""A node of ours with an actor, in processes of its own, and what a test asks of it: notes, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select, update
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob
from federation import activitypub
from federation.activitypub import Recipient
from federation.activitypub.activities import WIRE
from federation.runtime.composition import Federation
from federation.servers.links import Links
from tests.acceptance.node_process import NodeProcess
from tests.acceptance.worker_process import WorkerProcess
from workers.clock import SystemClock

NAME: Final = "/users/alice"


class ActorsProcess(NodeProcess):
    """`federation node serve` on loopback, for those who resolve no other name: its actors are to be seen there."""

    @property
    def host(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """An actor with the processes that show her and send what she does; `view` is the application's side."""

    serving: ActorsProcess
    worker: WorkerProcess
    view: Federation

    @property
    def id(self) -> str:
        return self.serving.url + NAME

    @property
    def links(self) -> Links:
        return self.view.links.of(WIRE)

    async def joins(self) -> None:
        async with self.view.outbox.transaction() as session:
            await activitypub.add_actor(session, self.id)

    async def sends(self, activities: Iterable[dict[str, Any]], *to: Recipient) -> list[str]:
        """These are owed from one moment on; their deliveries."""
        async with self.view.outbox.transaction() as session:
            sent = [await activitypub.send(session, activity, to) for activity in activities]
        return [delivery for each in sent for delivery in each.delivery_ids]

    def note(self, name: str, text: str = "hello") -> dict[str, Any]:
        to = [activitypub.PUBLIC]
        return {"id": f"{self.id}/notes/{name}", "type": "Note", "attributedTo": self.id, "to": to, "content": text}

    def creates(self, names: Iterable[str]) -> list[dict[str, Any]]:
        return [activitypub.create(self.note(name)) for name in names]

    def updates(self, names: Iterable[str]) -> list[dict[str, Any]]:
        made = [activitypub.create(self.note(name, text="bye")) for name in names]
        return [{**each, "id": f"{each['object']['id']}#update", "type": "Update"} for each in made]

    def deletes(self, names: Iterable[str]) -> list[dict[str, Any]]:
        return [activitypub.delete(self.id, f"{self.id}/notes/{name}") for name in names]

    async def rows(self) -> Sequence[DeliveryJob]:
        """What is owed, or given up and kept."""
        async with self.view.database.read() as session:
            return (await session.execute(select(DeliveryJob))).scalars().all()

    async def attempts(self) -> Sequence[DeliveryAttempt]:
        """All on record, but for those that only waited for their turn, the first one first."""
        query = select(DeliveryAttempt).where(col(DeliveryAttempt.outcome) != "parked")
        async with self.view.database.read() as session:
            return (await session.execute(query.order_by(col(DeliveryAttempt.id)))).scalars().all()

    async def waited(self) -> None:
        """What is held until some time has waited so long."""
        held = update(DeliveryJob).where(col(DeliveryJob.next_attempt_at).is_not(None))
        async with self.view.database.transaction() as session:
            await session.execute(held.values(next_attempt_at=SystemClock().now()))
