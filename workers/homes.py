"""Which event loop, of which process, something belongs to that cannot leave it: sockets, tasks, locks."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
        """The running loop, in this process."""
        return cls(asyncio.get_running_loop())

    @property
    def is_here(self) -> bool:
        """Whether this is called in that loop, in that process."""
        return self.pid == os.getpid() and asyncio.get_running_loop() is self.loop

    @property
    def is_gone(self) -> bool:
        """Whether nothing can run there any more: the loop is closed, or was another process's."""
        return self.pid != os.getpid() or self.loop.is_closed()


def at_loop_end(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """`close` is awaited when the running loop is shut down, as `asyncio.run` does, or the answer is forgotten.

    Hold on to the answer. A loop that is closed without a shutdown calls nothing.
    """
    waiting = _until_the_end(close)
    # A loop looks after the asynchronous generators that were begun in it: it closes them when it is shut down.
    with contextlib.suppress(StopIteration):
        waiting.__anext__().send(None)
    return waiting


async def _until_the_end(close: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # nobody is left who could do anything about it
            async with asyncio.timeout(CLOSING_SECONDS):
                await close()
