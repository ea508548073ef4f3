"""Chains that are waited for, and chains that are ended from outside."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from tests.workers.chaining import (
    LINKS,
    Holding,
    add_one,
    serving,
    ten_times,
    the_chain,
)
from tests.workers.running import forever, running
from workers.chains import Continuation, continue_with
from workers.errors import (
    JobCancelledError,
    JobEndedError,
    JobFailedError,
    JobGoneError,
    JobTimeoutError,
    LossReason,
    Unsupported,
)
from workers.jobs import DROP, CancelResult, EnqueueStatus, JobState
from workers.queue import Queue
from workers.specs import JobSpec
from workers.testing import Harness
from workers.testing.faults import counting
from workers.testing.steps import HOUR, PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job, SignalReason


async def test_a_waiter_has_the_end_of_a_chain_that_had_not_begun(harness: Harness) -> None:
    """Whoever waited from the start, and whoever asks after the end, has the last link's result."""
    storage, calls = counting(await harness.open())
    async with Queue(storage) as queue:
        await queue.start_job_chain("first", 1, id="chain")
        waiter = asyncio.create_task(queue.wait_for_job_chain_completion("chain"))
        await until(lambda: calls["status"] == 1)
        async with running(Worker(await harness.open(storage.queue), LINKS)), asyncio.timeout(PATIENCE):
            assert await waiter == 40
        assert await queue.wait_for_job_chain_completion("chain") == 40
        assert await queue.get_result("chain") == 40


async def test_a_link_that_fails_fails_the_chain(harness: Harness) -> None:
    """The waiter has the error of the link that failed for good."""

    async def refuse(job: Job) -> object:
        raise ValueError("bad luck")

    async with serving(harness, {"first": add_one, "second": refuse}) as (queue, _):
        await queue.start_job_chain("first", 1, id="chain", max_attempts=2)
        with pytest.raises(JobFailedError, match="bad luck"):
            await queue.wait_for_job_chain_completion("chain")
        chain = await the_chain(queue)
        assert (chain.name, chain.index, chain.state, chain.attempt) == ("second", 1, JobState.FAILED, 2)
        assert chain.error is not None
        assert (chain.error.message, chain.error.exhausted) == ("bad luck", True)


async def test_a_chain_is_cancelled_between_its_links(harness: Harness) -> None:
    """The link that was to come never runs, and the waiter is told."""

    async def later(job: Job) -> Continuation:
        return continue_with("second", None, delay=HOUR)

    async with serving(harness, {"first": later, "second": forever}) as (queue, recorder):
        await queue.start_job_chain("first", None, id="chain")
        await recorder.seen(Kind.CONTINUED)
        waiter = asyncio.create_task(queue.wait_for_job_chain_completion("chain"))
        assert await queue.cancel("chain") is CancelResult.CANCELLED
        with pytest.raises(JobCancelledError):
            async with asyncio.timeout(PATIENCE):
                await waiter
        assert (await the_chain(queue)).state is JobState.CANCELLED
        with pytest.raises(JobEndedError, match="was cancelled before"):
            await queue.complete_job_chain("chain", "too late")


async def test_waiting_has_an_end(harness: Harness) -> None:
    """A waiter out of time is told so and the chain goes on; no time at all is a mistake."""
    async with Queue(await harness.open()) as queue:
        await queue.start_job_chain("first", None, id="chain")
        with pytest.raises(JobTimeoutError, match="'chain'"):
            await queue.wait_for_job_chain_completion("chain", timeout=timedelta(seconds=0.1))
        assert (await the_chain(queue)).state is JobState.QUEUED
        with pytest.raises(ValueError, match="above zero"):
            await queue.wait_for_job_chain_completion("chain", timeout=timedelta(0))


async def test_a_chain_that_never_was_is_missed(harness: Harness) -> None:
    """At once: by those who wait for it or complete it; there is nothing to see or delete."""
    async with Queue(await harness.open()) as queue:
        with pytest.raises(JobGoneError, match="'chain'"):
            await queue.wait_for_job_chain_completion("chain")
        with pytest.raises(JobGoneError, match="'chain'"):
            await queue.complete_job_chain("chain", None)
        assert await queue.get_job_chain("chain") is None
        assert await queue.delete_job_chains(["chain"]) == 0


async def test_a_result_that_is_not_kept_is_missed(harness: Harness) -> None:
    """The retention of the first link holds for the last: nothing is left, and the waiter is told that.

    A small one would come with the end.
    """
    last = Holding("end" * 2_000)
    async with serving(harness, {"first": add_one, "second": last}) as (queue, recorder):
        await queue.enqueue_many([JobSpec(payload=1, id="chain", name="first", keep_completed=DROP)])
        await recorder.seen(Kind.ACTIVE, 2)
        storage, calls = counting(queue.storage, ended=True)
        async with Queue(storage) as client:
            waiter = asyncio.create_task(client.wait_for_job_chain_completion("chain"))
            await until(lambda: calls["status"] == 1)
            last.released.set()
            with pytest.raises(JobGoneError, match="not kept"):
                async with asyncio.timeout(PATIENCE):
                    await waiter
        assert await queue.get_job_chain("chain") is None


async def test_a_running_chain_can_be_deleted(harness: Harness) -> None:
    """Its handler is told at once, and what it returns all the same brings nothing back."""
    stubborn = Holding(continue_with("first", None))
    async with serving(harness, {"first": stubborn}) as (queue, recorder):
        await queue.start_job_chain("first", None, id="chain")
        await recorder.seen(Kind.ACTIVE)
        assert await queue.delete_job_chains(["chain"]) == 1
        await recorder.seen(Kind.LEASE_LOST)
        assert await queue.get_job_chain("chain") is None
    assert [(one.reason, one.loss) for one in stubborn.signals] == [(SignalReason.LEASE_LOST, LossReason.NOT_FOUND)]
    assert recorder.of(Kind.CONTINUED) == []
    async with queue:
        assert sum((await queue.counts()).values()) == 0
        assert (await queue.start_job_chain("first", None, id="chain")).status is EnqueueStatus.QUEUED


async def test_a_running_chain_can_be_completed(harness: Harness) -> None:
    """Its waiter has that result at once, its handler is told, and what it returns changes nothing."""
    stubborn = Holding("inside")
    async with serving(harness, {"first": add_one, "second": stubborn}) as (queue, recorder):
        await queue.start_job_chain("first", 1, id="chain")
        await recorder.seen(Kind.ACTIVE, 2)
        waiter = asyncio.create_task(queue.wait_for_job_chain_completion("chain"))
        await queue.complete_job_chain("chain", "outside")
        async with asyncio.timeout(PATIENCE):
            assert await waiter == "outside"
        await recorder.seen(Kind.LEASE_LOST)
        with pytest.raises(JobEndedError, match="completed before"):
            await queue.complete_job_chain("chain", "again")
    async with queue:
        chain = await the_chain(queue)
    assert (chain.index, chain.state, chain.result, chain.attempt) == (1, JobState.COMPLETED, "outside", 1)
    assert [(one.reason, one.loss) for one in stubborn.signals] == [(SignalReason.LEASE_LOST, LossReason.COMPLETED)]
    assert recorder.of(Kind.COMPLETED) == []


async def test_a_chain_is_continued_from_outside(harness: Harness) -> None:
    """What waits for an approval goes on with the next link, with what the link before it said of attempts."""
    if not harness.capabilities.outside_continuations:
        async with Queue(await harness.open()) as queue:
            with pytest.raises(Unsupported, match="outside_continuations"):
                await queue.complete_job_chain("chain", continue_with("ship", 1))
        return
    async with serving(harness, {"ship": ten_times}) as (queue, recorder):
        await queue.start_job_chain("await approval", None, id="chain", delay=HOUR, max_attempts=7)
        await queue.complete_job_chain("chain", continue_with("ship", 1))
        assert await queue.wait_for_job_chain_completion("chain", PATIENCE) == 10
        with pytest.raises(JobEndedError):
            await queue.complete_job_chain("chain", continue_with("ship", 1))
        with pytest.raises(JobGoneError):
            await queue.complete_job_chain("unknown", continue_with("ship", 1))
    assert [event.claim.max_attempts for event in recorder.of(Kind.COMPLETED) if event.claim] == [7]


async def test_of_many_completions_one_counts(harness: Harness) -> None:
    """One caller completes the chain, the others are told that it had ended; so with one that was deleted before."""
    storage = await harness.open()
    queues = [Queue(await harness.open(storage.queue)) for _ in range(5)]
    await queues[0].start_job_chain("first", None, id="chain")
    answers = await asyncio.gather(
        *(queue.complete_job_chain("chain", at) for at, queue in enumerate(queues)), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["JobEndedError"] * 4 + ["NoneType"]
    assert (await the_chain(queues[0])).result == answers.index(None)
    await queues[0].delete_job_chains(["chain"])
    with pytest.raises(JobGoneError):
        await queues[0].complete_job_chain("chain", None)
    for queue in queues:
        await queue.stop()


async def test_a_result_that_cannot_be_encoded_completes_nothing(harness: Harness) -> None:
    """It is refused before the storage hears of it."""
    async with Queue(await harness.open()) as queue:
        await queue.start_job_chain("first", None, id="chain")
        with pytest.raises(TypeError):
            await queue.complete_job_chain("chain", object())
        assert (await the_chain(queue)).state is JobState.QUEUED
