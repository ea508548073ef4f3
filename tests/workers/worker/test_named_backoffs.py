"""Back-offs that jobs only name, and jobs that are retried at once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.workers.running import Recorder, running
from workers import Retry, Snooze, Worker, WorkerOptions
from workers.jobs import NewJob
from workers.retry import AT_ONCE, NamedBackoff, RetryPolicy
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.worker.events import WorkerEventKind
from workers.worker.failures import MOST_TOLD, NamedBackoffs
from workers.worker.handlers import Job

SECOND = timedelta(seconds=1)


def grow(attempt: int, delay: timedelta) -> timedelta:
    return delay * attempt - SECOND


def refuse(attempt: int, delay: timedelta) -> timedelta:
    raise KeyError("delay")


@pytest.mark.parametrize(("attempt", "delay"), [(1, timedelta(0)), (2, SECOND), (3, 2 * SECOND)])
def test_a_known_name_says_how_long(attempt: int, delay: timedelta) -> None:
    """Its function gets the attempt and the job's own delay; less than nothing is at once."""
    policy = NamedBackoffs({"grow": grow}).policy(NamedBackoff(type="grow", delay=SECOND), attempt)
    assert policy is not None
    assert policy.delay(attempt) == delay


@pytest.mark.parametrize("name", ["nobody", "refuse", "junk"])
def test_a_name_that_says_nothing_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown one, and one whose function fails or returns something else, leave the wait to the retry policy."""
    backoffs = NamedBackoffs({"refuse": refuse, "junk": lambda attempt, delay: 5})  # type: ignore[dict-item,return-value]  # on purpose
    assert [backoffs.policy(NamedBackoff(type=name), attempt) for attempt in (1, 2)] == [None, None]
    [told] = caplog.messages
    assert repr(name) in told


def test_made_up_names_are_not_told_without_end(caplog: pytest.LogCaptureFixture) -> None:
    """Any producer may name what it likes."""
    backoffs = NamedBackoffs({})
    for number in range(2 * MOST_TOLD):
        backoffs.policy(NamedBackoff(type=f"name {number}"), 1)
    assert len(caplog.messages) == MOST_TOLD


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (ValueError(), timedelta(0)),
        (Retry(), timedelta(0)),
        (Retry(counted=False), SECOND),
        (Snooze(), SECOND),
        (Snooze(timedelta(0)), timedelta(0)),
    ],
    ids=["failed", "retry", "uncounted", "snoozed", "snoozed for nothing"],
)
async def test_at_once_is_for_failures(error: Exception, delay: timedelta) -> None:
    """A job that is retried at once does not spin while its handler is busy: that waits by the worker's policy."""

    async def handler(job: Job) -> None:
        raise error

    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, NewJob(id="job", name="work", payload=b"{}", backoff=AT_ONCE))
    policy = RetryPolicy(initial=SECOND, jitter=0)
    async with running(Worker(storage, {"work": handler}, observers=[recorder], options=WorkerOptions(retry=policy))):
        kind = WorkerEventKind.SNOOZED if isinstance(error, Snooze) else WorkerEventKind.FAILING
        assert (await recorder.seen(kind)).delay == delay
