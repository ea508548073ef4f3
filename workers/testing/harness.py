"""What the conformance suite needs to know about a storage, and how it gets one.

Write one `Harness` per storage and run every case with it:

    for case in all_cases():
        async with MyHarness() as harness:
            verdict = await run(case, harness)
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from workers.clock import ManualClock
from workers.storage.base import Capabilities, Storage
from workers.storage.memory import MemorySpace, MemoryStorage


class HarnessFailed(RuntimeError):
    """The harness could not do what a case needs, such as restart the server: nothing is said about the storage."""


class Harness(ABC):
    """A storage under test: opens clients, and lets time pass on the storage's clock.

    One harness serves one case. Leaving the context disconnects every client it opened.
    """

    moment: timedelta = timedelta(milliseconds=150)
    """A delay or lease that cases wait for: short, but several times as long as one call."""
    moves_time: bool = False
    """Whether `advance` costs nothing, so that cases may let hours pass."""
    clock_slack: timedelta = timedelta(0)
    """By how much a time that is read may be off if `moves_time`."""
    restarts: bool = False
    """Whether there is `restart_server`."""
    restartable: bool = False
    """Whether there is a server that `restart_server` could restart, if this harness knew how."""
    cuts: bool = False
    """Whether there is `cut_connections`."""
    fills: bool = False
    """Whether there are `fill` and `make_room`."""
    freezes: bool = False
    """Whether there are `freeze_server` and `thaw_server`."""
    swallows: bool = False
    """Whether there is `swallow`."""
    measures: bool = False
    """Whether there is `entries`."""

    def __init__(self) -> None:
        self._open: list[Storage] = []

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The limits that the storage declares."""

    @abstractmethod
    async def make(self, queue: str) -> Storage:
        """Make a client of the queue that is not connected yet, as separate from every other client as possible."""

    async def open(self, queue: str | None = None) -> Storage:
        """Open a connected client of `queue`, by default of an empty queue that nobody else uses."""
        storage = await self.make(queue or self.unique_queue())
        await storage.connect()
        self._open.append(storage)
        return storage

    async def shut(self, storage: Storage) -> None:
        """Disconnect the client."""
        self._open.remove(storage)
        await storage.disconnect()

    def unique_queue(self) -> str:
        """Return the name of a queue that nobody else uses."""
        return f"case-{uuid.uuid4().hex}"

    def now(self) -> datetime:
        """Return the time on the storage's clock, to within a second."""
        return datetime.now(UTC)

    async def advance(self, by: timedelta) -> None:
        """Let at least `by` pass on the storage's clock."""
        await asyncio.sleep((by + self.capabilities.delay_resolution).total_seconds() + 0.01)

    async def restart_server(self) -> None:
        """Stop the server and start it again with the data it promised to keep (`restarts` only)."""
        raise NotImplementedError(f"{type(self).__name__} declares no restarts")

    async def cut_connections(self) -> None:
        """Make the server close every client's connections and forget their scripts (`cuts` only)."""
        raise NotImplementedError(f"{type(self).__name__} declares no cuts")

    async def fill(self) -> None:
        """Leave the server no memory for what it does not have yet, until `make_room` (`fills` only)."""
        raise NotImplementedError(f"{type(self).__name__} cannot fill its server")

    async def make_room(self) -> None:
        """Give the server memory again (`fills` only)."""
        raise NotImplementedError(f"{type(self).__name__} cannot fill its server")

    async def freeze_server(self) -> None:
        """Let the server do nothing until `thaw_server`, and close no connection (`freezes` only)."""
        raise NotImplementedError(f"{type(self).__name__} cannot freeze its server")

    async def thaw_server(self) -> None:
        """Let the server go on where it was (`freezes` only)."""
        raise NotImplementedError(f"{type(self).__name__} cannot freeze its server")

    async def swallow(self) -> None:
        """Lose what goes over the clients' connections in either direction, and close none (`swallows` only).

        Connections that are made after that work.
        """
        raise NotImplementedError(f"{type(self).__name__} swallows nothing")

    async def swallow_answers(self, over: int | None) -> None:
        """Lose the rest of each answer of more than so many bytes, and its connection; of none, with None.

        No connection is closed (`swallows` only).
        """
        raise NotImplementedError(f"{type(self).__name__} swallows nothing")

    async def entries(self, storage: Storage) -> int:
        """Count the rows, keys, members or other entries that the storage keeps for this queue (`measures` only)."""
        raise NotImplementedError(f"{type(self).__name__} declares no measure")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            await self._open.pop().disconnect()


class MemoryHarness(Harness):
    """`MemoryStorage` on a clock that the cases move; storages of one harness share its `space`."""

    moment = timedelta(seconds=1)
    moves_time = True

    def __init__(self) -> None:
        super().__init__()
        self._clock = ManualClock()
        self.space = MemorySpace(self._clock)

    @property
    def capabilities(self) -> Capabilities:
        return MemoryStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return MemoryStorage(self.space, queue)

    def now(self) -> datetime:
        return self._clock.now()

    async def advance(self, by: timedelta) -> None:
        self._clock.advance(by)
        await asyncio.sleep(0)  # a case that advances until something happens must not keep its own timeout from ending
