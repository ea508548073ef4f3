"""The events of the demonstration, as an application service would cause them."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from nodes import DemoFailed, Node
from screen import Screen
from tally import Counts, Owed, Tally, count, delivered_to

from db import Follow, User, create_host_tables
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation

POSTS = 200
POSTS_BEFORE_OUTAGE = 100
OUTAGE_SECONDS = 5.0
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 30.0
"""How long nothing at all may happen: no arrival, no attempt, no probe."""


class Telling(ABC):
    """A story of one sender and its peers, of which the last is away in the middle of it.

    It gives up when nothing happens any more.
    """

    def __init__(self, sender: Node, peers: Sequence[Node], *, screen: Screen) -> None:
        self.sender = sender
        self.peers = peers
        self.screen = screen
        self.owed: set[str] = set()
        """The deliveries."""
        # Only explicit settings: neither the user's environment nor a .env may reach the demonstration.
        self.federation = Federation(Settings.from_values(sender.environment))

    @abstractmethod
    async def begin(self) -> None:
        """Do what comes before the posts."""

    @abstractmethod
    async def publish(self, number: int) -> None:
        """Publish a post to all peers."""

    @abstractmethod
    def count(self) -> Counts:
        """Return the numbers as they are now."""

    async def tell(self) -> Counts:
        """Run the story to its end.

        Raises:
            DemoFailed: nothing happened for 30 s, and it was not at its end.
        """
        try:
            await self.begin()
            await self._post()
            await self.until("the last deliveries", lambda: self.tally().delivered >= len(self.owed))
            return self.tally()
        finally:
            await self.federation.close()

    def tally(self) -> Counts:
        """Count, and show it."""
        tally = self.count()
        self.screen.show(tally)
        return tally

    async def _post(self) -> None:
        self.screen.note(f"alice publishes {POSTS} posts, each for all {len(self.peers)} peers")
        away = self.peers[-1]
        for number in range(POSTS_BEFORE_OUTAGE):
            await self.publish(number)
        await self.until(f"some posts at {away.name}", lambda: delivered_to(self.sender, away) > POSTS // 10)
        await asyncio.to_thread(away.stop)
        stopped = time.monotonic()
        self.screen.note(f"{away.name} is stopped, in the middle of it")
        for number in range(POSTS_BEFORE_OUTAGE, POSTS):
            await self.publish(number)
        await self.until("the outage", lambda: time.monotonic() - stopped >= OUTAGE_SECONDS)
        await asyncio.to_thread(away.start)
        seconds = time.monotonic() - stopped
        self.screen.note(f"{away.name} is back after {seconds:.1f} s; what is owed to it goes out by itself")

    async def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait until this has been reached.

        Raises:
            DemoFailed: nothing happened meanwhile for 30 s.
        """
        before, since = self.tally(), time.monotonic()
        while not reached():
            if (tally := self.tally()) != before:
                before, since = tally, time.monotonic()
            elif time.monotonic() - since > PATIENCE_SECONDS:
                raise DemoFailed(
                    f"nothing happened for {PATIENCE_SECONDS:g} s while it waited for {what}: "
                    f"{len(self.owed) - tally.delivered} of {len(self.owed)} deliveries have not yet been delivered, "
                    f"{tally.lost} lost; {tally}"
                )
            await asyncio.sleep(POLL_SECONDS)


class Story(Telling):
    """Follows and posts between nodes of ours."""

    def __init__(self, sender: Node, bobs: Node, carols: Node, *, screen: Screen) -> None:
        super().__init__(sender, [bobs, carols], screen=screen)
        self._owed = Owed()

    async def begin(self) -> None:
        """Let alice follow one user on each peer."""
        bobs, carols = self.peers
        self.screen.note("alice follows bob (public) on one peer and carol (private) on the other")
        for peer, user in ((bobs, "bob"), (carols, "carol")):
            async with self.federation.outbox.transaction() as session:
                requested = await self.federation.producers.request_follow(
                    session, follower_id="alice", following_id=user, server_url=peer.url
                )
            self.owed.add(requested.delivery_id)
            self._owed.follows.add((peer.url, user))
        await self.until("the follows", lambda: self.count().follows_accepted + self.count().follows_acknowledged >= 2)
        async with self.federation.database.transaction() as session:
            # Somebody on carol's node has followed alice before, so that her posts go there, too.
            session.add(
                Follow(
                    follower_id="dave",
                    following_id="alice",
                    accepted=True,
                    created_at=datetime.now(UTC),
                    following_server_url=carols.url,
                )
            )

    async def publish(self, number: int) -> None:
        """Publish a post of alice's."""
        async with self.federation.outbox.transaction() as session:
            published = await self.federation.producers.publish_post(
                session, author_id="alice", content=[{"type": "text", "value": f"post number {number}"}]
            )
        self.owed.update(published.delivery_ids)
        for peer in self.peers:
            self._owed.posts.setdefault(peer.url, set()).add(published.post_id)

    def count(self) -> Tally:
        """Count at the sender and in the peers' tables."""
        return count(self.sender, self.peers, self._owed)


async def settle_in(node: Node, *users: tuple[str, bool]) -> None:
    """Create the node's host tables, with these users (name, private)."""
    federation = Federation(Settings.from_values(node.environment))
    try:
        async with federation.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
            session.add_all(User(id=name, is_private=private) for name, private in users)
    finally:
        await federation.close()
