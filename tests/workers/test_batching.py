"""Concurrent calls that share round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from workers.batching import Batcher
from workers.errors import StorageUnavailable
from workers.testing.steps import PATIENCE


class Doubling:
    """Doubles numbers, each call as soon as `gate` is open; refuses groups with a negative number."""

    def __init__(self, limit: int = 100, calls: int = 1) -> None:
        self.groups: list[list[int]] = []
        self.gate = asyncio.Event()
        self.away = False
        self.batcher = Batcher(self.double, limit, calls=calls)

    async def double(self, items: Sequence[int]) -> list[int]:
        self.groups.append(list(items))
        await self.gate.wait()
        if self.away:
            raise StorageUnavailable("away")
        if any(item < 0 for item in items):
            raise ValueError("negative")
        return [2 * item for item in items]

    async def asked(self, *items: int) -> list[asyncio.Task[int]]:
        """Somebody asks for each, and none has an answer yet."""
        tasks = [asyncio.create_task(self.batcher.ask(item)) for item in items]
        await asyncio.sleep(0)
        return tasks

    async def is_under_way(self) -> None:
        """Somebody is being asked about."""
        async with asyncio.timeout(PATIENCE):
            while not self.groups:
                await asyncio.sleep(0)

    async def answers(self, tasks: Sequence[asyncio.Task[int]]) -> list[int | BaseException]:
        self.gate.set()
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_asks_at_once_shares_a_call() -> None:
    """All that come in the same moment are asked about together, up to the limit; each has its own answer."""
    doubling = Doubling(limit=3)
    assert await doubling.answers(await doubling.asked(1, 2, 3, 4, 5)) == [2, 4, 6, 8, 10]
    assert doubling.groups == [[1, 2, 3], [4, 5]]
    assert await doubling.batcher.ask(6) == 12


async def test_a_full_batch_does_not_wait_for_the_one_before() -> None:
    """As long as fewer calls are under way than may be; what fills no batch shares the next call, as ever."""
    doubling = Doubling(limit=3, calls=2)
    tasks = await doubling.asked(1, 2)
    await doubling.is_under_way()
    tasks += await doubling.asked(3, 4)
    await asyncio.sleep(0)
    assert doubling.groups == [[1, 2]]
    tasks += await doubling.asked(5, 6, 7, 8, 9, 10)
    await asyncio.sleep(0)
    assert doubling.groups == [[1, 2], [3, 4, 5]]
    assert await doubling.answers(tasks) == [2 * item for item in range(1, 11)]
    assert sorted(doubling.groups) == [[1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


async def test_calls_that_are_abandoned_are_all_ended() -> None:
    """Whoever asked knows the error: those that were taken by any call, and those that wait."""
    doubling = Doubling(limit=2, calls=2)
    tasks = await doubling.asked(1, 2, 3, 4, 5)
    await asyncio.sleep(0)
    assert doubling.groups == [[1, 2], [3, 4]]
    doubling.batcher.abandon(StorageUnavailable("over"))
    assert [str(answer) for answer in await doubling.answers(tasks)] == ["over"] * 5
    await doubling.batcher.close()
    assert not doubling.batcher.is_busy


async def test_who_comes_during_a_call_shares_the_next() -> None:
    """There is never more than one call under way."""
    doubling = Doubling()
    early = await doubling.asked(1)
    await doubling.is_under_way()
    late = await doubling.asked(2, 3)
    assert await doubling.answers([*early, *late]) == [2, 4, 6]
    assert doubling.groups == [[1], [2, 3]]


async def test_who_asks_alone_waits_for_no_batch() -> None:
    """The call is made in the asker's own task; what others ask meanwhile is a batch beside it."""
    doubling = Doubling()
    alone = asyncio.create_task(doubling.batcher.ask_at_once(1))
    rest = [asyncio.create_task(doubling.batcher.ask_at_once(item)) for item in (2, 3)]
    await asyncio.sleep(0)
    assert doubling.groups == [[1]]
    late = asyncio.create_task(doubling.batcher.ask_at_once(4))
    assert await doubling.answers([alone, *rest, late]) == [2, 4, 6, 8]
    assert doubling.groups[0] == [1]
    assert sorted(item for group in doubling.groups[1:] for item in group) == [2, 3, 4]
    assert isinstance((await asyncio.gather(doubling.batcher.ask_at_once(-1), return_exceptions=True))[0], ValueError)
    assert await doubling.batcher.ask_at_once(5) == 10


async def test_one_fault_costs_no_neighbour_anything() -> None:
    """What makes a group fail is asked about again one by one."""
    doubling = Doubling()
    one, two, bad, three = await doubling.answers(await doubling.asked(1, 2, -1, 3))
    assert (one, two, three) == (2, 4, 6)
    assert isinstance(bad, ValueError)


async def test_a_storage_that_is_away_is_not_asked_again() -> None:
    """Everybody in the group is told that nothing is known, after one try."""
    doubling = Doubling()
    doubling.away = True
    answers = await doubling.answers(await doubling.asked(1, 2, 3))
    assert [type(answer) for answer in answers] == [StorageUnavailable] * 3
    assert doubling.groups == [[1, 2, 3]]


@pytest.mark.parametrize("leaving", [0, 1, 2], ids=["the first", "the second", "the last"])
async def test_who_is_cancelled_disturbs_nobody(leaving: int) -> None:
    """The others are answered; who left before its turn is not asked about, and nothing is stuck."""
    doubling = Doubling()
    tasks = await doubling.asked(1, 2, 3)
    tasks[leaving].cancel()
    rest = [number for number in (1, 2, 3) if number != leaving + 1]
    assert await doubling.answers([task for task in tasks if task is not tasks[leaving]]) == [2 * n for n in rest]
    assert doubling.groups == [rest]
    assert await doubling.batcher.ask(4) == 8


async def test_who_is_cancelled_under_way_disturbs_nobody() -> None:
    """The call goes on for the others."""
    doubling = Doubling()
    tasks = await doubling.asked(1, 2, 3)
    await doubling.is_under_way()
    tasks[0].cancel()
    assert await doubling.answers(tasks[1:]) == [4, 6]
    assert doubling.groups == [[1, 2, 3]]


async def test_what_must_happen_happens_though_nobody_waits() -> None:
    """Without `skips_cancelled` an item is asked about even if whoever asked was cancelled before its turn."""
    asked: list[list[int]] = []

    async def note(items: Sequence[int]) -> list[int]:
        asked.append(list(items))
        return list(items)

    batcher = Batcher(note, 10, skips_cancelled=False)
    waiting = asyncio.create_task(batcher.ask(1))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await batcher.ask(2) == 2
    assert asked == [[1, 2]]


async def test_what_is_worth_repeating_is_repeated() -> None:
    """The others are told at once why there is no answer."""
    away = [True, True, False]

    async def answer(items: Sequence[int]) -> list[int]:
        if away.pop(0):
            raise StorageUnavailable("away")
        return list(items)

    batcher = Batcher(answer, 10, repeats=lambda item: item > 1)
    given_up, repeated = batcher.put(1), batcher.put(2)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable):
            await given_up
        assert not repeated.done()
        assert await repeated == 2
