"""The events of the demonstration, as an application service would cause them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from nodes import DemoFailed, Node
from screen import Screen
from tally import Owed, Tally, count, delivered_to

from db import Follow, User, create_host_tables
from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation

POSTS = 200
POSTS_BEFORE_OUTAGE = 100
OUTAGE_SECONDS = 5.0
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 30.0
"""How long nothing at all may happen: no arrival, no attempt, no probe."""


class Story:
    """Follows, posts and an outage among one sender and two peers; gives up when nothing happens any more."""

    def __init__(self, sender: Node, bobs: Node, carols: Node, *, screen: Screen) -> None:
        self._sender = sender
        self._bobs = bobs
        self._carols = carols
        self._screen = screen
        self._owed = Owed()
        # Only explicit settings: neither the user's environment nor a .env may reach the demonstration.
        self._federation = Federation(Settings.from_values(sender.environment))

    async def tell(self) -> Tally:
        """Run the story to its end.

        Raises:
            DemoFailed: nothing happened for 30 s, and it was not at its end.
        """
        try:
            await self._follow()
            await self._post()
            await self._until("the last deliveries", lambda: self.tally().delivered >= len(self._owed.deliveries))
            return self.tally()
        finally:
            await self._federation.close()

    def tally(self) -> Tally:
        """Return the numbers as they are now."""
        tally = count(self._sender, [self._bobs, self._carols], self._owed)
        self._screen.show(tally)
        return tally

    @property
    def owed(self) -> int:
        """How many deliveries were owed."""
        return len(self._owed.deliveries)

    async def _follow(self) -> None:
        self._screen.note("alice follows bob (public) on one peer and carol (private) on the other")
        for peer, user in ((self._bobs, "bob"), (self._carols, "carol")):
            async with self._federation.outbox.transaction() as session:
                requested = await self._federation.producers.request_follow(
                    session, follower_id="alice", following_id=user, server_url=peer.url
                )
            self._owed.deliveries.add(requested.delivery_id)
            self._owed.follows.add((peer.url, user))
        await self._until("the follows", lambda: self.tally().follows_accepted + self.tally().follows_acknowledged >= 2)
        async with self._federation.database.transaction() as session:
            # Somebody on carol's node has followed alice before, so that her posts go there, too.
            session.add(
                Follow(
                    follower_id="dave",
                    following_id="alice",
                    accepted=True,
                    created_at=datetime.now(UTC),
                    following_server_url=self._carols.url,
                )
            )

    async def _post(self) -> None:
        self._screen.note(f"alice publishes {POSTS} posts, each for both peers")
        for number in range(POSTS_BEFORE_OUTAGE):
            await self._publish(number)
        await self._until("some posts at carol's node", lambda: delivered_to(self._sender, self._carols) > POSTS // 10)
        await asyncio.to_thread(self._carols.stop)
        stopped = time.monotonic()
        self._screen.note(f"{self._carols.name} is stopped, in the middle of it")
        for number in range(POSTS_BEFORE_OUTAGE, POSTS):
            await self._publish(number)
        await self._until("the outage", lambda: time.monotonic() - stopped >= OUTAGE_SECONDS)
        await asyncio.to_thread(self._carols.start)
        away = time.monotonic() - stopped
        self._screen.note(f"{self._carols.name} is back after {away:.1f} s; what was held for it goes out by itself")

    async def _publish(self, number: int) -> None:
        async with self._federation.outbox.transaction() as session:
            published = await self._federation.producers.publish_post(
                session, author_id="alice", content=[{"type": "text", "value": f"post number {number}"}]
            )
        self._owed.deliveries.update(published.delivery_ids)
        for peer in (self._bobs, self._carols):
            self._owed.posts.setdefault(peer.url, set()).add(published.post_id)

    async def _until(self, what: str, reached: Callable[[], bool]) -> None:
        before, since = self.tally(), time.monotonic()
        while not reached():
            if (tally := self.tally()) != before:
                before, since = tally, time.monotonic()
            elif time.monotonic() - since > PATIENCE_SECONDS:
                raise DemoFailed(
                    f"nothing happened for {PATIENCE_SECONDS:g} s while it waited for {what}: "
                    f"{self.owed - tally.delivered} of {self.owed} deliveries have not yet been delivered, "
                    f"{tally.lost} lost; {tally}"
                )
            await asyncio.sleep(POLL_SECONDS)


async def settle_in(node: Node, *users: tuple[str, bool]) -> None:
    """Create the node's host tables, with these users (name, private)."""
    federation = Federation(Settings.from_values(node.environment))
    try:
        async with federation.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
            session.add_all(User(id=name, is_private=private) for name, private in users)
    finally:
        await federation.close()
