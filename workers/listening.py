"""What listens for strangers: how many connections there may be, and which one goes if there are too many.

Theory of operation. Connections are counted, in all and by client. If there are too many, the one that has owed us a
request for longest is cut: a silent client keeps nobody out, and one that asks at once gets in. Only where all are
being answered, one more is not heard.

Whatever else a process does needs descriptors as well, and the system gives a new one the lowest number that is free.
So the number of an accepted connection tells how many are taken, whoever took them: from three quarters of what the
process may have, a new connection is accepted only in place of an idle one, of the listener that has most of them. If
all are taken, the one that is kept for this takes what waits out of the queue and cuts it: otherwise the port would be
reported ready without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from workers.forwarded import read_address, subscriber

log = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""How many connections are accepted before the event loop turns to what else there is to do."""
SHARE_OF_DESCRIPTORS: Final = 0.75
QUIET: Final = timedelta(minutes=1)
"""How often at most the log tells the same thing that strangers cause."""
_PAUSE_SECONDS: Final = 1.0
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener.

    From `busy` connections on, each new one cuts the one that has been without a head for longest. If there is none,
    requests are answered 503, and a connection beyond `connections` is cut without an answer: by then the rest of the
    process needs the descriptors. One client may have `per_client` connections. `request` is the time for a request's
    head, including idle time before it; `body` is the time from there to the end of the body, and `answer` that to the
    last byte of the answer. With `streams` it counts anew from each byte that leaves us after all before it were taken.
    `early` is how long a client that still sends has to read an answer after which the connection closes. `barred` is
    the same for a client that was turned away at once, of which there may be hundreds a second.
    """

    busy: int = 400
    connections: int = 450
    per_client: int = 64
    request: timedelta = timedelta(seconds=15)
    body: timedelta = timedelta(seconds=60)
    answer: timedelta = timedelta(seconds=60)
    streams: bool = False
    early: timedelta = timedelta(seconds=2)
    barred: timedelta = timedelta(milliseconds=500)


class Doorkeeper(Protocol):
    """Knows whose a connection is, and who has to come back later."""

    def client(self, host: str) -> str | None:
        """Return whom a connection from *host* counts for; None if it has no share, because it stands for many."""
        ...

    def refusal(self, client: str | None) -> bytes | None:
        """Return the answer for a client that is turned away before a byte is read; None for one that comes in."""
        ...


class EverybodyEnters:
    """The doorkeeper of what turns nobody away. Without `shares` all connections are those of one proxy."""

    def __init__(self, *, shares: bool = True) -> None:
        self._shares = shares

    def client(self, host: str) -> str | None:
        """Return the address, for IPv6 its network."""
        address = read_address(host) if self._shares else None
        return None if address is None else subscriber(address)

    def refusal(self, _client: str | None) -> bytes | None:
        """Return None."""
        return None


class Cuttable(Protocol):
    """A connection, as far as its count goes."""

    def cut(self) -> None:
        """End it at once, without an answer."""
        ...


class Connections:
    """The connections of one listener."""

    def __init__(self, limits: ConnectionLimits, doorkeeper: Doorkeeper) -> None:
        self._limits = limits
        self._doorkeeper = doorkeeper
        self._clients: dict[Cuttable, str | None] = {}
        self._count: Counter[str | None] = Counter()
        self._idle: dict[Cuttable, None] = {}  # the one that has been idle for longest first

    def admit(self, connection: Cuttable, host: str) -> bool:
        """Count *connection* until it is `lost`, and return whether there is room for it."""
        client = self._doorkeeper.client(host)
        self._clients[connection] = client
        self._count[client] += 1
        if client is not None and self._count[client] > self._limits.per_client:
            return self._cut(each for each in self._idle if self._clients[each] == client)
        if len(self._clients) >= self._limits.busy:
            self.make_room()
        return len(self._clients) <= self._limits.connections

    def refusal(self, connection: Cuttable) -> bytes | None:
        """Return the answer to a connection whose client has to come back later; see `Doorkeeper`."""
        return self._doorkeeper.refusal(self._clients[connection])

    def rests(self, connection: Cuttable) -> None:
        """Note that we owe *connection* nothing from now on: it is before a head, or after its last answer."""
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def asks(self, connection: Cuttable) -> None:
        """Note that we owe *connection* an answer from now on."""
        self._idle.pop(connection, None)

    @property
    def idle(self) -> int:
        """How many we owe nothing."""
        return len(self._idle)

    def lost(self, connection: Cuttable) -> None:
        """Stop counting the connection. Repeating it does nothing."""
        self._idle.pop(connection, None)
        if connection not in self._clients:
            return
        client = self._clients.pop(connection)
        self._count[client] -= 1
        if not self._count[client]:
            del self._count[client]

    def make_room(self) -> bool:
        """Cut the connection that has been idle for longest. Return False if there is none."""
        return self._cut(iter(self._idle))

    def _cut(self, candidates: Iterator[Cuttable]) -> bool:
        connection = next(candidates, None)
        if connection is None:
            return False
        self.lost(connection)
        connection.cut()
        return True


_OPEN: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, set[Acceptor]]] = WeakKeyDictionary()
"""Of each event loop, what listens there: descriptors are the process's, and a loop cuts none of another's."""


class Acceptor:
    """Accepts connections of an open port from `start` until `close`, and makes a protocol for each."""

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol], *, bound: Connections) -> None:
        self._listener = listener
        self._make = make
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[object]] = set()
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._pause: asyncio.TimerHandle | None = None
        self._told = Occasionally()

    def start(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        _OPEN.setdefault(self._loop, set()).add(self)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more, and close the port. Repeating it does nothing."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        _OPEN.get(self._loop, set()).discard(self)
        if self._pause is not None:
            self._pause.cancel()
        if self._spare is not None:
            os.close(self._spare)

    async def wait_closed(self) -> None:
        """Wait until no connection is on its way to its protocol any more."""
        await asyncio.gather(*self._arriving, return_exceptions=True)

    def _accept(self) -> None:
        most = _most_descriptors()
        for _ in range(AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._take_one_out()
                return
            arriving = self._loop.create_task(self._arrive(accepted, most))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)

    def _make_room(self) -> bool:
        most = max((each._bound for each in _OPEN[self._loop]), key=lambda each: each.idle, default=None)
        return most is not None and most.make_room()

    async def _arrive(self, accepted: socket.socket, most: int) -> None:
        try:
            # With the number of a connection that goes for it: else those with high ones would become more and more.
            while accepted.fileno() >= most:
                if not self._make_room():
                    self._tell()
                    accepted.close()
                    return
                await asyncio.sleep(0)  # the event loop closes what is cut in its next turn
                await asyncio.sleep(0)
                high, accepted = accepted, accepted.dup()
                high.close()
            accepted.setblocking(False)
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:  # it has gone already
            accepted.close()
        except BaseException:
            accepted.close()
            raise

    def _take_one_out(self) -> None:
        """Cut what waits for longest. Without a descriptor, because others were quicker, leave the port for a while."""
        self._make_room()
        self._tell()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        if self._spare is None:
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self.start)

    def _tell(self) -> None:
        if (times := self._told.count()) is not None:
            log.warning(
                "descriptors_short allowed=%d cut=%d port=%s", _allowed(), times, self._listener.getsockname()[1]
            )


class Occasionally:
    """Says when to tell of what may happen a thousand times a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = float("-inf")
        self._times = 0

    def count(self) -> int | None:
        """Count one more time. Return how many there were since the last telling, or None if that was just now."""
        self._times += 1
        if self._now() < self._next:
            return None
        times, self._times = self._times, 0
        self._next = self._now() + QUIET.total_seconds()
        return times


def _allowed() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _most_descriptors() -> int:
    """Return the number from which on a descriptor is one of those that are kept for the rest of the process."""
    return int(_allowed() * SHARE_OF_DESCRIPTORS)
