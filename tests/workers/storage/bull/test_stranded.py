"""Jobs that Bull's own steps have left in no line are found, and put into the line once."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.storage.bull.steps import ERROR, NodeBull
from workers import Queue
from workers.jobs import Completed, Failed, RepairOutcome
from workers.storage.abilities import Strandable
from workers.storage.bull import BullStorage, recovery
from workers.storage.memory import MemoryStorage
from workers.testing.steps import HOUR, job


async def strand(node: NodeBull, **fields: object) -> str:
    """A job of Node's has just been lost from every line."""
    raw = await node.add(**fields)
    await node.client.lrem(node.key("wait"), 0, raw)
    return raw


async def test_a_stranded_job_is_found_and_queued(storage: BullStorage, node: NodeBull) -> None:
    """It runs behind those that wait, with the attempts it has made, and is stranded no more."""
    lost = [await strand(node, attempts=3, attemptsMade=1) for _ in range(12)]
    waiting = await node.add()
    async with Queue(storage) as queue:
        assert sorted(await queue.manage.stranded(), key=int) == lost
        repaired = await queue.manage.repair()
        assert (await queue.manage.stranded(), await queue.manage.repair()) == ([], [])
    assert [(one.id, one.reason, one.outcome) for one in repaired] == [
        (raw, recovery.REASON, RepairOutcome.REQUEUED) for raw in lost
    ]
    assert await node.line("wait") == [waiting, *lost]
    assert (await storage.claim("w", leases={"*": HOUR}, limit=2))[1].attempt == 2


async def test_a_stranded_job_of_a_paused_queue_waits_for_its_resume(storage: BullStorage, node: NodeBull) -> None:
    """It is put among the paused ones."""
    await storage.pause()
    lost = await strand(node)
    await storage.repair()
    assert (await node.line("paused"), await node.line("wait")) == ([lost], [])


async def test_jobs_that_are_somewhere_are_not_stranded(storage: BullStorage, node: NodeBull, redis_url: str) -> None:
    """Neither one in any list or set, nor one that is locked, nor what is no job, nor a job of another queue."""
    await storage.enqueue([job("done"), job("bad"), job("held")])
    done, bad, _ = await storage.claim("w", leases={"*": HOUR}, limit=3)
    await storage.settle([Completed(claim=done, result=b"1"), Failed(claim=bad, error=ERROR)])
    await storage.enqueue([job("waits"), job("later", delay=HOUR)])
    await node.add(line="paused")
    await node.add()
    locked = await strand(node)
    await node.client.set(node.key(f"{locked}:lock"), "somebody", px=60_000)
    await node.client.hset(node.key("removed"), "delay", "0")
    await node.client.hset(node.key("workers:quarantine:wait"), mapping={"data": "{}", "opts": "{}"})
    other = BullStorage(redis_url, f"{storage.queue}:prio:low")
    await other.connect()
    await other.enqueue([job("theirs")])
    await other.disconnect()
    assert await storage.stranded() == []


async def test_an_id_with_a_colon_may_be_stranded(storage: BullStorage, node: NodeBull) -> None:
    """Node of dialect C may choose any id; only where another queue counts it is none of ours."""
    await node.add("order:7")
    await node.client.delete(node.key("wait"))
    assert await storage.stranded() == ["order:7"]


async def test_a_job_that_moves_is_queued_once(storage: BullStorage, node: NodeBull) -> None:
    """However often a job changes its list while the lists are read, it is in exactly one of them."""
    raws = [await node.add() for _ in range(20)]
    enough = asyncio.Event()
    moving = asyncio.create_task(_move_to_and_fro(node, enough))
    try:
        for _ in range(20):
            assert await storage.repair() == []
    finally:
        enough.set()  # redis-py may swallow a cancellation
        await moving
    assert sorted(await node.line("wait") + await node.line("active"), key=int) == raws


async def _move_to_and_fro(node: NodeBull, enough: asyncio.Event) -> None:
    while not enough.is_set():
        await node.client.rpoplpush(node.key("wait"), node.key("active"))
        await node.client.rpoplpush(node.key("active"), node.key("wait"))


async def test_any_number_is_found(storage: BullStorage, node: NodeBull, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are held in memory at once, beside lists that are longer than one reading of them."""
    monkeypatch.setattr(recovery, "SUSPECTS", 7)
    monkeypatch.setattr(recovery, "SCANNED", 10)
    lost = [await strand(node) for _ in range(30)]
    waiting = [await node.add() for _ in range(35)]
    await storage.repair()
    line = await node.line("wait")
    assert line[:35] == waiting
    assert sorted(line[35:], key=int) == lost


async def test_a_queue_with_a_pattern_for_a_name(redis_url: str, node: NodeBull) -> None:
    """Only its own keys are looked at."""
    lost = await strand(node)
    odd = BullStorage(redis_url, f"{node.storage.queue[:-1]}?")
    await odd.connect()
    assert (await odd.stranded(), await node.storage.stranded()) == ([], [lost])
    await odd.disconnect()


async def test_other_storages_strand_nothing() -> None:
    """They do not offer to look, and their queues answer at once."""
    storage = MemoryStorage()
    assert not isinstance(storage, Strandable)
    async with Queue(storage) as queue:
        assert list(await queue.manage.stranded()) == []
