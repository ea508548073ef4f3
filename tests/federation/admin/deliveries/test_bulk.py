"""Deliveries are retried and dropped by the thousand: on every storage, in batches, beside workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from db import DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason
from federation.admin.deliveries.bulk import BulkDeliveries, Dropped, Retried
from federation.admin.deliveries.deliveries import OPEN, Selection
from federation.delivery.outbox.sweeper import OutboxSweeper
from tests.federation.admin.conftest import OTHER, PEER, Desk
from workers import JobState

SERVERS = [f"https://{number}.example" for number in range(7)]
EVERYTHING = Selection()
as_its_database = pytest.mark.spread("queue_settings", always=("sqlite", "postgres"))
"""What the queue does for it is called by other tests here on every storage."""


@pytest.fixture
def bulk(desk: Desk) -> BulkDeliveries:
    """In batches of three, so that few deliveries make several."""
    return BulkDeliveries(desk.database, desk.node.delivery_queues, batch=3)


async def test_failed_deliveries_are_owed_again(desk: Desk, bulk: BulkDeliveries) -> None:
    """As if they were new: row ready and unattempted, a job of a new series queued; ready ones are left alone."""
    ids = await desk.owe(*SERVERS)
    await desk.fail(*ids[:5])
    again = [f"{each}.1" for each in ids[:5]]
    seen: list[int] = []

    assert await bulk.retry(EVERYTHING, progress=seen.append) == Retried(retried=5, left=0)

    rows = await desk.rows()
    assert {(r.settled_at, r.outcome, r.last_error, r.error_code, r.last_attempted_at) for r in rows.values()} == {
        (None, None, None, None, None)
    }
    assert {(r.state, r.attempts) for r in rows.values()} == {(DeliveryState.READY, 0)}
    assert [rows[each].job_id for each in ids[:5]] == again
    assert await desk.states(*again, *ids[5:]) == [JobState.QUEUED] * 7
    assert seen == [3, 2]
    assert sorted(claim.job_id for claim in await desk.claim(*again)) == sorted(again)


@as_its_database
async def test_a_retried_delivery_has_its_text(desk: Desk, bulk: BulkDeliveries) -> None:
    """Shared or its own."""
    ids = [*await desk.owe(PEER), *await desk.owe(PEER, OTHER, shared=True)]
    await desk.fail(*ids)
    await bulk.retry(EVERYTHING)
    assert await desk.states(*(f"{each}.1" for each in ids)) == [JobState.QUEUED] * 3
    assert await desk.texts() == [2]
    assert {(await desk.rows())[each].payload == "" for each in ids[1:]} == {True}


@as_its_database
async def test_a_retry_cut_off_is_completed_by_the_sweeper(desk: Desk, bulk: BulkDeliveries) -> None:
    """The queue does not take the jobs: the rows are owed, and what was not added is added later."""
    ids = await desk.owe(PEER)
    await desk.fail(*ids)

    async def refuse(*_: object) -> list[object]:
        raise ConnectionError

    desk.queue.add_bulk, add = refuse, desk.queue.add_bulk  # type: ignore[assignment, method-assign] # it dies there
    with pytest.raises(ConnectionError):
        await bulk.retry(EVERYTHING)
    desk.queue.add_bulk = add  # type: ignore[method-assign] # as it was

    assert await desk.states(f"{ids[0]}.1") == [None]
    await OutboxSweeper(desk.database, desk.node.delivery_queues, min_age=timedelta(0)).sweep()
    assert await desk.states(f"{ids[0]}.1") == [JobState.QUEUED]


@as_its_database
async def test_deliveries_of_node_producers_are_not_retried(desk: Desk, bulk: BulkDeliveries) -> None:
    """We could not make their job again; they are counted, and left as they are."""
    ids = await desk.owe(PEER, OTHER)
    await desk.fail(*ids)
    await desk.make_nodes(ids[0])
    assert await bulk.retry(EVERYTHING) == Retried(retried=1, left=1)
    rows = await desk.rows()
    assert [rows[each].settled_at is None for each in ids] == [False, True]
    assert await desk.states(ids[0], f"{ids[1]}.1") == [JobState.FAILED, JobState.QUEUED]


@as_its_database
async def test_expired_deliveries_are_owed_again_and_held_ones_if_they_are_meant(
    desk: Desk, bulk: BulkDeliveries
) -> None:
    """By their state, or by their ids."""
    ids = await desk.owe(*SERVERS[:4])
    await desk.hold(*ids)
    await desk.expire(ids[0])
    assert await bulk.retry(EVERYTHING) == Retried(retried=1, left=0)
    assert await bulk.retry(Selection(ids=(ids[1],))) == Retried(retried=1, left=0)
    assert await bulk.retry(Selection(state=DeliveryState.HELD, server_url=SERVERS[2])) == Retried(retried=1, left=0)
    rows = await desk.rows()
    assert [rows[each].state for each in ids] == [DeliveryState.READY] * 3 + [DeliveryState.HELD]
    assert await desk.states(*(f"{each}.1" for each in ids)) == [JobState.QUEUED] * 3 + [None]


@as_its_database
async def test_a_retry_keeps_the_order_of_a_key(desk: Desk, bulk: BulkDeliveries) -> None:
    """The oldest is ready, the others wait for it, in whatever order the batches meet them."""
    ids = await desk.owe(*[PEER] * 5, key="post")
    for each in ids:
        await desk.fail(each)
    assert await bulk.retry(EVERYTHING) == Retried(retried=5, left=0)
    rows = await desk.rows()
    assert [rows[each].state for each in ids] == [DeliveryState.READY] + [DeliveryState.HELD] * 4
    assert [rows[each].held_reason for each in ids] == [None] + [HoldReason.ORDER] * 4
    assert [row.attempts for row in rows.values()] == [1] * 5
    await desk.node.ledger.gone(ids[0])
    assert (await desk.rows())[ids[1]].state is DeliveryState.READY


@as_its_database
async def test_what_a_younger_one_follows_is_not_retried(desk: Desk, bulk: BulkDeliveries) -> None:
    """Sent now, it would undo what the younger one does; other keys and other servers are no matter."""
    ids = await desk.owe(PEER, OTHER, PEER, key="post")
    await desk.fail(ids[0], ids[1])
    assert await bulk.retry(EVERYTHING) == Retried(retried=1, left=0, out_of_order=1)
    rows = await desk.rows()
    assert [rows[each].state for each in ids] == [DeliveryState.FAILED, DeliveryState.READY, DeliveryState.READY]


@as_its_database
async def test_what_a_younger_one_followed_cannot_be_retried_any_more(desk: Desk, bulk: BulkDeliveries) -> None:
    """When the younger one arrives, the older ones that were given up go with it, and their texts."""
    ids = await desk.owe(PEER, PEER, PEER, key="post")
    await desk.fail(ids[0])
    await desk.fail(ids[1])
    await desk.node.ledger.gone(ids[2])
    assert await desk.rows() == {}
    assert await bulk.retry(EVERYTHING) == Retried(retried=0, left=0)


async def test_a_drop_makes_the_next_of_the_key_ready(desk: Desk, bulk: BulkDeliveries) -> None:
    """With its job; those that are dropped together leave none to be made ready."""
    ids = await desk.owe(*[PEER] * 5, key="post")
    assert await bulk.drop(Selection(ids=(ids[0],))) == Dropped(dropped=1, busy=0)
    assert (await desk.rows())[ids[1]].state is DeliveryState.READY
    assert await desk.states(f"{ids[1]}.1") == [JobState.QUEUED]
    assert await bulk.drop(Selection(state=DeliveryState.HELD)) == Dropped(dropped=3, busy=0)
    assert set(await desk.rows()) == {ids[1]}


async def test_deliveries_of_later_series_are_dropped_with_their_jobs(desk: Desk, bulk: BulkDeliveries) -> None:
    """In every state; and one that a worker is trying is told by the job it names."""
    ids = await desk.owe(*SERVERS[:4])
    await desk.fail(*ids)
    await bulk.retry(EVERYTHING)
    await desk.hold(ids[0], ids[1])
    await desk.expire(ids[1])
    (claim,) = await desk.claim(f"{ids[2]}.1")
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=3, busy=1)
    assert set(await desk.rows()) == {ids[2]}
    assert await desk.states(f"{ids[2]}.1", f"{ids[3]}.1") == [JobState.PROCESSING, None]
    assert (await desk.queue.storage.renew([claim])).lost == {}


@as_its_database
async def test_an_attempt_whose_worker_died_is_on_record_when_its_delivery_is_dropped(
    desk: Desk, bulk: BulkDeliveries
) -> None:
    (lost,) = await desk.owe(PEER)
    async with desk.database.transaction() as session:
        row = await session.get_one(DeliveryJob, lost)
        row.sending, row.attempts, row.last_attempted_at = 1, 1, datetime.now(UTC)
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=1, busy=0)
    async with desk.database.read() as session:
        (attempt,) = (await session.execute(select(DeliveryAttempt))).scalars()
    assert (attempt.delivery_id, attempt.attempt, attempt.error_code) == (lost, 1, "STALLED")


@as_its_database
async def test_what_moves_on_while_it_is_dropped_stays(desk: Desk, bulk: BulkDeliveries) -> None:
    """It names another job than the one that was removed."""
    ids = await desk.owe(*SERVERS[:2])
    await desk.hold(*ids)
    storage = desk.queue.storage
    remove = storage.remove

    async def remove_and_release(some: Sequence[str]) -> int:
        await BulkDeliveries(desk.database, desk.node.delivery_queues).retry(Selection(ids=(ids[0],)))
        return await remove(some)

    storage.remove = remove_and_release  # type: ignore[assignment, method-assign] # the race, at its worst moment
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=1, busy=1)
    assert await desk.states(f"{ids[0]}.1") == [JobState.QUEUED]


@as_its_database
async def test_what_may_crash_workers_is_retried_apart(desk: Desk, bulk: BulkDeliveries) -> None:
    """Its job says so, and it begins alone; of the others none does."""
    ids = await desk.owe(PEER, OTHER)
    await desk.fail(*ids)
    await desk.suspect(ids[0], -2)
    assert await bulk.retry(EVERYTHING) == Retried(retried=2, left=0)
    rows = await desk.rows()
    assert [rows[each].suspect for each in ids] == [1, None]
    jobs = {claim.job_id: claim.payload for claim in await desk.claim(*(f"{each}.1" for each in ids))}
    assert [b"suspect" in jobs[f"{each}.1"] for each in ids] == [True, False]


async def test_dropped_deliveries_leave_nothing(desk: Desk, bulk: BulkDeliveries) -> None:
    """No row, no job, no text: open and failed ones, in as many batches as it takes."""
    ids = [*await desk.owe(*SERVERS), *await desk.owe(*SERVERS, shared=True)]
    await desk.fail(*ids[5:9])
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=14, busy=0)
    assert await desk.rows() == {}
    assert await desk.texts() == []
    assert await desk.states(*ids) == [None] * 14


@as_its_database
async def test_a_shared_text_stays_while_it_is_needed(desk: Desk, bulk: BulkDeliveries) -> None:
    """It has one reference less for each delivery dropped."""
    ids = await desk.owe(PEER, OTHER, *SERVERS, shared=True)
    assert await bulk.drop(Selection(server_url=PEER)) == Dropped(dropped=1, busy=0)
    assert await desk.texts() == [8]
    assert set(await desk.rows()) == set(ids[1:])


async def test_what_a_worker_is_just_trying_is_not_dropped(desk: Desk, bulk: BulkDeliveries) -> None:
    """Neither its row nor its job: the attempt ends as attempts do. Its neighbours go."""
    ids = await desk.owe(*SERVERS)
    (claim,) = await desk.claim(ids[2])
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=6, busy=1)
    assert set(await desk.rows()) == {ids[2]}
    assert await desk.states(*ids) == [None, None, JobState.PROCESSING, *[None] * 4]
    assert (await desk.queue.storage.renew([claim])).lost == {}


async def test_a_job_that_the_sweeper_adds_meanwhile_is_removed(desk: Desk, bulk: BulkDeliveries) -> None:
    """Between the removal of the job and that of the row: its shared text is still there, so it would be sent."""
    ids = await desk.owe(PEER, OTHER, shared=True)
    await desk.unqueue(*ids)
    sweeper = OutboxSweeper(desk.database, desk.node.delivery_queues, min_age=timedelta(0))
    storage = desk.queue.storage
    remove, swept = storage.remove, list[int]()

    async def remove_and_sweep(ids: Sequence[str]) -> int:
        removed = await remove(ids)
        if not swept:
            swept.append((await sweeper.sweep()).added)
        return removed

    storage.remove = remove_and_sweep  # type: ignore[assignment, method-assign] # the race, at its worst moment
    assert await bulk.drop(Selection(server_url=PEER)) == Dropped(dropped=1, busy=0)
    assert swept == [1]
    assert await desk.states(*ids) == [None, JobState.QUEUED]


@as_its_database
async def test_what_is_owed_after_the_command_began_is_not_dropped(desk: Desk, bulk: BulkDeliveries) -> None:
    """Nobody has agreed to that, and a busy node would keep the command going for ever."""
    ids = await desk.owe(*SERVERS)
    storage, later = desk.queue.storage, list[str]()
    remove = storage.remove

    async def remove_and_owe(some: Sequence[str]) -> int:
        later.extend(await desk.owe(*SERVERS[: 8 - len(later)]))
        return await remove(some)

    storage.remove = remove_and_owe  # type: ignore[assignment, method-assign] # an application beside the command
    assert await bulk.drop(EVERYTHING) == Dropped(dropped=len(ids), busy=0)
    assert (await desk.rows()).keys() == set(later)


@as_its_database
@pytest.mark.parametrize(
    ("selection", "gone"),
    [
        (Selection(server_url=PEER), {0, 1}),
        (Selection(state=DeliveryState.FAILED), {1, 2}),
        (Selection(code="TIMEOUT"), {2}),
        (Selection(older_than=timedelta(hours=1)), {3}),
        (Selection(server_url=PEER, state=OPEN), {0}),
    ],
    ids=["server", "failed", "code", "age", "both"],
)
async def test_only_the_selected_are_dropped(
    desk: Desk, bulk: BulkDeliveries, selection: Selection, gone: set[int]
) -> None:
    """By server, state, code, age, or several of them."""
    ids = await desk.owe(PEER, PEER, OTHER, OTHER)
    await desk.fail(ids[1])
    await desk.fail(ids[2], code="TIMEOUT")
    await desk.backdate(ids[3], datetime.now(UTC) - timedelta(hours=2))
    await bulk.drop(selection)
    assert set(ids) - set(await desk.rows()) == {ids[number] for number in gone}
