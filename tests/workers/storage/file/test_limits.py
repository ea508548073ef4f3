"""Limits and fair turns, in a journal: what started counts, whoever reads it, and however the writer ended."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import child, described, journal_of, killed_at_the_end, line, reopened
from workers.clock import ManualClock
from workers.jobs import Completed, Released
from workers.limits import HeldBack, Limit, LimitKey
from workers.storage.file import FileStorage
from workers.storage.file import journal as file_journal
from workers.testing.faults import counting
from workers.testing.steps import PATIENCE, background, ids, job, next_claim, until

A = LimitKey("api", "a")
LEASES = {"*": timedelta(hours=9)}


async def opened(directory: Path, clock: ManualClock, *, fsync: bool = True) -> FileStorage:
    """With another `fsync` a storage shares nothing with others but the directory, as another process would."""
    storage = FileStorage(directory, clock=clock, fsync=fsync)
    await storage.connect()
    return storage


async def started(storage: FileStorage, limit: int = 100) -> list[str]:
    return ids(await storage.claim("w", leases=LEASES, limit=limit))


@pytest.mark.parametrize("compacted", [False, True], ids=["as-written", "compacted"])
async def test_what_limits_know_survives_a_restart(
    compacted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits, what their buckets have, how many run, and whose turn it is: as if nothing had happened."""
    clock = ManualClock()
    storage = await opened(tmp_path, clock)
    limits = {
        "api": Limit("2/h", burst=3, version=4),
        "slow": Limit(concurrency=2),
        "gone": Limit(concurrency=1),
        "*": Limit("1000/s", concurrency=500),
    }
    await storage.declare_limits(limits)
    await storage.remove_limit("gone")
    await storage.enqueue([job(f"a{at}", limit_key=A) for at in range(6)])
    await storage.enqueue([job(f"s{at}", limit_key=LimitKey("slow")) for at in range(4)])
    await storage.enqueue([job(f"g{at}", limit_key=LimitKey("gone")) for at in range(2)])
    assert await started(storage) == ["a0", "a1", "a2", "s0", "s1", "g0", "g1"]
    await storage.enqueue([job(f"x{at}", fair_key="x") for at in range(3)])
    assert await started(storage, 1) == ["x0"]
    await storage.enqueue([job("y0", fair_key="y"), job("plain")])
    before = await described(storage)
    if compacted:
        marker = journal_of(tmp_path).read_bytes()[16:24]
        monkeypatch.setattr(file_journal, "SLACK_BYTES", 0)
        await storage.pause()
        await storage.enqueue([job("much", payload=bytes(20_000))])
        await storage.remove(["much"])
        await storage.resume()
        assert journal_of(tmp_path).read_bytes()[16:24] != marker
    await storage.disconnect()

    storage = await opened(tmp_path, clock)
    assert await described(storage) == before
    assert await storage.declared_limits() == {name: limits[name] for name in ("api", "slow", "*")}
    assert await started(storage) == ["x1", "y0", "plain", "x2"]
    held = await storage.held_back(["a3", "s2"])
    assert held == [HeldBack("api", "a", clock.now() + timedelta(minutes=30)), HeldBack("slow", "", None)]
    clock.advance(timedelta(minutes=30))
    assert await started(storage) == ["a3"]
    await storage.disconnect()


async def test_a_torn_start_took_no_token(tmp_path: Path) -> None:
    """Cut at any byte of a claim, the journal has neither the start nor its token: two start in any case."""
    clock = ManualClock()
    storage = await opened(tmp_path / "whole", clock)
    await storage.declare_limits({"api": Limit("1/d", burst=2)})
    await storage.enqueue([job(f"a{at}", limit_key=A) for at in range(4)])
    before = journal_of(tmp_path / "whole").stat().st_size
    assert await started(storage, 1) == ["a0"]
    await storage.disconnect()
    whole = journal_of(tmp_path / "whole").read_bytes()
    for cut in range(before, len(whole) + 1):
        journal_of(tmp_path / f"cut-{cut}").parent.mkdir(parents=True)
        journal_of(tmp_path / f"cut-{cut}").write_bytes(whole[:cut])
        storage = await opened(tmp_path / f"cut-{cut}", clock)
        assert await started(storage) == (["a1"] if cut == len(whole) else ["a0", "a1"])
        await storage.disconnect()


async def test_a_killed_process_took_a_token_for_each_start(tmp_path: Path) -> None:
    """However often starters are killed, as many jobs start as the bucket has tokens, and fair ones in their turns."""
    source = random.Random(3)
    storage = await reopened(tmp_path)
    await storage.declare_limits({"api": Limit("1/d", burst=150)})
    await storage.enqueue([job(f"a{at}", limit_key=A) for at in range(300)])
    await storage.enqueue([job(f"{key}{at}", fair_key=key, priority=1) for key in "xy" for at in range(200)])
    acknowledged: list[str] = []
    for _ in range(4):
        await storage.disconnect()
        process = child("start", tmp_path)
        with killed_at_the_end(process):
            acknowledged += [await line(process) for _ in range(source.randrange(10, 60))]
        storage = await reopened(tmp_path)
        found = [one for one in await storage.status([f"a{at}" for at in range(300)]) if one is not None]
        assert len(found) == 300
        running = {one.id for one in found if one.worker_id is not None}
        assert running >= {job_id for job_id in acknowledged if job_id.startswith("a")}
        assert running == {f"a{at}" for at in range(len(running))}
    rest = await started(storage, 10_000)
    assert len(running) + sum(job_id.startswith("a") for job_id in rest) == 150
    fair = [job_id for job_id in rest if not job_id.startswith("a")]
    for key in "xy":
        numbers = [int(job_id[1:]) for job_id in fair if job_id.startswith(key)]
        assert numbers == list(range(numbers[0], 200))
    assert abs(len([one for one in fair if one.startswith("x")]) * 2 - len(fair)) <= 2
    await storage.disconnect()


async def test_a_limit_declared_elsewhere_counts_here(tmp_path: Path) -> None:
    """So does its removal, which lets what it kept back start here; who sleeps is woken."""
    clock = ManualClock()
    here, there = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await there.enqueue([job(f"a{at}", limit_key=A) for at in range(3)])
    await there.declare_limits({"api": Limit("1/d")})
    assert await started(here) == ["a0"]
    assert await here.declared_limits() == {"api": Limit("1/d")}
    watched, calls = counting(here)
    worker = asyncio.create_task(next_claim(watched))
    async with background(worker):
        await until(lambda: calls["wait"])
        assert await there.remove_limit("api")
        assert (await worker).job_id == "a1"
    await here.disconnect()
    await there.disconnect()


@pytest.mark.parametrize("name", ["api", "*"])
async def test_a_place_freed_elsewhere_is_free_here(name: str, tmp_path: Path) -> None:
    """A worker asleep gets a job whose limit let no more run, once another process settled one; not at a renewal."""
    clock = ManualClock()
    here, there = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await here.declare_limits({name: Limit(concurrency=1)})
    await here.enqueue([job("first", limit_key=A), job("second", limit_key=A)])
    (held,) = await there.claim("v", leases=LEASES, limit=3)
    assert await started(here) == []
    watched, calls = counting(here)
    worker = asyncio.create_task(next_claim(watched))
    async with background(worker):
        await until(lambda: calls["wait"])
        before = calls["claim"]
        await there.renew([held])
        ready = await here._read(lambda state, now: state.table.claimable(["*"]))
        assert ready is (name == "*")  # and heard of that
        await there.settle([Completed(claim=held, result=b"")])
        assert (await worker).job_id == "second"
    assert calls["claim"] == before + 1
    await here.disconnect()
    await there.disconnect()


async def test_turns_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Whoever claims, the jobs of a fair key start in their order, and one of each key in turn."""
    clock = ManualClock()
    pair = [await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)]
    await pair[0].enqueue([job(f"{key}{at}", fair_key=key) for key in "xyz" for at in range(6)])
    found = [(await started(pair[number % 2], 1))[0] for number in range(18)]
    for key in "xyz":
        assert [one for one in found if one.startswith(key)] == [f"{key}{at}" for at in range(6)]
    assert [{one[0] for one in found[at : at + 3]} for at in range(0, 18, 3)] == [set("xyz")] * 6
    for each in pair:
        await each.disconnect()


async def test_a_turn_is_a_place_that_no_other_job_gets(tmp_path: Path) -> None:
    """A job that another process enqueues at that moment comes behind the one that came forward."""
    clock = ManualClock()
    here, there = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await here.enqueue([job("x1", fair_key="x"), job("x2", fair_key="x")])
    assert await started(here) == ["x1", "x2"]
    await here.enqueue([job("x3", fair_key="x"), job("x4", fair_key="x")])
    assert await started(here, 1) == ["x3"]
    await there.enqueue([job("behind")])
    assert await started(there) == ["x4", "behind"]
    await here.disconnect()
    await there.disconnect()


async def test_a_released_turn_comes_back(tmp_path: Path) -> None:
    """A fair job that was given back goes first of its key, and the one that had come forward keeps its turn."""
    clock = ManualClock()
    here, there = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await here.enqueue([job(f"x{at}", fair_key="x") for at in range(3)])
    (first,) = await here.claim("w", leases=LEASES, limit=1)
    await here.enqueue([job("y0", fair_key="y"), job("y1", fair_key="y")])
    await here.settle([Released(claim=first)])
    assert await described(here) == await described(there)
    assert await started(there) == ["x0", "x1", "y0", "x2", "y1"]
    await here.disconnect()
    await there.disconnect()


async def test_a_bucket_swept_elsewhere_is_forgotten_here(tmp_path: Path) -> None:
    """A process that only enqueues keeps nothing of keys that came and went."""
    clock = ManualClock()
    worker, producer = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await worker.declare_limits({"api": Limit("1/h")})
    for at in range(20):
        await producer.enqueue([job(f"j{at}", limit_key=LimitKey("api", str(at)))])
        assert await started(worker) == [f"j{at}"]
    assert len(await producer._read(lambda state, now: state.table.limits.buckets())) == 20
    clock.advance(timedelta(hours=2))
    while await worker.sweep(100):
        pass
    assert await producer._read(lambda state, now: state.table.limits.buckets()) == []
    await worker.disconnect()
    await producer.disconnect()


async def test_a_bucket_that_fills_earlier_elsewhere_does_so_here(tmp_path: Path) -> None:
    """When the clock was set back, and another process noted when the bucket fills now, that counts here as well."""
    clock = ManualClock()
    here, there = await opened(tmp_path, clock), await opened(tmp_path, clock, fsync=False)
    await here.declare_limits({"api": Limit("1/h")})
    await here.enqueue([job(f"a{at}", limit_key=A) for at in range(3)])
    clock.advance(timedelta(hours=5))
    assert await started(here) == ["a0"]
    clock.advance(timedelta(hours=-5))
    assert await started(there) == []
    await there.pause()  # which writes what it has noted
    await there.resume()
    assert await here._read(
        lambda state, now: state.table.limits.full_at(next(iter(state.table.limits.buckets())))
    ) == (clock.now() + timedelta(hours=1))
    clock.advance(timedelta(hours=1))
    assert await started(here) == ["a1"]
    await here.disconnect()
    await there.disconnect()


async def test_a_claim_past_parked_jobs_writes_nothing(tmp_path: Path) -> None:
    """What limits keep back is parked in memory: looking at it again and again adds nothing to the journal."""
    clock = ManualClock()
    storage = await opened(tmp_path, clock)
    await storage.declare_limits({"api": Limit("1/d")})
    await storage.enqueue([job(f"a{at}", limit_key=A) for at in range(50)])
    assert await started(storage) == ["a0"]
    size = journal_of(tmp_path).stat().st_size
    for _ in range(20):
        assert await started(storage) == []
    assert journal_of(tmp_path).stat().st_size == size
    async with asyncio.timeout(PATIENCE):
        await storage.wait(["*"], timeout=timedelta(milliseconds=1))
    await storage.disconnect()
