"""Flows on BullMQ, with our workers on every queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.workers.running import Recorder, running
from tests.workers.storage.bullmq.steps import ERROR
from workers import EnqueueStatus, JobState, Queue, StorageError, StorageUnavailable, Unsupported, Worker, WorkerOptions
from workers.errors import LeaseLost, LossReason, StorageDamaged, WaitForChildren
from workers.flows import MAX_FLOW_JOBS, FlowJob, flatten
from workers.jobs import (
    CancelResult,
    ChildFailure,
    Completed,
    Failed,
    FlowNode,
    JobRef,
    Released,
    SettleStatus,
    Suspended,
)
from workers.middlewares import measure_attempts
from workers.middlewares.outcome import Outcome
from workers.serde import JsonSerde
from workers.specs import new_job
from workers.storage.bullmq import BullMQStorage
from workers.testing import faulty
from workers.testing.steps import PATIENCE, claim_one, job, state, status
from workers.worker.events import WorkerEventKind
from workers.worker.handlers import Job


@pytest.fixture
async def parts(redis_url: str, storage: BullMQStorage) -> AsyncIterator[BullMQStorage]:
    """Another queue on the same server, for children."""
    parts = BullMQStorage(redis_url, f"{storage.queue}-parts")
    await parts.connect()
    yield parts
    await parts.disconnect()


@pytest.fixture
def queue(storage: BullMQStorage) -> Queue:
    return Queue(storage)


def part(parts: BullMQStorage, job_id: str, on_failure: ChildFailure | None = None) -> FlowJob:
    return FlowJob(payload=job_id, id=job_id, queue=parts.queue, on_failure=on_failure, max_attempts=1)


def children_of(parts: BullMQStorage, *ids: str, on_failure: ChildFailure | None = None) -> list[FlowNode]:
    """Further children of a running job, as a storage takes them."""
    specs = [part(parts, job_id, on_failure) for job_id in ids]
    return flatten(specs, parts.queue, partial(new_job, serde=JsonSerde(), queue=""), further=True)


class Outcomes:
    """The outcomes of attempts, in the order of their ends."""

    def __init__(self) -> None:
        self.seen: list[Outcome] = []

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        self.seen.append(outcome)


async def fail(storage: BullMQStorage) -> None:
    """The next job of the queue has failed for good."""
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])


async def complete(storage: BullMQStorage, result: bytes = b"1") -> None:
    """The next job of the queue has completed."""
    [outcome] = await storage.settle([Completed(claim=await claim_one(storage), result=result)])
    assert outcome.status is SettleStatus.APPLIED


async def test_a_flow_runs_from_its_leaves_to_its_root(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue
) -> None:
    """Every job has the results of its children, in whichever queue they ran; nothing else runs first."""
    leaves = [FlowJob(payload=number, id=f"leaf-{number}") for number in (1, 2)]
    middle = FlowJob(payload=10, id="middle/of", queue=parts.queue, children=leaves)
    tree = FlowJob(payload=100, id="root", children=[middle, part(parts, "lone")], priority=3)
    enqueued = await queue.enqueue_flow(tree)
    assert [one.id for one in enqueued.children] == ["middle/of", "lone"]
    assert [one.id for one in enqueued.children[0].children] == ["leaf-1", "leaf-2"]
    waiting = await status(storage, "root")
    assert (waiting.state, waiting.next_run_at) == (JobState.WAITING, None)
    assert (await storage.counts())[JobState.WAITING] == 1
    assert [one.id for one in (await storage.list(JobState.WAITING)).jobs] == ["root"]
    ran = []

    async def add_up(job: Job) -> object:
        children = await job.children()
        ran.append(job.id)
        return [job.payload, *(children.completed[child] for child in sorted(children.completed))]

    handlers = {"*": add_up}
    async with running(Worker(storage, handlers), Worker(parts, handlers)):
        result = await queue.wait_for_job_chain_completion("root", timedelta(seconds=PATIENCE))
    assert result == [100, ["lone"], [10, [1], [2]]]
    assert ran.index("middle/of") > max(ran.index("leaf-1"), ran.index("leaf-2"))
    assert ran[-1] == "root"


async def test_what_a_failure_means_for_the_parent(storage: BullMQStorage, parts: BullMQStorage, queue: Queue) -> None:
    """A failed child lets its parent fail, run at once, or wait for the others, as it was enqueued; else it waits."""
    for name, on_failure in [*((one.name, one) for one in ChildFailure), ("NONE", None)]:
        children = [part(parts, f"{name}-bad", on_failure), part(parts, f"{name}-good")]
        await queue.enqueue_flow(FlowJob(payload=None, id=name, children=children, max_attempts=3))
        await fail(parts)
        runs = name in ("FAIL_PARENT", "CONTINUE_PARENT")
        assert await state(storage, name) is (JobState.QUEUED if runs else JobState.WAITING)
        await complete(parts)
        assert await state(storage, name) is (JobState.WAITING if on_failure is None else JobState.QUEUED)
    await parts.remove(["NONE-bad"])
    assert await state(storage, "NONE") is JobState.QUEUED
    found = {}

    async def look(job: Job) -> None:
        children = await job.children()
        found[job.id] = {child.id: why for child, why in {**children.ignored, **children.failed}.items()}
        assert [*children.completed] == [JobRef(parts.queue, f"{job.id}-good")]

    recorder = Recorder()
    async with running(Worker(storage, {"*": look}, observers=[recorder])):
        await recorder.seen(WorkerEventKind.COMPLETED, 4)
        await recorder.seen(WorkerEventKind.FAILED)
    ignored = {name: {f"{name}-bad": "no"} for name in ("CONTINUE_PARENT", "IGNORE")}
    assert found == {**ignored, "REMOVE": {}, "NONE": {}}
    gone = await status(storage, "FAIL_PARENT")
    assert gone.last_error is not None
    reason = f"child bull:{parts.queue}:FAIL_PARENT-bad failed"
    assert (gone.last_error.type, gone.last_error.message) == ("ChildFailedError", reason)
    assert (gone.attempt, gone.last_error.exhausted) == (0, False)


async def test_children_are_added_and_waited_for_while_the_job_runs(
    storage: BullMQStorage, parts: BullMQStorage
) -> None:
    """The run ends uncounted and is repeated when they have ended, whichever replies are lost; none is added twice."""
    recorder, outcomes = Recorder(), Outcomes()
    shaky, faults = faulty(storage)
    faults.replies_lost["settle"] = faults.duplicated["enqueue_flow"] = 1
    answers = []

    async def split(job: Job) -> object:
        for impossible in (part(parts, "a", ChildFailure.REMOVE), part(parts, "b"), FlowJob(payload=None)):
            with pytest.raises(ValueError, match="needs an id"):
                await job.add_children([impossible])
        children = [part(parts, f"{job.id}-{number}", ChildFailure.IGNORE) for number in range(3)]
        answers.append([one.status for one in await job.add_children(children)])
        await job.wait_for_children()
        return sorted((await job.children()).completed.values())

    async def work(job: Job) -> object:
        return job.payload

    await storage.enqueue([job("whole", max_attempts=1)])
    worker = Worker(
        shaky, {"*": split}, observers=[recorder], options=WorkerOptions(middlewares=[measure_attempts(outcomes)])
    )
    async with running(worker):
        await recorder.seen(WorkerEventKind.SUSPENDED)
        assert (await status(storage, "whole")).attempt == 0
        async with running(Worker(parts, {"*": work})):
            await recorder.seen(WorkerEventKind.COMPLETED)
    assert await Queue(storage).get_result("whole") == ["whole-0", "whole-1", "whole-2"]
    assert answers == [[EnqueueStatus.DUPLICATE] * 3, [EnqueueStatus.COMPLETED] * 3]
    assert outcomes.seen == [Outcome.SUSPENDED, Outcome.COMPLETED]
    assert (await status(storage, "whole")).attempt == 1


async def test_a_child_is_added_once_whatever_became_of_its_record(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue, client: Any
) -> None:
    """A handler that runs again cannot set off work that it had done before, so it cannot go round for ever."""
    await storage.enqueue([job("whole")])
    held = await claim_one(storage)
    ids = ("dropped", "failed", "waits")
    await storage.enqueue_flow(children_of(parts, *ids, on_failure=ChildFailure.IGNORE), held)
    await complete(parts, b'"x"')
    await fail(parts)
    await parts.remove(["dropped", "failed"])
    again = await storage.enqueue_flow(children_of(parts, *ids), held)
    told = [(one.status, one.existing_state, one.result) for one in again if one is not None]
    assert told == [
        (EnqueueStatus.COMPLETED, JobState.COMPLETED, b'"x"'),
        (EnqueueStatus.DUPLICATE, JobState.FAILED, None),
        (EnqueueStatus.DUPLICATE, None, None),
    ]
    assert sum((await parts.counts()).values()) == 1


# The same flow again, and jobs that exist


async def test_a_flow_is_enqueued_again(storage: BullMQStorage, parts: BullMQStorage, queue: Queue) -> None:
    """Unfinished it is a duplicate; after a failure what failed runs again, and what has completed does not."""
    tree = FlowJob(
        payload=None, id="whole", children=[part(parts, one, ChildFailure.FAIL_PARENT) for one in ("good", "bad")]
    )
    await queue.enqueue_flow(tree)
    again = await queue.enqueue_flow(tree)
    assert (again.status, again.existing_state, again.children) == (EnqueueStatus.DUPLICATE, JobState.WAITING, ())
    await complete(parts, b'"once"')
    await fail(parts)
    await fail(storage)
    assert await state(storage, "whole") is JobState.FAILED
    anew = await queue.enqueue_flow(tree)
    statuses = [(one.status, one.result) for one in (anew, *anew.children)]
    assert statuses == [
        (EnqueueStatus.QUEUED, None),
        (EnqueueStatus.COMPLETED, "once"),
        (EnqueueStatus.QUEUED, None),
    ]
    assert await state(storage, "whole") is JobState.WAITING
    await complete(parts, b'"now"')
    page = await storage.children(await claim_one(storage), limit=10, cursor=None)
    assert sorted(page.completed.values()) == [b'"now"', b'"once"']
    assert (page.failed, page.unfinished) == ({}, 0)


@pytest.mark.parametrize("new", [0, 1])
async def test_jobs_that_exist_become_children(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue, new: int
) -> None:
    """A job that has completed counts at once, one that waits when it has; what is below such jobs is left out."""
    await parts.enqueue([job("done"), job("waits")])
    await complete(parts, b"7")
    ids = ["done", "waits", *["new"] * new]
    children = [replace(part(parts, one), children=[part(parts, "below")] * (one == "waits")) for one in ids]
    told = await queue.enqueue_flow(FlowJob(payload=None, id="whole", children=children))
    assert [one.children for one in told.children] == [()] * len(ids)
    assert await parts.status(["below"]) == [None]
    for _ in range(1 + new):
        assert await state(storage, "whole") is JobState.WAITING
        await complete(parts)
    page = await storage.children(await claim_one(storage), limit=10, cursor=None)
    assert page.completed == {JobRef(parts.queue, one): b"7" if one == "done" else b"1" for one in ids}


async def test_a_flow_of_jobs_that_have_completed_runs_at_once(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue
) -> None:
    """Nobody is left to set its root free, so adding it does."""
    await parts.enqueue([job("a"), job("b")])
    await complete(parts)
    await complete(parts)
    await queue.enqueue_flow(FlowJob(payload=None, id="whole", children=[part(parts, one) for one in "ab"]))
    assert len((await storage.children(await claim_one(storage), limit=10, cursor=None)).completed) == 2


async def test_a_child_has_one_parent(storage: BullMQStorage, parts: BullMQStorage, queue: Queue) -> None:
    """A flow with the child of another parent is refused as a whole, before anything of it is stored."""
    await queue.enqueue_flow(FlowJob(payload=None, id="first", children=[part(parts, "shared")]))
    second = FlowJob(payload=None, id="second", children=[part(parts, "new"), part(parts, "shared")])
    with pytest.raises(StorageError, match="the child of another job"):
        await queue.enqueue_flow(second)
    assert await storage.status(["second"]) == await parts.status(["new"]) == [None]
    await complete(parts)
    assert await state(storage, "first") is JobState.QUEUED


async def test_impossible_flows_are_refused(parts: BullMQStorage, queue: Queue) -> None:
    """Too many jobs, an id twice and a failure that means nothing to nobody are errors before anything is stored."""
    some = [FlowJob(payload=None) for _ in range(MAX_FLOW_JOBS)]
    twice = [part(parts, "a"), part(parts, "a")]
    for tree in (
        FlowJob(payload=None, children=some),
        FlowJob(payload=None, children=twice),
        FlowJob(payload=None, on_failure=ChildFailure.IGNORE),
        FlowJob(payload=None, children=[FlowJob(payload=None, queue="a:b")]),
        FlowJob(payload=None, children=[FlowJob(payload=object())]),
    ):
        with pytest.raises((ValueError, TypeError)):
            await queue.enqueue_flow(tree)
    assert sum((await queue.counts()).values()) == sum((await parts.counts()).values()) == 0
    largest = await queue.enqueue_flow(FlowJob(payload=None, children=some[1:]))
    assert len(largest.children) == MAX_FLOW_JOBS - 1


async def test_many_producers_insert_a_flow_once(redis_url: str, storage: BullMQStorage, parts: BullMQStorage) -> None:
    """One inserts it and the others are told so; of flows with a job in common one gets that, the others nothing."""
    async with AsyncExitStack() as stack:
        producers = [Queue(BullMQStorage(redis_url, storage.queue)) for _ in range(10)]
        for producer in producers:
            await stack.enter_async_context(producer)
        same = FlowJob(payload=None, id="same", children=[part(parts, f"same-{number}") for number in range(5)])
        told = await asyncio.gather(*(producer.enqueue_flow(same) for producer in producers))
        assert sorted(one.status for one in told) == [EnqueueStatus.DUPLICATE] * 9 + [EnqueueStatus.QUEUED]
        rivals = [FlowJob(payload=None, id=f"rival-{n}", children=[part(parts, "shared")]) for n in range(10)]
        tries = [producer.enqueue_flow(rival) for producer, rival in zip(producers, rivals, strict=True)]
        answers = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(answer, StorageError) for answer in answers) == 9
    counts, below = await storage.counts(), await parts.counts()
    assert (counts[JobState.WAITING], below[JobState.QUEUED]) == (2, 6)


async def test_a_damaged_queue_gets_no_half_of_a_flow(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue, client: Any
) -> None:
    """A key in the way of either queue is named, and nothing is inserted in the other."""
    tree = FlowJob(payload=None, id="whole", children=[part(parts, "a")])
    for damaged in (f"bull:{storage.queue}:waiting-children", f"bull:{parts.queue}:wait"):
        await client.set(damaged, "x")
        with pytest.raises(StorageDamaged, match=damaged):
            await queue.enqueue_flow(tree)
        await client.delete(damaged)
        assert await client.exists(f"bull:{storage.queue}:whole", f"bull:{parts.queue}:a") == 0
    await queue.enqueue_flow(tree)
    await complete(parts)
    held = await claim_one(storage)
    await client.set(f"bull:{storage.queue}:waiting-children", "x")
    await storage.enqueue_flow(children_of(parts, "b"), held)
    with pytest.raises(StorageUnavailable, match="waiting-children"):
        await storage.settle([Suspended(claim=held)])
    await storage.repair()
    [outcome] = await storage.settle([Suspended(claim=held)])
    assert outcome.status is SettleStatus.APPLIED


# Waiting for children


async def test_waiting_is_settled_like_anything_else(storage: BullMQStorage, parts: BullMQStorage, client: Any) -> None:
    """A lock that merely expired does no harm, a repeated settlement is noticed, and a late one is lost."""
    await storage.enqueue([job("whole")])
    held = await claim_one(storage)
    await storage.enqueue_flow(children_of(parts, "a"), held)
    await client.delete(f"bull:{storage.queue}:whole:lock")
    waits = Suspended(claim=held)
    told = [(await storage.settle([waits]))[0].status for _ in range(2)]
    assert told == [SettleStatus.APPLIED, SettleStatus.ALREADY_APPLIED]
    assert await storage.recover(10) == await storage.recover(10)
    await complete(parts)
    assert (await claim_one(storage)).attempt == 1
    [late] = await storage.settle([waits])
    assert (late.status, late.reason) == (SettleStatus.LOST, LossReason.TAKEN)


async def test_nobody_waits_for_children_that_have_ended(storage: BullMQStorage) -> None:
    """The job runs again at once and uncounted; a handler that always asks for it fails in the end."""
    await storage.enqueue([job("whole", max_attempts=1)])
    for _ in range(100):
        held = await claim_one(storage)
        assert held.attempt == 1
        await storage.settle([Suspended(claim=held)])
    assert (await status(storage, "whole")).last_error is None
    await storage.settle([Suspended(claim=await claim_one(storage))])
    ended = await status(storage, "whole")
    assert ended.state is JobState.FAILED
    assert ended.last_error is not None
    assert ended.last_error.message == "it waited 100 times in a row for children, and none was unfinished"


async def test_a_failed_flow_is_retried(storage: BullMQStorage, parts: BullMQStorage, queue: Queue) -> None:
    """Its child first, and then the parent, which waits for the child again."""
    children = [part(parts, "bad", ChildFailure.FAIL_PARENT)]
    await queue.enqueue_flow(FlowJob(payload=None, id="whole", children=children))
    await fail(parts)
    await fail(storage)
    assert (await parts.retry(["bad"]), await storage.retry(["whole"])) == (1, 1)
    recorder = Recorder()

    async def wait(job: Job) -> object:
        await job.wait_for_children()
        return [*(await job.children()).completed.values()]

    async with running(Worker(storage, {"*": wait}, observers=[recorder])):
        await recorder.seen(WorkerEventKind.SUSPENDED)
        await complete(parts, b"7")
        await recorder.seen(WorkerEventKind.COMPLETED)
    assert await queue.get_result("whole") == [7]


async def test_a_lost_job_gets_no_children(storage: BullMQStorage, parts: BullMQStorage) -> None:
    """Whoever lost the job, or gave it back, adds nothing to the run of another worker."""
    await storage.enqueue([job("whole")])
    lost = await claim_one(storage)
    await storage.settle([Released(claim=lost)])
    held = await claim_one(storage)
    with pytest.raises(LeaseLost):
        await storage.enqueue_flow(children_of(parts, "a"), lost)
    assert await parts.status(["a"]) == [None]
    with pytest.raises(ValueError, match="its own child"):
        await storage.enqueue_flow(children_of(storage, "whole"), held)


async def test_a_job_that_waits_for_children_is_cancelled(storage: BullMQStorage, parts: BullMQStorage) -> None:
    """It never runs again, and its children end as they would have; a request made before it waited is over."""
    await storage.enqueue([job("whole"), job("other")])
    for name in ("whole", "other"):
        held = await claim_one(storage)
        await storage.enqueue_flow(children_of(parts, f"{name}-child"), held)
        if name == "other":
            assert await storage.cancel(name) is CancelResult.PROCESSING
        await storage.settle([Suspended(claim=held)])
    assert await storage.cancel("whole") is CancelResult.CANCELLED
    await complete(parts)
    await complete(parts)
    held = await claim_one(storage)
    assert held.job_id == "other"
    assert (await storage.renew([held])).cancel_requested == frozenset()
    assert await storage.claim("w", leases={"*": timedelta(seconds=9)}, limit=1) == []
    assert await state(storage, "whole") is JobState.CANCELLED


async def test_a_running_parent_is_not_completed_from_outside(storage: BullMQStorage, parts: BullMQStorage) -> None:
    """BullMQ would refuse half-way, and leave the job locked for ever; once its children have ended it works."""
    await storage.enqueue([job("whole")])
    held = await claim_one(storage)
    await storage.enqueue_flow(children_of(parts, "a"), held)
    with pytest.raises(StorageError, match="children"):
        await storage.complete("whole", b"1")
    assert (await storage.renew([held])).lost == {}
    await complete(parts)
    assert await storage.complete("whole", b"1") is JobState.PROCESSING
    assert await state(storage, "whole") is JobState.COMPLETED


async def test_a_running_parent_fails_with_its_child(storage: BullMQStorage, parts: BullMQStorage) -> None:
    """Neither its result nor its wait counts any more, and the error says so; a handler can see it before."""
    recorder, seen = Recorder(), []

    async def parent(job: Job) -> None:
        fatal, mild = ChildFailure.FAIL_PARENT, ChildFailure.IGNORE
        await job.add_children([part(parts, f"{job.id}-bad", fatal), part(parts, f"{job.id}-left", mild)])
        await fail(parts)
        await complete(parts)
        seen.append((await job.children()).failed)
        if job.id == "waits":
            raise WaitForChildren

    await storage.enqueue([job("waits")])
    async with running(Worker(storage, {"*": parent}, observers=[recorder])):
        await recorder.seen(WorkerEventKind.FAILED)
        await storage.enqueue([job("returns")])
        await recorder.seen(WorkerEventKind.FAILED, 2)
    assert seen == [{JobRef(parts.queue, f"{one}-bad"): "no"} for one in ("waits", "returns")]
    for name in ("waits", "returns"):
        found = await status(storage, name)
        assert found.last_error is not None
        assert found.last_error.message == f"job '{name}' could not be settled: a child of the job in a flow has failed"


async def test_a_stop_gives_back_a_job_that_has_children(storage: BullMQStorage, parts: BullMQStorage) -> None:
    """The next worker runs it at once, finds its children and waits for them."""
    added = asyncio.Event()

    async def stopped(job: Job) -> None:
        await job.add_children([part(parts, "a", ChildFailure.IGNORE)])
        added.set()
        await asyncio.Event().wait()

    async def waits(job: Job) -> None:
        await job.wait_for_children()

    await storage.enqueue([job("whole", max_attempts=1)])
    async with running(Worker(storage, {"*": stopped})):
        await asyncio.wait_for(added.wait(), PATIENCE)
    assert await state(storage, "whole") is JobState.QUEUED
    recorder = Recorder()
    async with running(Worker(storage, {"*": waits}, observers=[recorder])):
        await recorder.seen(WorkerEventKind.SUSPENDED)
        await complete(parts)
        await recorder.seen(WorkerEventKind.COMPLETED)


# Reading


async def test_children_are_read_in_pages(storage: BullMQStorage, parts: BullMQStorage, client: Any) -> None:
    """However many they are, every child comes, and a page is about as long as asked for."""
    await storage.enqueue([job("whole")])
    held = await claim_one(storage)
    key = f"bull:{storage.queue}:whole"
    children = {f"bull:{parts.queue}:{number}": f'"{number:0100}"' for number in range(600)}
    await client.hset(f"{key}:processed", mapping=children)
    await client.hset(f"{key}:failed", f"other:{parts.queue}:x:1", "why")
    await client.zadd(f"{key}:unsuccessful", {f"bull:{parts.queue}:gone": 1})
    found, cursor, pages = {}, None, 0
    while pages == 0 or cursor is not None:
        page = await storage.children(held, limit=150, cursor=cursor)
        assert len(page.completed) < 300
        found.update({**page.completed, **page.ignored, **page.failed})
        cursor, pages = page.cursor, pages + 1
    assert found.pop(JobRef(parts.queue, "gone")) is None
    assert len(found) == 601
    assert pages >= 4
    for junk in ("", "3:0", "0:x", "0"):
        with pytest.raises(StorageError, match="cursor"):
            await storage.children(held, limit=1, cursor=junk)


async def test_a_reason_that_bullmq_gives_is_kept(storage: BullMQStorage, client: Any) -> None:
    """A job that BullMQ wants failed fails in its words; only a job that stalled counts as one that did."""
    reasons = {
        "child": "child bull:q:7 failed",
        "other": "not " + "today" * 999,
        "stall": "job stalled more than allowable limit",
    }
    await storage.enqueue([job(name) for name in reasons])
    for name, reason in reasons.items():
        await client.hset(f"bull:{storage.queue}:{name}", "defa", reason)
    recorder = Recorder()

    async def never(job: Job) -> None:
        raise AssertionError("it must not run")

    async with running(Worker(storage, {"*": never}, observers=[recorder])):
        await recorder.seen(WorkerEventKind.FAILED, 3)
    found = {name: (await status(storage, name)).last_error for name in reasons}
    read = {name: (error.type, error.message) for name, error in found.items() if error is not None}
    assert read["child"] == ("ChildFailedError", reasons["child"])
    assert read["other"] == ("UnrecoverableError", reasons["other"][:2_000])
    assert read["stall"][0] == "StalledError"
    assert "vanished" in read["stall"][1]


async def test_draining_removes_what_waits_for_children_here(
    storage: BullMQStorage, parts: BullMQStorage, queue: Queue
) -> None:
    """A parent goes with its last child; one whose children wait in another queue is left for them."""
    await queue.enqueue_flow(FlowJob(payload=None, id="here", children=[FlowJob(payload=None, id="a")]))
    await queue.enqueue_flow(FlowJob(payload=None, id="spread", children=[part(parts, "b")]))
    assert await storage.drain() == 2
    assert [one.id for one in (await storage.list(JobState.WAITING)).jobs] == ["spread"]


async def test_a_job_of_a_flow_cannot_follow_others(storage: BullMQStorage) -> None:
    """It would not wait for them; so the tree is refused, and nothing of it is stored."""
    async with Queue(storage) as queue:
        with pytest.raises(Unsupported, match="'whole'"):
            await queue.enqueue_flow(FlowJob(payload=1, id="whole", after=["other"]))
        assert await queue.get_status("whole") is None
