"""Deliveries of one ordering key to one server: none overtakes another, whoever enqueues and whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select

from db import Database, DeliveryJob, DeliveryPayload, DeliveryState, Follow, HoldReason
from federation.delivery.ledger.entries import Begin, Begun
from federation.delivery.ledger.ledger import Ledger
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import FOLLOWED, FOLLOWER, Site
from tests.federation.delivery.node import PATH, PAYLOAD, URL, Node
from tests.peer import Peer
from workers.clock import ManualClock, SystemClock

KEY = "note 1"


@pytest.fixture
async def node(database: Database) -> AsyncIterator[Node]:
    made = Node.on(database, ManualClock(SystemClock().now()))
    yield made
    await made.close()


async def test_only_the_oldest_of_a_key_has_a_job(node: Node) -> None:
    """The others are held for their turn; another key, another server and no key have turns of their own."""
    first, second, third = [await node.enqueue(key=KEY) for _ in range(3)]
    free = {
        await node.enqueue(key="note 2"),
        await node.enqueue(key=KEY, url="https://c.example"),
        await node.enqueue(),
        await node.enqueue(),
    }
    rows = await node.rows()
    assert await node.jobs() == await node.ready() == {first} | free
    for each in (second, third):
        assert (rows[each].state, rows[each].held_reason) == (DeliveryState.HELD, HoldReason.ORDER)
    assert [rows[each].ordering_position for each in (first, second, third)] == [1, 2, 3]


async def test_they_go_one_after_the_other(node: Node) -> None:
    """Each becomes ready in the transaction that ends the one before; its job has an id of its own."""
    ids = [await node.enqueue(key=KEY) for _ in range(5)]
    ledger = Ledger(node.database, add_jobs=node.queue.add_bulk, clock=node.clock)
    for number, each in enumerate(ids):
        assert await node.ready() == {each}
        assert (await node.rows())[each].job_id == (each if number == 0 else f"{each}.1")
        await ledger.gone(each)
        await ledger.close()
    assert await node.rows() == {}
    assert await node.jobs() == {ids[0], *(f"{each}.1" for each in ids[1:])}


async def test_a_younger_one_waits_behind_one_that_its_server_keeps_waiting(node: Node) -> None:
    """The oldest waits for the server, those behind it for their turn: a release sends it alone."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    first, second = await node.enqueue(key=KEY), await node.enqueue(key=KEY)
    rows = await node.rows()
    assert (rows[first].held_reason, rows[second].held_reason) == (HoldReason.SERVER, HoldReason.ORDER)
    assert await node.jobs() == set()
    await node.links.returned(URL, reason="probe")
    assert await node.releaser().tick() == 1
    assert await node.ready() == {first}


async def test_positions_do_not_depend_on_the_clock(node: Node) -> None:
    """It may be set back."""
    first = await node.enqueue(key=KEY)
    early = Node.on(node.database, ManualClock(), queue=node.queue)
    second = await early.enqueue(key=KEY)
    rows = await node.rows()
    assert rows[second].created_at < rows[first].created_at
    assert await node.ready() == {first}
    await Ledger(node.database).gone(first)
    assert await node.ready() == {second}
    await early.close()


async def test_enqueued_at_once_they_still_are_in_line(node: Node) -> None:
    """By many processes: one is ready, and each position is taken once."""
    others = [node.another() for _ in range(4)]
    ids = await asyncio.gather(*(each.enqueue(key=KEY) for each in others for _ in range(5)))
    rows = await node.rows()
    assert sorted(row.ordering_position or 0 for row in rows.values()) == list(range(1, 21))
    (first,) = await node.ready()
    assert rows[first].ordering_position == 1
    ledger, went = Ledger(node.database, clock=node.clock), []
    while ready := await node.ready():
        (each,) = ready
        went.append(rows[each].ordering_position)
        await ledger.gone(each)
    assert went == list(range(1, 21))
    assert {*ids} == rows.keys()
    for other in others:
        await other.close()


async def test_who_is_enqueued_while_the_older_one_ends_has_its_turn(migrated_postgres_url: str) -> None:
    """The end did not see it yet, so the sweep finds that it waits for nobody. On SQLite one comes after the other."""
    node = Node.on(Database(migrated_postgres_url), ManualClock(SystemClock().now()))
    first = await node.enqueue(key=KEY)
    async with node.outbox.transaction() as session:
        second = await node.outbox.enqueue_delivery(session, "deliver-post", URL + PATH, URL, PAYLOAD, ordering_key=KEY)
        await session.flush()
        await Ledger(node.database, clock=node.clock).gone(first)
    third = await node.enqueue(key=KEY)
    assert await node.ready() == set()
    assert (await node.held().sweep())["in_order"] == 1
    assert await node.ready() == {second}
    assert f"{second}.1" in await node.jobs()
    assert (await node.held().sweep())["in_order"] == 0
    assert (await node.rows())[third].held_reason is HoldReason.ORDER
    await node.close()
    await node.database.close()


@pytest.mark.parametrize("state", [DeliveryState.FAILED, DeliveryState.EXPIRED])
async def test_what_was_given_up_of_the_key_is_removed(node: Node, state: DeliveryState) -> None:
    """So no retry by hand resurrects what was replaced since; that of other keys and servers stays."""
    over = {"state": state, "held_reason": None, "settled_at": node.clock.now(), "ordering_position": 1}
    await node.add_held(2, ordering_key=KEY, **over)
    kept = {
        *await node.add_held(ordering_key="note 2", **over),
        *await node.add_held(ordering_key=KEY, url="https://c.example", **over),
    }
    new = await node.enqueue(key=KEY)
    assert (await node.rows()).keys() == kept | {new}
    assert await node.ready() == {new}


async def test_a_fan_out_is_in_line_at_each_server_for_itself(node: Node) -> None:
    """Ready where nothing older is, held where something is; what is given up takes its share of a text along."""
    busy, free = URL, "https://c.example"
    first = await node.enqueue(key=KEY, url=busy)
    async with node.outbox.transaction() as session:
        (failed,) = await node.outbox.enqueue_fanout(session, "n", PATH, [free], PAYLOAD, ordering_key="gone")
    await node.change([failed], state=DeliveryState.FAILED, ordering_key=KEY)
    async with node.outbox.transaction() as session:
        behind, alone = await node.outbox.enqueue_fanout(session, "n", PATH, [busy, free], PAYLOAD, ordering_key=KEY)
    rows = await node.rows()
    assert rows.keys() == {first, behind, alone}
    assert (rows[behind].held_reason, rows[alone].state) == (HoldReason.ORDER, DeliveryState.READY)
    assert behind not in await node.jobs()
    async with node.database.read() as session:
        texts = (await session.execute(select(DeliveryPayload))).scalars().all()
    assert [text.refs for text in texts] == [2]


async def unfollow(federation: Federation, peer: Peer) -> str | None:
    async with federation.outbox.transaction() as session:
        return await federation.producers.request_unfollow(
            session, follower_id=FOLLOWER, following_id=FOLLOWED, server_url=peer.url
        )


async def deliveries(federation: Federation) -> dict[str, DeliveryJob]:
    async with federation.database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}


@pytest.mark.parametrize("held", [False, True], ids=["ready", "held"])
async def test_an_unfollow_cancels_a_follow_that_was_never_sent(site: Site, peer: Peer, held: bool) -> None:
    """Neither is delivered: the peer never hears of it, although the follow's job is still in the queue.

    What else is owed, before and after it, stays.
    """
    federation = site.federation
    if held:
        await federation.links.hold(peer.url)
    before = await site.owe_post(peer)
    follow = await site.owe_follow(peer)
    after = await site.owe_post(peer)
    assert await unfollow(federation, peer) is None
    assert (await deliveries(federation)).keys() == {before, after}
    if not held:
        await site.ended(before, follow, after)
    assert {each.method for each in peer.arrived} == (set() if held else {"FEDERATE_POST"})
    async with federation.database.read() as session:
        assert (await session.execute(select(Follow))).all() == []


async def test_an_unfollow_waits_for_a_follow_that_may_have_been_sent(site: Site, peer: Peer) -> None:
    """An attempt has begun, so the server may know of it: it hears of both, in this order."""
    federation = site.federation
    follow = await site.owe_follow(peer)
    begun = await federation.ledger.begin(
        Begin(
            delivery_id=follow,
            job_id=follow,
            job_name="deliver-follow",
            server_url=peer.url,
            attempt=1,
            at=SystemClock().now(),
        )
    )
    assert isinstance(begun, Begun)
    after = await unfollow(federation, peer)
    assert after is not None
    assert (await deliveries(federation))[after].held_reason is HoldReason.ORDER

    await site.outcome(follow)
    await site.ended(f"{after}.1")

    assert [each.method for each in peer.arrived] == ["FEDERATE", "UNFOLLOW"]
    assert await deliveries(federation) == {}


async def test_an_unfollow_of_a_delivered_follow_is_sent_at_once(site: Site, peer: Peer) -> None:
    """There is nothing to wait for."""
    await site.outcome(await site.owe_follow(peer))
    await site.stop()
    after = await unfollow(site.federation, peer)
    assert after is not None
    assert (await deliveries(site.federation))[after].state is DeliveryState.READY
