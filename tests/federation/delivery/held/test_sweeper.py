"""Held deliveries: released in time, handed on when their server is up, given up when too old or forbidden."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from db import Database, DeliveryState, HoldReason, LinkState
from federation.admin import blacklist
from federation.delivery.held import sweeper as holding
from federation.delivery.held.sweeper import LONGEST_PAUSES
from federation.servers.link_rules import HEARD_INTERVAL
from tests.federation.delivery.node import URL, Node, StandsStill
from tests.federation.rows_read import watched
from workers.clock import ManualClock, SystemClock

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


@pytest.fixture
async def node(database: Database) -> AsyncIterator[Node]:
    made = Node.on(database, ManualClock(SystemClock().now()))
    yield made
    await made.close()


@pytest.mark.parametrize("reason", LONGEST_PAUSES)
async def test_a_delivery_whose_time_has_come_is_released(node: Node, reason: HoldReason) -> None:
    """Not before; with a series and a job of its own, as queues take the first one's id for a duplicate's."""
    pause = LONGEST_PAUSES[reason]
    (delivery,) = await node.add_held(reason=reason, next_attempt_at=node.clock.now() + pause)
    assert (await node.held().sweep())["released"] == 0
    node.clock.advance(pause)
    assert (await node.held().sweep())["released"] == 1
    row = (await node.rows())[delivery]
    assert (row.state, row.held_reason, row.held_at, row.next_attempt_at) == (DeliveryState.READY, None, None, None)
    assert (row.series, row.job_id) == (1, f"{delivery}.1")
    assert row.released_at is None  # it takes up none of the room that a returned server's release has
    assert await node.jobs() == {f"{delivery}.1"}
    assert (await node.held().sweep())["released"] == 0


async def test_a_delivery_whose_time_has_passed_is_released(node: Node) -> None:
    """Nobody may have swept for a while."""
    await node.add_held(reason=HoldReason.BUSY, next_attempt_at=node.clock.now() - HOUR)
    assert (await node.held().sweep())["released"] == 1


async def test_a_process_that_stands_still_in_a_sweep_lets_nothing_expire(node: Node) -> None:
    """What it found out about the clock holds for the moment at which it did."""
    await node.add_held()
    node.clock = StandsStill(node.clock.now())
    assert (await node.held().sweep())["expired"] == 0


@pytest.mark.parametrize("reason", LONGEST_PAUSES)
@pytest.mark.parametrize("ahead", [timedelta(minutes=1), timedelta(hours=6), timedelta(days=4000)])
async def test_a_time_that_a_wrong_clock_wrote_is_no_time(node: Node, reason: HoldReason, ahead: timedelta) -> None:
    """Further off than such a pause is long, by however little: released at once."""
    await node.add_held(reason=reason, next_attempt_at=node.clock.now() + LONGEST_PAUSES[reason] + ahead)
    assert (await node.held().sweep())["released"] == 1


@pytest.mark.parametrize(
    ("pauses", "wait", "released"),
    [
        (0, timedelta(hours=1), 0),
        (0, timedelta(hours=1, minutes=1), 1),
        (1, timedelta(hours=12), 0),
        (1, timedelta(hours=12, minutes=1), 1),
    ],
)
async def test_what_may_be_our_fault_waits_longer_than_what_is(
    node: Node, pauses: int, wait: timedelta, released: int
) -> None:
    """It has counted a pause; of all others a time that far off was written by a wrong clock."""
    await node.add_held(reason=HoldReason.OURS, alone=pauses, next_attempt_at=node.clock.now() + wait)
    assert (await node.held().sweep())["released"] == released


async def test_what_waits_for_its_server_or_its_turn_has_no_time(node: Node) -> None:
    """The server is down, and the older one is there: a sweep changes nothing, however often it comes."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    await node.add_held(3)
    line = {"ordering_key": "key", "url": "https://up.example"}
    await node.add_held(ordering_position=1, reason=HoldReason.OURS, next_attempt_at=node.clock.now() + HOUR, **line)
    await node.add_held(ordering_position=2, reason=HoldReason.ORDER, **line)
    before = {each: row.model_dump() for each, row in (await node.rows()).items()}
    for _ in range(3):
        swept = await node.held().sweep()
        assert set(swept.values()) == {0}
    assert {each: row.model_dump() for each, row in (await node.rows()).items()} == before
    assert await node.jobs() == set()


async def test_more_than_a_batch_is_released(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several transactions, each with one bulk add."""
    monkeypatch.setattr(holding, "BATCH", 1_000)
    await node.add_held(1_050, reason=HoldReason.BUSY, next_attempt_at=node.clock.now())
    assert (await node.held().sweep())["released"] == 1_050
    assert len(await node.ready()) == 1_050


async def test_a_blacklisted_server_without_anything_waiting_for_it_is_found(node: Node) -> None:
    """What is held for it because there was no room fails before its time has come."""
    await node.add_held(reason=HoldReason.BUSY, next_attempt_at=node.clock.now() + HOUR)
    await blacklist.add(node.database, URL, reason="spam")
    assert (await node.held().sweep())["blacklisted"] == 1


async def test_two_sweeps_at_once_release_each_delivery_once(node: Node) -> None:
    """One of them changes the row, and the queue has one job for it."""
    ids = await node.add_held(20, reason=HoldReason.BUSY, next_attempt_at=node.clock.now())
    other = node.another()
    swept = await asyncio.gather(node.held().sweep(), other.held().sweep())
    assert sum(int(str(each["released"])) for each in swept) == 20
    assert await node.jobs() == {f"{each}.1" for each in ids}
    await other.close()


async def test_a_delivery_that_is_too_old_expires(node: Node) -> None:
    """Whatever it waited for; it is kept, with what it failed with last, and one that is younger is not touched."""
    old = [
        *await node.add_held(error_code="TIMEOUT", created_at=node.clock.now() - timedelta(days=7, seconds=1)),
        *await node.add_held(reason=HoldReason.OURS, created_at=node.clock.now() - timedelta(days=8)),
    ]
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    (young,) = await node.add_held(created_at=node.clock.now() - timedelta(days=6))
    assert (await node.held().sweep())["expired"] == 2
    rows = await node.rows()
    for each in old:
        assert (rows[each].state, rows[each].held_reason) == (DeliveryState.EXPIRED, None)
        assert rows[each].settled_at == node.clock.now()
        assert "too old" in (rows[each].last_error or "")
    assert rows[old[0]].error_code == "TIMEOUT"
    assert rows[young].state is DeliveryState.HELD
    assert await node.jobs() == set()


async def test_without_a_maximum_age_nothing_expires(node: Node) -> None:
    """A delivery of last year goes out when its server is back."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    await node.add_held(created_at=node.clock.now() - timedelta(days=365))
    assert (await node.held(max_age=None).sweep())["expired"] == 0


async def test_what_is_ready_does_not_expire(node: Node) -> None:
    """It is being tried."""
    await node.add_held(state=DeliveryState.READY, held_reason=None, created_at=node.clock.now() - timedelta(days=30))
    assert (await node.held().sweep())["expired"] == 0


async def test_deliveries_to_a_blacklisted_server_fail(node: Node) -> None:
    """At the next sweep, whatever holds them, with the reason on record; those to others stay."""
    later = node.clock.now() + HOUR
    ids = [
        *await node.add_held(2),
        *await node.add_held(reason=HoldReason.BUSY, next_attempt_at=later),
        *await node.add_held(reason=HoldReason.OURS, next_attempt_at=later),
    ]
    (other,) = await node.add_held(url="https://c.example")
    await node.links.exhausted("https://c.example", "TIMEOUT", first_attempted_at=node.clock.now())
    await blacklist.add(node.database, URL, reason="spam")
    assert (await node.held().sweep())["blacklisted"] == len(ids)
    rows = await node.rows()
    for each in ids:
        assert (rows[each].state, rows[each].error_code) == (DeliveryState.FAILED, "BLACKLISTED")
        assert rows[each].settled_at == node.clock.now()
    assert rows[other].state is DeliveryState.HELD


@pytest.mark.parametrize("given_up", ["expired", "blacklisted"])
async def test_who_waits_behind_what_is_given_up_has_its_turn(node: Node, given_up: str) -> None:
    """In the same transaction; the younger one of an expired delivery is sent."""
    line: dict[str, Any] = {"ordering_key": "key"}
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    (old,) = await node.add_held(ordering_position=1, created_at=node.clock.now() - timedelta(days=8), **line)
    (young,) = await node.add_held(ordering_position=2, reason=HoldReason.ORDER, **line)
    if given_up == "blacklisted":
        await blacklist.add(node.database, URL, reason="spam")
        await node.held(max_age=None).sweep()
        assert {row.state for row in (await node.rows()).values()} == {DeliveryState.FAILED}
        return
    await node.held().sweep()
    rows = await node.rows()
    assert (rows[old].state, rows[young].state) == (DeliveryState.EXPIRED, DeliveryState.READY)
    assert await node.jobs() == {f"{young}.1"}


async def test_only_an_older_one_of_its_key_to_its_server_keeps_a_delivery_waiting(node: Node) -> None:
    """Not one of another key or to another server, nor one that was given up, though it were first of all."""
    line: dict[str, Any] = {"ordering_position": 1, "next_attempt_at": node.clock.now() + HOUR}
    first = line | {"reason": HoldReason.OURS}
    for key in ("a", "z"):
        await node.add_held(ordering_key=key, **first)
    for url in ("https://a.example", "https://z.example"):
        await node.add_held(ordering_key="key", url=url, **first)
    await node.add_held(ordering_key="key", **line, state=DeliveryState.FAILED, held_reason=None)
    (waiting,) = await node.add_held(ordering_key="key", ordering_position=2, reason=HoldReason.ORDER)
    assert (await node.held().sweep())["in_order"] == 1
    assert await node.ready() == {waiting}


@pytest.mark.parametrize("reason", [HoldReason.SERVER, HoldReason.REST])
async def test_what_is_held_for_a_server_that_is_up_is_released(node: Node, reason: HoldReason) -> None:
    """An enqueue may commit after the release has passed: the sweep asks for another one, once."""
    await node.add_held(5, reason=reason)
    assert (await node.held().sweep())["servers_to_release"] == 1
    assert (await node.links.find(URL)).release_at == node.clock.now()
    assert (await node.held().sweep())["servers_to_release"] == 0
    assert await node.ready() == set()


async def test_a_server_that_rests_or_is_away_is_left_alone(node: Node) -> None:
    """Whether it asked, fell, or an operator holds it; after the pause what was held for it goes out."""
    await node.links.rests("https://rests.example", HOUR)
    await node.links.exhausted("https://down.example", "TIMEOUT", first_attempted_at=node.clock.now())
    await node.links.hold("https://held.example")
    for name in ("rests", "down", "held"):
        await node.add_held(url=f"https://{name}.example", reason=HoldReason.REST)
    assert (await node.held().sweep())["servers_to_release"] == 0
    node.clock.advance(HOUR)
    node.links.forget("https://rests.example")
    assert (await node.held().sweep())["servers_to_release"] == 1
    assert [link.server_url for link in await node.links.due_for_release(9)] == ["https://rests.example"]


async def test_each_server_with_held_deliveries_is_found_once(node: Node) -> None:
    """However many it has; one that only waits for us, or for nothing, is none of them."""
    for name in ("a", "b", "c"):
        await node.add_held(7, url=f"https://{name}.example")
    await node.add_held(url="https://d.example", reason=HoldReason.OURS, next_attempt_at=node.clock.now() + HOUR)
    await node.add_held(url="https://e.example", state=DeliveryState.READY, held_reason=None)
    await node.add_held(url="https://f.example", state=DeliveryState.FAILED, held_reason=None)
    assert (await node.held().sweep())["servers_to_release"] == 3
    found = {link.server_url for link in await node.links.due_for_release(100)}
    assert found == {f"https://{name}.example" for name in "abc"}
    assert {link.state for link in await node.links.due_for_release(100)} == {LinkState.UP}


async def test_a_sweep_does_not_ask_for_each_absent_server(node: Node) -> None:
    """A look at the link of each would be a query for each, every half minute."""
    for name in range(60):
        url = f"https://s{name}.example"
        await node.add_held(url=url)
        await node.links.hold(url)
        node.links.forget(url)
    with watched() as queries:
        assert (await node.held().sweep())["servers_to_release"] == 0
    assert len(queries) < 20


async def test_the_first_delivery_held_for_a_server_brings_its_look_forward(node: Node) -> None:
    """Once a minute at most. What is held when it is looked at waits for the next look, as everything does then."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    for _ in range(5):
        await node.links.probe_failed(URL)
    await node.add_held()
    assert await node.held().newly_held() == []  # it was looked at a moment ago
    node.clock.advance(HEARD_INTERVAL)
    await node.add_held()
    assert await node.held().newly_held() == [(URL, "sealed")]
    await node.links.look_soon(URL)
    assert (await node.links.find(URL)).next_probe_at == node.clock.now()
    assert await node.held().newly_held() == []
    node.clock.advance(SECOND)
    await node.links.probe_failed(URL)
    node.clock.advance(HEARD_INTERVAL)
    await node.add_held()
    assert await node.held().newly_held() == []


async def test_a_sweep_finds_what_nobody_saw_come(node: Node) -> None:
    """For example, deliveries that a process has owed whose clock is slow, or that a worker has held."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    for _ in range(5):
        await node.links.probe_failed(URL)
    node.clock.advance(HEARD_INTERVAL)
    await node.add_held(created_at=node.clock.now() - HOUR)
    assert await node.held().newly_held() == []
    await node.held().sweep()
    assert (await node.links.find(URL)).next_probe_at == node.clock.now()


async def test_the_canary_that_failed_is_no_news_of_its_server(node: Node) -> None:
    """It is held again a moment after its look was noted: that must not bring the next look forward each minute."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    (only,) = await node.add_held()
    for _ in range(5):
        node.clock.advance(HEARD_INTERVAL)
        await node.change([only], canary_at=node.clock.now())
        await node.links.probe_failed(URL)
        node.clock.advance(SECOND)
        await node.change([only], held_at=node.clock.now())
        planned = (await node.links.find(URL)).next_probe_at
        node.clock.advance(HEARD_INTERVAL)
        await node.held().sweep()
        assert await node.held().newly_held() == []
        assert (await node.links.find(URL)).next_probe_at == planned


async def test_a_suspect_that_found_no_room_is_released_with_the_others(node: Node) -> None:
    """Nobody else would: what may crash workers does not go out by its time alone."""
    await node.add_held(reason=HoldReason.BUSY, next_attempt_at=node.clock.now(), suspect=4)
    assert (await node.held().sweep())["suspects_released"] == 1


async def test_what_goes_by_a_wire_that_is_gone_expires_as_all_that_is_held(node: Node) -> None:
    """A wire that was renamed or removed: nothing can be sent by it, and no rule spares it."""
    old = node.clock.now() - timedelta(days=8)
    (kept,) = await node.add_held(wire="gone")
    await node.add_held(wire="gone", created_at=old)
    (forbidden,) = await node.add_held(wire="gone", url="https://evil.example")
    await blacklist.add(node.database, "https://evil.example", reason="spam")
    node.blacklist.recheck()

    swept = await node.held().sweep()

    assert (swept["expired"], swept["blacklisted"], swept["servers_to_release"]) == (1, 1, 0)
    rows = await node.rows()
    assert (rows[kept].state, rows[forbidden].state) == (DeliveryState.HELD, DeliveryState.FAILED)
