"""Releasing: gently, oldest first, servers in turn; one delivery ahead where a look proves nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from db import Database, DeliveryState, HoldReason, LinkState
from federation.delivery.held.release import LOOKS
from tests.federation.delivery.node import URL, Node
from tests.federation.rows_read import cost, watched
from workers.clock import ManualClock

SECOND = timedelta(seconds=1)


@pytest.fixture
async def node(database: Database) -> AsyncIterator[Node]:
    made = Node.on(database, ManualClock())
    yield made
    await made.close()


async def test_a_release_begins_with_one_and_doubles_up_to_the_rate(node: Node) -> None:
    """A batch a second, oldest first; when nothing is left it is over."""
    ids = await node.add_held(40)
    await node.come_up()
    releaser = node.releaser(rate=8)
    went: list[int] = []
    while (await node.links.find(URL)).release_at is not None:
        went.append(await releaser.tick())
        assert await releaser.tick() == 0
        assert await node.ready() == set(ids[: sum(went)])
        node.clock.advance(SECOND)
    assert went == [1, 2, 4, 8, 8, 8, 8, 1]
    assert await node.jobs() == {f"{each}.1" for each in ids}
    assert (await node.links.find(URL)).release_rate == 1


async def test_the_oldest_goes_first_whatever_it_was_held_for(node: Node) -> None:
    """A rest, the server, a lack of room: the three are one line."""
    reasons = (HoldReason.REST, HoldReason.SERVER, HoldReason.BUSY)
    ids: list[str] = []
    for reason in (*reasons, *reversed(reasons)):
        ids += await node.add_held(reason=reason)
        node.clock.advance(SECOND)
    await node.come_up()
    releaser = node.releaser(rate=1)
    for count in range(1, len(ids) + 1):
        assert await releaser.tick() == 1
        assert await node.ready() == set(ids[:count])
        node.clock.advance(SECOND)


async def test_what_waits_for_something_else_is_not_released(node: Node) -> None:
    """Its turn, or a fault of ours; nor what is held for another server. What was held for a pause is."""
    await node.add_held(reason=HoldReason.ORDER)
    await node.add_held(reason=HoldReason.OURS, next_attempt_at=node.clock.now() + SECOND)
    await node.add_held(url="https://c.example")
    (rested,) = await node.add_held(reason=HoldReason.REST, next_attempt_at=node.clock.now() + 9 * SECOND)
    await node.come_up()
    assert await node.releaser().tick() == 1
    assert await node.ready() == {rested}


async def test_no_more_are_released_than_there_is_room_for(node: Node) -> None:
    """What is released and not tried yet counts over all servers, and room comes back with each attempt."""
    for name in ("a", "b", "c"):
        await node.add_held(10, url=f"https://{name}.example")
        await node.come_up(f"https://{name}.example")
    releaser = node.releaser(most_waiting=4)
    for _ in range(6):
        await releaser.tick()
        node.clock.advance(SECOND)
    assert len(await node.ready()) == 4
    waiting = sorted(await node.ready())
    await node.change(waiting[:3], released_at=None)  # as the beginning of an attempt does
    node.clock.advance(SECOND)
    assert await releaser.tick() == 3
    assert len(await node.ready()) == 7


async def test_a_rate_that_there_is_no_room_for_at_once_is_kept_by_smaller_batches(node: Node) -> None:
    """Twenty are tried in far less than a second, so fifty a second go out in twenties."""
    await node.add_held(500)
    await node.come_up()
    releaser = node.releaser(rate=50, most_waiting=20)
    went = 0
    for _ in range(4 * 14):
        went += await releaser.tick()
        await node.change(sorted(await node.ready()), state=DeliveryState.FAILED, released_at=None)
        node.clock.advance(LOOKS)
    assert 31 + 7 * 50 <= went <= 63 + 9 * 50  # after 1, 2, 4, 8 and 16, and a moment at 32


async def test_releasing_takes_as_many_statements_for_many_as_for_few(node: Node) -> None:
    """None of them is executed once for each delivery."""
    ids = await node.add_held(1 + 2 + 4 + 8 + 16 + 32 + 64)
    await node.come_up()
    releaser = node.releaser(rate=64, most_waiting=1_000)
    counts: list[int] = []

    def count(*arguments: Any) -> None:
        _, _, _, parameters, _, many = arguments
        counts[-1] += len(parameters) if many else 1

    event.listen(Engine, "before_cursor_execute", count)
    try:
        for _ in range(7):
            counts.append(0)
            await releaser.tick()
            node.clock.advance(SECOND)
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert await node.ready() == set(ids)
    assert len(set(counts)) == 1


async def test_a_batch_and_a_canary_read_what_they_send(node: Node) -> None:
    """They are the first of an index: who sorted a million would hold up every other writer for as long."""
    held = 5_000
    await node.add_held(held)
    await node.links.exhausted(URL, "HTTP_500", first_attempted_at=node.clock.now())
    async with node.database.transaction() as session:
        if session.get_bind().dialect.name == "postgresql":  # which analyzes by itself; SQLite does not
            await session.execute(text("ANALYZE"))
    with watched() as queries:
        assert await node.releaser().send_canary(URL)
        await node.come_up()
        await node.releaser().tick()
    assert await node.database.transact(partial(cost, queries=queries)) < held / 10


async def test_servers_have_their_turn_one_after_the_other(node: Node) -> None:
    """Of many with little room for all, none is served twice before each was served once."""
    servers = [f"https://s{n}.example" for n in range(5)]
    for url in servers:
        await node.add_held(10, url=url)
        await node.come_up(url)
        node.clock.advance(timedelta(milliseconds=1))
    releaser = node.releaser(rate=1, most_waiting=2)
    served: Counter[str] = Counter()
    for tick in range(1, 11):
        await releaser.tick()
        rows = [row for row in (await node.rows()).values() if row.released_at is not None]
        served.update(str(row.server_url) for row in rows)
        assert tick < 3 or min(served[url] for url in servers) >= 1
        await node.change([row.id for row in rows], released_at=None)
        node.clock.advance(SECOND)
    assert sum(served.values()) == 20
    assert {3, 4, 5} >= set(served.values())  # who is due at the same moment goes in any order


async def test_a_fall_in_between_keeps_the_rest(node: Node) -> None:
    """It is as it was, and the next release begins at half the rate."""
    ids = await node.add_held(20)
    await node.come_up()
    releaser = node.releaser()
    for _ in range(2):
        await releaser.tick()
        node.clock.advance(SECOND)
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    assert (await node.links.find(URL)).state is LinkState.DOWN
    for _ in range(5):
        assert await releaser.tick() == 0
        node.clock.advance(SECOND)
    assert await node.ready() == set(ids[:3])
    await node.links.returned(URL, reason="probe")
    assert await releaser.tick() == 1
    node.clock.advance(SECOND)
    assert await releaser.tick() == 0  # half a delivery a second
    node.clock.advance(SECOND)
    assert await releaser.tick() == 1


async def test_a_pause_that_the_server_asks_for_is_kept(node: Node) -> None:
    """Nothing goes out until then, and the release goes on by itself, at half the rate."""
    await node.add_held(20)
    await node.come_up()
    releaser = node.releaser()
    for _ in range(3):
        await releaser.tick()
        node.clock.advance(SECOND)
    await node.links.rests(URL, 30 * SECOND)
    for _ in range(29):
        assert await releaser.tick() == 0
        node.clock.advance(SECOND)
    node.clock.advance(SECOND)
    assert await releaser.tick() == 4


async def test_two_processes_release_each_batch_once(node: Node) -> None:
    """Whoever locks the link first; the other one finds its date moved."""
    ids = await node.add_held(31)
    await node.come_up()
    others = [node, node.another(), node.another()]
    releasers = [each.releaser() for each in others]
    went = []
    for _ in range(5):
        went.append(sum(await asyncio.gather(*(each.tick() for each in releasers))))
        node.clock.advance(SECOND)
    assert went == [1, 2, 4, 8, 16]
    assert await node.jobs() == {f"{each}.1" for each in ids}
    for each in others[1:]:
        await each.close()


async def test_a_canary_is_the_oldest_not_tried_since_the_link_went_down(node: Node) -> None:
    """Once all were, it is the one that waited longest; one at a time."""
    ids = await node.add_held(3)
    await node.change(ids[1:2], canary_at=node.clock.now() - SECOND)  # in an outage of before
    await node.links.exhausted(URL, "HTTP_500", first_attempted_at=node.clock.now())
    releaser, chosen = node.releaser(), []
    for _ in range(5):
        assert await releaser.send_canary(URL)
        (canary,) = await node.ready()
        assert await releaser.send_canary(URL)  # it is under way
        assert await node.ready() == {canary}
        row = (await node.rows())[canary]
        assert row.canary_at == row.released_at == node.clock.now()
        assert row.job_id in await node.jobs()
        chosen.append(canary)
        await node.change(
            [canary], state=DeliveryState.HELD, held_reason=HoldReason.SERVER, released_at=None, job_id=canary
        )
        node.clock.advance(SECOND)
    assert set(chosen[:3]) == set(ids)
    assert chosen[3:] == chosen[:2]
    assert chosen[1:3] != chosen[:2]


async def test_a_canary_never_tried_goes_before_one_that_was(node: Node) -> None:
    """The oldest of those, whatever its age among all."""
    ids = await node.add_held(3)
    await node.links.exhausted(URL, "HTTP_500", first_attempted_at=node.clock.now())
    node.clock.advance(SECOND)
    await node.change(ids[:1], canary_at=node.clock.now())
    assert await node.releaser().send_canary(URL)
    assert await node.ready() == {ids[1]}


async def test_without_a_held_delivery_there_is_no_canary(node: Node) -> None:
    """What waits for its turn or for us is none, and neither is another server's."""
    await node.add_held(reason=HoldReason.ORDER)
    await node.add_held(url="https://c.example")
    assert await node.releaser().send_canary(URL) is False
    assert await node.jobs() == set()


async def test_a_canary_sent_by_two_processes_is_one(node: Node) -> None:
    """Both find it under way."""
    await node.add_held(5)
    await node.links.exhausted(URL, "HTTP_500", first_attempted_at=node.clock.now())
    other = node.another()
    sent = await asyncio.gather(*(each.releaser().send_canary(URL) for each in (node, other)))
    assert sent == [True, True]
    assert len(await node.ready()) == len(await node.jobs()) == 1
    await other.close()


async def test_a_clock_set_back_keeps_no_release_waiting(node: Node) -> None:
    """The batch that it planned while it was two days ahead goes out now, and the next one when its time has come."""
    await node.add_held(4)
    await node.come_up()
    releaser = node.releaser(rate=50)
    assert await releaser.tick() == 1
    node.clock.advance(-timedelta(days=2))
    assert await releaser.tick() == 2
    assert await releaser.tick() == 0
    node.clock.advance(timedelta(seconds=1))
    assert await releaser.tick() == 1
