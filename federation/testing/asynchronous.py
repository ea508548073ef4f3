"""Nodes and remote servers for tests that are coroutine functions: what waits is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

from federation.activitypub.signatures import SignatureKind
from federation.testing.activity_server import ActivityServer, RemoteActor
from federation.testing.node import LocalNode
from federation.testing.sealed_server import FOLLOWER, SealedServer
from workers.background import Work, background

T = TypeVar("T")


class FederationNode(LocalNode):
    """A node for the time of a test: `async with FederationNode() as node:`.

    Its settings are in the environment meanwhile, and `federation` and `federation.sync` use it in whatever loop and
    thread. `settings` replaces some of them, by variable: with a DATABASE_URL the tables are made there, otherwise in
    an SQLite file in *folder* or a temporary one. `app` is the application, ASGI or WSGI, by which remote servers reach
    the node; without it the node answers by itself.

    Nothing is sent, and nothing that arrives is handled, but by `deliver` and `receive`.
    """

    async def deliver(self, *, within: timedelta = timedelta()) -> None:
        """Send what is due now, by the shipped workers.

        *within*: also what comes to be due in that time, retries and looks at servers that are away: the clock is moved
        to each such moment, and in the end by all of it.
        """
        await _waited(partial(self.engine.deliver, within))

    async def receive(self) -> None:
        """Handle what was received: follows, and by the functions of the application; run its tasks, too.

        Raises:
            ExceptionGroup: what these functions raised; they are called again at a later time, as in production.
        """
        await _waited(self.engine.receive)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class FakeRemote(ActivityServer):
    """A server of the fediverse on loopback: `async with FakeRemote(node) as remote:`.

    It has the actors that `actor` was asked for, verifies what it is sent, and lists that in `received`.
    """

    async def send(
        self,
        activity: Mapping[str, Any],
        *,
        by: RemoteActor | None = None,
        inbox: str | None = None,
        signature: SignatureKind | str = SignatureKind.CAVAGE,
    ) -> None:
        """Post an activity to the node, signed by one of this server's actors, by default bob.

        What it lacks of `@context`, `id` and `actor` is added. It goes to the inbox that all share unless another is
        named. `node.receive()` handles it.

        Raises:
            NotTaken: the node does not take it; the message has its answer.
        """
        await _waited(partial(self._send, self.signed(activity, by=by, inbox=inbox, signature=signature)))

    async def follow(self, actor: str, *, by: RemoteActor | None = None) -> None:
        """Ask to follow an actor of the node. `node.receive()` handles that, `node.deliver()` sends the answer.

        Raises:
            NotTaken: as for `send`.
        """
        await _waited(partial(self._send, self._follow(actor, by)))

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)


class FakeSealedRemote(SealedServer):
    """A server of the sealed wire on loopback: `async with FakeSealedRemote(node) as remote:`.

    It acknowledges what the node seals to it, and lists that in `received`. What it sends to the node needs the extra
    `node`.
    """

    async def introduce(self) -> None:
        """Have the node register this server, unless it has; `follow` does so by itself.

        Raises:
            NotTaken: the node does not believe it.
        """
        await _waited(self._introduce)

    async def follow(self, user_id: str, *, by: str = FOLLOWER) -> None:
        """Have a user of this server follow one of the node's: posts by that one are owed to this server then.

        Raises:
            NotTaken: there is no such user, or he does not want it.
        """
        await _waited(partial(self._follow, user_id, by))

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)


async def _waited(work: Work[T]) -> T:
    """Run the work in the background loop, while this one goes on."""
    return await asyncio.to_thread(background.run, work)
