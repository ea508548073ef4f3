"""Gaps between sweeps: what expires after them, and what a queue that lost its data has asked for again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from db import Database, DeliveryState
from federation.delivery.held.sweep_times import GAP, LOST_INTERVAL, SPARED, LastSweep, Sweeps, after_loss, after_sweep
from federation.delivery.outbox.sweeper import OutboxSweeper
from federation.retention import Purge
from tests.federation.delivery.node import URL, Node
from workers import Job, JobState, Worker
from workers.clock import ManualClock, SystemClock
from workers.storage.base import ANY_NAME
from workers.worker.events import WorkerEvent, WorkerEventKind

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
async def node(database: Database) -> AsyncIterator[Node]:
    made = Node.on(database, ManualClock(SystemClock().now()))
    yield made
    await made.close()


def swept(*gaps: timedelta) -> LastSweep:
    """After sweeps that far apart, the first of which is the first ever."""
    now, last = START, after_sweep(None, START)
    for gap in gaps:
        now += gap
        last = after_sweep(last, now)
    return last


def test_sweeps_that_follow_one_another_spare_nothing() -> None:
    """Nor does the first ever, nor a clock that is set back."""
    assert swept().spares_seconds == 0
    assert swept(*[MINUTE] * 9, GAP, -7 * DAY, MINUTE).spares_seconds == 0


def test_a_gap_begins_a_day_of_sweeping_in_which_nothing_expires() -> None:
    """A day in which sweeps follow one another; what lies in gaps does not count, and does not begin it anew."""
    assert swept(GAP + MINUTE).spares_seconds == SPARED.total_seconds()
    half = [HOUR] * 12
    assert swept(7 * DAY, *half).spares_seconds == SPARED.total_seconds() / 2
    assert swept(7 * DAY, *half, 3 * DAY).spares_seconds == SPARED.total_seconds() / 2
    assert swept(7 * DAY, *half, -10 * DAY).spares_seconds == SPARED.total_seconds() / 2
    assert swept(7 * DAY, *half, 3 * DAY, *half).spares_seconds == 0
    assert swept(7 * DAY, *half, *half, 3 * DAY).spares_seconds == SPARED.total_seconds()


def test_between_a_gap_and_the_next_sweep_everything_is_spared() -> None:
    """Whoever purges may come first."""
    last = swept(MINUTE)
    assert not last.spares(last.swept_at + GAP)
    assert not last.spares(last.swept_at - DAY)
    assert last.spares(last.swept_at + GAP + MINUTE)
    assert replace(last, spares_seconds=1.0).spares(last.swept_at)


def test_a_queue_loses_its_data_once_a_minute_at_most() -> None:
    """A time that is yet to come was written by a wrong clock."""
    lost = after_loss(None, START)
    assert lost.queue_lost_at == START
    assert after_loss(lost, START + LOST_INTERVAL - timedelta(seconds=1)) == lost
    assert after_loss(lost, START + LOST_INTERVAL).queue_lost_at == START + LOST_INTERVAL
    assert after_loss(lost, START - DAY).queue_lost_at == START - DAY


async def test_a_clock_that_is_a_week_ahead_expires_nothing_for_a_day_of_sweeping(node: Node) -> None:
    """Nor does it purge anything; set right within that day, nothing was lost."""
    (held,) = await node.add_held()
    (failed,) = await node.add_held(state=DeliveryState.FAILED, held_reason=None, settled_at=node.clock.now() - DAY)
    purge = Purge(node.database, sweeps=Sweeps(node.database), clock=node.clock)
    assert (await node.held().sweep())["expired"] == 0

    node.clock.advance(8 * DAY)
    assert await purge() == {"spared": True}
    for _ in range(23):
        assert (await node.held().sweep())["expired"] == 0
        assert await purge() == {"spared": True}
        node.clock.advance(HOUR)
    assert {each.state for each in (await node.rows()).values()} == {DeliveryState.HELD, DeliveryState.FAILED}

    for _ in range(2):
        await node.held().sweep()
        node.clock.advance(HOUR)
    assert (await node.rows())[held].state is DeliveryState.EXPIRED
    assert (await purge())["deliveries"] == 1
    assert failed not in await node.rows()


async def test_an_operator_may_say_that_the_clock_is_right(node: Node) -> None:
    """Then what is too old expires at once, and with the next sweeps."""
    await node.add_held(2)
    sweeps = Sweeps(node.database)
    await node.held().sweep()
    node.clock.advance(8 * DAY)
    await node.held().sweep()
    await sweeps.believe(node.clock.now())
    node.clock.advance(MINUTE)
    assert (await node.held().sweep())["expired"] == 2
    last = await sweeps.last()
    assert last is not None
    assert (last.swept_at, last.spares_seconds) == (node.clock.now(), 0)


@pytest.mark.parametrize("wrong", [datetime(1970, 1, 1, tzinfo=UTC), datetime(2106, 2, 7, 6, 28, 15, tzinfo=UTC)])
async def test_a_clock_that_is_decades_off_loses_nothing(node: Node, wrong: datetime) -> None:
    """Everything runs by it, and once it is right again, all goes on as if nothing had been."""
    right = node.clock.now()
    ids = await node.add_held(3)
    await node.links.exhausted(URL, "TIMEOUT", first_attempted_at=right)
    await node.held().sweep()
    purge = Purge(node.database, sweeps=Sweeps(node.database), clock=node.clock)
    sweeper = OutboxSweeper(node.database, node.queues, clock=node.clock)

    node.clock.advance(wrong - right)
    for _ in range(2):
        await node.held().sweep()
        await node.held().newly_held()
        await sweeper.sweep()
        await purge()
        for link in await node.links.due_for_probe(10):
            assert await node.links.take_probe(link)
            await node.links.probe_failed(URL)
        await node.releaser().tick()
        await node.links.rests(URL, None)
        node.clock.advance(MINUTE)

    node.clock.advance(right - node.clock.now() + 3 * MINUTE)
    assert [link.server_url for link in await node.links.due_for_probe(10)] == [URL]
    await node.held().sweep()
    assert {row.id for row in (await node.rows()).values() if row.state is DeliveryState.HELD} == set(ids)
    await node.links.returned(URL, reason="probe")
    node.clock.advance(DAY)  # it rests as long as it may have asked for
    for _ in range(4):
        await node.releaser().tick()
        node.clock.advance(MINUTE)
    assert await node.ready() == set(ids)


async def test_an_attempt_that_a_clock_put_off_for_days_is_due(node: Node) -> None:
    """It was ahead when the attempt before failed. Half an hour may be a pause of the settings, and a delay a wish."""
    late, soon, wished = await node.add_held(3, state=DeliveryState.READY, held_reason=None)
    rows = await node.rows()
    options: dict[str, dict[str, object]] = {
        late: {"backoff": {"type": "fixed", "delay": 3 * DAY / timedelta(milliseconds=1)}},
        soon: {"backoff": {"type": "fixed", "delay": HOUR / 2 / timedelta(milliseconds=1)}},
        wished: {"delay": 3 * DAY / timedelta(milliseconds=1)},
    }
    for delivery, opts in options.items():
        row = rows[delivery]
        await node.queue.add_bulk([(row.job_name or "", row.payload, {"jobId": delivery, "attempts": 5, **opts})])
    failing: list[str] = []

    def note(event: WorkerEvent) -> None:
        if event.kind is WorkerEventKind.FAILING and event.claim is not None:
            failing.append(event.claim.job_id)
            if len(failing) == 2:
                worker.stop()

    def fail(_job: Job) -> None:
        raise ValueError("not today")

    worker = Worker(node.queue.storage, {ANY_NAME: fail}, observers=[note])
    await worker.run()
    assert set(failing) == {late, soon}

    node.clock.advance(MINUTE)
    await OutboxSweeper(node.database, node.queues, clock=node.clock).sweep()
    for state, expected in ((JobState.QUEUED, late), (JobState.FAILING, soon), (JobState.SCHEDULED, wished)):
        assert [job.id for job in (await node.queue.storage.list(state)).jobs] == [expected]


@pytest.mark.parametrize("series", [0, 1])
async def test_a_tried_job_that_was_put_off_for_days_is_due(node: Node, series: int) -> None:
    """No wish delays those: it was snoozed, which is no failure."""
    (delivery,) = await node.add_held(state=DeliveryState.READY, held_reason=None, series=series)
    job = f"{delivery}.1" if series else delivery
    await node.change([delivery], job_id=job, first_attempted_at=None if series else node.clock.now())
    row = (await node.rows())[delivery]
    delay = 3 * DAY / timedelta(milliseconds=1)
    await node.queue.add_bulk([(row.job_name or "", row.payload, {"jobId": job, "delay": delay})])
    node.clock.advance(MINUTE)
    await OutboxSweeper(node.database, node.queues, clock=node.clock).sweep()
    assert [each.id for each in (await node.queue.storage.list(JobState.QUEUED)).jobs] == [job]
