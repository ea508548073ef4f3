"""One text to many addresses, each in a line of its own, under one lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from db import Database, DeliveryPayload, DeliveryState, HoldReason
from federation.delivery.ledger.ledger import Ledger
from federation.delivery.outbox.insert import BATCH, Address
from federation.delivery.outbox.ordering import lock_keys
from federation.delivery.outbox.ordering_keys import at_place
from federation.delivery.outbox.outbox import Outbox
from tests.federation.delivery.node import PAYLOAD, URL, Node
from workers.clock import ManualClock, SystemClock

OTHER = "https://c.example"
LOCKS = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")


@pytest.fixture
async def node(database: Database) -> AsyncIterator[Node]:
    made = Node.on(database, ManualClock(SystemClock().now()))
    yield made
    await made.close()


def inbox(number: int, *, url: str = URL, thing: str | None = "note 1") -> Address:
    """A target on that server, in its line of that thing."""
    target = f"{url}/{number}/inbox"
    return target, url, None if thing is None else at_place(thing, target)


async def owe(
    outbox: Outbox, session: AsyncSession, addresses: Sequence[Address], payload: str = PAYLOAD
) -> tuple[str, ...]:
    def work(inside: Session) -> tuple[str, ...]:
        planned = outbox.inserter.addressed(
            inside, "deliver-post", addresses, payload, activity_id="https://a.example/1", actor="https://a.example/u"
        )
        outbox.plan(inside, planned)
        return planned.owed

    return await outbox.within(session, work, "addressed")


async def owed(node: Node, *addresses: Address) -> tuple[str, ...]:
    async with node.outbox.transaction() as session:
        return await owe(node.outbox, session, addresses)


async def test_a_text_goes_to_many_addresses(node: Node) -> None:
    """More than one batch of them, several on one server; it is stored once, under what its protocol calls it."""
    number = BATCH + 5
    addresses = [inbox(each, url=f"https://s{each % 700}.example") for each in range(number)]
    ids = await owed(node, *addresses)
    rows = await node.rows()
    assert [(rows[each].target_url, rows[each].server_url, rows[each].ordering_key) for each in ids] == addresses
    assert {(row.state, row.ordering_position, row.payload) for row in rows.values()} == {(DeliveryState.READY, 1, "")}
    async with node.database.read() as session:
        (stored,) = (await session.execute(select(DeliveryPayload))).scalars()
    assert (stored.payload, stored.refs) == (PAYLOAD, number)
    assert (stored.activity_id, stored.actor) == ("https://a.example/1", "https://a.example/u")
    assert {row.payload_id for row in rows.values()} == {stored.id}


async def test_each_address_waits_in_its_own_line(node: Node) -> None:
    """What comes later about one thing waits where something of it is owed, and nowhere else."""
    first = await owed(node, inbox(1), inbox(2))
    later = await owed(node, inbox(1), inbox(2), inbox(3), inbox(1, thing="note 2"), inbox(1, thing=None))
    rows = await node.rows()
    assert [(rows[each].held_reason, rows[each].ordering_position) for each in later] == [
        (HoldReason.ORDER, 2),
        (HoldReason.ORDER, 2),
        (None, 1),
        (None, 1),
        (None, None),
    ]
    assert await node.jobs() == {*first, *later[2:]}
    await Ledger(node.database, clock=node.clock).gone(first[0])
    assert await node.ready() == {first[1], later[0], *later[2:]}


async def test_the_lines_of_one_transaction_know_each_other(node: Node) -> None:
    """Also those of single deliveries that the session has not written yet."""
    target, url, key = inbox(1)
    async with node.outbox.transaction() as session:
        first = await node.outbox.enqueue_delivery(session, "deliver-post", target, url, PAYLOAD, ordering_key=key)
        (second,) = await owe(node.outbox, session, [inbox(1)])
        (third,) = await owe(node.outbox, session, [inbox(1)])
    rows = await node.rows()
    assert [rows[each].ordering_position for each in (first, second, third)] == [1, 2, 3]
    assert await node.ready() == {first}


async def test_what_a_server_keeps_waiting_has_no_job(node: Node) -> None:
    """With a line and without one."""
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=node.clock.now())
    ids = await owed(node, inbox(1), inbox(2, thing=None), inbox(1, url=OTHER))
    rows = await node.rows()
    assert [rows[each].held_reason for each in ids] == [HoldReason.SERVER, HoldReason.SERVER, None]
    assert await node.jobs() == {ids[2]}


@pytest.mark.parametrize("state", [DeliveryState.FAILED, DeliveryState.EXPIRED])
async def test_what_was_given_up_of_a_line_is_removed(node: Node, state: DeliveryState) -> None:
    """With its share of its text; that of other lines, and of the same key at another server, stays."""
    first = await owed(node, inbox(1), inbox(2))
    await node.change(first, state=state, settled_at=node.clock.now())
    over = {"state": state, "held_reason": None, "settled_at": node.clock.now(), "ordering_position": 1}
    (elsewhere,) = await node.add_held(url=OTHER, ordering_key=inbox(1)[2], **over)
    (new,) = await owed(node, inbox(1))
    rows = await node.rows()
    assert rows.keys() == {first[1], elsewhere, new}
    assert await node.ready() == {new}
    async with node.database.read() as session:
        assert sorted((await session.execute(select(DeliveryPayload.refs))).scalars()) == [1, 1]


@pytest.mark.parametrize(
    "bad",
    [
        (URL + "/1", OTHER, None),
        (URL + "/\u00e9", URL, None),
        (URL + "/a b", URL, None),
        (URL + "/a\tb", URL, None),
        (URL, URL, None),
        (URL + ".evil.example/1", URL, None),
        (URL + "/1", URL, ""),
        (URL + "/1", URL, "x" * 513),
        (URL + "/" + "x" * 2048, URL, None),
        ("inbox", URL, None),
    ],
)
async def test_a_bad_address_refuses_all(node: Node, bad: Address) -> None:
    """Nothing is written."""
    async with node.outbox.transaction() as session:
        with pytest.raises(ValueError, match=r"."):
            await owe(node.outbox, session, [inbox(1), bad])
        assert (await session.execute(select(func.count()).select_from(DeliveryPayload))).scalar_one() == 0
    assert await node.rows() == {}


async def test_the_lines_of_a_thing_take_one_lock(migrated_postgres_url: str) -> None:
    """Whoever locks: the table of locks has room for some thousands. Two things have two."""
    node = Node.on(Database(migrated_postgres_url), ManualClock(SystemClock().now()))
    addresses = [inbox(each) for each in range(300)]
    async with node.outbox.transaction() as session:
        await owe(node.outbox, session, addresses)
        assert (await session.execute(LOCKS)).scalar_one() == 1
        await owe(node.outbox, session, [inbox(1, thing="note 2"), inbox(1, thing=None)])
        assert (await session.execute(LOCKS)).scalar_one() == 2
        keys = [key for _, _, key in addresses if key is not None]
        await session.run_sync(lambda inside: lock_keys(inside.connection(), keys))
        assert (await session.execute(LOCKS)).scalar_one() == 2
    await node.close()
    await node.database.close()


async def test_owed_at_once_they_are_in_line(node: Node) -> None:
    """By many processes: each position of a line is taken once, whichever addresses they are about."""
    others = [node.another() for _ in range(4)]
    await asyncio.gather(*(owed(each, inbox(1), inbox(2 + number)) for number, each in enumerate(others)))
    lines: dict[str | None, list[int]] = {}
    for row in (await node.rows()).values():
        lines.setdefault(row.ordering_key, []).append(row.ordering_position or 0)
    assert sorted(lines.pop(inbox(1)[2])) == [1, 2, 3, 4]
    assert [*lines.values()] == [[1]] * 4
    for other in others:
        await other.close()


async def test_a_savepoint_rolled_back_takes_its_rows_along(node: Node) -> None:
    """Text, rows and jobs."""
    async with node.outbox.transaction() as session:
        (kept,) = await owe(node.outbox, session, [inbox(1)])
        savepoint = await session.begin_nested()
        await owe(node.outbox, session, [inbox(2), inbox(3)])
        await savepoint.rollback()
    assert await node.jobs() == (await node.rows()).keys() == {kept}
    async with node.database.read() as session:
        assert (await session.execute(select(func.count()).select_from(DeliveryPayload))).scalar_one() == 1
