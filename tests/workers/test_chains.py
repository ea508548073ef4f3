"""Chains through queues and workers: links under one id, ended by their handlers or from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import pytest

from tests.workers.harnesses import HARNESSES
from tests.workers.running import AT_ONCE, Recorder, forever, running
from workers.chains import Chain, Continuation, continue_with
from workers.errors import (
    JobCancelledError,
    JobEndedError,
    JobFailedError,
    JobGoneError,
    JobTimeoutError,
    LossReason,
    UnrecoverableError,
)
from workers.jobs import DROP, CancelResult, EnqueueStatus, JobState
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import JobSpec
from workers.testing import Harness, all_cases
from workers.testing.faults import counting
from workers.testing.steps import HOUR, LEASE, PATIENCE, claim, claim_one, enqueue, until
from workers.testing.steps import job as new_job
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import HandlerFunction, Job, Signal, SignalReason

MINUTE: Final = timedelta(minutes=1)
ORDINARY: Final = next(case for case in all_cases() if not case.needs)

Handlers = Mapping[str, HandlerFunction]


@pytest.fixture(params=HARNESSES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Each storage in turn."""
    async with HARNESSES[request.param](ORDINARY, request) as opened:
        yield opened


@asynccontextmanager
async def serving(harness: Harness, handlers: Handlers) -> AsyncIterator[tuple[Queue, Recorder]]:
    """A client of a queue that another client's worker serves, whom its own renewals would tell of nothing in time."""
    storage, recorder = await harness.open(), Recorder()
    elsewhere = await harness.open(storage.queue)
    worker = Worker(elsewhere, handlers, concurrency=10, lease=LEASE, retry=AT_ONCE, observers=[recorder])
    async with Queue(storage) as queue, running(worker):
        yield queue, recorder


async def the_chain(queue: Queue, chain_id: str = "chain") -> Chain:
    """The chain as it stands; it must exist."""
    chain = await queue.get_job_chain(chain_id)
    assert chain is not None, f"chain {chain_id!r} should exist"
    return chain


def number(job: Job) -> int:
    assert isinstance(job.payload, int)
    return job.payload


async def add_one(job: Job) -> Continuation:
    return continue_with("second", number(job) + 1)


def add_two(job: Job) -> Continuation:
    return continue_with("third", number(job) + 2)


async def ten_times(job: Job) -> int:
    return number(job) * 10


LINKS: Final[Handlers] = {"first": add_one, "second": add_two, "third": ten_times}


class Holding:
    """A handler that notes the signals of its jobs, and returns `result` when it is cancelled, or released."""

    def __init__(self, result: object) -> None:
        self.signals: list[Signal] = []
        self.released = asyncio.Event()
        self._result = result

    async def __call__(self, job: Job) -> object:
        self.signals.append(job.signal)
        with contextlib.suppress(asyncio.CancelledError):
            await self.released.wait()
        return self._result


# From link to link


async def test_links_run_wherever_their_names_are_served(harness: Harness) -> None:
    """Three links, one of them a plain function, run in the two queues that serve them; a third client has the end."""
    storage = await harness.open()
    queues = [Queue(await harness.open(storage.queue)) for _ in range(2)]
    for queue, names in zip(queues, (("first", "third"), ("second",)), strict=True):
        served = names if harness.limits.name_filter else tuple(LINKS)
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
    key = "key" if harness.limits.ordering_keys else None

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
    assert second.keep_completed == second.keep_failed == timedelta(seconds=90)


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


# Waiting for the end


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
        assert await queue.get_job_chain("chain") is None


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
    """The retention of the first link holds for the last: nothing is left, and the waiter is told that."""
    last = Holding("end")
    async with serving(harness, {"first": add_one, "second": last}) as (queue, recorder):
        await queue.enqueue_many([JobSpec(payload=1, id="chain", name="first", keep_completed=DROP)])
        await recorder.seen(Kind.ACTIVE, 2)
        storage, calls = counting(queue.storage)
        async with Queue(storage) as client:
            waiter = asyncio.create_task(client.wait_for_job_chain_completion("chain"))
            await until(lambda: calls["status"] == 1)
            last.released.set()
            with pytest.raises(JobGoneError, match="not kept"):
                async with asyncio.timeout(PATIENCE):
                    await waiter
        assert await queue.get_job_chain("chain") is None


# Ended from outside


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
