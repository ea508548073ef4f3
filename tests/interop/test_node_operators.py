"""What Node's own means show of the work of ours on a BullMQ queue, and of what Node's jobs ask of our worker."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from federation.base.queues.queue import OF_SCHEDULES, JobQueue
from tests.interop.peer import NodePeer
from tests.patience import PATIENCE_SECONDS
from workers import EnqueueStatus, StorageError, Worker, WorkerOptions
from workers.jobs import TERMINAL_EVENTS
from workers.storage.bullmq import BullMQStorage
from workers.worker.events import WorkerEvent, WorkerEventKind
from workers.worker.handlers import Job

pytestmark = pytest.mark.spread("package")


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(f"{redis_url}?metrics=60", f"interop-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


async def sees_workers(node: NodePeer, count: int) -> list[str]:
    """Node's `getWorkers` lists so many; the names of their connections."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(names := list(await node.call("workers"))) != count:
            await asyncio.sleep(0.05)
    return names


async def test_a_failing_node_job(storage: BullMQStorage, node: NodePeer) -> None:
    """It is retried as Node would: at once, or by its own back-off; Node sees its logs and stacks, and who worked."""
    data, options = {"n": 1}, {"attempts": 3, "keepLogs": 2, "stackTraceLimit": 2, "ourOwnOption": {"kept": True}}
    plain = {"name": "plain", "data": data, "opts": {**options, "jobId": "plain"}}
    named = {**options, "jobId": "named", "backoff": {"type": "jitterish", "delay": 7}}
    failing: dict[str, list[timedelta | None]] = {"plain": [], "named": []}
    asked: list[tuple[int, timedelta]] = []

    async def fail(job: Job) -> object:
        job.log(f"attempt {job.attempt}")
        raise ValueError(f"boom {job.attempt}")

    def jitterish(attempt: int, delay: timedelta) -> timedelta:
        asked.append((attempt, delay))
        return timedelta(milliseconds=attempt)

    def watch(event: WorkerEvent) -> None:
        if event.kind is WorkerEventKind.FAILING and event.claim is not None:
            failing[event.claim.job_id].append(event.delay)

    worker = Worker(
        storage,
        {"*": fail},
        observers=[watch],
        options=WorkerOptions(worker_id="host 1=ä", backoffs={"jitterish": jitterish}),
    )
    async with asyncio.timeout(PATIENCE_SECONDS), storage.events() as events:
        await node.add(plain, {"name": "named", "data": data, "opts": named})
        running = asyncio.create_task(worker.run())
        ended: set[str] = set()
        while len(ended) < 2:
            event = await events.get()
            ended |= {event.job_id} if event.kind in TERMINAL_EVENTS else set()
    assert failing == {
        "plain": [timedelta(0)] * 2,
        "named": [timedelta(milliseconds=1), timedelta(milliseconds=2)],
    }
    assert asked == [(1, timedelta(milliseconds=7)), (2, timedelta(milliseconds=7))]
    for job_id in failing:
        assert await node.call("logs", job_id) == ["attempt 2", "attempt 3"]
        found = await node.read(job_id)
        assert [stack.splitlines()[-1] for stack in found["stacktrace"]] == ["ValueError: boom 2", "ValueError: boom 3"]
        assert (found["opts"]["keepLogs"], found["opts"]["ourOwnOption"]) == (2, {"kept": True})
    assert int(await node.call("counted", "failed")) == 2
    assert int(await node.call("counted", "completed")) == 0
    queue = b64encode(storage.queue.encode()).decode()
    assert await sees_workers(node, 1) == [f"bull:{queue}:w:host%201=%C3%A4"]
    worker.stop()
    await running
    assert await sees_workers(node, 0) == []


OPTIONS: dict[str, object] = {
    "timestamp": 1_700_000_000_000,
    "priority": 5,
    "delay": 3_600_000,
    "attempts": 4,
    "backoff": {"type": "jitterish", "delay": 7},
    "lifo": True,
    "removeOnComplete": 100,
    "removeOnFail": {"age": 60, "count": 10, "limit": 5},
    "keepLogs": 3,
    "stackTraceLimit": 2,
    "sizeLimit": 1_000,
    "parent": {"id": "mother", "queue": "bull:{queue}"},
    "debounce": {"id": "old"},
    "deduplication": {"id": "new", "ttl": 60_000, "extend": True},
    "failParentOnFailure": True,
    "continueParentOnFailure": True,
    "ignoreDependencyOnFailure": True,
    "removeDependencyOnFailure": True,
    "telemetry": {"metadata": "trace", "omitContext": True},
}
"""A value for each option of BullMQ's `add` but the id."""


def jobs_options(package: str) -> set[str]:
    """The names of `JobsOptions` in the type definitions of the installed npm package."""
    types = Path(__file__).parent / "node_modules" / package / "dist" / "esm"
    base = (types / "interfaces" / "base-job-options.d.ts").read_text()
    more = (types / "types" / "job-options.d.ts").read_text()
    public = base + more.partition("export type JobsOptions")[0]  # what follows it is BullMQ's own
    return set(re.findall(r"^ {4}(\w+)\?:", public, re.MULTILINE))


async def test_every_option_of_add(storage: BullMQStorage, node: NodePeer, package: str) -> None:
    """`JobQueue.add` takes each option that BullMQ's own has, and Node reads the job as one that Node added."""
    known = jobs_options(package)
    assert OPTIONS.keys() - known <= {"debounce"}, "only BullMQ 6 has one of them no more"
    assert known - OPTIONS.keys() <= OF_SCHEDULES | {"jobId"}
    queue = JobQueue(storage)
    text = json.dumps({name: OPTIONS[name] for name in known & OPTIONS.keys()}).replace("{queue}", storage.queue)
    await queue.add("parent", {}, {"jobId": "mother"})
    for name, value in json.loads(text).items():
        ours = await queue.add("child", {"n": 1}, {name: value, "jobId": f"ours-{name}"})
        assert (ours.id, ours.status) == (f"ours-{name}", EnqueueStatus.QUEUED)
        unique = "deduplication" in name or "debounce" in name
        theirs = {name: {**value, "id": f"theirs-{name}"} if unique else value, "jobId": f"theirs-{name}"}
        await node.add({"name": "child", "data": {"n": 1}, "opts": theirs})
        read = [await node.read(job_id) for job_id in (ours.id, f"theirs-{name}")]
        if not unique and name != "sizeLimit":  # which counts at the add alone
            assert read[0]["opts"][name] == read[1]["opts"][name] == value
        for part in ("priority", "delay", "parentKey", "deduplicationId", "state"):
            assert unique or read[0].get(part) == read[1].get(part), (name, part)
    again = await queue.add("child", {}, {"deduplication": {"id": "new"}})
    assert (again.id, again.status) == ("ours-deduplication", EnqueueStatus.DUPLICATE)
    assert (await node.read("ours-timestamp"))["timestamp"] == OPTIONS["timestamp"]
    with pytest.raises(StorageError, match="parent"):
        await queue.add("child", {}, {"parent": {"id": "nobody", "queue": f"bull:{storage.queue}"}})
    await queue.stop()
