"""What all remote servers of a test have: an address, answers as they are told, and times when they are away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

from federation.testing.loopback import Loopback, RemoteAnswer, RemoteRequest, Trouble
from federation.testing.network import ENDLESS
from federation.testing.node import LocalNode
from workers.background import background

Told: TypeAlias = int | RemoteAnswer | Trouble
"""A status, a whole answer, or none."""

SHORT: Final = {Trouble.HANGS: timedelta(seconds=0.2), Trouble.DRIPS: timedelta(seconds=3)}
"""How long a node waits for a server that was told to keep it waiting, in place of fifteen seconds."""


class LocalServer(ABC):
    """A remote server on loopback, with which a node under test exchanges activities."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._in_turn: deque[Told] = deque()
        self._always: Told | None = None
        self._server: Loopback | None = None

    @property
    def url(self) -> str:
        """The server's origin, on a free port."""
        return self._running.url

    @property
    def patience(self) -> timedelta:
        """How long the node waits for the next answer at most."""
        told = self._in_turn[0] if self._in_turn else self._always
        return SHORT.get(told, ENDLESS) if isinstance(told, Trouble) else ENDLESS

    def answers(self, told: Told | None = None) -> None:
        """Answer all that is delivered so from now on; without an argument, as a server does that is well."""
        self._in_turn.clear()
        self._always = told

    def answers_in_turn(self, *told: Told) -> None:
        """Answer the next deliveries so, one after the other, and then as before."""
        self._in_turn.extend(told)

    def away(self) -> None:
        """Refuse connections from now on, as a machine does on which nothing runs."""
        background.run(self._running.leave)

    def back(self) -> None:
        """Be there again, at the same address."""
        background.run(self._running.open)

    def open(self) -> None:
        """Be there for the node, until it is closed."""
        self._node.check_open()
        server = Loopback(self._respond)
        background.run(server.open)
        self._server = server
        self._node.network.remotes[server.url] = self

    async def close(self) -> None:
        """End, in the background loop. A second call does nothing."""
        server, self._server = self._server, None
        if server is not None:
            self._node.network.remotes.pop(server.url, None)
            await server.close()

    def _end(self) -> None:
        background.run(partial(self.close))

    @property
    def _running(self) -> Loopback:
        if self._server is None:
            raise RuntimeError(f"this {type(self).__name__} is not open: use it in a `with` block, or as a fixture")
        return self._server

    def _told_or(self, usual: RemoteAnswer) -> RemoteAnswer | Trouble:
        """Return what is answered to a delivery."""
        told = self._in_turn.popleft() if self._in_turn else self._always
        if told is None:
            return usual
        return RemoteAnswer(told) if isinstance(told, int) else told

    @abstractmethod
    async def _respond(self, request: RemoteRequest) -> RemoteAnswer | Trouble: ...


def status_of(answer: RemoteAnswer | Trouble) -> int | None:
    """Return the status that the other side gets, if it gets one."""
    if isinstance(answer, RemoteAnswer):
        return answer.status
    return 200 if answer is Trouble.DRIPS else None
