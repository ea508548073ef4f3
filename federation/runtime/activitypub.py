"""What a node has that sends by ActivityPub; no other node imports this."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from db import Database
from federation.activitypub.actors import Actors
from federation.activitypub.inboxes import gone_among
from federation.activitypub.keys import ActorKeys
from federation.activitypub.outbound import Senders
from federation.activitypub.purge import ActivityPurge
from federation.activitypub.signatures import SignatureKind
from federation.activitypub.wire import ActivityWire
from federation.base.meter import Meter
from federation.base.settings.settings import Settings
from federation.delivery.outbox.insert import OutboxInserter
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.protocol.keys import KeyRing
from federation.servers.links import Links
from workers.clock import Clock


class ActivityPub:
    """A node's actors, the keys by which they sign and are known, what owes their activities, and what sends them.

    `inserter` returns what writes rows: it is made of the node's wires, one of which is this. Close it.

    Raises:
        ConfigurationError: the node has no URL or no keys of its own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        database: Database,
        ring: KeyRing | None,
        links: Links,
        client: FederationClient,
        own_client: Callable[[], FederationClient],
        guard: AddressGuard,
        inserter: Callable[[], OutboxInserter],
        meter: Meter,
        clock: Clock,
    ) -> None:
        settings.require_identity()
        assert settings.better_auth_url is not None
        self._settings = settings
        self._own_url = settings.better_auth_url
        self._inserter = inserter
        self._clock = clock
        bits = settings.federation_activitypub_key_bits
        self.actors = Actors(ring=ring, bits=bits, clock=clock, own_url=self._own_url)
        self.keys = ActorKeys(database, ring, clock)
        self.wire = ActivityWire(
            own_url=self._own_url,
            keys=self.keys,
            links=links,
            client=client,
            own_client=own_client,
            guard=guard,
            database=database,
            first_knock=SignatureKind(settings.federation_activitypub_first_knock.value),
            allow_http=settings.federation_activitypub_http,
            clock=clock,
            meter=meter,
        )
        self.purge = ActivityPurge(database)

    @cached_property
    def senders(self) -> Senders:
        """What owes activities."""
        return Senders(
            own_url=self._own_url,
            inserter=self._inserter(),
            gone_among=gone_among,
            allow_http=self._settings.federation_activitypub_http,
            allowed_hostnames=self._settings.dev_allowed_hostnames,
            clock=self._clock,
        )

    async def close(self) -> None:
        """Stop reading."""
        await self.wire.close()
        await self.keys.close()
