"""Request bodies, read within bounds of size, time and memory.

Theory of operation. A body counts by the memory that it takes: its bytes while it arrives, several times as much once
it is complete, for what is made of it. A body over 64 KiB is read only if somebody vouches for its sender, and then
waits for its turn (`HeavyWork`). A stranger's large body is refused by its announced length, or once that much of it
has come. Small bodies and large ones have memory of their own: large ones that never end keep no small one out.

Of each memory a client and a network have a share (see `shares`). If a body of theirs exceeds it, their slowest one
that still arrives gives way; a complete one waits for others to end instead, as work does by itself. If all is taken,
the slowest body gives way of whoever has most in arriving ones. So bodies that never end keep none out that comes at
once, whoever sends them and however many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

from starlette.requests import ClientDisconnect, Request

from federation.node.heavy import HEAVY_BYTES, HeavyWork
from federation.node.refusals import FrameworkRefusal, Refusal, try_later
from federation.node.shares import EVERYBODY, PATIENCE, SHARES

BODY_TIMEOUT = timedelta(seconds=15)
SMALL_MEMORY_BYTES: Final = 12 * 1024 * 1024
LARGE_MEMORY_BYTES: Final = 16 * 1024 * 1024
BODY_WEIGHT: Final = 8
"""How many times its length a body takes while it is worked on: itself, its members, the ciphertext, the plaintext as
bytes and as text, the activity, and what goes to the database."""
MAX_ARRIVING: Final = 768
"""How many bodies may arrive at a time in one memory: each takes as much at least, however little of it has come."""
DISCARDED_BYTES = HEAVY_BYTES
"""How much of a refused body is read and dropped, so that the connection can be used again."""

# The rest of a refused body may still be on its way: the connection cannot be used again.
_CLOSE = {"Connection": "close"}


TooLarge: TypeAlias = Callable[[int], Refusal]
"""Makes the refusal of a body, given the limit in bytes."""


def framework_too_large(limit: int) -> Refusal:
    """Return the refusal that most endpoints use for a body that is too large."""
    return FrameworkRefusal(413, f"The body has more than {limit} bytes", code="PAYLOAD_TOO_LARGE", headers=_CLOSE)


Vouch: TypeAlias = Callable[[], Awaitable[None]]
"""Raises a `Refusal` if the name that a request gives does not allow a body over 64 KiB."""


async def _for_anybody() -> None:
    pass


class _Memory:
    """A budget of *most* bytes.

    A client and a network have a sixteenth of them for what they send, and as much for what is worked on, or one body
    if that is more.
    """

    def __init__(self, most: int) -> None:
        self.least = most // MAX_ARRIVING
        self._most = most
        self._share = most // SHARES
        self._sent: Counter[str] = Counter()
        self._worked_on: Counter[str] = Counter()
        self._arriving: dict[_Body, None] = {}  # in the order in which they began
        self._freed = asyncio.Event()

    def arrives(self, body: _Body, amount: int) -> None:
        """Let a body that is arriving hold that much more.

        Raises:
            Refusal: 503, it is the one that has to give way.
        """
        self._arriving[body] = None
        self._hold(body, amount)
        self._make_room(body, body.names)

    def has_arrived(self, body: _Body) -> None:
        """Note that the body is complete. Repeating it does nothing."""
        self._arriving.pop(body, None)

    async def works(self, body: _Body, weight: int) -> None:
        """Let a complete body hold *weight* bytes, once its holders have room for them.

        Raises:
            Refusal: 503, they had none in time, or nobody has.
        """
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                while any(0 < self._worked_on[name] > self._share - weight for name in body.holders):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise _no_memory() from None
        self._hold(body, -body.held)
        body.is_worked_on = True
        self._hold(body, weight)
        self._make_room(body, [EVERYBODY])

    def leave(self, body: _Body) -> None:
        """Take back everything that the body holds. Repeating it does nothing."""
        self.has_arrived(body)
        self._hold(body, -body.held)
        self._freed.set()

    def _hold(self, body: _Body, amount: int) -> None:
        body.held += amount
        held = self._worked_on if body.is_worked_on else self._sent
        for name in body.names:
            held[name] += amount
            if not held[name]:
                del held[name]

    def _make_room(self, body: _Body, names: Iterable[str]) -> None:
        for name in names:
            while self._is_exceeded(name, body):
                slowest = self._slowest(name)
                if slowest is None or slowest is body:
                    raise _no_memory()
                slowest.give_way()

    def _is_exceeded(self, name: str, body: _Body) -> bool:
        sent = self._sent[name]
        if name == EVERYBODY:
            return sent + self._worked_on[name] > self._most
        return sent > self._share and sent > body.held

    def _slowest(self, name: str) -> _Body | None:
        """Return the body that has been arriving for longest, of the client that holds most in arriving ones."""
        arriving = [body for body in self._arriving if name in body.names]
        held: Counter[str] = Counter()
        for body in arriving:
            held[body.names[0]] += body.held
        largest = max(held, key=held.__getitem__, default=None)
        return next((body for body in arriving if body.names[0] == largest), None)


@dataclass(slots=True, eq=False)
class _Body:
    """A body, and how much it holds of which memory."""

    memory: _Memory
    holders: Sequence[str]
    content: bytearray = field(default_factory=bytearray)
    held: int = 0
    deadline: asyncio.Timeout | None = None
    gave_way: bool = False
    is_worked_on: bool = False

    @property
    def names(self) -> Sequence[str]:
        """What it counts under, its client first."""
        return (*self.holders, EVERYBODY)

    def take(self, amount: int) -> None:
        """Hold that much more while it arrives.

        Raises:
            Refusal: 503, it has to give way.
        """
        if self.gave_way:  # the end of its deadline is on its way
            raise _no_memory()
        self.memory.arrives(self, amount)

    def end(self) -> None:
        """Note that it is complete.

        Raises:
            Refusal: 503, it had to give way.
        """
        self.take(0)
        self.memory.has_arrived(self)

    def give_way(self) -> None:
        """End its arrival, for another's sake."""
        self.memory.leave(self)
        if self.deadline is not None and not self.deadline.expired():
            self.gave_way = True
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def move(self, memory: _Memory) -> None:
        """Hold the same amount of *memory* instead, from now on."""
        held = self.held
        self.memory.leave(self)
        self.memory = memory
        self.take(held)


def _no_memory() -> Refusal:
    return try_later("Too many requests at once", reason="BODY_MEMORY")


class BodyReader:
    """Reads request bodies.

    Small ones take at most *memory* bytes together, large ones at most *large* while they arrive. A body has *timeout*
    to arrive. A flood of large or slow bodies thus costs a known amount of memory, and the sender of a body that does
    not fit is told to come back.
    """

    def __init__(
        self,
        *,
        timeout: timedelta = BODY_TIMEOUT,
        memory: int = SMALL_MEMORY_BYTES,
        large: int = LARGE_MEMORY_BYTES,
        heavy: HeavyWork | None = None,
    ) -> None:
        self._timeout = timeout.total_seconds()
        self._small = _Memory(memory)
        self._large = _Memory(large)
        self._heavy = heavy or HeavyWork()

    @asynccontextmanager
    async def read(
        self,
        request: Request,
        *,
        limit: int,
        too_large: TooLarge = framework_too_large,
        vouch: Vouch = _for_anybody,
        holders: Sequence[str] = (),
        timeout: timedelta | None = None,
    ) -> AsyncIterator[bytearray]:
        """Read the whole body. Its memory counts as taken until the block ends.

        *timeout* replaces the reader's. *vouch* is asked about a body over 64 KiB. The memory counts for the shares of
        *holders*, the client first.

        Raises:
            Refusal: the one of *vouch*; the one of *too_large*, 413, over *limit* bytes; 408 too slow or cut off; 503
                no memory left.
        """
        body = _Body(self._small, holders)
        try:
            seconds = self._timeout if timeout is None else timeout.total_seconds()
            await self._fill(body, request, limit, too_large, vouch, seconds)
            weight = BODY_WEIGHT * len(body.content)
            if body.memory is self._large:
                async with self._heavy.room(weight):
                    body.memory.leave(body)
                    yield body.content
            else:
                await body.memory.works(body, weight)
                yield body.content
        finally:
            body.memory.leave(body)

    async def discard(self, request: Request) -> bool:
        """Read and drop a short body. Return False if it is not short: then the connection cannot be used again."""
        if _announced(request) > DISCARDED_BYTES:
            return False
        received = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self._timeout):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > DISCARDED_BYTES:
                        return False
                return True
        return False

    async def _fill(
        self, body: _Body, request: Request, limit: int, too_large: TooLarge, vouch: Vouch, seconds: float
    ) -> None:
        if _announced(request) > max(limit, DISCARDED_BYTES):
            raise too_large(limit)
        if _announced(request) > HEAVY_BYTES:
            await self._admit_large(body, _announced(request), vouch)
        try:
            async with asyncio.timeout(seconds) as body.deadline:
                received = await self._receive(body, request, limit, vouch)
                body.end()
        except TimeoutError:
            if body.gave_way:
                raise _no_memory() from None
            text = f"The body did not arrive within {seconds:g} seconds"
            raise FrameworkRefusal(408, text, code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        except ClientDisconnect:
            raise FrameworkRefusal(408, "The body broke off", code="REQUEST_TIMEOUT", headers=_CLOSE) from None
        if received > limit:
            raise too_large(limit)

    async def _receive(self, body: _Body, request: Request, limit: int, vouch: Vouch) -> int:
        """Return how many bytes came; from *limit* on they are dropped, and at last no more are read."""
        received = 0
        body.take(body.memory.least)
        async for chunk in request.stream():
            received += len(chunk)
            if received > max(limit, DISCARDED_BYTES):
                break
            if received > HEAVY_BYTES and body.memory is self._small:
                await self._admit_large(body, limit, vouch)
            if received <= limit:
                body.take(max(0, received - body.held))
                body.content += chunk
        return received

    async def _admit_large(self, body: _Body, size: int, vouch: Vouch) -> None:
        try:
            await vouch()
            await self._heavy.turn(size)
        except Refusal as refusal:
            refusal.headers = {**refusal.headers, **_CLOSE}
            raise
        body.move(self._large)


def _announced(request: Request) -> int:
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else 0
