"""What has happened in a database, told to the event loops of this process.

Theory of operation. Commits are announced by the thread that made or noticed them; waiters and subscribers live in
event loops, of which a process may have several, one after another or side by side. Each pair of queue and loop has
one `Ears`, touched in its loop alone; the registry of them is shared between threads and guarded by a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from workers.jobs import JobEventKind
from workers.storage.broadcast import Broadcast

Events: TypeAlias = Sequence[tuple[JobEventKind, str]]


class Ears:
    """One event loop's waiters for and subscribers of one queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.users = 0
        self.subscribers = 0
        self.broadcast = Broadcast()
        self.bells: set[asyncio.Event] = set()

    def hear(self, events: Events, wake: bool) -> None:
        """Subscribers have the events; with `wake`, every waiter looks again."""
        for kind, job_id in events:
            self.broadcast.publish(kind, job_id)
        if wake:
            for bell in self.bells:
                bell.set()

    @contextmanager
    def bell(self) -> Iterator[asyncio.Event]:
        """An event that every wake-up sets, until the context ends."""
        bell = asyncio.Event()
        self.bells.add(bell)
        try:
            yield bell
        finally:
            self.bells.discard(bell)


class Notices:
    """All ears on one database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ears: dict[tuple[int, asyncio.AbstractEventLoop], Ears] = {}

    @contextmanager
    def listen(self, queue: int, *, subscribe: bool = False) -> Iterator[Ears]:
        """The running loop's ears for `queue`, which hear everything announced until the context ends."""
        loop = asyncio.get_running_loop()
        with self._lock:
            ears = self._ears.setdefault((queue, loop), Ears(loop))
            ears.users += 1
            ears.subscribers += subscribe
        try:
            yield ears
        finally:
            with self._lock:
                ears.users -= 1
                ears.subscribers -= subscribe
                if not ears.users:
                    self._ears.pop((queue, loop), None)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits or listens."""
        return bool(self._ears)

    def subscribed(self) -> set[int]:
        """The queues that somebody subscribed to."""
        with self._lock:
            return {queue for (queue, _), ears in self._ears.items() if ears.subscribers}

    def awaited(self) -> dict[int, set[str]]:
        """The jobs with subscribers of their own, by queue."""
        with self._lock:
            found: dict[int, set[str]] = {}
            for (queue, _), ears in self._ears.items():
                found.setdefault(queue, set()).update(ears.broadcast.awaited())
            return found

    def tell(self, queue: int, events: Events, *, wake: bool) -> None:
        """Whoever listens to `queue` hears of it; from any thread."""
        if not events and not wake:
            return
        with self._lock:
            found = [(key, ears) for key, ears in self._ears.items() if key[0] == queue]
        self._deliver(found, events, wake)

    def wake_all(self) -> None:
        """Every waiter of every queue looks again; from any thread."""
        with self._lock:
            found = list(self._ears.items())
        self._deliver(found, (), True)

    def _deliver(
        self, found: Sequence[tuple[tuple[int, asyncio.AbstractEventLoop], Ears]], events: Events, wake: bool
    ) -> None:
        for key, ears in found:
            try:
                ears.loop.call_soon_threadsafe(ears.hear, events, wake)
            except RuntimeError:  # the loop was closed under its waiters
                with self._lock:
                    self._ears.pop(key, None)
