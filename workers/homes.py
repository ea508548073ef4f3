"""The event loop and process that things belong to which cannot leave them: sockets, tasks, locks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Self

CLOSING_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """An event loop and the process it runs in. A fork copies the loop, but not what runs it."""

    loop: asyncio.AbstractEventLoop
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def here(cls) -> Self:
        """Return the running loop, in this process."""
        return cls(asyncio.get_running_loop())

    @property
    def is_here(self) -> bool:
        """Whether this is called in that loop, in that process."""
        return self.pid == os.getpid() and asyncio.get_running_loop() is self.loop

    @property
    def is_inherited(self) -> bool:
        """Whether it is a fork's copy of what belongs to the parent."""
        return self.pid != os.getpid()

    @property
    def is_gone(self) -> bool:
        """Whether nothing can run there any more: the loop is closed, or was another process's."""
        return self.pid != os.getpid() or self.loop.is_closed()


class ForkLock:
    """A lock that a fork's child finds free, even if a thread of the parent held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_inherited: Final[list[object]] = []


def keep_inherited(thing: object) -> None:
    """Keep `thing`, a copy that a fork made, for good: parent and child share its descriptors.

    Destroying it would remove them from the selector of the parent's loop, which would then get no answers any more.
    """
    _inherited.append(thing)


class AtLoopEnd:
    """Awaits `close` when the running loop is shut down, or when nobody refers to this object any more.

    `asyncio.run` shuts its loop down. A loop that is closed without a shutdown calls nothing.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._closers = [close]
        # A loop closes the asynchronous generators that were begun in it when it is shut down.
        self._waiting = _until_the_end(self._closers)
        with contextlib.suppress(StopIteration):
            self._waiting.__anext__().send(None)

    def dismiss(self) -> None:
        """Forget `close`: nothing needs to be closed any more."""
        self._closers.clear()


async def _until_the_end(closers: list[Callable[[], Awaitable[None]]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # nobody is left who could do anything about it
            async with asyncio.timeout(CLOSING_SECONDS):
                for close in closers:
                    await close()
