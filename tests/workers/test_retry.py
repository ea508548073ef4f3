"""Back-off delays."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.patience import PATIENCE_SECONDS
from workers import Job, Queue, Tasks
from workers.retry import RetryPolicy

SECOND = timedelta(seconds=1)


def test_the_default_delays() -> None:
    """Without jitter the defaults wait 10, 20, 40, 80, 160, 300 and again 300 seconds."""
    policy = RetryPolicy(jitter=0)
    assert [policy.delay(attempt) / SECOND for attempt in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]


def test_a_fixed_delay() -> None:
    """A multiplier of 1 waits the same time after every attempt."""
    policy = RetryPolicy(initial=5 * SECOND, multiplier=1, jitter=0)
    assert {policy.delay(attempt) for attempt in range(1, 100)} == {5 * SECOND}


def test_no_delay() -> None:
    """An initial delay of zero stays zero."""
    assert RetryPolicy(initial=timedelta(0)).delay(50) == timedelta(0)


def test_huge_attempts_do_not_overflow() -> None:
    """After a million attempts the delay is the maximum."""
    assert RetryPolicy(jitter=0).delay(1_000_000) == 300 * SECOND


def test_the_maximum_wins_over_the_initial_delay() -> None:
    """An initial delay above the maximum is cut to it."""
    assert RetryPolicy(initial=9 * SECOND, maximum=4 * SECOND, jitter=0).delay(1) == 4 * SECOND


def test_jitter_spreads_both_ways() -> None:
    """Jitter multiplies the delay by a factor drawn evenly from 1 ± its share."""
    policy = RetryPolicy(jitter=0.1)
    drawn: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    assert policy.delay(1, uniform=lowest) == 9 * SECOND
    assert policy.delay(1, uniform=lambda low, high: high) == 11 * SECOND
    assert drawn == [(0.9, 1.1)]


def test_default_jitter_stays_within_a_tenth() -> None:
    """Delays really drawn stay within ±10 % and are not all the same."""
    delays = {RetryPolicy().delay(1) for _ in range(200)}
    assert min(delays) >= 9 * SECOND
    assert max(delays) <= 11 * SECOND
    assert len(delays) > 1


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({"initial": -SECOND}, "must not be negative"),
        ({"maximum": -SECOND}, "must not be negative"),
        ({"multiplier": 0.5}, "multiplier must be at least 1"),
        ({"jitter": 1.5}, "jitter is a share"),
        ({"jitter": -0.1}, "jitter is a share"),
    ],
)
def test_wrong_policies_are_refused(policy: dict[str, timedelta | float], problem: str) -> None:
    """A policy that makes no sense is refused with what is wrong."""
    with pytest.raises(ValueError, match=problem):
        RetryPolicy(**policy)  # type: ignore[arg-type] # the wrong values are the point


def test_a_function_of_the_attempt_and_the_error_decides() -> None:
    """Exactly, in seconds or as a timedelta; without an error, as in a plan, the numbers do."""
    policy = RetryPolicy(backoff=lambda attempt, error: attempt * 60 if isinstance(error, OSError) else timedelta(1))
    assert policy.delay(2, OSError()) == timedelta(minutes=2)
    assert policy.delay(2, ValueError()) == timedelta(days=1)
    assert policy.delay(1, uniform=lambda low, high: 1) == timedelta(seconds=10)


@pytest.mark.parametrize(
    "answer",
    [None, "5", True, -1, float("nan"), float("inf"), timedelta(days=40_000), OSError(), SystemExit(3)],
)
def test_a_wrong_back_off_is_told_by_name_and_the_policy_decides(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt has to end all the same."""

    def hasty(attempt: int, error: BaseException) -> timedelta:
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[return-value]  # what is refused

    policy = RetryPolicy(backoff=hasty, jitter=0)
    assert policy.delay(2, OSError()) == timedelta(seconds=20)
    [line] = caplog.messages
    assert "hasty" in line
    assert line.endswith("the policy decides")


async def test_a_job_brings_no_function_along() -> None:
    """What it brings along is stored; that of its task or worker is not."""
    with pytest.raises(ValueError, match="has no function; give that to the task or worker"):
        await Queue("memory://").enqueue(1, backoff=RetryPolicy(backoff=lambda attempt, error: 1))
    with pytest.raises(TypeError, match="backoff is a plain function of the attempt and its error, not 5"):
        RetryPolicy(backoff=5)  # type: ignore[arg-type]  # what is refused

    async def later(attempt: int, error: BaseException) -> int:
        return 1

    with pytest.raises(TypeError, match="backoff is a plain function"):
        Tasks("memory://").task(backoff=later)(later)  # type: ignore[arg-type]  # likewise


async def test_a_task_has_its_own_back_off() -> None:
    """Called with the number of the attempt and what it raised."""
    app, seen = Tasks("memory://"), list[tuple[int, str]]()

    def soon(attempt: int, error: BaseException) -> float:
        seen.append((attempt, str(error)))
        return 0

    @app.task(max_attempts=3, backoff=soon)
    async def fail(job: Job) -> int:
        if job.attempt < 3:
            raise OSError(f"no {job.attempt}")
        return job.attempt

    async with app:
        assert await (await fail.enqueue()).result(PATIENCE_SECONDS) == 3
    assert seen == [(1, "no 1"), (2, "no 2")]
