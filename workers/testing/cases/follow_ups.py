"""What a handler enqueues with its end, where that follows other jobs as well."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from workers.jobs import (
    DROP,
    Continued,
    JobState,
    SettleStatus,
)
from workers.storage.base import Storage
from workers.testing.case import DEPENDENCIES, case
from workers.testing.cases.dependencies import follower
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    enqueue,
    failed,
    job,
    state,
    status,
)


@case(guarantees=(6, 25), needs=(DEPENDENCIES,))
async def what_follows_a_completion_waits_for_others(storage: Storage) -> None:
    """A job that is enqueued by a completion may follow others, and runs when the last of them has completed."""
    await enqueue(storage, job("first"), job("second"), job("third"))
    first, second, third = await claim(storage, 3)
    then = follower("last", "second", "third")
    await apply(storage, replace(completed(first), then=then))
    assert (await status(storage, "last")).waits_for == 2
    await apply(storage, completed(second))
    assert await claim(storage, 5) == []
    await apply(storage, completed(third))
    assert (await claim_one(storage)).job_id == "last"


@case(guarantees=(6, 25), needs=(DEPENDENCIES,))
async def what_follows_a_completion_learns_of_ends_before(storage: Storage) -> None:
    """Of the others one has completed, one failed and one is unknown: it fails, or runs however they ended."""
    await enqueue(storage, job("done"), job("bad"))
    done, bad = await claim(storage, 2)
    await apply(storage, completed(done), failed(bad))
    for number, (others, run, expected) in enumerate(
        (
            (("done",), False, JobState.SCHEDULED),
            (("done", "bad"), False, JobState.FAILED),
            (("unknown",), False, JobState.FAILED),
            (("bad", "unknown"), True, JobState.SCHEDULED),
        )
    ):
        await enqueue(storage, job(f"begins-{number}", keep_completed=DROP))
        held = await claim_one(storage)
        then = follower(f"then-{number}", *others, run=run, delay=HOUR)
        await apply(storage, replace(completed(held), then=then))
        assert await state(storage, f"then-{number}") is expected, f"after {others}"


@case(guarantees=(6, 25), needs=(DEPENDENCIES,))
async def a_chain_goes_on_after_others(harness: Harness, storage: Storage) -> None:
    """A next link waits for those that it follows, then for its delay; a repeated settlement changes nothing."""
    await enqueue(storage, job("chain"), job("part"))
    held, part = await claim(storage, 2)
    step = Continued(claim=held, then=follower("chain", "part", chain_index=1, delay=HOUR))
    await apply(storage, step)
    found = await status(storage, "chain")
    assert (found.state, found.waits_for, found.chain_index, found.attempt) == (JobState.WAITING, 1, 1, 0)
    [again] = await storage.settle([step])
    assert again.status is SettleStatus.ALREADY_APPLIED
    await apply(storage, completed(part))
    found = await status(storage, "chain")
    assert found.state is JobState.SCHEDULED
    assert found.next_run_at is not None
    assert abs(found.next_run_at - harness.now() - HOUR) < timedelta(minutes=1)
    await storage.promote(["chain"])
    assert (await claim_one(storage)).chain_index == 1


@case(guarantees=(6, 25), needs=(DEPENDENCIES,))
async def a_chain_ends_that_cannot_go_on_after_others(storage: Storage) -> None:
    """A next link that follows a failed job, or an unknown one, fails its chain, and those who follow that."""
    await enqueue(storage, job("bad"))
    await apply(storage, failed(await claim_one(storage)))
    for number, other in enumerate(("bad", "unknown")):
        chain = f"chain-{number}"
        await enqueue(storage, job(chain), follower(f"last-{number}", chain))
        then = follower(chain, other, chain_index=1)
        await apply(storage, Continued(claim=await claim_one(storage), then=then))
        assert [await state(storage, one) for one in (chain, f"last-{number}")] == [JobState.FAILED] * 2
    await enqueue(storage, job("runs"))
    then = follower("runs", "bad", "unknown", run=True, chain_index=1)
    await apply(storage, Continued(claim=await claim_one(storage), then=then))
    assert (await claim_one(storage)).chain_index == 1
