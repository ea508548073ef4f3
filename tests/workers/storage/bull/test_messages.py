"""What the Bull storage and Node's Bull 1.x tell each other, and how either wakes the other."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from tests.workers.storage.bull.steps import ERROR, NodeBull, a_script_of, claimed, heard, key, parsed
from workers.jobs import Completed, Failed, JobEventKind, ProgressReport, Retried
from workers.storage.bull import BullStorage
from workers.storage.bull.scripts import EMITTER
from workers.testing.steps import PATIENCE, claim_one, job, until

CREATED = ["data", "opts", "progress", "delay", "timestamp", "attempts", "attemptsMade", "stacktrace", "returnvalue"]


async def test_node_is_told_with_whole_jobs(storage: BullStorage, node: NodeBull) -> None:
    """Each event is `[who, job, ...]` with the id among the options: anything else would end the Node process."""
    names = [f"{name}@{storage.queue}" for name in ("waiting", "progress", "failed", "completed", "stalled")]
    async with heard(node.client, *names) as message:
        await storage.enqueue([job("one", payload=b"not json \xff")])
        held = await claim_one(storage)
        await storage.progress([ProgressReport(claim=held, value=b"42")])
        await storage.settle([Retried(claim=held, delay=timedelta(0), error=ERROR)])
        await storage.settle([Completed(claim=await claim_one(storage), result=b'{"done":true}')])
        told = [await message() for _ in range(4)]
    assert [channel.partition("@")[0] for channel, _ in told] == ["waiting", "progress", "failed", "completed"]
    waiting, progress, failed, completed = map(parsed, told)
    assert {message[0] for message in (waiting, progress, failed, completed)} == {EMITTER}
    assert list(waiting[1]) == CREATED
    assert (len(waiting), waiting[1]["opts"]["jobId"], waiting[1]["returnvalue"]) == (2, "one", None)
    assert (progress[2], progress[1]["progress"], failed[1]["attemptsMade"], failed[2]) == (42, 42, 1, {})
    assert (completed[1]["returnvalue"], completed[2]) == ({"done": True}, {"done": True})
    assert completed[1]["stacktrace"] == ["ValueError: no"]


async def test_what_is_no_json_is_not_published(storage: BullStorage, node: NodeBull) -> None:
    """Junk in a job of Node's, and control characters in it, never make a message that Node cannot parse."""
    await node.add("bad", data='{"a":NaN}', opts="[1]", stacktrace="[", progress="x", returnvalue='"\n"')
    async with heard(node.client, f"failed@{storage.queue}") as message:
        await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
        [_, told, _] = parsed(await message())
    assert (told["data"], told["opts"], told["progress"]) == (None, {"jobId": "bad"}, 0)
    assert (told["stacktrace"], told["returnvalue"]) == (["ValueError: no"], " ")


async def test_old_dialects_have_no_such_events(old: BullStorage, node: NodeBull) -> None:
    """Beside Bull 1.0 nothing is published that only 1.1 knows."""
    async with heard(node.client, f"waiting@{old.queue}", key(old, "jobs")) as message:
        await old.enqueue([job("7")])
        assert await message() == (key(old, "jobs"), "7")


async def test_node_is_heard(storage: BullStorage, node: NodeBull) -> None:
    """Events of Node's reach our subscribers, junk and our own echo do not; a failed run that is repeated is no end."""

    def message(**about: object) -> str:
        return json.dumps(
            [node.token, {"data": {}, "opts": {"jobId": "one"}, "attempts": 2, "attemptsMade": 1, **about}]
        )

    async with storage.subscribe("one") as events:
        for junk in ("", "{}", "[", "[1]", "null", '["x",{"opts":{}}]', '["x",{"opts":{"jobId":null}},1]', "\x00"):
            await node.client.publish(f"completed@{storage.queue}", junk)
        await node.client.publish(f"completed@{storage.queue}", json.dumps([EMITTER, {"opts": {"jobId": "one"}}]))
        await node.client.publish(f"bull:{storage.queue}:workers:events@0", b"\xc1junk")
        for name, about in (("waiting", {}), ("failed", {}), ("failed", {"attemptsMade": 2}), ("completed", {})):
            await node.client.publish(f"{name}@{storage.queue}", message(**about))
        kinds = [(await events.get()).kind for _ in range(4)]
    assert kinds == [JobEventKind.QUEUED, JobEventKind.FAILING, JobEventKind.FAILED, JobEventKind.COMPLETED]


@pytest.mark.parametrize("silently", [False, True])
async def test_what_node_adds_wakes(silently: bool, storage: BullStorage, node: NodeBull) -> None:
    """A sleeper gets what Node adds, and what Node puts in line without a word."""
    async with a_script_of(node.client):
        waiting = asyncio.create_task(storage.wait(["*"], timeout=6 * timedelta(seconds=PATIENCE)))
    try:
        await until(lambda: _somebody_hears(node))
        assert not waiting.done()
        if silently:
            await node.client.hset(node.key("mute"), mapping={"data": "{}", "opts": "{}"})
            await node.client.lpush(node.key("wait"), "mute")
        else:
            await node.add()
        async with asyncio.timeout(PATIENCE):
            await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(await claimed(storage)) == 1


async def _somebody_hears(node: NodeBull) -> bool:
    [(_, hearers)] = await node.client.pubsub_numsub(node.key("paused"))
    return bool(hearers)


async def test_nobody_listens_for_a_busy_worker(storage: BullStorage, node: NodeBull) -> None:
    """Each added job is a message: who has not waited for a while is sent them no more, until the next wait."""
    await storage.wait(["*"], timeout=timedelta(milliseconds=1))
    await until(lambda: _nobody_hears_adds(storage, node))
    await claimed(storage, 1_000)
    waiting = asyncio.create_task(storage.wait(["*"], timeout=6 * timedelta(seconds=PATIENCE)))
    async with asyncio.timeout(PATIENCE):
        while await _nobody_hears_adds(storage, node):
            pass
        await waiting


async def _nobody_hears_adds(storage: BullStorage, node: NodeBull) -> bool:
    await node.add()
    [(_, hearers)] = await node.client.pubsub_numsub(node.key("jobs"))
    return not hearers
