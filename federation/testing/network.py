"""What a node under test reaches: the remotes of the test and itself, and nothing beyond this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, Protocol, TypeAlias

from federation.http.client import DEFAULT_TIMEOUT, FederationClient
from federation.http.errors import NetworkError
from federation.http.guard import AddressGuard, Target
from federation.http.messages import Response
from federation.http.pool import ConnectionPool
from federation.http.threat_policy import NetworkErrorCode

ENDLESS: Final = timedelta.max


class Reachable(Protocol):
    """A remote server of a test."""

    @property
    def patience(self) -> timedelta:
        """How long a request to it waits at most: less than usual where it was told to keep others waiting."""

    async def close(self) -> None: ...


AskOurselves: TypeAlias = Callable[[Target, str], Awaitable[Response]]
"""Answers a GET of one of the node's own URLs: its target, and what it accepts."""


class Network:
    """The remotes of a test, by their origins, and the application by which the node is reached, if it is by one."""

    def __init__(self) -> None:
        self.remotes: dict[str, Reachable] = {}
        self.app: object | None = None

    def patience(self, origin: str) -> timedelta:
        """Return the longest that a request to this server waits."""
        found = self.remotes.get(origin)
        return ENDLESS if found is None else found.patience

    async def close(self) -> None:
        """Close all remotes."""
        for remote in list(self.remotes.values()):
            await remote.close()


class LocalClient(FederationClient):
    """The node's own guarded client, which connects to this machine only, and reaches the node without a socket."""

    def __init__(self, guard: AddressGuard, network: Network, *, own_url: str | None, ask: AskOurselves) -> None:
        super().__init__(guard, ConnectionPool(guard))
        self._network = network
        self._own_url = own_url
        self._ask = ask

    async def fetch(self, url: str, *, timeout: timedelta = DEFAULT_TIMEOUT, **options: Any) -> Response:
        """Return the whole response; see `FederationClient.fetch`.

        Raises:
            NetworkError: also where the server is none of this machine's.
        """
        target = self._guard.check_url(url)
        if target.origin == self._own_url:
            return await self._ask(target, str((options.get("headers") or {}).get("Accept", "*/*")))
        if not self._guard.exempts(target):
            detail = "a test reaches no server but those on this machine, such as its FakeRemote"
            raise NetworkError(NetworkErrorCode.CONN_REFUSED, target.origin, detail)
        return await super().fetch(url, timeout=min(timeout, self._network.patience(target.origin)), **options)
