"""A node with an actor, whose worker posts activities; where its own actor is served, and a peer, follow a script."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

from sqlalchemy import select

from db import ActivityActor, ActivityInbox, ActivityKey, DeliveryJob, DeliveryState, new_id
from federation.activitypub.activities import JOB, WIRE
from federation.activitypub.keys import ActorKeys, make_private_key, public_pem, seal
from federation.activitypub.signatures import SignatureKind
from federation.activitypub.wire import ActivityWire
from federation.admin.why import explain
from federation.base.queues.queue import ACTIVITIES_QUEUE_NAME
from federation.base.settings.settings import Settings
from federation.delivery.wire import Wire
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.runtime.composition import Federation
from federation.servers.link_rules import Link
from federation.servers.links import Links
from tests.federation.delivery.harness import Fate, Site
from tests.misbehaving import Behaviour, Canned, MisbehavingServer, Received, respond, respond_with
from workers.clock import ManualClock

ALICE: Final = "/users/alice"
INBOX: Final = "/users/bob/inbox"
ATTEMPTS: Final = 2
"""A series has so many."""


@cache
def private_key() -> bytes:
    """One for all tests: it takes its time to make."""
    return make_private_key(2048)


def kind_of(request: Received) -> SignatureKind:
    """The kind of signature that a request has."""
    return SignatureKind.RFC9421 if "signature-input" in request.headers else SignatureKind.CAVAGE


def takes(*kinds: SignatureKind, refusal: int = 401) -> Behaviour:
    """Takes what is signed by these kinds."""
    return respond_with(lambda request: Canned(status=202 if kind_of(request) in kinds else refusal, body=b""))


@dataclass(slots=True)
class Scene:
    """What a test sees. `own` is where others find our actor."""

    site: Site
    own: MisbehavingServer
    peer: MisbehavingServer
    clock: ManualClock

    @property
    def federation(self) -> Federation:
        return self.site.federation

    @property
    def actor(self) -> str:
        return self.own.url + ALICE

    @property
    def links(self) -> Links:
        return self.federation.links.of(WIRE)

    async def link(self) -> Link:
        return await self.links.find(self.peer.url)

    def shows_actor(self, **changes: object) -> None:
        """The actor's document is to be seen, with these members of its key changed."""
        key = {"id": f"{self.actor}#main-key", "owner": self.actor, "publicKeyPem": public_pem(private_key())}
        document = {"id": self.actor, "type": "Person", "publicKey": {**key, **changes}}
        self.own.routes[ALICE] = respond(200, {}, json.dumps(document).encode())

    def activity(self) -> str:
        made = {"id": f"{self.actor}/creates/{new_id()}", "type": "Create", "actor": self.actor, "object": {}}
        return json.dumps(made)

    async def owe(self, inbox: str | None = None, *, payload: str | None = None, key: str | None = None) -> str:
        """An activity is owed to the peer's inbox; the delivery's id."""
        outbox, server = self.federation.outbox, self.peer.url
        async with outbox.transaction() as session:
            return await outbox.enqueue_delivery(
                session, JOB, inbox or server + INBOX, server, payload or self.activity(), ordering_key=key
            )

    async def fate(self, delivery_id: str | None = None, *, series: int = 0) -> Fate:
        """What becomes of one, of a new one by default, at the end of a series of attempts."""
        row = delivery_id or await self.owe()
        return await self.site.outcome(f"{row}.{series}" if series else row, row=row)

    async def later(self, delivery_id: str, series: int, wait: timedelta) -> Fate:
        """What becomes of it after so long, when a sweep has found that its time has come, and not a second before."""
        for step in (timedelta(0), wait - timedelta(seconds=1), timedelta(seconds=1)):
            assert {row.state for row in await self.rows()} == {DeliveryState.HELD}
            self.clock.advance(step)
            await self.federation.held_sweeper.sweep()
        return await self.fate(delivery_id, series=series)

    async def inbox(self, url: str | None = None) -> ActivityInbox | None:
        async with self.federation.database.read() as session:
            return await session.get(ActivityInbox, url or self.peer.url + INBOX)

    async def rows(self) -> Sequence[DeliveryJob]:
        async with self.federation.database.read() as session:
            return (await session.execute(select(DeliveryJob))).scalars().all()

    async def why(self) -> str:
        """What an operator is told about the peer."""
        return "\n".join((await explain(self.federation, self.peer.url)).sentences())


@asynccontextmanager
async def scene(
    settings: Settings,
    ssl_context: ssl.SSLContext,
    *,
    first_knock: SignatureKind = SignatureKind.CAVAGE,
    allowed: Mapping[str, object] | None = None,
    own: MisbehavingServer | None = None,
    peer: MisbehavingServer | None = None,
) -> AsyncIterator[Scene]:
    """A node on the database of the settings; with servers given, they go on as they are."""
    guard, clock = AddressGuard(settings.dev_allowed_hostnames), ManualClock(datetime.now(UTC))
    client = FederationClient(guard, ConnectionPool(guard, ssl_context=ssl_context))
    made: list[ActivityWire] = []

    def wires(node: Federation) -> Sequence[Wire]:
        made.append(
            ActivityWire(
                own_url="https://a.example",
                keys=ActorKeys(node.database, node.keys, clock),
                links=node.links,
                client=client,
                own_client=lambda: client,
                guard=guard,
                database=node.database,
                first_knock=first_knock,
                allow_http=False,
                clock=clock,
            )
        )
        return made

    federation = Federation(settings, client=client, clock=clock, wires=wires)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(federation.close)
        own = own or await stack.enter_async_context(MisbehavingServer())
        peer = peer or await stack.enter_async_context(MisbehavingServer())
        stack.push_async_callback(made[0].close)
        site = Site(federation)
        site.processor = federation.delivery_processor
        site.storage = federation.worker_storage(ACTIVITIES_QUEUE_NAME)
        found = Scene(site, own, peer, clock)
        await _add_actor(federation, found.actor)
        yield await _entered(stack, found)


async def _entered(stack: AsyncExitStack, found: Scene) -> Scene:
    await stack.enter_async_context(found.site)
    return found


async def _add_actor(federation: Federation, actor: str) -> None:
    assert federation.keys is not None
    now = federation.clock.now() - timedelta(days=1)
    secret = federation.keys.pairs()[0].signing.secret
    async with federation.database.transaction() as session:
        if await session.get(ActivityActor, actor) is not None:
            return
        session.add(ActivityActor(id=actor, name="alice", created_at=now))
        session.add(
            ActivityKey(
                key_id=f"{actor}#main-key",
                actor_id=actor,
                kind="rsa",
                private=seal(private_key(), secret),
                public_pem=public_pem(private_key()),
                created_at=now,
                use_from=now,
            )
        )
