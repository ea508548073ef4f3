"""Chains through queues and workers: links under one id, from one to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.workers.chaining import (
    LINKS,
    MINUTE,
    Holding,
    add_one,
    serving,
    the_chain,
)
from tests.workers.running import forever
from workers.chains import Continuation, continue_with
from workers.errors import (
    JobFailedError,
    UnrecoverableError,
)
from workers.jobs import EnqueueStatus, JobState
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.testing import Harness
from workers.testing.steps import HOUR, claim, claim_one, enqueue
from workers.testing.steps import job as new_job
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job


async def test_links_run_wherever_their_names_are_served(harness: Harness) -> None:
    """Three links, one of them a plain function, run in the two queues that serve them; a third client has the end."""
    storage = await harness.open()
    queues = [Queue(await harness.open(storage.queue)) for _ in range(2)]
    for queue, names in zip(queues, (("first", "third"), ("second",)), strict=True):
        served = names if harness.capabilities.name_filter else tuple(LINKS)
        queue.execute({name: LINKS[name] for name in served})
    async with Queue(storage) as client, queues[0], queues[1]:
        assert (await client.start_job_chain("first", 1, id="chain")).status is EnqueueStatus.QUEUED
        assert await client.wait_for_job_chain_completion("chain") == 40
        chain = await the_chain(client)
        assert (chain.id, chain.name, chain.index, chain.attempt) == ("chain", "third", 2, 1)
        assert (chain.state, chain.result, chain.error) == (JobState.COMPLETED, 40, None)
        assert chain.finished_at is not None
        assert chain.created_at <= chain.finished_at


async def test_many_chains_at_once(harness: Harness) -> None:
    """Fifty chains of three links end each with its own result."""
    async with serving(harness, LINKS) as (queue, recorder):
        started = [await queue.start_job_chain("first", at) for at in range(50)]
        ends = await asyncio.gather(*(queue.wait_for_job_chain_completion(one.id) for one in started))
        assert ends == [10 * (at + 3) for at in range(50)]
        await recorder.seen(Kind.COMPLETED, 50)
        assert len(recorder.of(Kind.CONTINUED)) == 100


async def test_a_chain_can_be_looked_at_while_it_runs(harness: Harness) -> None:
    """It shows the link it is in, has no result yet, and cannot be started again."""
    last = Holding("end")
    async with serving(harness, {"first": add_one, "second": last}) as (queue, recorder):
        began = await queue.start_job_chain("first", 1, id="chain")
        await recorder.seen(Kind.ACTIVE, 2)
        chain = await the_chain(queue)
        assert (chain.name, chain.index, chain.state, chain.attempt) == ("second", 1, JobState.PROCESSING, 1)
        assert (chain.result, chain.error, chain.finished_at) == (None, None, None)
        assert (await queue.start_job_chain("first", 1, id=began.id)).status is EnqueueStatus.DUPLICATE
        last.released.set()
        assert await queue.wait_for_job_chain_completion("chain") == "end"


async def test_a_handler_knows_which_link_it_runs(harness: Harness) -> None:
    """Links are counted from 0, also through a retry; the id is the same in all of them."""

    async def work(job: Job) -> object:
        if job.attempt == 1:
            raise ValueError("once more")
        return continue_with("work", [*job.payload, job.chain_index]) if job.chain_index < 2 else [*job.payload, job.id]

    async with serving(harness, {"work": work}) as (queue, _):
        await queue.start_job_chain("work", [], id="chain")
        assert await queue.wait_for_job_chain_completion("chain") == [0, 1, "chain"]


async def test_a_link_is_retried_as_itself(harness: Harness) -> None:
    """Attempts count within a link: the second may fail as often as the first did."""

    async def fail_once(job: Job) -> object:
        if job.attempt == 1:
            raise ValueError(job.name)
        return continue_with("second", None) if job.name == "first" else job.attempt

    async with serving(harness, {"first": fail_once, "second": fail_once}) as (queue, recorder):
        await queue.start_job_chain("first", None, id="chain", max_attempts=2)
        assert await queue.wait_for_job_chain_completion("chain") == 2
        await recorder.seen(Kind.COMPLETED)
        assert len(recorder.of(Kind.FAILING)) == 2


async def test_a_link_is_as_the_one_before(harness: Harness) -> None:
    """Attempts, back-off, priority and retention go on, the ordering key does not."""
    backoff = RetryPolicy(initial=MINUTE, jitter=0)
    key = "key" if harness.capabilities.ordering_keys else None

    async def later(job: Job) -> Continuation:
        return continue_with("second", None, delay=HOUR)

    async with serving(harness, {"first": later}) as (queue, recorder):
        await queue.start_job_chain(
            "first",
            None,
            id="chain",
            max_attempts=7,
            priority=3,
            backoff=backoff,
            ordering_key=key,
            result_ttl=90_000,
            keep_failed=timedelta(days=2),
        )
        await recorder.seen(Kind.CONTINUED)
    storage = queue.storage
    if key is not None:
        await enqueue(storage, new_job("of the key", ordering_key=key))
        assert (await claim_one(storage)).job_id == "of the key"
    assert await storage.promote(["chain"]) == 1
    second = await claim_one(storage)
    assert (second.job_id, second.attempt, second.chain_index) == ("chain", 1, 1)
    assert (second.max_attempts, second.priority, second.backoff) == (7, 3, backoff)
    assert (second.keep_completed, second.keep_failed) == (timedelta(seconds=90), timedelta(days=2))


async def test_a_link_may_differ_from_the_one_before(harness: Harness) -> None:
    """What `continue_with` says of attempts, back-off, priority and delay is so."""
    backoff = RetryPolicy(initial=2 * MINUTE, jitter=0)

    async def otherwise(job: Job) -> Continuation:
        return continue_with("second", None, delay=HOUR, max_attempts=2, priority=1, backoff=backoff)

    async with serving(harness, {"first": otherwise}) as (queue, recorder):
        await queue.start_job_chain("first", None, id="chain", max_attempts=7, priority=3)
        await recorder.seen(Kind.CONTINUED)
        assert (await the_chain(queue)).state is JobState.SCHEDULED
    assert await claim(queue.storage) == []
    await queue.storage.promote(["chain"])
    second = await claim_one(queue.storage)
    assert (second.max_attempts, second.priority, second.backoff) == (2, 1, backoff)


def unserialisable() -> Continuation:
    return continue_with("second", object())


def unnamed() -> Continuation:
    return continue_with("", None)


def named_too_long() -> Continuation:
    return continue_with("n" * 513, None)


def back_in_time() -> Continuation:
    return continue_with("second", None, delay=timedelta(seconds=-1))


def never_tried() -> Continuation:
    return continue_with("second", None, max_attempts=0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (unserialisable, "JSON serializable"),
        (unnamed, "job name"),
        (named_too_long, "job name"),
        (back_in_time, "delay"),
        (never_tried, "max_attempts"),
    ],
    ids=["payload", "no name", "long name", "delay", "attempts"],
)
async def test_a_wrong_continuation_fails_the_chain(
    harness: Harness, wrong: Callable[[], Continuation], told: str
) -> None:
    """At once, saying what was wrong, as the link that made it; nothing of a next link is there."""
    async with serving(harness, {"first": lambda job: wrong(), "second": forever}) as (queue, _):
        await queue.start_job_chain("first", None, id="chain", max_attempts=5)
        with pytest.raises(JobFailedError, match=f"cannot be continued: .*{told}") as caught:
            await queue.wait_for_job_chain_completion("chain")
        chain = await the_chain(queue)
    assert (chain.name, chain.index, chain.state, chain.attempt) == ("first", 0, JobState.FAILED, 1)
    assert caught.value.original is not None
    assert caught.value.original.type == UnrecoverableError.__name__
    assert await claim(queue.storage) == []
