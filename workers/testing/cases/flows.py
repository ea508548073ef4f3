"""The promises of `FlowStorage`, and of storages that have no flows."""

from __future__ import annotations

from workers.errors import Unsupported
from workers.flows import FlowJob
from workers.jobs import EnqueueStatus, JobRef, JobState, Suspended
from workers.queue import Queue
from workers.storage.base import FlowStorage, Storage
from workers.testing.case import FLOWS, case
from workers.testing.harness import Harness
from workers.testing.steps import apply, claim, claim_one, completed, enqueue, job, state


@case(guarantees=(24,))
async def a_storage_without_flows_says_so(harness: Harness, storage: Storage) -> None:
    """Without `capabilities.flows` a flow is refused with `Unsupported`, and nothing is inserted."""
    tree = FlowJob(payload=None, id="parent", children=[FlowJob(payload=None, id="child")])
    async with Queue(storage) as queue:
        try:
            answer = await queue.enqueue_flow(tree)
        except Unsupported:
            assert not harness.capabilities.flows
            assert await storage.status(["parent", "child"]) == [None, None]
        else:
            assert harness.capabilities.flows
            assert [one.status for one in (answer, *answer.children)] == [EnqueueStatus.QUEUED] * 2


@case(guarantees=(6, 24), needs=(FLOWS,))
async def a_parent_waits_for_its_children(harness: Harness) -> None:
    """It is scheduled until the completion of its last child, which makes it claimable in the same step."""
    storage, parts = await harness.open(), await harness.open()
    assert isinstance(storage, FlowStorage)
    children = [FlowJob(payload=None, id=name, queue=parts.queue) for name in ("a", "b")]
    async with Queue(storage) as queue:
        await queue.enqueue_flow(FlowJob(payload=None, id="parent", children=children))
    for held in await claim(parts, 2):
        assert await state(storage, "parent") is JobState.WAITING
        assert await claim(storage) == []
        await apply(parts, completed(held, b"1"))
    parent = await claim_one(storage)
    found = await storage.children(parent, limit=10, cursor=None)
    assert found.completed == {JobRef(parts.queue, name): b"1" for name in ("a", "b")}
    assert (found.unfinished, found.cursor) == (0, None)


@case(guarantees=(4, 24), needs=(FLOWS,))
async def nobody_waits_without_an_unfinished_child(storage: Storage) -> None:
    """A job that wants to wait for children, and has none, is claimable at once, and the attempt is not counted."""
    await enqueue(storage, job("alone"))
    await apply(storage, Suspended(claim=await claim_one(storage)))
    assert (await claim_one(storage)).attempt == 1
