"""How a worker is asked to stop, and what it waits for ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Literal, TypeVar

T = TypeVar("T")


class Stop:
    """Whether a worker shall stop, and whether without grace; it listens from `listen` to `close`."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._heard: asyncio.Task[Literal[True]] | None = None  # done once it was asked

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """The worker shall stop; asked again, without grace."""
        if self.asked:
            self._hurry.set()
        self._asked.set()

    def hurry(self) -> None:
        """There is no grace."""
        self._hurry.set()

    def listen(self) -> None:
        """What is waited for ends early from now on."""
        self._heard = asyncio.create_task(self._asked.wait())

    def close(self) -> None:
        """Nothing is waited for any more."""
        if self._heard is not None:
            self._heard.cancel()

    async def until(self, call: asyncio.Future[T]) -> None:
        """Return when the call is done, or the worker shall stop."""
        assert self._heard is not None
        either: list[asyncio.Future[T] | asyncio.Task[Literal[True]]] = [call, self._heard]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def unless(self, work: Coroutine[object, object, None]) -> bool:
        """Await `work`; being asked to stop cuts it short. Whether it came to its end."""
        task = asyncio.create_task(work)
        try:
            await self.until(task)
        finally:
            while not task.done():
                task.cancel()
                # Again and again: a single cancellation can be swallowed by what the task awaits.
                await asyncio.wait([task], timeout=1)
        if task.cancelled():
            return False
        task.result()
        return True

    async def grace(self, tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
        """The tasks are done, or had that long, or there is no grace."""
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
    """The tasks are done, or had that long."""
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)


def first_failure(group: ExceptionGroup[Exception]) -> Exception:
    """What made the tasks of a worker end; the others followed from it."""
    failure = group.exceptions[0]
    return first_failure(failure) if isinstance(failure, ExceptionGroup) else failure
