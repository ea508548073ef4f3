"""What is done again and again beside the workers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from federation.runtime.tending import LONGEST_PAUSE, Tending
from tests.simulation.loop import VirtualLoop

SECOND, QUARTER = timedelta(seconds=1), timedelta(seconds=0.25)


class Ticks:
    """Remembers when it was called, and raises as often as asked."""

    def __init__(self, *, failures: int = 0, takes: float = 0) -> None:
        self.times: list[float] = []
        self._failures = failures
        self._takes = takes

    async def tick(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._takes)
        if len(self.times) <= self._failures:
            raise ConnectionError


@pytest.fixture
def during() -> Iterator[Callable[[float, Tending], None]]:
    """Tends for so many virtual seconds, and stops."""
    loop = VirtualLoop()

    async def tend(seconds: float, tending: Tending) -> None:
        tending.start()
        tending.start()
        await asyncio.sleep(seconds)
        await tending.stop()

    yield lambda seconds, tending: loop.run_until_complete(tend(seconds, tending))
    assert not asyncio.all_tasks(loop)
    loop.close()


During = Callable[[float, Tending], None]


def test_each_is_done_at_its_own_interval(during: During) -> None:
    """Started twice, each is done once; one that takes long delays itself alone."""
    each_second, quarterly, long = Ticks(), Ticks(), Ticks(takes=1)
    during(3.1, Tending({each_second.tick: SECOND, quarterly.tick: QUARTER, long.tick: QUARTER}))
    assert each_second.times == [1, 2, 3]
    assert quarterly.times == [number / 4 for number in range(1, 13)]
    assert long.times == [0.25, 1.5, 2.75]


def test_one_that_fails_is_done_less_often_and_stops_no_other(during: During) -> None:
    """Its pause doubles up to half a minute, until it succeeds."""
    failing, other = Ticks(failures=7), Ticks()
    during(130, Tending({failing.tick: SECOND, other.tick: SECOND}))
    pauses = [after - before for before, after in zip([0, *failing.times], failing.times, strict=False)]
    assert pauses[:10] == [1, 2, 4, 8, 16, LONGEST_PAUSE.total_seconds(), LONGEST_PAUSE.total_seconds(), 30, 1, 1]
    assert other.times == list(range(1, 130))


def test_a_stop_ends_all_even_in_the_middle(during: During) -> None:
    """No task of them is left, and it may be started again."""
    ticks = Ticks(takes=100)
    tending = Tending({ticks.tick: SECOND})
    during(2, tending)
    during(2, tending)
    assert ticks.times == [1, 3]


def test_none_is_done_before_what_they_wait_for(during: During) -> None:
    """Each is put off as if it had failed itself, and then done."""
    ready, ticks = Ticks(failures=2), Ticks()
    during(8, Tending({ticks.tick: SECOND}, ready=ready.tick))
    assert ready.times[:3] == [1, 3, 7]
    assert ticks.times == [7]
