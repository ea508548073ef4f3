"""Batches cut into what one script shall handle and one call shall carry."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 1_000
"""Jobs that one script handles at most, during which the server serves nobody else."""
PORTION_BYTES: Final = 64 << 20
"""Payloads or results that one call sends at most, unless it is a single one."""


def portions(items: Sequence[T], size: Callable[[T], int] = lambda _: 0, at_once: int = AT_ONCE) -> Iterator[list[T]]:
    """The items in order, as many at a time as one script shall handle and one call shall carry."""
    portion: list[T] = []
    carried = 0
    for item in items:
        if portion and (len(portion) == at_once or carried + size(item) > PORTION_BYTES):
            yield portion
            portion, carried = [], 0
        portion.append(item)
        carried += size(item)
    if portion:
        yield portion


async def in_steps(step: Callable[[int], Awaitable[int]], limit: int = sys.maxsize) -> int:
    """How many `step` has removed in all: it is told how many it may each time, until it finds fewer."""
    removed = 0
    while removed < limit:
        some = min(limit - removed, AT_ONCE)
        gone = await step(some)
        removed += gone
        if gone < some:
            break
    return removed
