"""The slots of one worker: how many are free, and which attempts go on without one.

Theory of operation. The claim loop takes a slot for every claim. The attempt gives it back when it has ended, or
earlier, by going on in overtime. The event loop alone takes slots and ends attempts, but a plain function leaves its
slot from a thread of its own, so whatever changes is changed under a lock. The claim loop reads without it: since it
looked, more slots may have become free, never fewer, for nobody else takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Slots:
    """`count` slots, and room for `overtime` attempts at once beside them; attempts are known by their tokens."""

    def __init__(self, count: int, overtime: int) -> None:
        self._count = count
        self._room = overtime
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._overtime: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.freed = asyncio.Event()
        """Set when a slot becomes free; whoever waits for the next one clears it."""

    @property
    def free(self) -> int:
        """How many more attempts may start now."""
        return self._count - len(self._taken)

    def take(self, token: str) -> None:
        """The attempt is in a slot; in the event loop only."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._taken.add(token)

    def leave(self, token: str) -> bool:
        """The attempt goes on in overtime, if it did not before; from any thread, at once.

        False: there is no room, or no such attempt.
        """
        with self._lock:
            if token not in self._taken:
                return token in self._overtime
            if len(self._overtime) >= self._room:
                return False
            self._taken.remove(token)
            self._overtime.add(token)
        self._tell()
        return True

    def end(self, token: str) -> None:
        """The attempt has ended, in its slot or in overtime; in the event loop only."""
        with self._lock:
            self._overtime.discard(token)
            if token not in self._taken:
                return
            self._taken.remove(token)
        self.freed.set()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived its worker
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.freed.set)
