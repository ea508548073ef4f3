"""What handlers tell while they run: progress, and lines for the log."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from tests.workers.running import Recorder, broken, outcome, running
from workers.errors import StorageError
from workers.jobs import LogLine, OutcomeKind, ProgressReport
from workers.storage.base import Storage
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import LINES_AT_ONCE, MAX_LINE_BYTES
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Job


async def progress_of(storage: Storage, job_id: str) -> bytes | None:
    return (await steps.status(storage, job_id)).encoded_progress


async def test_progress_is_seen_while_the_handler_runs() -> None:
    """What an async and a plain handler report is in their jobs' status before they end."""
    storage = MemoryStorage()
    seen, seen_too = asyncio.Event(), threading.Event()

    async def report(job: Job) -> None:
        job.progress({"done": 1, "of": 2})
        await seen.wait()

    def report_plainly(job: Job) -> bool:
        job.progress(0.5)
        return seen_too.wait(PATIENCE)

    await steps.enqueue(storage, steps.job("one", name="async"), steps.job("two", name="plain"))

    async def is_told() -> bool:
        return [await progress_of(storage, job_id) for job_id in ("one", "two")] == [b'{"done":1,"of":2}', b"0.5"]

    async with running(Worker(storage, {"async": report, "plain": report_plainly})):
        await until(is_told)
        seen.set()
        seen_too.set()
        assert (await outcome(storage, "one")).kind is OutcomeKind.COMPLETED
        assert (await outcome(storage, "two")).result == b"true"


async def test_the_last_report_is_sent_before_the_job_ends() -> None:
    """However fast they come, the newest is what stays, and few calls were made for all of them."""
    storage, calls = counting(MemoryStorage())

    async def report(job: Job) -> None:
        for number in range(1_000):
            job.progress(number)
            if number % 100 == 0:
                await asyncio.sleep(0)

    await steps.enqueue(storage, *(steps.job(f"job-{number}") for number in range(10)))
    async with running(Worker(storage, {"work": report})):
        for number in range(10):
            await outcome(storage, f"job-{number}")
            assert await progress_of(storage, f"job-{number}") == b"999"
    assert 1 <= calls["progress"] <= 20


async def test_a_report_under_way_is_waited_for() -> None:
    """A job is not settled while its last report is on its way: the storage would not take it any more."""

    class Slow(MemoryStorage):
        async def progress(self, reports: Sequence[ProgressReport]) -> None:
            asked.set()
            await answer.wait()
            await super().progress(reports)

    storage, asked, answer = Slow(), asyncio.Event(), asyncio.Event()
    counted, calls = counting(storage)

    async def report(job: Job) -> None:
        job.progress("almost there")
        await asked.wait()

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(counted, {"work": report})):
        await asyncio.wait_for(asked.wait(), PATIENCE)
        await asyncio.sleep(0)
        assert calls["settle"] == 0
        answer.set()
        await outcome(storage, "job")
    assert await progress_of(storage, "job") == b'"almost there"'


async def test_who_reports_nothing_costs_nothing() -> None:
    """Without reports the storage is not asked."""
    storage, calls = counting(MemoryStorage())
    await steps.enqueue(storage, steps.job("silent"))
    async with running(Worker(storage, {"work": lambda job: None})):
        await outcome(storage, "silent")
    assert calls["progress"] == 0


@pytest.mark.parametrize(
    "value", [b"bytes", float("nan"), "x" * 4_095, "\ud800"], ids=["no JSON", "NaN", "4097 bytes", "a surrogate"]
)
async def test_what_is_no_progress_is_refused_at_the_call(value: object) -> None:
    """A value that cannot be encoded, or not within 4 KiB, is the handler's error, and nothing is reported."""
    storage, calls = counting(MemoryStorage())

    async def report(job: Job) -> str:
        with pytest.raises(ValueError, match="progress must be"):
            job.progress(value)
        return "went on"

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": report})):
        assert (await outcome(storage, "job")).result == b'"went on"'
    assert calls["progress"] == 0


async def test_a_storage_that_takes_no_reports_costs_no_job() -> None:
    """Its errors are reported, and the job completes all the same."""
    storage, faults = faulty(MemoryStorage())
    broken(faults, "progress")
    recorder = Recorder()

    async def report(job: Job) -> None:
        job.progress(1)

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": report}, observers=[recorder])):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert len(recorder.of(Kind.ERROR)) == 1
    assert await progress_of(storage, "job") is None


async def test_a_storage_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that hangs is given up after a while, and the job settled."""
    monkeypatch.setattr("workers.worker.events.SEND_SECONDS", 0.05)

    class Silent(MemoryStorage):
        async def progress(self, reports: Sequence[ProgressReport]) -> None:
            await asyncio.Event().wait()

    storage, recorder = Silent(), Recorder()

    async def report(job: Job) -> None:
        job.progress(1)

    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": report}, observers=[recorder])):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert isinstance(recorder.of(Kind.ERROR)[0].error, TimeoutError)


async def test_an_attempt_that_ended_reports_nothing_more() -> None:
    """A handler that kept its job object has no say when the attempt is over, also within the same worker."""
    storage, calls = counting(MemoryStorage())
    kept: list[Job] = []
    await steps.enqueue(storage, steps.job("first"), steps.job("second", name="later"))

    async def use_the_first(job: Job) -> None:
        await until(lambda: calls["settle"] >= 1)
        kept[0].progress("too late")

    async with running(Worker(storage, {"work": kept.append, "later": use_the_first}, concurrency=2)):
        await outcome(storage, "second")
    assert calls["progress"] == 0
    kept[0].progress("long after")


async def test_lines_of_a_job_name_it(caplog: pytest.LogCaptureFixture) -> None:
    """`job.log` writes to the logger `workers.job`, with the job bound, and what would end a line escaped."""
    storage = MemoryStorage(queue="mail")

    async def talk(job: Job) -> None:
        job.log("half\nERROR way \x1b[31m\u2028 \ud800")

    await steps.enqueue(storage, steps.job("job"))
    with caplog.at_level(logging.INFO, "workers.job"):
        async with running(Worker(storage, {"work": talk})):
            await outcome(storage, "job")
    [record] = [record for record in caplog.records if record.name == "workers.job"]
    assert record.getMessage() == "half\\nERROR way \\x1b[31m\\u2028 \\ud800"
    bound = {name: record.__dict__[name] for name in ("job_id", "job_name", "attempt", "queue")}
    assert bound == {"job_id": "job", "job_name": "work", "attempt": 1, "queue": "mail"}


def test_long_lines_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    """A line takes at most 8 KiB of the log, whatever its characters take."""
    job = Job(id="1", name="work", payload=None, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    with caplog.at_level(logging.INFO, "workers.job"):
        for line in ("x" * 10_000, "\x00" * 10_000, "é" * 10_000):
            job.log(line)
    assert [len(message.encode()) for message in caplog.messages] == [MAX_LINE_BYTES] * 3


class LogKeepingStorage(MemoryStorage):
    """Takes log lines, or `fails` to."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._fails = fails

    async def log(self, lines: Sequence[LogLine]) -> None:
        if self._fails:
            raise StorageError("no room")
        self.lines += [line.text for line in lines]


async def test_log_lines_are_kept_before_the_job_ends() -> None:
    """In their order, from plain functions too; of more than a batch holds, the last ones."""

    def chatter(job: Job) -> None:
        for number in range(3 * LINES_AT_ONCE):
            job.log(f"line {number}")

    storage = LogKeepingStorage()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": chatter})):
        await outcome(storage, "job")
        assert storage.lines[-1] == f"line {3 * LINES_AT_ONCE - 1}"
    numbers = [int(line.removeprefix("line ")) for line in storage.lines]
    assert numbers == sorted(numbers)


async def test_log_lines_that_nobody_takes_cost_no_job() -> None:
    """The storage's error is reported, and the job completes."""

    async def say(job: Job) -> None:
        job.log("hello")

    storage, recorder = LogKeepingStorage(fails=True), Recorder()
    await steps.enqueue(storage, steps.job("job"))
    async with running(Worker(storage, {"work": say}, observers=[recorder])):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
    assert str(recorder.of(Kind.ERROR)[0].error) == "no room"


async def test_progress_is_read_as_a_value() -> None:
    """As the handler reported it; what another program wrote that is no JSON is none."""
    storage = MemoryStorage()
    await steps.enqueue(storage, steps.job("job"))
    held = await steps.claim_one(storage)
    assert (await steps.status(storage, "job")).progress is None
    for encoded, value in ((b'{"done":1}', {"done": 1}), (b"0.5", 0.5), (b"\xff", None), (b"[" * 4_000, None)):
        await storage.progress([ProgressReport(claim=held, value=encoded)])
        assert (await steps.status(storage, "job")).progress == value
