"""Suspects run apart from all other deliveries, and the one that crashes workers is found."""

from __future__ import annotations

import asyncio

from sqlalchemy import select
from sqlmodel import col

from db import AttemptNote, DeliveryAttempt, DeliveryJob, DeliveryState
from federation.delivery.attempt.concurrency import CrashSuspects
from federation.delivery.ledger.entries import Abandoned, Begin, Begun
from federation.delivery.ledger.ledger import Ledger
from federation.delivery.ledger.statements import FATAL_ALONE, FIRST_SUSPECTS
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import Site
from tests.peer import Peer
from workers.clock import ManualClock


class Sides:
    """Attempts of both sides that stay inside until they are told to leave."""

    def __init__(self) -> None:
        self.suspects = CrashSuspects()
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, name: str, *, suspect: bool = False) -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._attempt(name, suspect))
        await self.settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def _attempt(self, name: str, suspect: bool) -> None:
        async with self.suspects.enter(suspect=suspect):
            self.inside.append(name)
            await self._leave[name].wait()
            self.inside.remove(name)


async def test_sides_take_turns() -> None:
    """Who comes while the other side waits waits too, and all who wait go in together."""
    sides = Sides()
    await sides.come("1")
    await sides.come("2")
    await sides.come("s1", suspect=True)
    await sides.come("3")
    await sides.come("s2", suspect=True)
    assert sides.inside == ["1", "2"]
    await sides.leave("1")
    assert sides.inside == ["2"]
    await sides.leave("2")
    assert sides.inside == ["s1", "s2"]
    await sides.leave("s1", "s2")
    assert sides.inside == ["3"]
    await sides.leave("3")
    await sides.come("s3", suspect=True)
    assert sides.inside == ["s3"]


async def test_who_gives_up_waiting_keeps_nobody_out() -> None:
    """Before its turn, and in the very step in which it is let in."""
    sides = Sides()
    await sides.come("1")
    await sides.come("s1", suspect=True)
    await sides.come("2")
    await sides.cancel("s1")
    await sides.leave("1")
    assert sides.inside == ["2"]
    await sides.come("s2", suspect=True)
    sides._leave["2"].set()
    while sides.inside:
        await asyncio.sleep(0)
    sides._tasks["s2"].cancel()
    await sides.settle()
    await sides.come("3")
    assert "3" in sides.inside


def abandoned(delivery: str) -> Abandoned:
    """Of its first job."""
    now = ManualClock().now()
    return Abandoned(delivery_id=delivery, job_id=delivery, at=now, until=now, error="crashed")


class Crashes:
    """Attempts that begin, and either all arrive or go down together with the one that is poison."""

    def __init__(self, federation: Federation, ledger: Ledger, poison: str) -> None:
        self._federation = federation
        self._ledger = ledger
        self._poison = poison
        self.count = 0
        self.largest = 0

    async def run(self, ids: list[str]) -> None:
        rows = await self._rows(ids)
        self.largest = max(self.largest, len(rows))
        assert all([isinstance(await self._begin(row, attempt=1), Begun) for row in rows])
        if self._poison in ids:
            self.count += 1
            for row in rows:
                assert not isinstance(await self._begin(row, attempt=2), Begun)
        else:
            for row in rows:
                await self._ledger.gone(row.id)

    async def _rows(self, ids: list[str]) -> list[DeliveryJob]:
        async with self._federation.database.read() as session:
            query = select(DeliveryJob).where(col(DeliveryJob.id).in_(ids))
            return list((await session.execute(query)).scalars())

    async def _begin(self, row: DeliveryJob, *, attempt: int) -> object:
        assert row.job_id is not None
        assert row.job_name is not None
        assert row.server_url is not None
        return await self._ledger.begin(
            Begin(
                delivery_id=row.id,
                job_id=row.job_id,
                job_name=row.job_name,
                server_url=row.server_url,
                attempt=attempt,
                at=row.created_at,
            )
        )

    async def ready(self) -> list[str]:
        async with self._federation.database.read() as session:
            query = select(col(DeliveryJob.id)).where(col(DeliveryJob.state) == DeliveryState.READY)
            return list((await session.execute(query)).scalars())


async def test_one_poison_delivery_among_five_hundred_is_found(site: Site, peer: Peer, federation: Federation) -> None:
    """Nine crashes single it out, two more convict it; everything else arrives, and the log knows the last attempt."""
    ledger = Ledger(federation.database)
    deliveries = await site.owe_posts(peer, 500)
    poison = deliveries[137]
    for each in deliveries:
        await ledger.abandoned(abandoned(each))

    crashes = Crashes(federation, ledger, poison)
    for _ in range(100):
        await federation.held_sweeper.sweep()
        if not (group := await crashes.ready()):
            break
        await crashes.run(group)

    async with federation.database.read() as session:
        [left] = (await session.execute(select(DeliveryJob))).scalars()
        log = (
            select(DeliveryAttempt).where(col(DeliveryAttempt.delivery_id) == poison).order_by(col(DeliveryAttempt.id))
        )
        attempts = list((await session.execute(log)).scalars())
    assert (left.id, left.state, left.error_code) == (poison, DeliveryState.FAILED, "STALLED")
    assert crashes.largest == FIRST_SUSPECTS
    assert crashes.count == 9 + FATAL_ALONE - 1
    assert {attempt.error_code for attempt in attempts} == {"STALLED"}
    assert [attempt.note for attempt in attempts] == [None] * (crashes.count - 1) + [AttemptNote.GIVEN_UP]


async def test_a_second_group_waits_for_the_first(site: Site, peer: Peer, federation: Federation) -> None:
    """As long as one of them is under way, no other suspect is released."""
    ledger = Ledger(federation.database)
    deliveries = await site.owe_posts(peer, FIRST_SUSPECTS + 1)
    for each in deliveries:
        await ledger.abandoned(abandoned(each))
    assert [(await federation.held_sweeper.sweep())["suspects_released"] for _ in range(2)] == [FIRST_SUSPECTS, 0]
