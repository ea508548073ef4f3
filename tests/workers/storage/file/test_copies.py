"""The copies of a queue that processes have in memory: they agree, and hear of what the others did."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.workers.storage.file.steps import LEASES, MINUTE, described, journal_of
from workers.clock import ManualClock
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import UnknownDependency
from workers.jobs import (
    DROP,
    TERMINAL_EVENTS,
    AfterFailure,
    Cancelled,
    Claim,
    Completed,
    Continued,
    CronRow,
    EnqueueStatus,
    Failed,
    JobEventKind,
    ProgressReport,
    Released,
    Retried,
)
from workers.limits import Limit, LimitKey
from workers.storage.file import FileStorage
from workers.storage.file import journal as file_journal
from workers.testing.steps import ERROR, PATIENCE, background, ids, job, next_claim


class RandomSteps:
    """Steps of any kind on any of a few jobs, the same for one seed."""

    def __init__(self, seed: int, clock: ManualClock) -> None:
        self._source = random.Random(seed)
        self._clock = clock
        self._ids = [f"job-{number}" for number in range(12)]
        self.claims: list[Claim] = []

    async def __call__(self, storage: FileStorage) -> None:
        steps = (self._enqueue, self._enqueue, self._claim, self._claim, self._settle, self._settle)
        others = (self._lease, self._pass_time, self._manage, self._limit, self._turn)
        await self._source.choice((*steps, *others))(storage)

    async def _enqueue(self, storage: FileStorage) -> None:
        delay, key = self._source.choice((0, 0, 20)), self._source.choice((None, "k", "l"))
        options: dict[str, Any] = {"delay": timedelta(seconds=delay), "priority": self._source.randrange(2)}
        if key is not None:
            kind = self._source.choice(("ordering_key", "limit_key", "fair_key"))
            options[kind] = LimitKey("api", key) if kind == "limit_key" else key
        mode = self._source.choice((None, *DeduplicationMode))
        if mode is not None:
            ttl = None if mode is DeduplicationMode.SIMPLE else timedelta(seconds=20)
            options["deduplication"] = Deduplication(key=self._source.choice("mn"), mode=mode, ttl=ttl)
        new = job(self._source.choice(self._ids), **options)
        if self._source.randrange(2):
            after = self._others(new.id)
            new = replace(new, after=after, after_failure=self._source.choice((*AfterFailure,)))
        with contextlib.suppress(UnknownDependency):
            await storage.enqueue([new])

    def _others(self, job_id: str) -> tuple[str, ...]:
        return tuple(sorted({one for one in self._source.choices(self._ids, k=2) if one != job_id}))

    async def _claim(self, storage: FileStorage) -> None:
        self.claims += await storage.claim(self._source.choice("vw"), leases=LEASES, limit=2)

    async def _settle(self, storage: FileStorage) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self._source.randrange(len(self.claims)))
        keep = self._source.choice((DROP, MINUTE, None))
        delay = timedelta(seconds=self._source.choice((0, 9)))
        options = (
            Completed(claim=claim, result=b"r", keep=keep, then=job(self._source.choice(self._ids))),
            Continued(claim=claim, then=job(claim.job_id, fair_key=self._source.choice((None, "k")))),
            Continued(claim=claim, then=replace(job(claim.job_id), after=self._others(claim.job_id))),
            Failed(claim=claim, error=ERROR, keep=keep),
            Retried(claim=claim, delay=delay, error=ERROR),
            Released(claim=claim),
            Cancelled(claim=claim, keep=keep),
        )
        await storage.settle([self._source.choice(options)])

    async def _lease(self, storage: FileStorage) -> None:
        await storage.renew(self.claims)
        await storage.progress([ProgressReport(claim=claim, value=claim.token.encode()) for claim in self.claims[::2]])
        await storage.recover(2)

    async def _pass_time(self, storage: FileStorage) -> None:
        self._clock.advance(timedelta(seconds=self._source.choice((1, 30, 90, 3_600))))
        await storage.status(self._ids)
        await storage.sweep(self._source.randrange(4))

    async def _manage(self, storage: FileStorage) -> None:
        job_id = self._source.choice(self._ids)
        await storage.cancel(job_id)
        await storage.retry([job_id])
        await storage.promote([self._source.choice(self._ids)])
        await storage.update_result_ttl(job_id, MINUTE)

    async def _limit(self, storage: FileStorage) -> None:
        name = self._source.choice(("api", "*"))
        limit = Limit(self._source.choice((None, "3/m")), concurrency=self._source.choice((None, 2, 5)))
        await storage.declare_limits({name: limit})
        await storage.remove_limit(self._source.choice(("*", "none")))

    async def _turn(self, storage: FileStorage) -> None:
        found = await storage.crons()
        revision = found.rows[0].revision + 1 if found.rows else 1
        row = CronRow(name="cron", revision=revision, due=self._clock.now(), body="{}")
        await storage.replace_cron(row, jobs=[job(self._source.choice(self._ids))])


async def test_two_copies_and_a_fresh_one_always_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever two processes do in turn, through compactions too, both know the same, and so does a third one."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 4_000)
    source, clock = random.Random(11), ManualClock()
    step = RandomSteps(12, clock)
    # With another `fsync` a storage shares nothing with the first but the directory, as another process would.
    pair = [FileStorage(tmp_path, clock=clock, fsync=fsync) for fsync in (True, False)]
    for storage in pair:
        await storage.connect()
    for turn in range(800):
        await step(source.choice(pair))
        if turn % 20 == 0:
            first, second = [await described(each) for each in pair]
            assert first == second
    assert len(os.listdir(tmp_path / "default")) == 1
    for each in pair:
        last = await described(each)
        await each.disconnect()
    fresh = FileStorage(tmp_path, clock=clock)
    await fresh.connect()
    assert await described(fresh) == last
    await fresh.disconnect()


@pytest.mark.parametrize("seed", range(4))
async def test_a_fresh_copy_claims_what_an_old_one_does(seed: int, tmp_path: Path) -> None:
    """Whatever it heard of the others, whose turn it is and what a limit keeps back follow from the journal alone."""
    source, clock, claimed = random.Random(seed), ManualClock(), 0
    step = RandomSteps(seed, clock)
    pair = [FileStorage(tmp_path / "queue", clock=clock, fsync=fsync) for fsync in (True, False)]
    for storage in pair:
        await storage.connect()
    for turn in range(300):
        await step(source.choice(pair))
        if turn % 10 == 0:
            shutil.copytree(tmp_path / "queue", tmp_path / str(turn))
            fresh = FileStorage(tmp_path / str(turn), clock=clock, fsync=False)
            await fresh.connect()
            limit = source.choice((1, 2, 50))
            here, there = [await one.claim("v", leases=LEASES, limit=limit) for one in (fresh, source.choice(pair))]
            await fresh.disconnect()
            assert ids(here) == ids(there)
            claimed += len(there)
            step.claims += there
    assert claimed > 10
    for storage in pair:
        await storage.disconnect()


async def test_a_copy_is_brought_up_to_date_and_not_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it did itself, by what another process wrote, and where that one replaced the journal by a snapshot."""
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    copy, journals = await there._read(lambda state, now: state), set()
    for number, slack in enumerate((1 << 20, 1 << 20, 0, 0, 0)):
        monkeypatch.setattr(file_journal, "SLACK_BYTES", slack)
        await here.enqueue([job(f"job-{number}", payload=b"p" * 1_000)])
        journals.add(journal_of(tmp_path).read_bytes()[16:24])
        assert await there._read(lambda state, now: state) is copy
        await there.cancel(f"job-{number}")
    assert len(journals) > 1
    assert await described(here) == await described(there)
    await here.disconnect()
    await there.disconnect()


async def test_events_are_heard_through_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber in another process hears of every job while the journal is replaced again and again."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 2_000)
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    async with asyncio.timeout(3 * PATIENCE), there.events() as subscription:
        for number in range(40):
            await here.enqueue([job(f"job-{number}", payload=b"p" * 1_000)])
            (claim,) = await here.claim("w", leases=LEASES, limit=1)
            await here.settle([Completed(claim=claim, result=b"", keep=DROP)])
            kinds = [(await subscription.get()).kind for _ in range(3)]
            assert kinds == [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.COMPLETED]
    await here.disconnect()
    await there.disconnect()


async def test_a_key_freed_elsewhere_is_free_here(tmp_path: Path) -> None:
    """A job that waits for its ordering key is claimed here, once another process settled the one that held the key."""
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    await here.enqueue(
        [job("first", ordering_key="k"), job("second", ordering_key="k"), job("third", ordering_key="k")]
    )
    (held,) = await there.claim("w", leases=LEASES, limit=3)
    assert await here.claim("v", leases=LEASES, limit=3) == []
    worker = asyncio.create_task(next_claim(here))
    async with background(worker):
        await there.settle([Completed(claim=held, result=b"", keep=DROP)])
        assert (await worker).job_id == "second"
    assert await there.claim("w", leases=LEASES, limit=3) == []
    await here.disconnect()
    await there.disconnect()


async def test_a_key_seen_to_be_free_here_is_not_taken_from_who_has_it_now(tmp_path: Path) -> None:
    """That a throttled key was over is written here when another process has given it to its next job already."""
    clock = ManualClock()
    here, there = FileStorage(tmp_path, clock=clock), FileStorage(tmp_path, clock=clock, fsync=False)
    await here.connect()
    await there.connect()
    throttled = Deduplication(key="m", mode=DeduplicationMode.THROTTLE, ttl=timedelta(seconds=20))
    await here.enqueue([job("first", deduplication=throttled)])
    await there.counts()
    clock.advance(timedelta(seconds=30))
    await here.counts()  # which sees that the key is free, and has nothing to write yet
    simple = Deduplication(key="m", mode=DeduplicationMode.SIMPLE)
    assert (await there.enqueue([job("second", deduplication=simple)]))[0].status is EnqueueStatus.QUEUED
    await here.pause()
    assert (await there.enqueue([job("third", deduplication=simple)]))[0].id == "second"
    await here.disconnect()
    await there.disconnect()


async def test_a_copy_that_only_looks_keeps_nothing_to_write(tmp_path: Path) -> None:
    """What the clock changed there is written by others sooner or later, and is no change of its own any more."""
    clock = ManualClock()
    worker, looker = FileStorage(tmp_path, clock=clock), FileStorage(tmp_path, clock=clock, fsync=False)
    await worker.connect()
    await looker.connect()
    await worker.declare_limits({"api": Limit("1/m")})
    throttled = Deduplication(key="m", mode=DeduplicationMode.THROTTLE, ttl=MINUTE)
    for number in range(10):
        limited = job(f"limited-{number}", limit_key=LimitKey("api", str(number)), keep=MINUTE)
        await worker.enqueue([limited, job(f"keyed-{number}", deduplication=throttled, keep=MINUTE)])
        claims = await worker.claim("w", leases=LEASES, limit=9)
        assert len(claims) == 2
        await worker.settle([Completed(claim=claim, result=b"") for claim in claims])
        clock.advance(timedelta(hours=1))
        await looker.counts()
        await worker.sweep(100)
    assert await looker._read(lambda state, now: bool(state._changes)) is False
    await worker.disconnect()
    await looker.disconnect()


async def test_a_copy_left_behind_hears_of_the_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that missed several journals still learns which jobs ended meanwhile, and how."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 1_000)
    replaced = set()

    async def fill(storage: FileStorage, name: str) -> None:
        for number in range(20):
            await storage.enqueue([job(f"{name}-{number}", payload=b"p" * 2_000)])
            replaced.add(journal_of(tmp_path).read_bytes()[16:24])

    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await here.enqueue([job("done"), job("failed"), job("cancelled"), job("waits")])
    await there.connect()
    await fill(here, "before")
    claims = await here.claim("w", leases=LEASES, limit=2)
    await here.settle([Completed(claim=claims[0], result=b""), Failed(claim=claims[1], error=ERROR)])
    await here.cancel("cancelled")
    await fill(here, "after")
    assert len(replaced) >= 4
    heard = {}
    async with asyncio.timeout(3 * PATIENCE), there.events() as subscription:
        while len(heard) < 3:
            event = await subscription.get()
            if event.kind in TERMINAL_EVENTS:
                heard[event.job_id] = event.kind
    assert heard == {
        "done": JobEventKind.COMPLETED,
        "failed": JobEventKind.FAILED,
        "cancelled": JobEventKind.CANCELLED,
    }
    await here.disconnect()
    await there.disconnect()


async def test_a_copy_left_behind_hears_of_cancel_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that missed several journals still learns which of its jobs are not wanted any more."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 1_000)
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    await here.enqueue([job("wanted"), job("cancelled"), job("removed"), job("completed")])
    await there.claim("w", leases=LEASES, limit=4)
    await here.cancel("cancelled")
    await here.remove(["removed"], running=True)
    await here.complete("completed", b"")
    for number in range(50):
        await here.enqueue([job(f"filler-{number}", payload=b"p" * 2_000)])
    async with asyncio.timeout(3 * PATIENCE), there.cancel_requests() as requests:
        heard = {(await requests.get()).job_id for _ in range(3)}
    assert heard == {"cancelled", "removed", "completed"}
    await here.disconnect()
    await there.disconnect()
