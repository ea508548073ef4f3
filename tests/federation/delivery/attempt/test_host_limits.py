"""Turns at servers, and the room for attempts that wait for them outside the worker's slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import pytest

from db import DeliveryState, HoldReason
from federation.delivery.attempt.host_limits import (
    LONGEST_PAUSE,
    MAX_REMEMBERED,
    SHORTEST_PAUSE,
    SILENT_FIRST_BYTE,
    SILENT_FOR,
    Busy,
    HostLimits,
    Turn,
)
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import hang
from tests.peer import Peer, acquaint

B_URL, C_URL = "https://b.example", "https://c.example"
NEVER, AT_ONCE = timedelta(days=1), timedelta(0)
FEW = 5
"""Attempts of 15 s at a server that hangs, while 200 others are made."""


class Slots:
    """A worker's side: how many attempts have left their slots."""

    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> bool:
        self.left += 1
        return True


@asynccontextmanager
async def held(
    limits: HostLimits, url: str = B_URL, *, slots: Slots | None = None, size: int = 1
) -> AsyncIterator[Turn]:
    async with limits.turn(url, size=size, leave_slot=(slots or Slots()).leave) as turn:
        yield turn


async def once(
    limits: HostLimits, url: str = B_URL, *, answered: bool | None = True, slots: Slots | None = None
) -> None:
    async with held(limits, url, slots=slots) as turn:
        turn.answered = answered


async def known_as_quick(limits: HostLimits, *urls: str) -> None:
    for url in urls:
        await once(limits, url)


async def settle() -> None:
    """Whatever can happen without time passing has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_new_server_gets_one_attempt_at_a_time_and_no_slot_for_long() -> None:
    """The first leaves its slot after a moment, and so does who waits behind it."""
    limits, slots = HostLimits(per_server=3, most=10, quick=NEVER, new=AT_ONCE, usual=AT_ONCE), Slots()
    async with held(limits, slots=slots) as turn:
        waiting = asyncio.create_task(once(limits, slots=slots))
        await settle()
        assert (slots.left, limits.outside, waiting.done()) == (2, 2, False)
        turn.answered = True
    await waiting
    assert limits.outside == 0


async def test_how_long_a_new_server_may_hold_a_slot_goes_by_what_others_take() -> None:
    """Where others take milliseconds, one that hangs does not hold a slot for as long as ten of them."""
    limits, slots = HostLimits(per_server=1, most=10, new=AT_ONCE, usual=NEVER), Slots()
    async with held(limits, slots=slots):
        await settle()
        assert slots.left == 0
    for _ in range(1000):
        await once(limits, C_URL)
    async with held(limits, "https://d.example", slots=slots):
        while not slots.left:
            await asyncio.sleep(0.001)


async def test_a_quick_server_has_so_many_turns_and_keeps_its_slots() -> None:
    """Beyond them attempts wait in order, in their slots."""
    limits, slots, order = HostLimits(per_server=2, most=10, quick=NEVER), Slots(), list[int]()
    await known_as_quick(limits, B_URL)
    started = asyncio.Event()

    async def attempt(number: int) -> None:
        async with held(limits, slots=slots) as turn:
            order.append(number)
            await started.wait()
            turn.answered = True

    attempts = [asyncio.create_task(attempt(number)) for number in range(5)]
    await settle()
    assert order == [0, 1]
    started.set()
    await asyncio.gather(*attempts)
    assert order == [0, 1, 2, 3, 4]
    assert slots.left == 0


async def test_a_first_quick_answer_gives_the_server_all_its_turns() -> None:
    """Who waited behind the first goes on at once, as many as may."""
    limits, running = HostLimits(per_server=2, most=10, quick=NEVER), list[int]()
    go_on = asyncio.Event()

    async def attempt(number: int) -> None:
        async with held(limits) as turn:
            running.append(number)
            await go_on.wait()
            turn.answered = True

    async with held(limits) as turn:
        attempts = [asyncio.create_task(attempt(number)) for number in range(3)]
        await settle()
        assert running == []
        turn.answered = True
    await settle()
    assert running == [0, 1]
    go_on.set()
    await asyncio.gather(*attempts)


async def test_an_attempt_that_takes_long_leaves_its_slot() -> None:
    """Also at a server that was quick; and the next answer decides again."""
    limits, slots = HostLimits(per_server=1, most=10, quick=timedelta(milliseconds=1), usual=AT_ONCE), Slots()
    async with held(limits) as turn:
        turn.answered = True
    limits._servers[B_URL].quick = True  # as a real answer in under a millisecond would have it
    async with held(limits, slots=slots) as turn:
        while not slots.left:
            await asyncio.sleep(0.001)
        assert limits.outside == 1
        turn.answered = True
    assert not limits._servers[B_URL].quick


async def test_no_answer_ends_the_wait_of_all_behind() -> None:
    """They are told to stay away, and the server is suspect: its next attempt has less time to get an answer."""
    limits = HostLimits(per_server=1, most=10, quick=NEVER)
    async with held(limits) as turn:
        assert turn.first_byte is None
        waiting = [asyncio.create_task(once(limits)) for _ in range(3)]
        await settle()
        turn.answered = False
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [Busy] * 3
    async with held(limits) as turn:
        assert turn.first_byte == SILENT_FIRST_BYTE
        turn.answered = True
    async with held(limits) as turn:
        assert turn.first_byte is None


async def test_a_server_is_taken_for_silent_for_a_while_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has become slow would never be given the time that it takes; nor one whose answers took long before."""
    limits, loop = HostLimits(per_server=1, most=10, quick=NEVER), asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    async with held(limits) as turn:
        turn.answered, turn.waited = True, 4.0
    async with held(limits) as turn:
        turn.answered = False
    async with held(limits) as turn:
        assert turn.first_byte == timedelta(seconds=8)
        turn.answered = False
    now += SILENT_FOR.total_seconds()
    async with held(limits) as turn:
        assert turn.first_byte is None


async def test_a_fault_of_ours_says_nothing_of_the_server() -> None:
    """It stays what it was."""
    limits = HostLimits(per_server=1, most=10, quick=NEVER)
    await known_as_quick(limits, B_URL)
    slots = Slots()
    await once(limits, answered=None)
    await once(limits, slots=slots)
    assert slots.left == 0


async def test_without_room_an_attempt_is_sent_away() -> None:
    """By number and by size; a quick server's is not."""
    limits = HostLimits(per_server=3, most=2, most_bytes=100, quick=NEVER, new=AT_ONCE, usual=AT_ONCE)
    await known_as_quick(limits, C_URL)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(held(limits, "https://1.example"))
        await settle()
        with pytest.raises(Busy):
            await stack.enter_async_context(held(limits, "https://2.example", size=100))
        await stack.enter_async_context(held(limits, "https://3.example", size=99))
        await settle()
        with pytest.raises(Busy):
            await stack.enter_async_context(held(limits, "https://4.example", size=0))
        await stack.enter_async_context(held(limits, C_URL))
    assert limits.outside == 0
    await once(limits, "https://4.example")


async def test_one_server_has_a_fifth_of_the_room() -> None:
    """Beyond that a known slow one's attempts are sent away, and others find room."""
    limits = HostLimits(per_server=1, most=10, quick=timedelta(0))
    await once(limits)  # known, and no answer is quick
    async with held(limits):
        waiting = asyncio.create_task(once(limits))
        await settle()
        with pytest.raises(Busy):
            await once(limits)
        await once(limits, C_URL)
    await waiting


async def test_the_more_are_sent_away_the_longer_they_stay() -> None:
    """From five seconds to ten minutes, a quarter more or less."""
    limits = HostLimits(per_server=1, most=1, quick=NEVER, new=AT_ONCE, usual=AT_ONCE)
    pauses = list[timedelta]()
    async with held(limits, C_URL):
        await settle()
        for _ in range(2_000):
            with pytest.raises(Busy) as busy:
                await once(limits)
            pauses.append(busy.value.pause)
    assert SHORTEST_PAUSE * 0.75 <= pauses[0] <= SHORTEST_PAUSE * 1.25
    assert LONGEST_PAUSE * 0.75 <= pauses[-1] <= LONGEST_PAUSE * 1.25


async def test_an_old_crowd_does_not_lengthen_pauses() -> None:
    """Once the server has answered quickly, whoever is sent away next stays as short a time as the first did."""
    limits = HostLimits(per_server=1, most=1, quick=NEVER, new=AT_ONCE, usual=AT_ONCE)
    async with held(limits, C_URL):
        await settle()
        for _ in range(2_000):
            with pytest.raises(Busy):
                await once(limits)
    await once(limits)
    await once(limits, answered=False)
    async with held(limits, C_URL):
        await settle()
        with pytest.raises(Busy) as busy:
            await once(limits)
    assert busy.value.pause <= SHORTEST_PAUSE * 1.25


async def test_a_turn_passed_to_one_who_gave_up_is_passed_on() -> None:
    """A cancelled waiter neither keeps a turn nor loses one."""
    limits = HostLimits(per_server=1, most=10, quick=NEVER)
    async with held(limits) as turn:
        first, second = asyncio.create_task(once(limits)), asyncio.create_task(once(limits))
        await settle()
        turn.answered = True
    first.cancel()  # in the very turn of the loop in which it was handed the other turn
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    await once(limits)
    assert limits.outside == 0


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyboardInterrupt])
async def test_a_turn_comes_back_however_the_attempt_ends(error: type[BaseException]) -> None:
    """An exception or a cancellation frees the place."""
    limits = HostLimits(per_server=1, most=1, quick=NEVER)
    with pytest.raises(error):
        async with held(limits):
            raise error
    await once(limits)
    assert limits.outside == 0


async def test_what_is_remembered_is_bounded() -> None:
    """The server that was longest not heard of is forgotten first."""
    limits = HostLimits(per_server=1, most=10, quick=NEVER)
    for number in range(MAX_REMEMBERED + 5):
        await once(limits, f"https://{number}.example")
    assert len(limits._servers) == MAX_REMEMBERED


@pytest.mark.spread("queue_settings")
@pytest.mark.usefixtures("queue_settings")
async def test_hanging_servers_hold_up_nobody_else(
    make_settings: MakeSettings, peer: Peer, queue_settings: dict[str, object]
) -> None:
    """200 deliveries to a healthy server, behind 200 to one that never answers, arrive while that one hangs.

    It has one attempt at a time, a few if the machine is slow; what found no room to wait for it is held. So are some
    of the others, for a moment, where the healthy server's first answer took longer than a new server's turn.
    """
    settings = make_settings(
        federation_delivery_concurrency=10, federation_overtime=50, federation_lease="30s", **queue_settings
    )
    federation = Federation(settings)
    await acquaint(federation, peer)
    async with Peer(generate_own_keys()) as sick:
        sick.server.default = hang()
        await acquaint(federation, sick)
        async with Site(federation) as site:
            waiting = await site.owe_posts(sick, 200)
            healthy = await site.owe_posts(peer, 200)
            await site.ended(*healthy)
            kept_back = [row for delivery in healthy if (row := (await site.fate(delivery)).row) is not None]
            assert {(row.held_reason, row.attempts) for row in kept_back} <= {(HoldReason.BUSY, 0)}
            assert len(kept_back) <= 10, "no more than were in the slots before the first answer"
            rows = [(await site.fate(delivery)).row for delivery in waiting]
            assert {(row.state, row.held_reason) for row in rows if row is not None} <= {
                (DeliveryState.READY, None),
                (DeliveryState.HELD, HoldReason.BUSY),
                (DeliveryState.HELD, HoldReason.SERVER),
            }
            assert sum(row.attempts for row in rows if row is not None) <= FEW
            await site.stop(skip_grace=True)  # the hanging one would use all of it
        await federation.close()

    assert len(peer.applied) == 200 - len(kept_back)
    assert peer.replayed == 0
    assert 1 <= len(sick.deliveries) <= FEW
