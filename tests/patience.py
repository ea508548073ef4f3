"""How long tests wait for what must happen. It says nothing of how quickly it does: a machine may be busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS: Final = 120.0
"""For one thing to happen: a start, an answer, a stop. Only a failure ever waits as long."""

LONG_PATIENCE_SECONDS: Final = 600.0
"""For a whole story of processes that are killed and started again."""


async def until(is_so: Callable[[], object], *, patience: float = PATIENCE_SECONDS) -> None:
    """It has become so; `is_so` may be a coroutine function."""

    async def look() -> object:
        found = is_so()
        return await found if isawaitable(found) else found

    await eventually(look, bool, patience=patience)


async def eventually(
    look: Callable[[], Awaitable[T]], holds: Callable[[T], object], *, patience: float = PATIENCE_SECONDS
) -> T:
    """What `look` answered when it held, asked again and again: at first often, so that what is quick stays so."""
    deadline, pause = time.monotonic() + patience, 0.002
    while True:
        async with asyncio.timeout(patience):
            found = await look()
        if holds(found):
            return found
        assert time.monotonic() < deadline, f"after {patience:g} s there was still: {found!r}"
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, 0.05)
