"""How many attempts one server may have, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from db import AttemptOutcome
from federation.app import Federation
from federation.delivery.errors import Parked
from federation.delivery.slots import MAX_REMEMBERED, ServerSlots
from federation.protocol.keys import generate_own_keys
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import Exchange, Received, hang
from tests.peer import Peer, acquaint
from workers import JobState

B_URL, C_URL = "https://b.example", "https://c.example"


async def test_a_server_has_so_many_slots_and_no_more() -> None:
    """The attempt beyond is parked for about a second, uncounted; another server's is not."""
    slots = ServerSlots(2)
    async with slots.take(B_URL, "1"), slots.take(B_URL, "2"):
        with pytest.raises(Parked) as parked:
            async with slots.take(B_URL, "3"):
                pass
        async with slots.take(C_URL, "4"):
            pass

    assert parked.value.delay is not None
    assert timedelta(seconds=0.75) <= parked.value.delay <= timedelta(seconds=1.25)
    assert (parked.value.counted, parked.value.postponed) == (False, True)
    assert B_URL in str(parked.value)


async def test_a_quick_server_is_worth_waiting_for() -> None:
    """Ten attempts at once for a server of one slot all get their turn, in order, where each is quick."""
    slots, turns = ServerSlots(1), list[int]()

    async def attempt(number: int) -> None:
        async with slots.take(B_URL, str(number)):
            turns.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(attempt(number) for number in range(10)))
    assert turns == list(range(10))


async def test_nobody_waits_for_a_slow_server() -> None:
    """Who waited in vain was the last to wait: from then on everybody is parked at once, until an attempt is quick."""
    slots = ServerSlots(1)
    async with slots.take(B_URL, "1"):
        with pytest.raises(Parked):
            await _take_once(slots, "2")
        with pytest.raises(Parked):
            _take_once(slots, "3").send(None)  # at once: the first step of the coroutine already raises

    async with slots.take(B_URL, "4"):  # quick
        pass
    async with slots.take(B_URL, "5"):
        waiting = asyncio.create_task(_take_once(slots, "6"))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_a_slot_passed_to_one_who_gave_up_is_passed_on() -> None:
    """A cancelled waiter neither keeps a slot nor loses one."""
    slots = ServerSlots(1)
    async with slots.take(B_URL, "1"):
        first, second = (asyncio.create_task(_take_once(slots, number)) for number in ("2", "3"))
        await asyncio.sleep(0)
    first.cancel()  # in the very turn in which the slot was handed to it
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    await _take_once(slots, "4")


async def _take_once(slots: ServerSlots, delivery_id: str) -> None:
    async with slots.take(B_URL, delivery_id):
        pass


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, KeyboardInterrupt])
async def test_a_slot_comes_back_however_the_attempt_ends(error: type[BaseException]) -> None:
    """An exception or a cancellation frees the slot."""
    slots = ServerSlots(1)
    with pytest.raises(error):
        async with slots.take(B_URL, "1"):
            raise error

    async with slots.take(B_URL, "2"):
        pass


async def test_a_parked_delivery_is_noted_once_until_it_had_a_slot() -> None:
    """However often it is parked, the log hears of it once, and again after a real attempt."""
    slots = ServerSlots(1)

    assert [slots.note_parked(B_URL, "1"), slots.note_parked(B_URL, "1"), slots.note_parked(B_URL, "2")] == [
        True,
        False,
        True,
    ]
    async with slots.take(B_URL, "1"):
        pass
    assert [slots.note_parked(B_URL, "1"), slots.note_parked(B_URL, "2")] == [True, False]


def test_what_is_remembered_is_bounded() -> None:
    """The oldest parked deliveries are forgotten first."""
    slots = ServerSlots(1)
    for number in range(MAX_REMEMBERED + 1):
        slots.note_parked(B_URL, str(number))

    assert slots.note_parked(B_URL, "0") is True
    assert slots.note_parked(B_URL, str(MAX_REMEMBERED)) is False


async def test_the_more_are_parked_the_longer_they_stay_away() -> None:
    """Of a large backlog to one server no more than a few hundred come back each second, and none after half a minute;
    another server's are not affected."""
    slots = ServerSlots(1)
    async with slots.take(B_URL, "running"), slots.take(C_URL, "also running"):
        await _slow_down(slots, B_URL, C_URL)
        for number in range(1_000):
            slots.note_parked(B_URL, str(number))
        assert timedelta(seconds=3.75) <= await _parking(slots, B_URL) <= timedelta(seconds=6.25)
        assert await _parking(slots, C_URL) <= timedelta(seconds=1.25)
        for number in range(MAX_REMEMBERED):
            slots.note_parked(B_URL, f"more {number}")
        assert timedelta(seconds=22.5) <= await _parking(slots, B_URL) <= timedelta(seconds=37.5)


async def _slow_down(slots: ServerSlots, *urls: str) -> None:
    await asyncio.gather(*(_parking(slots, url) for url in urls))


async def _parking(slots: ServerSlots, url: str) -> timedelta:
    """How long a further delivery to the busy server is sent away."""
    with pytest.raises(Parked) as parked:
        async with slots.take(url, "one more"):
            pass
    assert parked.value.delay is not None
    return parked.value.delay


@pytest.mark.usefixtures("queue_settings")
async def test_parked_deliveries_arrive_uncounted(site: Site, peer: Peer) -> None:
    """Six at once for a server of three slots: three wait about a second and are delivered at their first attempt."""
    go_on = asyncio.Event()

    async def slow(request: Received, exchange: Exchange) -> None:
        await go_on.wait()
        await honest(request, exchange)

    honest, peer.server.default = peer.server.default, slow
    deliveries = await site.owe_posts(peer, 6)
    site.start()
    await site.until(lambda: len(site.failing) == 3)
    assert len(peer.deliveries) <= 3
    go_on.set()

    await site.ended(*deliveries)

    assert len(peer.applied) == 6
    assert peer.replayed == 0
    fates = [await site.fate(delivery) for delivery in deliveries]
    assert [(fate.state, fate.job.attempt, fate.row) for fate in fates] == [(JobState.COMPLETED, 1, None)] * 6
    outcomes = sorted([entry.outcome.value for entry in fate.log] for fate in fates)
    assert outcomes == [["delivered"]] * 3 + [["parked", "delivered"]] * 3
    parked = [entry for fate in fates for entry in fate.log if entry.outcome is AttemptOutcome.PARKED]
    assert {(entry.error_code, entry.http_status, entry.request_bytes) for entry in parked} == {("PARKED", None, None)}


async def test_a_hanging_server_holds_up_nobody_else(
    make_settings: MakeSettings, peer: Peer, queue_settings: dict[str, object]
) -> None:
    """200 deliveries to a healthy server, behind 200 to one that never answers, arrive while its first three hang."""
    settings = make_settings(
        federation_delivery_concurrency=10,
        federation_per_server=3,
        federation_lease="30s",
        **queue_settings,
    )
    federation = Federation(settings)
    await acquaint(federation, peer)
    async with Peer(generate_own_keys()) as sick:
        sick.server.default = hang()
        await acquaint(federation, sick)
        async with Site(federation) as site:
            waiting = await site.owe_posts(sick, 200)
            await site.ended(*await site.owe_posts(peer, 200))
            assert {outcome for delivery in waiting for outcome in await _outcomes(site, delivery)} <= {
                AttemptOutcome.PARKED
            }
            await site.stop(skip_grace=True)  # the hanging ones would use all of it
        await federation.close()

    assert len(peer.applied) == 200
    assert peer.replayed == 0
    assert len(sick.deliveries) == 3


async def _outcomes(site: Site, delivery: str) -> set[AttemptOutcome]:
    return {entry.outcome for entry in (await site.fate(delivery)).log}
