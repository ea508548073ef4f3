"""Jobs of workers that die or fall silent, in Node or here, and jobs that only take long."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from redis.asyncio import Redis

from tests.chaos import ledger
from tests.interop.bull_child import Order, bull_child, kill
from tests.interop.bull_jobs import Obedient
from tests.interop.bull_queue import Ids, a_job, ended
from tests.interop.peer import BullPeer, bull_peer
from tests.patience import eventually
from tests.workers.running import AT_ONCE, Recorder, running
from workers import Worker, WorkerOptions
from workers.errors import LossReason
from workers.jobs import Completed, SettleStatus
from workers.storage.bull import BullStorage
from workers.testing.steps import HOUR
from workers.worker.events import WorkerEventKind

SECOND = timedelta(seconds=1)
LONG_MS = 4_000
"""Longer than a lock of 1 s, and the time after which a job without one is taken for abandoned."""


async def test_a_killed_node_workers_job_runs_here(
    queue: BullStorage, peer: BullPeer, redis_url: str, version: str
) -> None:
    """A job whose Node process was killed is run by a worker of ours, however long its own leases are, and soon after
    the lock of 1 s is over; the dead run was no failure.
    """
    job_id = await peer.add({"hold": True, "result": 1}, attempts=3)
    recorder, handler = Recorder(), Obedient()
    handler.release(job_id)
    async with bull_peer(version, redis_url, queue.queue) as doomed:
        await doomed.work()
        await eventually(doomed.runs, len)
        async with running(Worker(queue, {"*": handler}, lease=HOUR, observers=[recorder])):
            await recorder.seen(WorkerEventKind.READY)
            await doomed.kill()
            killed = time.monotonic()
            assert (await ended(queue, job_id)).result == b"1"
    assert len(handler.runs) == 1
    assert handler.runs[0].at - killed < 11
    found = await peer.read(job_id)
    assert (found["state"], found["attemptsMade"]) == ("completed", 0)
    await nothing_left(peer)


async def test_a_job_of_our_killed_worker_runs_in_node(
    queue: BullStorage, peer: BullPeer, ids: Ids, order: Order
) -> None:
    """A job whose Python process was killed is run by Node, and counted as no failure."""
    job_id = ids()
    async with bull_child(order) as doomed:
        await queue.enqueue([a_job(job_id, {"hold": True, "result": 1}, max_attempts=3)])
        await eventually(lambda: written(order), len)
        await kill(doomed)
    await peer.work()
    await eventually(peer.runs, len)
    await peer.call("release", job_id)
    assert (await ended(queue, job_id)).result == b"1"
    assert len(await peer.runs()) == 1
    assert (await peer.read(job_id))["attemptsMade"] == 0
    await nothing_left(peer)


async def written(order: Order) -> list[dict[str, object]]:
    """The lines of the child's ledger so far."""
    return list(ledger.lines(Path(order.ledger)))


async def nothing_left(peer: BullPeer) -> None:
    """Nothing waits, nothing is running, one job is completed."""
    counts = await peer.call("counts")
    assert counts == {"wait": 0, "paused": 0, "active": 0, "delayed": 0, "completed": 1}


async def test_long_jobs_are_left_alone(queue: BullStorage, peer: BullPeer, ids: Ids, order: Order) -> None:
    """A job that outlasts every lock runs once, in Node and here, while workers of both kinds look for dead ones."""
    here, handler = ids(), Obedient()
    async with running(Worker(queue, {"*": handler}, concurrency=1, lease=SECOND)):
        await queue.enqueue([a_job(here, {"ms": LONG_MS, "result": "here"})])
        await eventually(lambda: runs_of(handler), len)
        in_node = await peer.add({"ms": LONG_MS, "result": "node"})
        await peer.work()
        await eventually(peer.runs, len)
        async with bull_child(order):
            results = [(await ended(queue, job_id)).result for job_id in (here, in_node)]
    assert results == [b'"here"', b'"node"']
    assert [run.id for run in handler.runs] == [here]
    assert [run["id"] for run in await peer.runs()] == [in_node]
    assert await written(order) == []


async def test_what_a_sweep_put_back_is_still_ours(npm_packages: None, redis_url: str) -> None:
    """Jobs whose locks lapsed, which Bull 1.1 took for abandoned and nobody took up, are renewed and settled."""
    queue = BullStorage(redis_url, f"swept-{uuid.uuid4().hex}", dialect="C")
    await queue.connect()
    async with bull_peer("1.1.3", redis_url, queue.queue) as sweeper:
        renewed, settled = [await sweeper.add({}) for _ in range(2)]
        claims = await queue.claim("slow", leases={"*": timedelta(milliseconds=200)}, limit=2)
        await sweeper.work(concurrency=0, sweep_ms=100)
        await eventually(lambda: sweeper.call("counts"), lambda counts: counts["wait"] == 2)
        assert (await queue.renew([replace(claims[0], lease=timedelta(minutes=1))])).lost == {}
        assert (await sweeper.read(renewed))["state"] == "active"
        outcomes = await queue.settle([Completed(claim=claim, result=b"1") for claim in claims])
        assert [outcome.status for outcome in outcomes] == [SettleStatus.APPLIED] * 2
        assert (await sweeper.read(settled))["returnvalue"] == 1
        counts = await sweeper.call("counts")
        assert counts == {"wait": 0, "paused": 0, "active": 0, "delayed": 0, "completed": 2}
    await queue.disconnect()


async def test_what_comes_too_late_is_refused_here(queue: BullStorage, peer: BullPeer) -> None:
    """A claim whose lock lapsed, and whose job Node runs since, neither renews nor settles."""
    job_id = await peer.add({"hold": True, "result": "node"})
    [claim] = await queue.claim("slow", leases={"*": timedelta(milliseconds=200)}, limit=1)
    await peer.work()
    await eventually(peer.runs, len)
    assert (await queue.renew([claim])).lost == {claim.token: LossReason.TAKEN}
    [outcome] = await queue.settle([Completed(claim=claim, result=b'"late"')])
    assert outcome.status is SettleStatus.LOST
    await peer.call("release", job_id)
    assert (await ended(queue, job_id)).result == b'"node"'
    [outcome] = await queue.settle([Completed(claim=claim, result=b'"too late"')])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.COMPLETED)
    assert (await peer.read(job_id))["returnvalue"] == "node"
    assert [run["id"] for run in await peer.runs()] == [job_id]
    await nothing_left(peer)


async def test_what_comes_too_late_from_node(queue: BullStorage, peer: BullPeer, redis_url: str, version: str) -> None:
    """A Node process that was stopped past its lock finds its job run here: Bull 1.1 is refused, 1.0 ends the job
    without asking; either way it has one result, is in no list any more, and our worker goes on.
    """
    job_id = await peer.add({"hold": True, "result": 1})
    handler = Obedient()
    async with bull_peer(version, redis_url, queue.queue) as slow:
        await slow.work()
        await eventually(slow.runs, len)
        slow.stop()
        async with running(Worker(queue, {"*": handler}, lease=SECOND)):
            await eventually(lambda: runs_of(handler), len)
            slow.go_on()
            await slow.call("release", job_id)
            if version == "1.0.0":
                await eventually(lambda: peer.read(job_id), lambda found: found["state"] == "completed")
            else:
                assert (await slow.read(job_id))["state"] == "active"
                handler.release(job_id)
            assert (await ended(queue, job_id)).result == b"1"
            another = await peer.add({"result": 2})
            assert (await ended(queue, another)).result == b"2"
    assert len(handler.of(job_id)) == 1
    counts = await eventually(lambda: peer.call("counts"), lambda found: not found["active"])
    assert counts == {"wait": 0, "paused": 0, "active": 0, "delayed": 0, "completed": 2}


async def runs_of(handler: Obedient) -> list[object]:
    """The runs so far."""
    return list(handler.runs)


POISON = {
    "no hash": {},
    "no data": {"opts": "{}"},
    "data that is no JSON": {"data": "{", "opts": "{}"},
    "options that are no JSON": {"data": "{}", "opts": "{"},
}


async def test_poison_is_taken_out_of_nodes_way(queue: BullStorage, peer: BullPeer, redis_url: str) -> None:
    """What no Node worker can load, and would leave in `active` or move to and fro for ever, ours drop or fail."""
    await peer.work()
    prefix = f"bull:{queue.queue}:"
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        for job_id, fields in zip(map(str, range(101, 105)), POISON.values(), strict=True):
            if fields:
                await client.hset(prefix + job_id, mapping=fields)
            await client.lpush(prefix + "wait", job_id)
        await eventually(lambda: client.llen(prefix + "active"), lambda stuck: stuck == len(POISON))
        async with running(Worker(queue, {"*": Obedient()}, lease=SECOND, options=WorkerOptions(max_stalls=1))):
            last = await peer.add({"result": 1})
            assert (await ended(queue, last)).result == b"1"
            await eventually(lambda: lines(client, prefix), lambda found: found == ([], []))
        assert await client.smembers(prefix + "failed") == {"103", "104"}
        assert await client.smembers(prefix + "completed") == {last}


async def lines(client: Redis, prefix: str) -> tuple[list[str], list[str]]:
    """What waits and what runs at one moment."""
    async with client.pipeline(transaction=True) as view:
        waiting, active = await view.lrange(prefix + "wait", 0, -1).lrange(prefix + "active", 0, -1).execute()
    return waiting, active


async def test_both_versions_and_ours_share_a_queue(npm_packages: None, redis_url: str) -> None:
    """While a fleet of Bull 1.0 is being replaced, by Bull 1.1 or by ours, every job is completed, by whomever."""
    queue = BullStorage(redis_url, f"mixed-{uuid.uuid4().hex}", dialect="B")
    await queue.connect()
    async with bull_peer("1.0.0", redis_url, queue.queue) as old, bull_peer("1.1.3", redis_url, queue.queue) as newer:
        handler = Obedient()
        for peer in (old, newer):
            await peer.work(concurrency=1, stalls=100)
        async with running(
            Worker(queue, {"*": handler}, concurrency=1, lease=SECOND, options=WorkerOptions(retry=AT_ONCE))
        ):
            data = {"failures": 1, "ms": 10, "result": 1}
            ids = [await peer.add(data, attempts=9, backoff=20) for _ in range(10) for peer in (old, newer)]
            ids += [ours := await queue.next_id()]
            await queue.enqueue([a_job(ours, data, max_attempts=9)])
            outcomes = [await ended(queue, job_id) for job_id in ids]
        ran = [{run["id"] for run in await peer.runs()} for peer in (old, newer)]
    await queue.disconnect()
    assert {outcome.result for outcome in outcomes} == {b"1"}
    assert all(ran)
    assert handler.runs
    assert set().union(*ran, {run.id for run in handler.runs}) == set(ids)
