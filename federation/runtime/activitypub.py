"""What a node has that sends by ActivityPub; no other node imports this."""

from __future__ import annotations

from dataclasses import dataclass

from db import Database
from federation.activitypub.actors import Actors
from federation.activitypub.inboxes import gone_among
from federation.activitypub.keys import ActorKeys
from federation.activitypub.outbound import Senders
from federation.base.settings.settings import Settings
from federation.delivery.outbox.insert import OutboxInserter
from federation.protocol.keys import KeyRing
from workers.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityPub:
    """A node's actors, the keys by which they sign and are known, and what owes their activities. Close it."""

    actors: Actors
    keys: ActorKeys
    senders: Senders

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        database: Database,
        ring: KeyRing | None,
        inserter: OutboxInserter,
        clock: Clock,
    ) -> ActivityPub:
        """Make the parts of these others.

        Raises:
            ConfigurationError: the node has no URL or no keys of its own.
        """
        settings.require_identity()
        assert settings.better_auth_url is not None
        own_url, bits = settings.better_auth_url, settings.federation_activitypub_key_bits
        return cls(
            actors=Actors(ring=ring, bits=bits, clock=clock, own_url=own_url),
            keys=ActorKeys(database, ring, clock),
            senders=Senders(
                own_url=own_url,
                inserter=inserter,
                gone_among=gone_among,
                allow_http=settings.federation_activitypub_http,
                allowed_hostnames=settings.dev_allowed_hostnames,
                clock=clock,
            ),
        )

    async def close(self) -> None:
        """Stop reading."""
        await self.keys.close()
