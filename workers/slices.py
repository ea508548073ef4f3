"""Long work in the event loop, in slices between which everybody else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

from workers.clock import monotonic

T = TypeVar("T")
R = TypeVar("R")

SLICE_SECONDS: Final = 0.005
"""After this time the others go on."""


async def in_slices(make: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what `make` returns for each of the items, as `sliced` yields them, without its cost for each."""
    made, began = list[R](), monotonic()
    for item in items:
        if monotonic() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = monotonic()
        made.append(make(item))
    return made


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and now and then let the others go on."""
    began = monotonic()
    for item in items:
        if monotonic() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = monotonic()
        yield item
