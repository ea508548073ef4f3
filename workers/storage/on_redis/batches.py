"""Splitting of batches by jobs per script and bytes per call."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 1_000
"""How many jobs one script handles at most; the server serves nobody else meanwhile."""
PORTION_BYTES: Final = 64 << 20
"""How many bytes of payloads or results one call sends at most, unless a single one is larger."""


def portions(items: Sequence[T], size: Callable[[T], int] = lambda _: 0, at_once: int = AT_ONCE) -> Iterator[list[T]]:
    """Split the items, in order, into portions for one script and one call each."""
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
    """Call `step` with how many it may remove, until it removes fewer; return how many it removed in all."""
    removed = 0
    while removed < limit:
        some = min(limit - removed, AT_ONCE)
        gone = await step(some)
        removed += gone
        if gone < some:
            break
    return removed
