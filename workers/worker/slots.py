"""The slots of one worker: how many are free, and which attempts run without one.

Theory of operation. The claim loop takes a slot for every claim. The attempt gives it back when it ends, or earlier, by
going on in overtime. Only the event loop takes slots and ends attempts, but a plain function leaves its slot from a
thread of its own, so every change is made under a lock. The claim loop reads without the lock: since it looked, more
slots may have become free, but never fewer, because nobody else takes them.

A handler that has ended needs its slot no more, though its end is not stored yet. As many such attempts as there are
slots keep none, so that claims and settlements travel at the same time. A worker with a single slot does one after the
other: its next job begins when the end of the last one is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Final

from workers.checks import check_whole

MOST_SLOTS: Final = 1_000_000


def check_slots(concurrency: int, overtime: int) -> None:
    """Accept at least one slot.

    Raises:
        ValueError: it is none, or no whole number.
    """
    check_whole("concurrency", concurrency, 1, MOST_SLOTS)
    check_whole("overtime", overtime, 0, MOST_SLOTS)


class Slots:
    """`count` slots, and room for `overtime` attempts without a slot; attempts are known by their tokens."""

    def __init__(self, count: int, overtime: int) -> None:
        self.count = count
        self._room = overtime
        self._lock = threading.Lock()
        self._ahead = count if count > 1 else 0  # ended, and not stored yet, without a slot
        self._taken: set[str] = set()
        self._ending: set[str] = set()
        self._overtime: set[str] = set()
        self._reserved = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.freed = asyncio.Event()
        """Set when a slot becomes free; the one who waits for the next clears it."""

    @property
    def free(self) -> int:
        """How many more attempts may start now."""
        return self.free_without(())

    def free_without(self, tokens: Collection[str]) -> int:
        """Return how many more attempts may start once the ends of these are stored."""
        ending = len(self._ending) - sum(token in self._ending for token in tokens)
        return max(0, self.count - self._reserved - len(self._taken) - max(0, ending - self._ahead))

    @contextlib.contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Keep so many free slots for claims that are under way; in the event loop only."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._note_free()

    def take(self, token: str) -> None:
        """Put the attempt into a slot; in the event loop only."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._taken.add(token)

    def leave(self, token: str) -> bool:
        """Let the attempt go on in overtime, unless it does already; from any thread, without blocking.

        Returns False when there is no room, or no such attempt.
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

    def begin_end(self, token: str) -> None:
        """Note that the handler has ended and its end is about to be stored; in the event loop only."""
        with self._lock:
            if token in self._taken:
                self._taken.remove(token)
                self._ending.add(token)
        self._note_free()

    def end(self, token: str) -> None:
        """Give back what the attempt held, a slot or room for overtime; in the event loop only."""
        with self._lock:
            for attempts in (self._taken, self._ending, self._overtime):
                attempts.discard(token)
        self._note_free()

    def _note_free(self) -> None:
        if not self.freed.is_set() and self.free:  # it is mostly known
            self.freed.set()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived its worker
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.freed.set)
