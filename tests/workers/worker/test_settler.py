"""Settlements go to the storage in groups, and as often as it takes while their leases last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.workers.running import AT_ONCE, Recorder, broken, done, running
from workers import WorkerOptions
from workers.chains import continue_with
from workers.errors import LossReason, StorageUnavailable
from workers.jobs import Claim, Completed, Failed, JobState, Settlement, SettleOutcome, SettleStatus
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.exchanges import Settler
from workers.worker.handlers import Job


@asynccontextmanager
async def settling(
    storage: Storage, *, alive: set[str] | None = None
) -> AsyncIterator[tuple[Settler, list[BaseException]]]:
    """A settler at work, and what it reports; leases last while their job's id is in `alive` (default: for ever)."""
    errors: list[BaseException] = []

    def holds(claim: Claim) -> bool:
        return alive is None or claim.job_id in alive

    settler = Settler(storage.settle, limit=None, holds=holds, report=errors.append)
    async with steps.background(asyncio.create_task(settler.run())):
        yield settler, errors


async def claims(storage: Storage, count: int = 1) -> list[Claim]:
    """Claims on that many new jobs."""
    await steps.enqueue(storage, *(steps.job(str(number)) for number in range(count)))
    return await steps.claim(storage, count)


async def test_settlements_of_one_turn_go_in_one_call() -> None:
    """Fifty attempts that end together are settled by one call, each with its own outcome."""
    storage, calls = counting(MemoryStorage())
    held = await claims(storage, 50)
    await steps.apply(storage, steps.completed(held[7]))
    calls.clear()
    async with settling(storage) as (settler, errors), asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(*(settler.settle(steps.completed(claim)) for claim in held))
    assert calls["settle"] == 1
    statuses = [outcome.status for outcome in outcomes if outcome]
    assert statuses.count(SettleStatus.APPLIED) == 49
    assert statuses[7] is SettleStatus.ALREADY_APPLIED
    assert errors == []


async def test_settlements_gather_while_a_call_is_under_way() -> None:
    """There is never more than one call at a time; what arrives meanwhile goes with the next."""

    class Slow(MemoryStorage):
        async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
            groups.append(len(settlements))
            under_way.set()
            await answer.wait()
            return await super().settle(settlements)

    groups: list[int] = []
    under_way, answer = asyncio.Event(), asyncio.Event()
    storage = Slow()
    held = await claims(storage, 10)
    async with settling(storage) as (settler, _), asyncio.timeout(PATIENCE):
        first = asyncio.create_task(settler.settle(steps.completed(held[0])))
        await under_way.wait()
        others = [asyncio.create_task(settler.settle(steps.completed(claim))) for claim in held[1:]]
        await asyncio.sleep(0)
        answer.set()
        await asyncio.gather(first, *others)
    assert groups == [1, 9]


async def test_a_storage_that_fails_is_asked_again_while_the_lease_lasts() -> None:
    """Lost requests are reported and repeated until one arrives."""
    storage, faults = faulty(MemoryStorage())
    (claim,) = await claims(storage)
    faults.requests_lost["settle"] = 3
    async with settling(storage) as (settler, errors), asyncio.timeout(PATIENCE):
        outcome = await settler.settle(steps.completed(claim))
    assert outcome is not None
    assert outcome.status is SettleStatus.APPLIED
    assert [type(error) for error in errors] == [StorageUnavailable] * 3


async def test_a_lost_reply_is_found_to_have_been_applied() -> None:
    """The repeated call finds its own work done."""
    storage, faults = faulty(MemoryStorage())
    (claim,) = await claims(storage)
    faults.replies_lost["settle"] = 1
    async with settling(storage) as (settler, _), asyncio.timeout(PATIENCE):
        outcome = await settler.settle(steps.completed(claim))
    assert outcome is not None
    assert outcome.status is SettleStatus.ALREADY_APPLIED


async def test_settlements_are_given_up_when_their_lease_has_ended() -> None:
    """Of a group that cannot be settled those without a lease are given up, the others tried on."""
    storage, faults = faulty(MemoryStorage())
    dead, living = await claims(storage, 2)
    broken(faults, "settle")
    async with settling(storage, alive={living.job_id}) as (settler, _), asyncio.timeout(PATIENCE):
        pending = asyncio.create_task(settler.settle(steps.completed(living)))
        assert await settler.settle(steps.completed(dead)) is None
        assert not pending.done()
        broken(faults, "settle", down=False)
        assert await pending is not None
    assert await steps.state(storage, dead.job_id) is JobState.PROCESSING
    assert await steps.state(storage, living.job_id) is JobState.COMPLETED


async def test_one_settlement_a_storage_cannot_take_costs_its_neighbours_nothing() -> None:
    """An exception that is none of the contract's gives up the one settlement that causes it, and is reported."""

    class Buggy(MemoryStorage):
        async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
            if any(settlement.claim.job_id == "1" for settlement in settlements):
                raise ZeroDivisionError
            return await super().settle(settlements)

    storage = Buggy()
    held = await claims(storage, 3)
    async with settling(storage) as (settler, errors), asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(*(settler.settle(steps.completed(claim)) for claim in held))
    assert [outcome and outcome.status for outcome in outcomes] == [SettleStatus.APPLIED, None, SettleStatus.APPLIED]
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_nobody_waits_for_a_settler_that_has_ended() -> None:
    """Settlements under way, waiting, and yet to come are all given up when the settler ends."""

    class Silent(MemoryStorage):
        async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
            under_way.set()
            await asyncio.Event().wait()
            return []

    under_way = asyncio.Event()
    storage = Silent()
    first, second, third = await claims(storage, 3)
    async with asyncio.timeout(PATIENCE):
        async with settling(storage) as (settler, _):
            asked = asyncio.create_task(settler.settle(steps.completed(first)))
            await under_way.wait()
            waiting = asyncio.create_task(settler.settle(steps.completed(second)))
            await asyncio.sleep(0)
        assert await asked is None
        assert await waiting is None
        assert await settler.settle(steps.completed(third)) is None


@pytest.mark.parametrize("lost", ["requests_lost", "replies_lost"])
async def test_a_storage_error_is_no_failure_of_the_handler(lost: str) -> None:
    """A job whose settlement failed at first has run once, and completed, whichever half of the call was lost."""
    storage, faults = faulty(MemoryStorage())
    getattr(faults, lost)["settle"] = 2
    recorder = Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": done}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))):
        await recorder.seen(Kind.COMPLETED)
    assert recorder.story("job") == [Kind.ACTIVE, Kind.COMPLETED]
    assert len(recorder.of(Kind.ERROR)) == 2
    status = await steps.status(storage, "job")
    assert (status.state, status.attempt) == (JobState.COMPLETED, 1)


async def test_a_settlement_that_comes_too_late_is_told() -> None:
    """A job that was taken by another worker meanwhile: `lease_lost`, and the other's attempt is untouched."""
    storage, recorder = MemoryStorage(), Recorder()
    ran = asyncio.Event()

    async def dawdle(job: Job) -> str:
        ran.set()
        await taken.wait()
        return "too late"

    taken = asyncio.Event()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": dawdle}, observers=[recorder])
    async with running(worker):
        await ran.wait()
        held = (await recorder.seen(Kind.ACTIVE)).claim
        assert held is not None
        await steps.apply(storage, steps.released(held))
        other = await steps.claim_one(storage, worker_id="other")
        taken.set()
        await recorder.seen(Kind.LEASE_LOST)
    status = await steps.status(storage, "job")
    assert (status.state, status.worker_id) == (JobState.PROCESSING, "other")
    await steps.apply(storage, steps.completed(other))
    assert Kind.COMPLETED not in recorder.story()


class Narrow(MemoryStorage):
    """Takes no results of more than ten bytes, and no continuations; with `errors` False no errors either."""

    errors = True

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        return [await self._settle(settlement) for settlement in settlements]

    async def _settle(self, settlement: Settlement) -> SettleOutcome:
        small = isinstance(settlement, Completed) and len(settlement.result) <= 10
        if small or (self.errors and isinstance(settlement, Failed)):
            return (await super().settle([settlement]))[0]
        return SettleOutcome(status=SettleStatus.ERROR, detail="no room for it")


@pytest.mark.parametrize("result", ["x" * 100, continue_with("work", None)], ids=["result", "continuation"])
async def test_a_success_the_storage_cannot_take_is_a_failure(result: object) -> None:
    """It would be refused again, so the job fails at once, with the storage's reason; the worker reports it too."""
    storage, recorder = Narrow(), Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": lambda _: result}, observers=[recorder])):
        error = (await recorder.seen(Kind.ERROR)).error
        await recorder.seen(Kind.FAILED)
    assert "'job' could not be settled: no room for it" in str(error)
    outcome = await storage.result("job")
    assert outcome is not None
    assert outcome.error is not None
    assert "no room for it" in outcome.error.message


async def test_a_failure_the_storage_cannot_take_is_only_reported() -> None:
    """Nothing is left to settle instead; the lease runs out, and the worker goes on with other jobs."""
    storage, recorder = Narrow(), Recorder()
    storage.errors = False
    await steps.enqueue(storage, steps.job("job"), steps.job("other", name="done"))
    handlers = {"work": lambda _: "x" * 100, "done": done}
    async with running(Worker(storage, handlers, observers=[recorder])):
        await recorder.seen(Kind.ERROR, 2)
        await recorder.seen(Kind.COMPLETED)
    assert Kind.FAILED not in recorder.story()


async def test_a_lost_settlement_carries_its_reason() -> None:
    """What `settle` answers for a job that completed elsewhere is passed on as it is."""
    storage = MemoryStorage()
    (claim,) = await claims(storage)
    await steps.apply(storage, steps.released(claim))
    await steps.apply(storage, steps.completed(await steps.claim_one(storage)))
    async with settling(storage) as (settler, _), asyncio.timeout(PATIENCE):
        outcome = await settler.settle(steps.completed(claim))
    assert outcome is not None
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.COMPLETED)
