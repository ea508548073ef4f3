"""Work that many ask for at once is done once, and ends when its owner closes."""

from __future__ import annotations

import asyncio

import pytest

from federation.base.cache import SingleFlight


async def test_closing_ends_what_nobody_waits_for_any_more() -> None:
    """After `close` no task of it runs on, not even one that was forgotten."""
    flight: SingleFlight[None] = SingleFlight()
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    waiters = [asyncio.create_task(flight.run("a", work))]
    await asyncio.sleep(0)
    flight.forget("a")
    waiters.append(asyncio.create_task(flight.run("a", work)))
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    await flight.close()
    assert ended == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await waiters[1]


async def test_what_is_asked_for_after_forgetting_starts_anew() -> None:
    """Those who wait get what they asked for; the next one gets new work."""
    flight: SingleFlight[int] = SingleFlight()
    go_on = asyncio.Event()
    outcomes = iter([1, 2])

    async def work() -> int:
        outcome = next(outcomes)
        await go_on.wait()
        return outcome

    first, also_first = (asyncio.create_task(flight.run("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    flight.forget("a")
    second = asyncio.create_task(flight.run("a", work))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(first, also_first, second) == [1, 1, 2]
