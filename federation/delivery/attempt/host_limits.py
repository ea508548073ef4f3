"""How many attempts at one server are under way at once, so that slow ones take no slots from others.

Theory of operation. An attempt that waits for its server needs memory, not CPU. So after `QUICK` it leaves its slot to
another attempt and goes on in overtime. A server that answered this process quickly the last time may have `per_server`
attempts at once. Any other server gets one at a time: if it is known to be slow, outside the slots from the beginning;
if it is new, after `NEW`. Both times are longer where all servers take long: `SLOWER` times what an attempt usually
takes. If all turns at a server are taken, an attempt waits in line, under the same rule. No server may have more than a
fifth of the room, so a long backlog to a new one waits a moment in the slots. An attempt that gets no answer ends the
wait of all behind it: their deliveries are held for a while, and so are those for which there is no room left. So a
server that hangs costs no slot anything, and takes room for one attempt at a time.

A server that gave no answer the last time is taken for silent, for `SILENT_FOR`. It gets only `SILENT_FIRST_BYTE` to
begin its answer, or twice as long as its last one took, and not the whole deadline, so that a thousand such servers
pass through the room quickly. That lasts until its link is down, about: what is sent later, to find out whether it is
back, gets the whole deadline again, or a server that has become slow would be away for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

QUICK: Final = timedelta(seconds=1)
NEW: Final = timedelta(milliseconds=50)
"""How long an attempt at a server that has not answered this process yet may hold its slot, where others are quick."""
SLOWER: Final = 4
"""An attempt counts as slow once it takes this many times as long as others: if all are slow, it is not the server.
Letting them out of their slots would only start more of them on a machine that has too many already.
"""
USUAL: Final = timedelta(milliseconds=60)
"""What an attempt is believed to take before any has been answered."""
LONGEST_STAY: Final = timedelta(seconds=5)
SILENT_FIRST_BYTE: Final = timedelta(seconds=5)
SILENT_FOR: Final = timedelta(seconds=30)
"""As long as a link takes to fall, and no longer than the pause before the first look at one that has fallen."""
MOST_BYTES: Final = 64 * 1024 * 1024
SHARE: Final = 5
"""No server has more than one part in this many of the room."""
SHORTEST_PAUSE: Final = timedelta(seconds=5)
LONGEST_PAUSE: Final = timedelta(minutes=10)
SPREAD: Final = 0.25
"""By this part of it a pause is longer or shorter, so that not all come back at the same moment."""
LONGEST_BUSY: Final = LONGEST_PAUSE * (1 + SPREAD)
MAX_REMEMBERED: Final = 10_000

LeaveSlot = Callable[[], bool]


class Busy(Exception):
    """There is no room to wait for the server; `pause` is how long to stay away."""

    def __init__(self, server_url: str, pause: timedelta) -> None:
        super().__init__(f"no room to wait for {server_url}")
        self.pause = pause


@dataclass(slots=True)
class _Server:
    """A server as this process remembers it.

    `quick` says how it answered the last time, once it `is_known`, and `silent_until` for how long it is taken for
    silent, by the loop's clock. `turned_away` counts the deliveries that were sent away and are not back yet; `seconds`
    is about how long an attempt takes, and `answered_in` how long its last answer took.
    """

    url: str
    is_known: bool = False
    quick: bool = False
    silent_until: float = 0.0
    answered_in: float = 0.0
    used: int = 0
    outside: int = 0
    turned_away: int = 0
    seconds: float = 1.0
    waiting: deque[_Place] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return not (self.used or self.outside or self.waiting)


@dataclass(slots=True, eq=False)
class _Place:
    """One attempt, waiting or under way; `turn` is set while it waits."""

    server: _Server
    size: int
    leave_slot: LeaveSlot
    outside: bool = False
    turn: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def arm(self, seconds: float, call: Callable[[_Place], None]) -> None:
        """Schedule `call` in that many seconds."""
        self.timer = asyncio.get_running_loop().call_later(seconds, call, self)


@dataclass(slots=True)
class Turn:
    """An attempt's turn at its server. Its holder notes whether the server answered, and after how many seconds.

    With `waited` None, the whole duration of the turn counts, whatever else was done in it. `first_byte` is how long to
    wait for the beginning of an answer; None: as long as the attempt may take.
    """

    first_byte: timedelta | None
    answered: bool | None = None
    waited: float | None = None


class HostLimits:
    """Turns at servers for the attempts of one process, and room for `most` of them outside the worker's slots."""

    def __init__(
        self,
        *,
        per_server: int,
        most: int,
        most_bytes: int = MOST_BYTES,
        quick: timedelta = QUICK,
        new: timedelta = NEW,
        usual: timedelta = USUAL,
    ) -> None:
        self._per_server = per_server
        self._most = most
        self._most_bytes = most_bytes
        self._share = max(most // SHARE, per_server)
        self._quick = quick.total_seconds()
        self._new = new.total_seconds()
        self._usual = usual.total_seconds()  # about how long answered attempts take
        self._servers: OrderedDict[str, _Server] = OrderedDict()
        self._outside = 0
        self._bytes = 0

    @property
    def outside(self) -> int:
        """How many attempts are in overtime."""
        return self._outside

    @asynccontextmanager
    async def turn(self, server_url: str, *, size: int, leave_slot: LeaveSlot) -> AsyncIterator[Turn]:
        """Wait for a turn at the server and hold it; `size` is what the attempt has in memory, in bytes.

        Raises:
            Busy: there is no room to wait, or the server did not answer the attempts before this one.
        """
        server = self._remembered(server_url)
        place = _Place(server=server, size=size, leave_slot=leave_slot)
        if not server.quick and not (self._go_outside(place) if server.is_known else not self._is_full(size)):
            raise self._busy(server)
        place.arm(self._stay(server), self._take_too_long)
        try:
            await self._wait(place)
            server.turned_away = max(server.turned_away - 1, 0)
            loop = asyncio.get_running_loop()
            started = loop.time()
            turn = Turn(_first_byte(server, started))
            try:
                yield turn
            finally:
                self._judge(server, turn, loop.time() - started if turn.waited is None else turn.waited)
                self._release(server)
        finally:
            if place.timer is not None:
                place.timer.cancel()
            self._come_back(place)
            self._forget_idle()

    def _stay(self, server: _Server) -> float:
        """Return how many seconds an attempt at the server may stay in its slot."""
        return self._slow_after(self._quick if server.quick else self._new)

    def _slow_after(self, seconds: float) -> float:
        return max(seconds, min(SLOWER * self._usual, LONGEST_STAY.total_seconds()))

    def _remembered(self, server_url: str) -> _Server:
        server = self._servers.get(server_url)
        if server is None:
            server = self._servers[server_url] = _Server(server_url)
        self._servers.move_to_end(server_url)
        return server

    def _forget_idle(self) -> None:
        while len(self._servers) > MAX_REMEMBERED:
            url, oldest = next(iter(self._servers.items()))
            if not oldest.is_idle:
                return
            del self._servers[url]

    def _go_outside(self, place: _Place) -> bool:
        """Move the attempt to overtime, if there is room. Return whether it is there now."""
        server = place.server
        if place.outside:
            return True
        if self._is_full(place.size) or server.outside >= self._share:
            return False
        place.outside = True
        server.outside += 1
        self._outside += 1
        self._bytes += place.size
        place.leave_slot()  # a worker that is not ours has no such thing: the attempt stays in its slot
        return True

    def _is_full(self, size: int) -> bool:
        return self._outside >= self._most or self._bytes + size > self._most_bytes

    def _come_back(self, place: _Place) -> None:
        if place.outside:
            place.server.outside -= 1
            self._outside -= 1
            self._bytes -= place.size

    def _take_too_long(self, place: _Place) -> None:
        """Move an attempt out of its slot that has been there too long.

        If there is no room outside, an attempt that only waits gives up; one under way keeps its slot. A new server
        counts as known from now on, namely as slow, and the attempts in line behind this one no longer wait for it.
        """
        place.server.is_known = True
        if not self._go_outside(place) and place.turn is not None and not place.turn.done():
            place.turn.set_exception(self._busy(place.server))

    async def _wait(self, place: _Place) -> None:
        server = place.server
        if server.used < self._turns(server):
            server.used += 1
            return
        place.turn = asyncio.get_running_loop().create_future()
        server.waiting.append(place)
        try:
            await place.turn
        except BaseException:
            if place.turn.done() and not place.turn.cancelled() and place.turn.exception() is None:
                self._release(server)  # the turn came just as we gave up: we have to pass it on
            elif place in server.waiting:
                server.waiting.remove(place)
            raise
        finally:
            place.turn = None

    def _turns(self, server: _Server) -> int:
        return self._per_server if server.quick else 1

    def _release(self, server: _Server) -> None:
        """Hand the turn to the attempt that has waited longest, or to several if the server may have more by now."""
        server.used -= 1
        while server.waiting and server.used < self._turns(server):
            place = server.waiting.popleft()
            if place.turn is not None and not place.turn.done():
                place.turn.set_result(None)
                server.used += 1

    def _judge(self, server: _Server, turn: Turn, seconds: float) -> None:
        if turn.answered is None:  # the attempt ended for a reason on our side
            return
        server.seconds += (seconds - server.seconds) / 4
        server.is_known = True
        server.silent_until = 0.0 if turn.answered else asyncio.get_running_loop().time() + SILENT_FOR.total_seconds()
        server.quick = turn.answered and seconds < self._slow_after(self._quick)
        if turn.answered:
            server.answered_in = seconds
            self._usual += (seconds - self._usual) / 20
            if server.quick:  # some of those that were sent away went on in other processes, or are over
                server.turned_away = 0
            return
        while server.waiting:
            waiting = server.waiting.popleft()
            if waiting.turn is not None and not waiting.turn.done():
                waiting.turn.set_exception(self._busy(server))

    def _busy(self, server: _Server) -> Busy:
        server.turned_away += 1
        seconds = server.turned_away * server.seconds / self._turns(server)
        pause = min(max(timedelta(seconds=seconds), SHORTEST_PAUSE), LONGEST_PAUSE)
        return Busy(server.url, pause * random.uniform(1 - SPREAD, 1 + SPREAD))  # noqa: S311 - guards nothing


def _first_byte(server: _Server, now: float) -> timedelta | None:
    return max(SILENT_FIRST_BYTE, timedelta(seconds=2 * server.answered_in)) if now < server.silent_until else None
