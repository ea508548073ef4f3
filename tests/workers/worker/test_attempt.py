"""What the end of an attempt means for its job."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.workers.running import AT_ONCE, NEVER, Recorder, done, outcome, running
from workers import WorkerOptions
from workers.errors import Retry, Snooze, UnknownJobError, UnrecoverableError
from workers.jobs import DROP, Claim, Failed, JobState, NewJob, OutcomeKind, Retention, Retried
from workers.retry import RetryPolicy
from workers.serde import JsonSerde
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.worker import Worker
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.failures import settlement_of_failure
from workers.worker.handlers import Handler, HandlerFunction, Job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DOUBLING = RetryPolicy(jitter=0)


def claim(attempt: int = 1, max_attempts: int = 3) -> Claim:
    return Claim(
        job_id="job",
        name="work",
        payload=b"{}",
        token="token",
        worker_id="worker",
        lease=MINUTE,
        attempt=attempt,
        max_attempts=max_attempts,
        created_at=NOW,
        keep_completed=DROP,
        keep_failed=DROP,
    )


def retried(error: BaseException, attempt: int = 1, max_attempts: int = 3) -> Retried:
    settlement = settlement_of_failure(claim(attempt, max_attempts), error, DOUBLING, now=NOW)
    assert isinstance(settlement, Retried)
    return settlement


@pytest.mark.parametrize(
    ("error", "attempt", "delay"),
    [
        (ValueError(), 1, timedelta(seconds=10)),
        (ValueError(), 2, timedelta(seconds=20)),
        (Retry(), 2, timedelta(seconds=20)),
        (Retry(delay=MINUTE), 1, MINUTE),
        (Retry(delay=-MINUTE), 1, timedelta(0)),
        (Retry(at=NOW + MINUTE), 1, MINUTE),
        (Retry(at=NOW - MINUTE), 1, timedelta(0)),
        (Retry(at_least=MINUTE), 1, MINUTE),
        (Retry(at_least=timedelta(seconds=1)), 2, timedelta(seconds=20)),
    ],
    ids=[
        *("any error", "any error, later", "a plain retry"),
        *("delay", "a negative delay", "at", "at a time past"),
        *("at least, longer than the policy", "at least, shorter than the policy"),
    ],
)
def test_when_an_attempt_is_repeated(error: BaseException, attempt: int, delay: timedelta) -> None:
    """The delay is what the handler's `Retry` says, else the policy's for this attempt."""
    settlement = retried(error, attempt)
    assert settlement.delay == delay
    assert (settlement.counted, settlement.snoozed) == (True, False)


@pytest.mark.parametrize(
    ("error", "snoozed"),
    [(Retry(counted=False), False), (Snooze(), True)],
    ids=["uncounted", "snoozed"],
)
def test_an_uncounted_retry_spends_no_attempt(error: Retry, snoozed: bool) -> None:
    """Also on its last attempt the job runs again."""
    settlement = retried(error, attempt=3, max_attempts=3)
    assert (settlement.counted, settlement.snoozed) == (False, snoozed)


@pytest.mark.parametrize("error", [ValueError("no"), Retry("no"), Retry("no", delay=MINUTE)], ids=repr)
def test_the_last_attempt_fails_the_job_as_exhausted(error: BaseException) -> None:
    """With no attempt left a failure, and a counted retry, ends the job with the error that used it up."""
    settlement = settlement_of_failure(claim(attempt=3), error, DOUBLING)
    assert isinstance(settlement, Failed)
    assert (settlement.error.type, settlement.error.message) == (type(error).__name__, "no")
    assert settlement.error.exhausted


def test_an_unrecoverable_error_fails_the_job_at_once() -> None:
    """Attempts left over do not matter, and are not said to be exhausted."""
    settlement = settlement_of_failure(claim(attempt=1), UnrecoverableError("bad address"), DOUBLING)
    assert isinstance(settlement, Failed)
    assert (settlement.error.type, settlement.error.message) == ("UnrecoverableError", "bad address")
    assert not settlement.error.exhausted


class Obsolete(UnrecoverableError):
    """One whose arguments are its own."""

    def __init__(self, url: str) -> None:
        super().__init__(f"nobody needs {url}", keep=DROP)


class Gone(UnrecoverableError):
    """One that leaves no record, however it is made."""

    keep = DROP

    def __init__(self) -> None:
        """Call nobody else."""


@pytest.mark.parametrize(
    ("error", "keep"),
    [
        (UnrecoverableError("no"), None),
        (UnrecoverableError("no", keep=DROP), DROP),
        (UnrecoverableError("no", keep=MINUTE), MINUTE),
        (Obsolete("this"), DROP),
        (Gone(), DROP),
        (UnknownJobError("no"), None),
    ],
    ids=["the job's own", "no record", "a minute", "a subclass", "a subclass of its own making", "one of ours"],
)
def test_an_unrecoverable_error_says_how_long_its_record_lasts(
    error: UnrecoverableError, keep: Retention | None
) -> None:
    """What `keep` says overrides the job's own retention, and says nothing unless asked to."""
    settlement = settlement_of_failure(claim(), error, DOUBLING)
    assert isinstance(settlement, Failed)
    assert (settlement.keep, settlement.error.message) == (keep, str(error))


@pytest.mark.parametrize("keep", [timedelta(0), -MINUTE, timedelta(days=40_000)], ids=str)
def test_a_retention_that_cannot_be_is_refused(keep: timedelta) -> None:
    """Where the error is made, and not when its job is settled."""
    with pytest.raises(ValueError, match="a retention is DROP or a duration"):
        UnrecoverableError("no", keep=keep)


class Once(Exception):
    """Raised by a handler whose job need not run again."""


async def fail(job: Job) -> None:
    raise Once


@pytest.mark.parametrize(
    ("backoff", "handlers_own", "expected"),
    [
        (timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=1)),
        (None, timedelta(seconds=2), timedelta(seconds=2)),
        (None, None, timedelta(seconds=3)),
    ],
    ids=["the job's", "the handler's", "the worker's"],
)
async def test_whose_back_off_counts(
    backoff: timedelta | None, handlers_own: timedelta | None, expected: timedelta
) -> None:
    """The job's own policy wins over its handler's, that over the worker's."""

    def fixed(delay: timedelta | None) -> RetryPolicy | None:
        return None if delay is None else RetryPolicy(initial=delay, jitter=0)

    storage, recorder = MemoryStorage(), Recorder()
    job = NewJob(id="job", name="work", payload=b"{}", backoff=fixed(backoff))
    await steps.enqueue(storage, job)
    handler = Handler(fail, retry=fixed(handlers_own))
    policy = fixed(timedelta(seconds=3))
    async with running(Worker(storage, {"work": handler}, observers=[recorder], options=WorkerOptions(retry=policy))):
        assert (await recorder.seen(Kind.FAILING)).delay == expected


async def test_a_failing_job_runs_until_its_attempts_are_spent() -> None:
    """Every attempt is run and counted; the last failure is the job's error."""
    storage, recorder = MemoryStorage(), Recorder()
    attempts: list[int] = []

    async def always(job: Job) -> None:
        attempts.append(job.attempt)
        raise ValueError(f"attempt {job.attempt} of {job.max_attempts}")

    await steps.enqueue(storage, steps.job("job", max_attempts=4))
    async with running(Worker(storage, {"work": always}, observers=[recorder], options=WorkerOptions(retry=AT_ONCE))):
        ended = await outcome(storage, "job")
        await recorder.seen(Kind.FAILED)
    assert attempts == [1, 2, 3, 4]
    assert ended.error is not None
    assert (ended.error.message, ended.error.exhausted) == ("attempt 4 of 4", True)
    assert "in always" in ended.error.stack
    assert [event.kind for event in recorder.events if event.error] == [Kind.FAILING] * 3 + [Kind.FAILED]


async def test_a_handler_reads_why_the_attempt_before_failed() -> None:
    """The first attempt finds no error, the next one that of the first."""
    storage = MemoryStorage()
    seen: list[str | None] = []

    async def twice(job: Job) -> None:
        seen.append(None if job.last_error is None else job.last_error.message)
        if len(seen) == 1:
            raise ValueError("the first time")

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": twice}, options=WorkerOptions(retry=AT_ONCE))):
        await outcome(storage, "job")
    assert seen == [None, "the first time"]


async def test_a_snooze_is_told_as_such() -> None:
    """Observers hear of a snooze, with its delay, and of no failure."""
    storage, recorder = MemoryStorage(), Recorder()

    async def busy(job: Job) -> None:
        raise Snooze(timedelta(hours=1))

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": busy}, observers=[recorder])):
        told = await recorder.seen(Kind.SNOOZED)
    assert (told.delay, recorder.of(Kind.FAILING)) == (timedelta(hours=1), [])
    assert (await steps.status(storage, "job")).last_error is None


async def test_uncounted_retries_keep_the_attempt() -> None:
    """A job that was snoozed is on its first attempt still."""
    storage = MemoryStorage()
    attempts: list[int] = []

    async def busy_at_first(job: Job) -> None:
        attempts.append(job.attempt)
        if len(attempts) < 5:
            raise Snooze(timedelta(0)) if len(attempts) % 2 == 0 else Retry("busy", delay=timedelta(0), counted=False)

    await steps.enqueue(storage, steps.job("job", max_attempts=1))
    async with running(Worker(storage, {"work": busy_at_first})):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert attempts == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("handler", "result"),
    [(done, b"null"), (lambda job: job.payload, b'{"text":"\xc3\xa9"}'), (lambda job: "", b'""')],
    ids=["None", "an object", "empty text"],
)
async def test_results_are_stored(handler: HandlerFunction, result: bytes) -> None:
    """Whatever the handler returned is kept as encoded; None is a result like any other."""
    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("job", payload='{"text": "é"}'.encode()))
    async with running(Worker(storage, {"work": handler})):
        ended = await outcome(storage, "job")
    assert (ended.kind, ended.result) == (OutcomeKind.COMPLETED, result)


def _bottomless() -> list[object]:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "result",
    [object(), float("nan"), b"bytes", "\ud800", _bottomless()],
    ids=["object", "nan", "bytes", "surrogate", "deep"],
)
async def test_a_result_that_cannot_be_stored_fails_the_job(result: object) -> None:
    """Running the handler again would not help; the error names type and serde, not the value."""
    storage = MemoryStorage()

    async def give(job: Job) -> object:
        return result

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": give}, options=WorkerOptions(retry=AT_ONCE))):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert ended.error.type == "UnrecoverableError"
    assert f"result of type {type(result).__name__}" in ended.error.message
    assert "JsonSerde" in ended.error.message
    assert (await steps.status(storage, "job")).attempt == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff\xfe\x00", b"NaN", b"[" * 200_000, b"9" * 5_000, b"secret"],
    ids=["empty", "torn", "not UTF-8", "NaN", "deep", "huge number", "not JSON"],
)
async def test_a_payload_that_cannot_be_read_fails_the_job(payload: bytes) -> None:
    """The handler never sees it; the error tells size and serde, and nothing of the content."""
    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("job", payload=payload), steps.job("next"))
    async with running(Worker(storage, {"work": done}, options=WorkerOptions(retry=AT_ONCE))):
        ended = await outcome(storage, "job")
        assert (await outcome(storage, "next")).kind is OutcomeKind.COMPLETED
    assert ended.error is not None
    assert ended.error.type == "CorruptPayloadError"
    assert f"payload of {len(payload)} bytes" in ended.error.message
    assert "secret" not in ended.error.message + ended.error.stack


async def test_the_error_of_a_serde_is_not_kept() -> None:
    """What a serde says about a payload it cannot read may quote it, so neither message nor stack repeat it."""

    class Talkative(JsonSerde):
        def loads(self, data: bytes) -> object:
            raise ValueError(f"cannot read {data!r}")

    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("job", payload=b"secret"))
    async with running(Worker(storage, {"work": done}, options=WorkerOptions(payload_serde=Talkative()))):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert ended.error.type == "CorruptPayloadError"
    assert "secret" not in ended.error.message + ended.error.stack


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        GeneratorExit(),
        BaseException("odd"),
        ExceptionGroup("x", [OSError()]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("threaded", [False, True], ids=["async", "thread"])
async def test_no_exception_of_a_handler_ends_the_worker(error: BaseException, threaded: bool) -> None:
    """Whatever the handler raises fails its own attempt; the worker runs the next job."""
    storage = MemoryStorage()

    def in_thread(job: Job) -> None:
        raise error

    async def in_loop(job: Job) -> None:
        raise error

    handlers: dict[str, HandlerFunction | Handler] = {"odd": in_thread if threaded else in_loop, "work": done}
    await steps.enqueue(storage, steps.job("odd", name="odd", max_attempts=1))
    async with running(Worker(storage, handlers)):
        ended = await outcome(storage, "odd")
        await steps.enqueue(storage, steps.job("next"))
        assert (await outcome(storage, "next")).kind is OutcomeKind.COMPLETED
    assert ended.error is not None
    carried = not (threaded and isinstance(error, GeneratorExit))  # which would close the coroutine that waits for it
    assert ended.error.type == (type(error).__name__ if carried else "RuntimeError")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise self.args[0]


class Unencodable(str):
    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise RuntimeError("a text of a class of its own")


class Odd(Exception):
    def __str__(self) -> str:
        return Unencodable("odd")


@pytest.mark.parametrize(
    "error",
    [Unspeakable(RuntimeError()), Unspeakable(SystemExit(1)), Odd(), ValueError("\ud800 \x00")],
    ids=["no message", "an exit", "no plain text", "no text"],
)
async def test_an_exception_that_cannot_be_told_still_fails_the_job(error: Exception) -> None:
    """A message that cannot be made, or not be stored, does not keep the attempt from ending."""
    storage = MemoryStorage()

    async def odd(job: Job) -> None:
        raise error

    await steps.enqueue(storage, steps.job("job", max_attempts=1))
    async with running(Worker(storage, {"work": odd})):
        ended = await outcome(storage, "job")
    assert ended.error is not None
    assert ended.error.type == type(error).__name__
    assert (ended.error.message + ended.error.stack).encode()


async def test_a_failing_job_waits_for_its_time() -> None:
    """Between attempts the job reads `failing`, with its last error and the time of its next run."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": fail}, observers=[recorder], options=WorkerOptions(retry=NEVER))):
        await recorder.seen(Kind.FAILING)
    status = await steps.status(storage, "job")
    assert (status.state, status.attempt) == (JobState.FAILING, 1)
    assert status.next_run_at is not None
    assert timedelta(minutes=59) < status.next_run_at - status.created_at < timedelta(minutes=61)
    assert status.last_error is not None
    assert status.last_error.type == "Once"
