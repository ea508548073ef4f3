"""The same nodes and remote servers for tests without `async`: what waits returns when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Self

from federation.activitypub.signatures import SignatureKind
from federation.testing.activity_server import ActivityServer, RemoteActor
from federation.testing.node import LocalNode
from federation.testing.sealed_server import FOLLOWER, SealedServer
from workers.background import background


class SyncFederationNode(LocalNode):
    """A node for the time of a test: `with SyncFederationNode() as node:`; see `FederationNode`."""

    def deliver(self, *, within: timedelta = timedelta()) -> None:
        """Send what is due now, or comes to be due within that time."""
        background.run(partial(self.engine.deliver, within))

    def receive(self) -> None:
        """Handle what was received, and run the application's tasks."""
        background.run(self.engine.receive)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncFakeRemote(ActivityServer):
    """A server of the fediverse on loopback; see `FakeRemote`."""

    def send(
        self,
        activity: Mapping[str, Any],
        *,
        by: RemoteActor | None = None,
        inbox: str | None = None,
        signature: SignatureKind | str = SignatureKind.CAVAGE,
    ) -> None:
        """Post an activity to the node, signed by one of this server's actors."""
        background.run(partial(self._send, self.signed(activity, by=by, inbox=inbox, signature=signature)))

    def follow(self, actor: str, *, by: RemoteActor | None = None) -> None:
        """Ask to follow an actor of the node."""
        background.run(partial(self._send, self._follow(actor, by)))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


class SyncFakeSealedRemote(SealedServer):
    """A server of the sealed wire on loopback; see `FakeSealedRemote`."""

    def introduce(self) -> None:
        """Have the node register this server, unless it has."""
        background.run(self._introduce)

    def follow(self, user_id: str, *, by: str = FOLLOWER) -> None:
        """Have a user of this server follow one of the node's."""
        background.run(partial(self._follow, user_id, by))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
