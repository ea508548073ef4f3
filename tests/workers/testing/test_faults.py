"""A bad connection does what it is told to, and a worker behind one completes every job all the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.workers.running import AT_ONCE, running
from workers import WorkerOptions
from workers.errors import Retry, StorageUnavailable, UnrecoverableError
from workers.jobs import (
    Claim,
    Completed,
    Failed,
    JobOutcome,
    NewJob,
    OutcomeKind,
    Released,
    Retried,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.abilities import (
    Exchange,
    ExchangesJobs,
    HoldsWakeUps,
    KeepsCrons,
    KeepsLimits,
    OfOneLoop,
    Pooled,
    TakesLeave,
)
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.redis import RedisStorage
from workers.storage.sql import SqlStorage
from workers.testing import Fault, Faults, RandomFaults, counting, faulty
from workers.testing.steps import PATIENCE, claim_one, job, state
from workers.worker import Worker
from workers.worker.handlers import Job

SLEEP = timedelta(hours=1)


async def test_a_duplicated_call_reaches_the_storage_twice() -> None:
    """The caller gets the second answer."""
    counted, calls = counting(MemoryStorage())
    storage, faults = faulty(counted)
    faults.duplicated["enqueue"] = 1
    assert [result.status.value for result in await storage.enqueue([job("a")])] == ["duplicate"]
    assert calls["enqueue"] == 2


async def test_a_cut_call_is_broken_off() -> None:
    """A call that had its effect before the cut kept it; one that was waiting ends at once."""
    storage, faults = faulty(MemoryStorage())
    faults.cut.update(["enqueue", "wait"])
    with pytest.raises(StorageUnavailable, match="enqueue: the connection was cut"):
        await storage.enqueue([job("a")])
    await claim_one(storage)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StorageUnavailable, match="wait: the connection was cut"):
            await storage.wait(["*"], timeout=SLEEP)


async def test_a_delayed_call_comes_late() -> None:
    """What is done meanwhile comes before it, and it is answered in the end."""
    storage, faults = faulty(MemoryStorage(), Faults(delay=timedelta(milliseconds=500)))
    faults.delayed["enqueue"] = 1
    late = asyncio.create_task(storage.enqueue([job("a")]))
    await asyncio.sleep(0)
    assert await state(storage, "a") is None
    await late
    assert await state(storage, "a") is not None


async def test_one_fault_at_a_time() -> None:
    """Planned faults of one verb come one per call, and then none."""
    faults = Faults()
    faults.cut["claim"] = faults.delayed["claim"] = 1
    assert [faults.next("claim") for _ in range(3)] == [Fault.DELAYED, Fault.CUT, None]


def test_a_seed_repeats_its_faults() -> None:
    """The same seed gives the same faults, of every kind, and never to a verb left out."""
    rolls = [RandomFaults(seed, rate=0.5, verbs=["claim"]) for seed in (1, 1, 2)]
    first, same, other = ([faults.next("claim") for _ in range(100)] for faults in rolls)
    assert first == same != other
    assert set(first) == {*Fault, None}
    assert sum(rolls[0].happened.values()) == sum(fault is not None for fault in first)
    assert {RandomFaults(1, rate=1).next(verb) for verb in ("connect", "disconnect")} == {None}


class Ledger(MemoryStorage if TYPE_CHECKING else object):
    """What really happened in the storage it is mixed into, whatever the worker was told."""

    claimed: dict[str, Claim]
    ended: dict[str, Settlement]
    applied: set[str]

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims = await super().claim(worker_id, leases=leases, limit=limit)
        assert not self.claimed.keys() & {held.token for held in claims}, "a token was used twice"
        self.claimed.update((held.token, held) for held in claims)
        return claims

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        # Noted beforehand: what is cut off here is done all the same, and perhaps never asked for again.
        self.ended.update((settlement.claim.token, settlement) for settlement in settlements)
        outcomes = await super().settle(settlements)
        self.note(settlements, outcomes)
        return outcomes

    def note(self, settlements: Sequence[Settlement], outcomes: Sequence[SettleOutcome]) -> None:
        for settlement, outcome in zip(settlements, outcomes, strict=True):
            token = settlement.claim.token
            if outcome.status in (SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED):
                self.applied.add(token)
            elif token not in self.applied:  # else it is repeated, and another claim has taken the job by now
                del self.ended[token]

    def attempts(self, job_id: str) -> int:
        """How many of the job's claims count."""
        given_back = (Released, Retried)
        return sum(held.job_id == job_id for held in self.claimed.values()) - sum(
            isinstance(end, given_back) and not (isinstance(end, Retried) and end.counted)
            for end in self.ended.values()
            if end.claim.job_id == job_id
        )


class MemoryLedger(Ledger, MemoryStorage):
    pass


class SqliteLedger(Ledger, SqlStorage):
    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        self.ended.update((settlement.claim.token, settlement) for settlement in settlements)
        turn = await super().settle_and_claim(settlements, worker_id, leases=leases, limit=limit)
        self.note(settlements, turn.outcomes)
        self.claimed.update((held.token, held) for held in turn.claims or ())
        return turn


@asynccontextmanager
async def opened(kind: type[Ledger], directory: Path) -> AsyncIterator[Ledger]:
    """A ledger on an empty storage."""
    target = f"sqlite:///{directory}/jobs.db" if kind is SqliteLedger else MemorySpace()
    ledger = kind(target)
    ledger.claimed, ledger.ended, ledger.applied = {}, {}, set()
    if isinstance(ledger, SqliteLedger):
        await ledger.migrate()
    await ledger.connect()
    yield ledger
    await ledger.disconnect()


async def good(job: Job) -> str:
    return f"done {job.id}"


async def shaky(job: Job) -> str:
    if job.attempt == 1:
        raise ValueError("the first attempt fails")
    return f"done {job.id}"


def patient() -> Callable[[Job], object]:
    asked: Counter[str] = Counter()

    async def wait_once(job: Job) -> str:
        asked[job.id] += 1
        if asked[job.id] == 1:
            raise Retry(delay=timedelta(0), counted=False)
        return f"done {job.id}"

    return wait_once


async def hopeless(job: Job) -> None:
    raise UnrecoverableError("this job cannot be done")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [MemoryLedger, SqliteLedger])
async def test_a_worker_behind_a_bad_connection_completes_every_job(
    kind: type[Ledger], seed: int, tmp_path: Path
) -> None:
    """Of 200 jobs none is lost, each ends once and as its handler says, and each of its attempts is counted."""
    names = ("good", "shaky", "patient", "hopeless")
    jobs = [job(f"{names[number % 4]}-{number}", name=names[number % 4], max_attempts=50) for number in range(200)]
    async with opened(kind, tmp_path) as ledger:
        storage, faults = faulty(ledger, RandomFaults(seed, rate=0.25))
        worker = Worker(
            storage,
            {"good": good, "shaky": shaky, "patient": patient(), "hopeless": hopeless},
            concurrency=8,
            lease=timedelta(milliseconds=600),
            options=WorkerOptions(retry=AT_ONCE, poll_interval=timedelta(milliseconds=200), max_stalls=50),
        )
        async with running(worker), asyncio.timeout(6 * PATIENCE):
            for start in range(0, 200, 50):
                await _insist(storage, jobs[start : start + 50])
            while await _unfinished(ledger) or worker.running:
                await asyncio.sleep(0.005)
        assert isinstance(faults, RandomFaults)
        assert faults.happened.total() >= 10
        ends = Counter(end.claim.job_id for end in ledger.ended.values() if isinstance(end, Completed | Failed))
        assert ends == Counter(new.id for new in jobs)
        for new in jobs:
            await _ended_as_it_should(ledger, new)


async def _ended_as_it_should(ledger: Ledger, new: NewJob) -> None:
    outcome = await ledger.result(new.id)
    (found,) = await ledger.status([new.id])
    assert outcome is not None
    assert found is not None
    if new.name == "hopeless":
        assert outcome.kind is OutcomeKind.FAILED
    else:
        assert outcome == JobOutcome(kind=OutcomeKind.COMPLETED, result=f'"done {new.id}"'.encode())
    assert found.attempt == ledger.attempts(new.id) >= (2 if new.name == "shaky" else 1)


async def _insist(storage: Storage, jobs: Sequence[NewJob]) -> None:
    """The jobs are in the queue, as a producer gets them there: by saying it until it is answered."""
    while True:
        try:
            await storage.enqueue(jobs)
        except StorageUnavailable:
            continue
        return


async def _unfinished(storage: Storage) -> bool:
    counts = await storage.counts()
    return sum(number for kept, number in counts.items() if kept.value not in ("completed", "failed")) > 0


@pytest.mark.parametrize(
    "ability", [HoldsWakeUps, KeepsCrons, KeepsLimits, OfOneLoop, Pooled, TakesLeave, ExchangesJobs]
)
def test_a_wrapped_storage_has_the_abilities_of_the_one_behind_it(ability: type) -> None:
    """Also where `isinstance` looks past `__getattr__`, as it does from Python 3.12 on."""
    for storage in (MemoryStorage(), RedisStorage("redis://127.0.0.1:1", queue="q")):
        assert isinstance(faulty(storage)[0], ability) == isinstance(storage, ability)
