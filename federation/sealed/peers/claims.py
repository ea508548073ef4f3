"""Who owns a key: what a server has to prove before it is registered, and what happens if its key is taken.

Theory of operation. Public keys are no secret, so somebody may be registered with another's key; the owner is whoever
can open what is sealed to the key, or sign with it. If the claimant can and the registered server cannot, the latter's
row is deleted, together with the follows that name it: it could read nothing that was sent to it. What is still owed to
it stays and waits for a discovery, which it cannot pass with that key. If both can, which earlier versions make
possible by opening for everybody, or neither can, nothing changes, and the claim is noted for the operator in the row
that holds the key. A row has one claim at most, so that strangers cannot fill a table, and a weaker claim never
replaces a better one.

A server that has proved itself once does not lose an encryption key for being silent: somebody may have silenced it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import ColumnElement, delete, exists, or_, select, update
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Follow, Server
from federation.http.client import FederationFetch
from federation.protocol.discovery import DiscoverDocument
from federation.protocol.keys import KeyRing
from federation.protocol.possession import NO_PROOF, Proof
from federation.sealed.peers.possession import PING_TIMEOUT, Possession
from federation.sealed.peers.registry import KeysTaken, Registry
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

CLAIM_AGE: Final = timedelta(days=7)
"""How long a claim is reported, unless it is repeated."""


class ShowsOurKeys(Exception):
    """A server shows one of this node's own keys as its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A registered server that has one of the keys that another shows.

    `proved` says that it has proved to hold it before.
    """

    url: str
    public_key: str
    encryption_public_key: str
    proved: bool


class Claims:
    """Registers servers by the keys they show; `ring` is this node's own, `own_url` its name."""

    def __init__(
        self,
        *,
        own_url: str | None,
        ring: KeyRing | None,
        registry: Registry,
        fetch: FederationFetch,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._ring = ring
        self._registry = registry
        self._database = registry.database
        self._possession = Possession(own_url=own_url, fetch=fetch)
        self._clock = clock or SystemClock()

    def require_not_ours(self, url: str, document: DiscoverDocument) -> None:
        """Check that no key of the document is this node's own.

        Raises:
            OwnKeys: one of them is. This is logged.
        """
        pairs = self._ring.pairs(now=True) if self._ring is not None else ()
        for own in pairs:
            if document.public_key == own.signing.public_text or (
                document.encryption_public_key == own.encryption.public_text
            ):
                log.warning("keys_taken", server_url=url, held_by=self._own_url, proved=None)
                raise ShowsOurKeys(f"{url} shows a key of this node as its own")

    async def ask(self, url: str, document: DiscoverDocument, *, timeout: timedelta = PING_TIMEOUT) -> Proof:
        """Ask the server to prove that it holds these keys, with one request at most."""
        return await self._possession.ask(
            url,
            public_key=document.public_key,
            encryption_public_key=document.encryption_public_key,
            timeout=timeout,
        )

    async def has_proved(self, url: str) -> bool:
        """Tell whether the server has proved before that it holds its registered keys."""
        async with self._database.read() as session:
            query = select(col(Server.id)).where(col(Server.url) == url, col(Server.proved_at).is_not(None))
            return (await session.execute(query)).first() is not None

    async def holders(self, url: str, document: DiscoverDocument) -> list[Holder]:
        """Return the other servers that are registered with one of these keys, two at most."""
        query = select(
            col(Server.url), col(Server.public_key), col(Server.encryption_public_key), col(Server.proved_at)
        ).where(
            col(Server.url) != url,
            or_(
                col(Server.public_key) == document.public_key,
                col(Server.encryption_public_key) == document.encryption_public_key,
            ),
        )
        async with self._database.read() as session:
            return [
                Holder(url=holder, public_key=signing, encryption_public_key=sealing, proved=proved_at is not None)
                for holder, signing, sealing, proved_at in await session.execute(query)
            ]

    async def register(
        self, url: str, document: DiscoverDocument, proof: Proof, *, knows_key: str | None = None
    ) -> None:
        """Register as `Registry.register` does. If a key is taken, it goes to whoever proves to hold it.

        Raises:
            KeysTaken: another server is registered with one of the keys, and it is not proved to be this one's.
        """
        try:
            await self._registry.register(
                url=url,
                public_key=document.public_key,
                encryption_public_key=document.encryption_public_key,
                knows_key=knows_key,
            )
        except KeysTaken:
            await self._contest(url, document, proof, knows_key)
        if proof.opened:
            await self.note_proved(url, document.public_key, document.encryption_public_key)

    async def note_proved(self, url: str, public_key: str, encryption_public_key: str) -> None:
        """Note that the server has proved to hold these keys, unless it is registered with others."""
        async with self._database.transaction() as session:
            await session.run_sync(self.note_proved_within, url, public_key, encryption_public_key)

    def note_proved_within(self, session: Session, url: str, public_key: str, encryption_public_key: str) -> None:
        """Do the same as `note_proved`, within a synchronous caller's transaction."""
        session.execute(
            update(Server).where(*_is_row(url, public_key, encryption_public_key)).values(proved_at=self._clock.now())
        )

    async def withdraw(self, url: str, document: DiscoverDocument) -> None:
        """Delete the registration that was just made with these keys, unless a follow names the server already."""
        followed = exists().where(or_(col(Follow.follower_server_url) == url, col(Follow.following_server_url) == url))
        row = _is_row(url, document.public_key, document.encryption_public_key)
        async with self._database.transaction() as session:
            await session.execute(delete(Server).where(*row, ~followed))
        self._registry.forget(url)

    async def _contest(self, url: str, document: DiscoverDocument, proof: Proof, knows_key: str | None) -> None:
        """Register the server in place of those that held its keys, if it may have them; see the module.

        Raises:
            KeysTaken: it may not. Nothing was changed.
        """
        holders = await self.holders(url, document)
        for holder in holders:
            taken = _proves(proof, document, holder)
            if not taken or await self._keeps(holder, document):
                await self._note(holder.url, url, proved=taken)
                log.warning("keys_taken", server_url=url, held_by=holder.url, proved=taken)
                raise KeysTaken(f"{url}: one of its keys is registered for another server")
        await self._replace(url, document, holders, knows_key)
        for holder in holders:
            log.warning("keys_reassigned", server_url=url, held_by=holder.url)

    async def _keeps(self, holder: Holder, document: DiscoverDocument) -> bool:
        proof = NO_PROOF
        if not await self._registry.is_blacklisted(holder.url):
            proof = await self._possession.ask(
                holder.url, public_key=holder.public_key, encryption_public_key=holder.encryption_public_key
            )
        if proof.opened:
            await self.note_proved(holder.url, holder.public_key, holder.encryption_public_key)
        if _proves(proof, document, holder):
            return True
        is_sealing = document.encryption_public_key == holder.encryption_public_key
        return is_sealing and holder.proved and proof.opened is None

    async def _replace(
        self, url: str, document: DiscoverDocument, holders: Sequence[Holder], knows_key: str | None
    ) -> None:
        async with self._database.transaction() as session:
            for holder in holders:
                row = _is_row(holder.url, holder.public_key, holder.encryption_public_key)
                await session.execute(delete(Server).where(*row))
            await self._registry.register(
                url=url,
                public_key=document.public_key,
                encryption_public_key=document.encryption_public_key,
                knows_key=knows_key,
                session=session,
            )
        for changed in (url, *(holder.url for holder in holders)):
            self._registry.forget(changed)

    async def _note(self, holder: str, claimant: str, *, proved: bool) -> None:
        """Note the claim. A claim without proof does not replace one with proof while that is still reported."""
        now = self._clock.now()
        noted = col(Server.claimed_by)
        place = or_(noted.is_(None), noted == claimant, col(Server.claimed_at) < now - CLAIM_AGE)
        values = {"claimed_by": claimant, "claimed_at": now, "claim_proved": proved}
        if not proved:
            place = or_(place, col(Server.claim_proved).is_(False))
        claim = update(Server).where(col(Server.url) == holder).values(**values)
        async with self._database.transaction() as session:
            await session.execute(claim if proved else claim.where(place))


def _is_row(url: str, public_key: str, encryption_public_key: str) -> tuple[ColumnElement[bool], ...]:
    return (
        col(Server.url) == url,
        col(Server.public_key) == public_key,
        col(Server.encryption_public_key) == encryption_public_key,
    )


def _proves(proof: Proof, claimed: DiscoverDocument, holder: Holder) -> bool:
    """Tell whether *proof* is about the disputed key. If only the signing key is disputed, opening proves nothing."""
    if claimed.encryption_public_key == holder.encryption_public_key:
        return proof.opened is True
    return proof.signed
