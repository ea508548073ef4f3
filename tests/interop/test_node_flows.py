"""Flows of BullMQ between Node and us: trees, failures that reach parents, children added while a job runs."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.interop.peer import FlowPeer, flow_peer
from tests.workers.running import Recorder, running
from workers import JobState, Queue, Worker
from workers.flows import FlowJob
from workers.jobs import ChildFailure
from workers.storage.bullmq import BullMQStorage
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import Job

pytestmark = pytest.mark.spread("package")


@pytest.fixture
async def whole(redis_url: str) -> AsyncIterator[BullMQStorage]:
    """The queue of parents."""
    storage = BullMQStorage(redis_url, f"whole{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def parts(redis_url: str) -> AsyncIterator[BullMQStorage]:
    """The queue of children."""
    storage = BullMQStorage(redis_url, f"parts{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def node(package: str, redis_url: str) -> AsyncIterator[FlowPeer]:
    async with flow_peer(package, redis_url) as peer:
        yield peer


def node_tree(whole: BullMQStorage, parts: BullMQStorage, name: str, *children: dict[str, Any]) -> dict[str, Any]:
    """A parent and its children as Node's `FlowProducer` takes them."""
    below = [{"name": "part", "queueName": parts.queue, **child} for child in children]
    return {"name": "whole", "queueName": whole.queue, "data": {}, "opts": {"jobId": name}, "children": below}


def child(job_id: str, data: dict[str, Any], **opts: object) -> dict[str, Any]:
    return {"data": data, "opts": {"jobId": job_id, **opts}}


def part(
    parts: BullMQStorage,
    job_id: str,
    payload: dict[str, object],
    *,
    on_failure: ChildFailure | None = None,
    priority: int = 0,
) -> FlowJob:
    """A child as we take it."""
    return FlowJob(payload=payload, id=job_id, name="part", queue=parts.queue, on_failure=on_failure, priority=priority)


async def test_our_workers_run_a_flow_of_node(whole: BullMQStorage, parts: BullMQStorage, node: FlowPeer) -> None:
    """A parent gets the results of its children; one that fails with its child says of which, as in Node."""
    await node.add(node_tree(whole, parts, "sum", child("a", {"n": 1}), child("b", {"n": 2})))
    await node.add(
        node_tree(
            *(whole, parts, "tolerant", child("c", {"n": 3})),
            child("ignored", {"error": "so what"}, ignoreDependencyOnFailure=True),
        )
    )
    await node.add(node_tree(whole, parts, "doomed", child("bad", {"error": "no"}, failParentOnFailure=True)))

    async def work(job: Job) -> object:
        assert isinstance(job.payload, dict)
        if "error" in job.payload:
            raise ValueError(job.payload["error"])
        return job.payload["n"]

    async def add_up(job: Job) -> object:
        children = await job.children()
        return {"sum": sum(map(int, map(str, children.completed.values()))), "ignored": [*children.ignored.values()]}

    recorder = Recorder()
    async with running(Worker(whole, {"*": add_up}, observers=[recorder]), Worker(parts, {"*": work})):
        await recorder.seen(WorkerEventKind.COMPLETED, 2)
        await recorder.seen(WorkerEventKind.FAILED)
    assert (await node.read(whole.queue, "sum"))["returnvalue"] == {"sum": 3, "ignored": []}
    assert (await node.read(whole.queue, "tolerant"))["returnvalue"] == {"sum": 3, "ignored": ["so what"]}
    doomed = await node.read(whole.queue, "doomed")
    assert (doomed["state"], doomed["failedReason"]) == ("failed", f"child bull:{parts.queue}:bad failed")


async def test_node_runs_our_flow(whole: BullMQStorage, parts: BullMQStorage, node: FlowPeer, redis_url: str) -> None:
    """To Node it is a flow of its own, field by field; we read the results, and the reason of a failed parent."""
    queue = Queue(whole, max_attempts=1)
    good = [part(parts, f"good-{n}", {"result": n}, priority=n) for n in (1, 2)]
    some = part(parts, "ignored", {"error": "so what"}, on_failure=ChildFailure.IGNORE)
    await queue.enqueue_flow(FlowJob(payload={}, id="whole", name="whole", children=[*good, some]))
    bad = part(parts, "bad", {"error": "no"}, on_failure=ChildFailure.FAIL_PARENT)
    await queue.enqueue_flow(FlowJob(payload={}, id="doomed", name="whole", children=[bad]))

    keep = {"workers": 1, "attempts": 1, "removeOnComplete": {"age": 3600}, "removeOnFail": {"age": 604800}}
    theirs = child("bad-of-node", {"error": "no"}, **keep, failParentOnFailure=True)
    await node.add(node_tree(whole, parts, "doomed-of-node", theirs))
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        found = []
        for name in ("bad", "bad-of-node"):
            fields = await client.hgetall(f"bull:{parts.queue}:{name}")
            options = {**json.loads(fields.pop("opts")), "jobId": "", "backoff": None, "workers": "ours alone"}
            found.append(json.loads(json.dumps([fields, options]).replace("-of-node", "")))
        for fields, _ in found:
            del fields["timestamp"]
            fields["parent"] = json.loads(fields["parent"])
    assert found[0] == found[1]

    await node.work(**{parts.queue: 5, whole.queue: 3})
    assert await queue.get_result("whole") == {
        "own": None,
        "children": [{"own": n, "children": [], "ignored": []} for n in (1, 2)],
        "ignored": ["so what"],
    }
    [status] = await whole.status(["doomed"])
    assert status is not None
    assert status.last_error is not None
    assert (status.state, status.last_error.message) == (JobState.FAILED, f"child bull:{parts.queue}:bad failed")
    await queue.stop()


async def test_children_added_while_a_job_runs(whole: BullMQStorage, parts: BullMQStorage, node: FlowPeer) -> None:
    """Either side adds them and waits; the other side runs them, and takes the parent over afterwards."""
    recorder, queue = Recorder(), Queue(whole)

    async def split(job: Job) -> object:
        if job.name == "ours":
            added = part(parts, "3", {"result": 3}, on_failure=ChildFailure.IGNORE)
            await job.add_children([added])
        await job.wait_for_children()
        return {child.id: value for child, value in (await job.children()).completed.items()}

    async def work(job: Job) -> object:
        return job.payload

    children = [{"queue": parts.queue, "name": "part", "id": f"part-{n}", "data": n} for n in (1, 2)]
    await queue.enqueue({"add": children}, id="theirs", name="theirs")
    await node.step(whole.queue)
    assert (await node.read(whole.queue, "theirs"))["state"] == "waiting-children"
    async with running(Worker(whole, {"*": split}, observers=[recorder]), Worker(parts, {"part": work})):
        await recorder.seen(WorkerEventKind.COMPLETED)
        assert (await node.read(whole.queue, "theirs"))["returnvalue"] == {"part-1": 1, "part-2": 2}
    async with running(Worker(whole, {"*": split}, observers=[recorder])):
        await queue.enqueue({"result": "node"}, id="ours", name="ours")
        await recorder.seen(WorkerEventKind.SUSPENDED)
    await node.work(**{parts.queue: 1, whole.queue: 1})
    ran = {"own": 3, "children": [], "ignored": []}
    assert await queue.get_result("ours") == {"own": "node", "children": [ran], "ignored": []}
    await queue.stop()
