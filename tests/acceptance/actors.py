"""A node of ours with an actor, in processes of its own, and what a test asks of it: notes, and what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import select, update
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob
from federation import activitypub
from federation.activitypub import Recipient
from federation.activitypub.activities import WIRE
from federation.base.settings.settings import Settings
from federation.runtime import nodes
from federation.runtime.composition import Federation
from federation.servers.links import Links
from tests.acceptance.node_process import NodeProcess
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from workers.clock import SystemClock

NAME: Final = "/users/alice"
SHORT: Final = {
    "FEDERATION_ACTIVITYPUB": "1",
    "FEDERATION_ACTIVITYPUB_HTTP": "1",
    "FEDERATION_LEASE": "2s",
    "FEDERATION_DELIVERY_ATTEMPTS": "6",
    "FEDERATION_DELIVERY_BACKOFF": "50ms",
    "FEDERATION_MAX_STALLS": "100",
    "FEDERATION_OUTBOX_INTERVAL": "1s",
    "FEDERATION_PROBE_INTERVAL": "500ms",
}
"""Retries and looks at servers follow each other quickly."""


class ActorsProcess(NodeProcess):
    """`federation node serve` on loopback, for those who resolve no other name: its actors are to be seen there."""

    @classmethod
    def at(cls, place: Mapping[str, object], directory: Path, *, site: str, **more: str) -> Self:
        """With rows and queues there, and these settings beside `SHORT`."""
        settings = {name.upper(): str(value) for name, value in place.items()}
        return cls(
            name="a",
            keys=A.keys,
            directory=directory,
            database_url=settings.pop("DATABASE_URL"),
            settings={**SHORT, **settings, **more},
            command=("node", "serve"),
            site=site,
        )

    @property
    def host(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """An actor with the processes that show her and send what she does; `view` is the application's side."""

    serving: ActorsProcess
    worker: WorkerProcess
    view: Federation

    @classmethod
    @asynccontextmanager
    async def present(cls, serving: ActorsProcess, worker: WorkerProcess) -> AsyncIterator[Self]:
        """She is to be seen, and nothing is sent yet."""
        view = Federation(Settings.from_values(serving.environment))
        nodes.adopt(view)
        found = cls(serving=serving, worker=worker, view=view)
        await found.joins()
        await serving.start()
        yield found
        nodes.release()
        await view.close()

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
