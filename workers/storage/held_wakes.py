"""Wake-ups that wait for the end of a block, so that many enqueues wake those who wait once.

Theory of operation. An open block is known to the task that opened it, and to those begun inside, by a context
variable. An enqueue of theirs tells the storage to wake nobody, and notes the names of its jobs. The end of the block,
however it comes about, wakes for all names at once. A task that outlives the block wakes by itself again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from workers.errors import WorkersError
from workers.jobs import NewJob

Wake: TypeAlias = Callable[[Collection[str]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Block:
    owner: HeldWakes
    names: set[str] = field(default_factory=set)
    is_open: bool = True


_blocks: Final[ContextVar[tuple[_Block, ...]]] = ContextVar("workers-held-wakes", default=())


def some_are_held() -> bool:
    """Tell whether an enqueue made here may belong to a block, and so must not share a call with others."""
    return any(block.is_open for block in _blocks.get())


class HeldWakes:
    """The blocks on one storage."""

    @asynccontextmanager
    async def hold(self, wake: Wake) -> AsyncIterator[None]:
        """Let enqueues wake nobody until the block ends; one inside of another leaves that to the outer one.

        `wake` wakes those who wait for jobs of these names.

        Raises:
            StorageUnavailable: nobody may have been woken, unless the block raised an error of its own.
        """
        block = _Block(self)
        before = _blocks.set((*_blocks.get(), block))
        try:
            yield
        except BaseException:
            with suppress(WorkersError):
                await self._end(block, wake)
            raise
        else:
            await self._end(block, wake)
        finally:
            _blocks.reset(before)

    async def _end(self, block: _Block, wake: Wake) -> None:
        block.is_open = False
        outer = self._current()
        if outer is not None:
            outer.names |= block.names
        elif block.names:
            await asyncio.shield(asyncio.ensure_future(wake(block.names)))

    def held(self, jobs: Iterable[NewJob]) -> bool:
        """Tell whether the enqueue of these jobs is to wake nobody, because a block will."""
        block = self._current()
        if block is not None:
            block.names.update(job.name for job in jobs)
        return block is not None

    def _current(self) -> _Block | None:
        return next((block for block in reversed(_blocks.get()) if block.owner is self and block.is_open), None)
