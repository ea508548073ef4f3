"""What users do that other servers must hear of: follow, unfollow, post."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from federation.delivery.outbox.outbox import Outbox
from federation.protocol.urls import canonical_origin
from federation.sealed.outbound.writes import Content, Plan, Produced, PublishedPost, RequestedFollow
from federation.sealed.peers.discovery import Discovery, Shown
from federation.sealed.peers.registry import Registry
from workers.clock import Clock, SystemClock

__all__ = ["Content", "Producers", "PublishedPost", "RequestedFollow", "ServerRefused"]


class ServerRefused(Exception):
    """The other server is blacklisted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A server that may be followed, and what it shows of itself, which is None if it is registered here."""

    server_url: str
    shown: Shown | None


class Producers:
    """Builds activities in this node's name and owes their delivery, all in the caller's transaction."""

    def __init__(
        self,
        *,
        own_url: str,
        outbox: Outbox,
        registry: Registry,
        discovery: Discovery,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._outbox = outbox
        self._registry = registry
        self._discovery = discovery
        self.produced = Produced(own_url=own_url, owing=outbox.owing, clock=clock or SystemClock())

    async def request_follow(
        self,
        session: AsyncSession,
        *,
        follower_id: str,
        following_id: str,
        server_url: str,
        requester_signature: str | None = None,
    ) -> RequestedFollow:
        """Store the local user's follow of a user on `server_url` as pending, and owe its request.

        An unknown server is discovered first, over the network: call this before the session's other writes.

        Raises:
            ServerRefused: the server is blacklisted.
            DiscoveryError: it is unknown and could not be discovered.
            BlockedUrl, ValueError: its URL is not acceptable.
        """
        self._outbox.check_kind(session, "request_follow")
        met = await self.meet(server_url)

        def owe(inside: Session) -> RequestedFollow:
            return self.follow(
                inside,
                self._outbox.plan,
                met,
                follower_id=follower_id,
                following_id=following_id,
                requester_signature=requester_signature,
            )

        return await self._outbox.within(session, owe, "request_follow")

    async def request_unfollow(
        self, session: AsyncSession, *, follower_id: str, following_id: str, server_url: str
    ) -> str | None:
        """Remove the local user's follow, owe the news of it to the other server, and return the delivery's id.

        Returns None if there is nothing to send: there was no such follow, or its own request was never tried and is
        cancelled now. Otherwise the server hears of the unfollow after the follow, never before.
        """

        def owe(inside: Session) -> str | None:
            return self.produced.unfollow(
                inside,
                plan=self._outbox.plan,
                follower_id=follower_id,
                following_id=following_id,
                server_url=server_url,
            )

        return await self._outbox.within(session, owe, "request_unfollow")

    async def publish_post(
        self,
        session: AsyncSession,
        *,
        author_id: str,
        content: Content,
        published: datetime | None = None,
        is_private: bool | None = None,
        post_id: str | None = None,
        author_signature: str | None = None,
    ) -> PublishedPost:
        """Store the local user's post, and owe a delivery to every server that is to have it.

        Those are the servers of accepted follows that name the author on either side. With the author's policy
        `followers` only the servers of those who follow the author get it; with `none`, no server does.

        Raises:
            ValueError: receivers would refuse it: it has no content, or a block lacks what its type requires.
        """

        def owe(inside: Session) -> PublishedPost:
            return self.produced.post(
                inside,
                plan=self._outbox.plan,
                author_id=author_id,
                content=content,
                published=published,
                is_private=is_private,
                post_id=post_id,
                author_signature=author_signature,
            )

        return await self._outbox.within(session, owe, "publish_post")

    async def meet(self, server_url: str) -> Met:
        """Prepare a follow of somebody on that server.

        A registered server needs nothing; of any other, read what it shows at its `/discover`.

        Raises:
            ServerRefused, DiscoveryError, BlockedUrl, ValueError: as `request_follow`.
        """
        server_url = canonical_origin(server_url)
        if server_url == self._own_url:
            raise ValueError(f"{server_url} is this node: a follow between its own users needs no delivery")
        standing = await self._registry.standing(server_url)
        if standing.blacklisted:
            raise ServerRefused(f"{server_url} is blacklisted")
        if standing.server is not None:
            return Met(server_url=server_url, shown=None)
        return Met(server_url=server_url, shown=await self._discovery.meet(server_url))

    def follow(
        self,
        session: Session,
        plan: Plan,
        met: Met,
        *,
        follower_id: str,
        following_id: str,
        requester_signature: str | None,
    ) -> RequestedFollow:
        """Write the follow's rows, and register the server if that is still to be done.

        Raises:
            DiscoveryError: another server is registered with one of its keys.
        """
        self._outbox.owing.enter(session)
        if met.shown is not None:
            self._discovery.register_within(session, met.server_url, met.shown)
        return self.produced.follow(
            session,
            plan=plan,
            follower_id=follower_id,
            following_id=following_id,
            server_url=met.server_url,
            requester_signature=requester_signature,
        )
