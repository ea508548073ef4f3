"""Where Bull 1.x itself loses, repeats or strands jobs, ours do not; W1 ... W12 are the races of its protocol."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.workers.storage.bull.conftest import GRACE
from tests.workers.storage.bull.steps import ERROR, SHORT, NodeBull, a_script_of, claimed, expired, heard, key
from workers.errors import JobLockedError, LossReason
from workers.jobs import Completed, Failed, JobState, Released, Retried, SettleStatus
from workers.storage.bull import BullStorage
from workers.testing.steps import HOUR, PATIENCE, claim_one, job, state, status, until


async def test_w1_a_job_that_is_just_being_taken_is_left_alone(storage: BullStorage, node: NodeBull) -> None:
    """Between Node's two steps a job has no lock: the recovery that sees it so looks again, and lets go."""
    raw = await node.add()
    await node.take()
    async with a_script_of(node.client):
        recovering = asyncio.create_task(storage.recover(10))
    await node.lock(raw)
    assert (await recovering).requeued == ()
    assert await node.line("active") == [raw]


async def test_w1_a_job_that_stays_without_a_lock_comes_back(storage: BullStorage, node: NodeBull) -> None:
    """After the grace what Node took and never locked is in front of the line again; that is no stall of Bull 1.1."""
    raw, behind = await node.add(), await node.add()
    await node.take()
    clock = asyncio.get_running_loop().time
    began = clock()
    assert (await storage.recover(10)).requeued == (raw,)
    assert clock() - began >= GRACE.total_seconds()
    assert await node.line("wait") == [raw, behind]
    assert (await node.record(raw))["stalledCounter"] == "0"


async def test_w2_a_completed_job_in_line_is_only_taken_off(storage: BullStorage, node: NodeBull) -> None:
    """An id that is completed and in line, or active, is not run and not recovered once more."""
    waiting, active = await node.add("waiting-too"), await node.add("active-too")
    await node.client.sadd(node.key("completed"), waiting, active)
    await node.client.lrem(node.key("wait"), 0, active)
    await node.client.lpush(node.key("active"), active)
    assert await claimed(storage) == []
    assert (await storage.recover(10)).requeued == ()
    assert (await node.line("wait"), await node.line("active")) == ([], [])
    assert await state(storage, waiting) is JobState.COMPLETED


async def test_w3_a_failed_run_leaves_no_lock_behind(storage: BullStorage, node: NodeBull) -> None:
    """A job that is to run again is in line and free in one step, for whoever comes first."""
    await storage.enqueue([job("one")])
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(0), error=ERROR)])
    assert await node.take() == "one"
    await node.lock("one")


async def test_w3_a_locked_job_in_line_waits_for_its_lock(storage: BullStorage, node: NodeBull) -> None:
    """It stays in its place, others are taken past it, and waiters sleep until it is free."""
    locked, free = await node.add(), await node.add()
    await node.client.set(node.key(f"{locked}:lock"), "somebody", px=60_000)
    assert await claimed(storage) == [free]
    assert await node.line("wait") == [locked]
    await node.client.pexpire(node.key(f"{locked}:lock"), 300)
    rounds = 0
    while not (ids := await claimed(storage)):
        await storage.wait(["*"], timeout=timedelta(seconds=5))
        rounds += 1
        assert rounds < 50, "the wait does not sleep"
    assert ids == [locked]


async def test_w3_a_locked_job_is_not_removed(storage: BullStorage, node: NodeBull) -> None:
    """One that waits, or has failed, while somebody has its lock is neither removed nor retried: that is told."""
    await storage.enqueue([job("spent")])
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    waiting, free = [await node.add() for _ in range(2)]
    for raw in (waiting, "spent"):
        await node.client.set(node.key(f"{raw}:lock"), "somebody", px=60_000)
    with pytest.raises(JobLockedError, match="locked by another program") as refused:
        await storage.remove([waiting, free, "spent"])
    assert (refused.value.ids, refused.value.done) == ((waiting, "spent"), 1)
    with pytest.raises(JobLockedError, match="'spent'"):
        await storage.retry(["spent"])
    assert await node.line("wait") == [waiting]
    assert await node.client.get(node.key(f"{waiting}:lock")) == "somebody"
    assert await storage.remove([waiting], running=True) == 1
    await node.unlock("spent")
    assert await storage.retry(["spent"]) == 1


async def test_w3_any_number_of_locked_jobs_hide_no_other(storage: BullStorage, node: NodeBull) -> None:
    """The claim looks behind 450 locked ones."""
    locked = [await node.add(f"locked-{number}") for number in range(450)]
    free = [await node.add(f"free-{number}") for number in range(3)]
    for raw in locked:
        await node.client.set(node.key(f"{raw}:lock"), "somebody", px=60_000)
    assert await claimed(storage, 2) == free[:2]
    assert await node.line("wait") == [*locked, free[2]]


async def test_w5_a_lapse_of_a_lock_is_no_crash(old: BullStorage, node: NodeBull) -> None:
    """Beside dialect A a job without a lock is recovered after the whole grace, not at once; also one of ours."""
    await old.enqueue([job("7")])
    await claim_one(old, lease=SHORT)
    await expired(node, "7")
    async with a_script_of(node.client):
        recovering = asyncio.create_task(old.recover(10))
    await node.lock("7")  # dialect A takes over where the job stands
    assert (await recovering).requeued == ()
    await node.unlock("7")
    assert (await old.recover(10)).requeued == ("7",)


async def test_w6_a_stolen_lock_is_a_lost_claim(storage: BullStorage, node: NodeBull) -> None:
    """Another token in the lock refuses renewals and results, and the thief's run goes on."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage)
    await node.client.set(node.key("one:lock"), node.token, px=60_000)
    assert dict((await storage.renew([held])).lost) == {held.token: LossReason.TAKEN}
    for end in (Completed(claim=held, result=b"1"), Failed(claim=held, error=ERROR), Released(claim=held)):
        [outcome] = await storage.settle([end])
        assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)
    assert (await node.line("active"), await node.client.get(node.key("one:lock"))) == (["one"], node.token)


async def test_w6_an_older_claim_is_nothing_to_one_without_a_lock(storage: BullStorage, node: NodeBull) -> None:
    """When the lock of the job's claim has run out as well, that claim alone may still end it."""
    await storage.enqueue([job("one")])
    older = await claim_one(storage, lease=SHORT)
    await expired(node, "one")
    await storage.recover(10)
    held = await claim_one(storage, lease=SHORT)
    await expired(node, "one")
    assert (await storage.settle([Completed(claim=older, result=b"1")]))[0].reason is LossReason.TAKEN
    assert dict((await storage.renew([older])).lost) == {older.token: LossReason.TAKEN}
    assert (await storage.settle([Completed(claim=held, result=b"2")]))[0].status is SettleStatus.APPLIED


async def test_w7_a_job_that_a_sweep_put_back_may_still_end(storage: BullStorage, node: NodeBull) -> None:
    """While it waits for the next to take it, its first worker completes it, and it runs no more."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage, lease=SHORT)
    await expired(node, "one")
    await node.sweep()
    assert await node.line("wait") == ["one"]
    [outcome] = await storage.settle([Completed(claim=held, result=b"1")])
    assert outcome.status is SettleStatus.APPLIED
    assert (await node.line("wait"), await state(storage, "one")) == ([], JobState.COMPLETED)


async def test_w7_a_renewal_takes_back_what_a_sweep_put_back(storage: BullStorage, node: NodeBull) -> None:
    """A late renewal of a job that nobody took meanwhile keeps others from running it."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage, lease=SHORT)
    await expired(node, "one")
    await node.sweep()
    assert (await storage.renew([replace(held, lease=HOUR)])).lost == {}
    assert (await node.line("wait"), await node.line("active")) == ([], ["one"])


async def test_w7_a_job_that_another_took_is_lost(storage: BullStorage, node: NodeBull) -> None:
    """Once Node has taken it after its sweep, or ended it, the first worker's result is nobody's."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage, lease=SHORT)
    await expired(node, "one")
    await node.sweep()
    await node.take()
    await node.lock("one")
    late = Completed(claim=held, result=b"1")
    assert (await storage.settle([late]))[0].reason is LossReason.TAKEN
    await node.unlock("one")
    await node.client.lrem(node.key("active"), 0, "one")
    await node.client.sadd(node.key("completed"), "one")
    assert (await storage.settle([late]))[0].reason is LossReason.COMPLETED


@pytest.mark.parametrize("place", ["wait", "active", "delayed"])
async def test_w8_an_id_without_a_record_is_dropped_and_told(
    place: str, storage: BullStorage, node: NodeBull, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever line it is in, it is out of it, makes no record, and the job behind it runs."""
    for raw in ("gone", "no-data"):
        if place == "delayed":
            await node.client.zadd(node.key("delayed"), {raw: 1})
        else:
            await node.client.lpush(node.key(place), raw)
    await node.client.hset(node.key("no-data"), "opts", "{}")
    await node.add("good")
    await storage.recover(10)
    assert await claimed(storage) == ["good"]
    assert (await node.line("wait"), await node.client.zcard(node.key("delayed"))) == ([], 0)
    assert await node.line("active") == ["good"]
    assert await node.record("gone") == {}
    assert "bull.job_without_record" in caplog.text
    assert "gone" in caplog.text


async def test_w9_promoted_jobs_outlive_pauses(storage: BullStorage, node: NodeBull) -> None:
    """What is put in line while paused, in whatever way, waits among the paused, and no pause or resume loses it."""
    await storage.enqueue([job(name) for name in ("retried", "released", "spent", "recovered")])
    retried, released, spent, recovered = await storage.claim("w", leases={"*": HOUR}, limit=4)
    await storage.enqueue([job("due", delay=SHORT), job("promoted", delay=HOUR)])
    await storage.settle([Failed(claim=spent, error=ERROR)])
    await storage.renew([replace(recovered, lease=timedelta(milliseconds=1))])
    await storage.pause()
    await storage.settle([Retried(claim=retried, delay=timedelta(0), error=ERROR), Released(claim=released)])
    await expired(node, "recovered")
    await storage.recover(10)
    assert (await storage.retry(["spent"]), await storage.promote(["promoted"])) == (1, 1)
    await until(lambda: _is_due(storage, "due"))
    assert await node.line("wait") == []
    await storage.pause()
    await storage.resume()
    assert sorted(await claimed(storage)) == ["due", "promoted", "recovered", "released", "retried", "spent"]


async def _is_due(storage: BullStorage, job_id: str) -> bool:
    return await state(storage, job_id) is JobState.QUEUED


@pytest.mark.parametrize("step", ["claim", "recover"])
async def test_w9_what_is_due_while_paused_is_lined_up(storage: BullStorage, node: NodeBull, step: str) -> None:
    """A paused queue's wait ends for it, and any claim, or a full worker's recovery, puts it among the paused ones."""
    await storage.enqueue([job("waiting")])
    await storage.pause()
    await storage.enqueue([job("due", delay=SHORT)])
    async with asyncio.timeout(PATIENCE):
        await storage.wait(["*"], timeout=HOUR)
    assert await (claimed(storage) if step == "claim" else _requeued(storage)) == []
    assert (await node.line("paused"), await node.line("wait")) == (["waiting", "due"], [])
    assert (await node.record("due"))["delay"] == "0"


async def _requeued(storage: BullStorage) -> list[str]:
    return list((await storage.recover(10)).requeued)


async def test_w9_pausing_and_resuming_merge_both_lines(storage: BullStorage, node: NodeBull) -> None:
    """Jobs that Node pushed past a pause survive the next pause and the resume; the paused ones run first."""
    await node.add("paused-1")
    await node.add("paused-2")
    async with heard(node.client, key(storage, "paused")) as message:
        await storage.pause()
        await node.add("past-1")
        await node.add("past-2")
        await storage.pause()
        assert (await node.line("paused"), await node.line("wait")) == (
            ["paused-1", "paused-2", "past-1", "past-2"],
            [],
        )
        await node.add("past-3")
        await storage.resume()
        assert [(await message())[1] for _ in range(3)] == ["paused", "paused", "resumed"]
    assert await node.line("wait") == ["paused-1", "paused-2", "past-1", "past-2", "past-3"]
    assert await node.client.exists(node.key("meta-paused"), node.key("paused")) == 0


async def test_a_retry_by_hand_goes_where_nodes_does(storage: BullStorage, node: NodeBull) -> None:
    """A failed job that is last in, first out is the next to run, any other stands behind those that wait."""
    lifo, plain = await node.add(opts='{"lifo":true}'), await node.add()
    claims = await storage.claim("w", leases={"*": HOUR}, limit=2)
    await storage.settle([Failed(claim=claim, error=ERROR) for claim in claims])
    waiting = await node.add()
    assert await storage.retry([plain, lifo]) == 2
    assert await node.line("wait") == [lifo, waiting, plain]
    assert (await node.record(lifo))["attemptsMade"] == "1"


async def test_w11_what_is_due_needs_no_timer_of_node(storage: BullStorage, node: NodeBull) -> None:
    """A claim puts what is due in line, at the back, tells Node of the next time once, and never comes early."""
    now = int((await node.client.time())[0]) * 1_000
    for name, eta in (("second", now - 5), ("first", now - 9), ("later", now + 60_000)):
        await node.client.hset(node.key(name), mapping={"data": "{}", "opts": "{}", "delay": 9})
        await node.client.zadd(node.key("delayed"), {name: eta * 4_096 + 4_095})
    await node.add("waiting")
    async with heard(node.client, key(storage, "delayed")) as message:
        assert await claimed(storage) == ["waiting", "first", "second"]
        assert float((await message())[1]) == now + 60_000 + 4_095 / 4_096
    assert (await node.record("first"))["delay"] == "0"
    assert await state(storage, "later") is JobState.SCHEDULED


async def test_a_crash_counts_for_jobs_of_ours_alone(storage: BullStorage, node: NodeBull) -> None:
    """With one attempt ours fails as it is lost; Node's goes on once, as with Bull, whatever we allow ours."""
    await storage.enqueue([job("ours", max_attempts=1)])
    await claim_one(storage, lease=SHORT)
    await expired(node, "ours")
    assert (await storage.recover(10)).failed == ("ours",)
    theirs = await node.add(attemptsMade=1)  # as after Node's `retry` of a failed job: one run more than its attempts
    assert (await claim_one(storage, lease=SHORT)).attempt == 2
    await expired(node, theirs)
    assert (await storage.recover(10, max_stalls=3)).requeued == (theirs,)
    assert (await node.record(theirs))["stalledCounter"] == "1"
    assert "lockAcquired" not in await node.record(theirs)
    await claim_one(storage, lease=SHORT)
    await expired(node, theirs)
    assert (await storage.recover(10, max_stalls=3)).failed == (theirs,)
    record = await node.record(theirs)
    assert (record["failedReason"], record["attemptsMade"]) == ("job stalled more than allowable limit", "1")
    found = await status(storage, theirs)
    assert found.last_error is not None
    assert found.last_error.type == "StalledError"


async def test_recovered_jobs_keep_their_order(storage: BullStorage, node: NodeBull) -> None:
    """Of a worker that died with several jobs the first taken is the first again."""
    names = [f"job-{number}" for number in range(5)]
    await storage.enqueue([job(name) for name in names])
    await storage.claim("w", leases={"*": SHORT}, limit=4)
    await expired(node, "job-0")
    await expired(node, "job-3")
    await storage.recover(10)
    assert await node.line("wait") == names


async def test_w10_a_hash_without_a_job_is_none(storage: BullStorage, node: NodeBull) -> None:
    """What Node's races leave of a job, a delay or a mark, is no job, and its id is free."""
    await node.client.hset(node.key("gone"), "delay", "0")
    await node.client.hset(node.key("removed"), "lockAcquired", "1")
    assert await storage.status(["gone", "removed"]) == [None, None]
    assert await storage.cancel("gone") == "not_found"
    await storage.enqueue([job("gone"), job("removed")])
    assert await claimed(storage) == ["gone", "removed"]


async def test_recovery_ends_on_a_busy_queue(storage: BullStorage, node: NodeBull) -> None:
    """Though at every look another job has just been taken, a recovery is over when the first ones are clear."""
    enough = asyncio.Event()
    taking = asyncio.create_task(_take_on_and_on(node, enough))
    try:
        await until(lambda: node.line("active"))
        async with asyncio.timeout(PATIENCE):
            assert (await storage.recover(10)).failed == ()
    finally:
        enough.set()  # redis-py may swallow a cancellation
        await taking


async def _take_on_and_on(node: NodeBull, enough: asyncio.Event) -> None:
    """Always some job is active and not locked yet, none for long."""
    before = await node.add()
    await node.take()
    while not enough.is_set():
        raw = await node.add()
        await node.take()
        await asyncio.sleep(0.02)
        await node.lock(before, 60_000)
        before = raw
