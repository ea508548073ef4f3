"""The request to stop a worker, waits that it cuts short, and the last that its storage hears of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Final, Literal, TypeVar

from workers.errors import StorageError, StorageUnavailable
from workers.storage.abilities import TakesLeave
from workers.storage.base import Storage

T = TypeVar("T")

CANCELLED_EACH_SECONDS: Final = 1.0
FAREWELL_SECONDS: Final = 1.0


class Stop:
    """Whether a worker is to stop, and whether without grace; it listens from `listen` to `close`."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._heard: asyncio.Task[Literal[True]] | None = None  # done once it was asked

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the worker to stop; asked again, to stop without grace."""
        if self.asked:
            self._hurry.set()
        self._asked.set()

    def hurry(self) -> None:
        """Skip the grace."""
        self._hurry.set()

    def listen(self) -> None:
        """Cut waits short from now on."""
        self._heard = asyncio.create_task(self._asked.wait())

    def close(self) -> None:
        """Stop listening: nothing is waited for any more."""
        if self._heard is not None:
            self._heard.cancel()

    async def until(self, call: asyncio.Future[T]) -> None:
        """Return when the call is done, or the worker is to stop."""
        assert self._heard is not None
        either: list[asyncio.Future[T] | asyncio.Task[Literal[True]]] = [call, self._heard]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def unless(self, work: Coroutine[object, object, None]) -> bool:
        """Await `work` unless asked to stop, which cuts it short. Returns whether it came to its end."""
        task = asyncio.create_task(work)
        try:
            await self.until(task)
        finally:
            await cancel_all([task])
        if task.cancelled():
            return False
        task.result()
        return True

    async def grace(self, tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
        """Wait until the tasks are done, the time is over, or the grace is skipped."""
        if not tasks:
            return
        waits = [asyncio.create_task(all_done(tasks, seconds)), asyncio.create_task(self._until_hurried())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pending in waits:
                pending.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _until_hurried(self) -> None:
        await self._hurry.wait()


async def all_done(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait until the tasks are done, for at most `seconds`."""
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)


async def cancel_all(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks until they have ended: what a task awaits may swallow a single cancellation."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCELLED_EACH_SECONDS)


def first_failure(group: ExceptionGroup[Exception]) -> Exception:
    """Return the exception that made a worker's tasks end; the others followed from it."""
    failure = group.exceptions[0]
    return first_failure(failure) if isinstance(failure, ExceptionGroup) else failure


async def take_leave(storage: Storage, worker_id: str) -> None:
    """Let the storage list the worker no more; one that cannot, or does not answer soon, lists it for an hour."""
    if not isinstance(storage, TakesLeave):
        return
    with contextlib.suppress(StorageUnavailable, StorageError, TimeoutError):
        async with asyncio.timeout(FAREWELL_SECONDS):
            await storage.farewell(worker_id)
