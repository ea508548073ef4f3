"""The middlewares that come with the package: what they say of each way an attempt can end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from tests.workers.running import LEASE, NEVER, Recorder, done, forever, running
from workers import QueueOptions, WorkerOptions
from workers.errors import JobFailedError, LossReason, Retry, Snooze, StorageUnavailable, UnrecoverableError
from workers.limits import Limit
from workers.middlewares import AttemptFilter, JobMeter, Outcome, log_attempts, measure_attempts, outcome_of
from workers.middlewares.opentelemetry import JobInstruments, trace_attempts
from workers.middlewares.prometheus import JobCounters, PrometheusMetrics, QueueGauges
from workers.queue import Queue
from workers.retry import RetryPolicy
from workers.specs import JobSpec
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.testing.faults import counting, faulty
from workers.testing.steps import PATIENCE, until
from workers.worker import Worker
from workers.worker.events import WorkerEvent
from workers.worker.events import WorkerEventKind as Kind
from workers.worker.handlers import Handler, HandlerFunction, Job, Middleware, SignalReason

SECRET = "payload-4711"  # never to be seen by a log, a metric or a trace


async def no_use(job: Job) -> None:
    raise UnrecoverableError(f"cannot send {SECRET}")


async def not_now(job: Job) -> None:
    raise ValueError(f"busy with {SECRET}")


async def later(job: Job) -> None:
    raise Retry(f"asked to come back with {SECRET}", delay=timedelta(hours=1))


async def busy(job: Job) -> None:
    raise Snooze(timedelta(hours=1))


class Ending:
    """A handler, what is done to its job while it runs, and how that ends."""

    def __init__(
        self,
        handler: HandlerFunction | Handler,
        outcome: Outcome,
        kind: Kind,
        *,
        error: str | None = None,
        cancelled: bool = False,
        stopped: bool = False,
    ) -> None:
        self.handler = handler
        self.outcome = outcome
        self.kind = kind
        self.error = error
        self.cancelled = cancelled
        self.stopped = stopped


UNTIL_CANCELLED = "asyncio.exceptions.CancelledError"
ENDINGS = {
    "returned": Ending(done, Outcome.COMPLETED, Kind.COMPLETED),
    "asked for a retry": Ending(later, Outcome.RETRIED, Kind.FAILING),
    "snoozed": Ending(busy, Outcome.SNOOZED, Kind.SNOOZED),
    "raised": Ending(not_now, Outcome.RETRIED, Kind.FAILING, error="ValueError"),
    "unrecoverable": Ending(no_use, Outcome.FAILED, Kind.FAILED, error="workers.errors.UnrecoverableError"),
    "timed out": Ending(
        Handler(forever, timeout=timedelta(milliseconds=1)), Outcome.RETRIED, Kind.FAILING, error=UNTIL_CANCELLED
    ),
    "cancelled": Ending(forever, Outcome.CANCELLED, Kind.CANCELLED, error=UNTIL_CANCELLED, cancelled=True),
    "released": Ending(forever, Outcome.RELEASED, Kind.RELEASED, stopped=True),
}

every_ending = pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())


async def end(ending: Ending, *middlewares: Middleware) -> None:
    """One attempt at a job of a worker with these middlewares has ended so."""
    storage, recorder = MemoryStorage(queue="mail"), Recorder()
    await steps.enqueue(storage, steps.job("job", payload=f'"{SECRET}"'.encode(), max_attempts=2))
    worker = Worker(
        storage,
        {"work": ending.handler},
        lease=LEASE,
        observers=[recorder],
        options=WorkerOptions(worker_id="w1", retry=NEVER, middlewares=middlewares, grace=timedelta(0)),
    )
    async with running(worker):
        await recorder.seen(Kind.ACTIVE)
        if ending.cancelled:
            await storage.cancel("job")
        if ending.stopped:
            worker.stop()
        await recorder.seen(ending.kind)


@every_ending
async def test_an_attempt_is_one_log_line(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    """The line names job, attempt, outcome and the exception's type, and nothing of payload or message."""
    with caplog.at_level(logging.INFO, "workers.attempts"):
        await end(ending, log_attempts)
    [line] = [record.getMessage() for record in caplog.records if record.name == "workers.attempts"]
    assert line.startswith(f"job job (work) attempt 1 of 2: {ending.outcome.value} after 0.")
    assert SECRET not in caplog.text


async def test_a_hostile_name_stays_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """An id with line ends cannot pass for a line of its own."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("a\nERROR all is lost"))
    with caplog.at_level(logging.INFO, "workers.attempts"):
        async with running(
            Worker(storage, {"*": done}, observers=[recorder], options=WorkerOptions(middlewares=[log_attempts]))
        ):
            await recorder.seen(Kind.COMPLETED)
    assert "job a\\nERROR all is lost (work)" in caplog.text


class Lines(logging.Handler):
    """A log whose format names the attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(job_id)s/%(attempt)s %(message)s"))
        self.addFilter(AttemptFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, list[str]]]:
    """A logger of the application, and what it has written."""
    logger, handler = logging.getLogger("application"), Lines()
    logger.addHandler(handler)
    yield logger, handler.lines
    logger.removeHandler(handler)


async def test_a_handlers_own_lines_name_its_job(log: tuple[logging.Logger, list[str]]) -> None:
    """Lines that async and plain handlers write carry their job and attempt; lines outside of attempts a dash."""
    logger, lines = log
    storage, recorder = MemoryStorage(), Recorder()

    async def write(job: Job) -> None:
        await asyncio.create_task(write_later())

    async def write_later() -> None:
        logger.warning("from a task")

    def write_plainly(job: Job) -> None:
        logger.warning("from a thread")

    await steps.enqueue(storage, steps.job("one", name="async"), steps.job("two", name="plain"))
    handlers = {"async": write, "plain": write_plainly}
    async with running(
        Worker(storage, handlers, observers=[recorder], options=WorkerOptions(middlewares=[log_attempts]))
    ):
        await recorder.seen(Kind.COMPLETED, 2)
    logger.warning("from nowhere")
    assert sorted(lines) == ["-/- from nowhere", "one/1 from a task", "two/1 from a thread"]


class Observations:
    """Metrics as a list."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Outcome]] = []

    def observe(self, name: str, outcome: Outcome, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((name, outcome))


@every_ending
async def test_every_ending_is_measured(ending: Ending) -> None:
    """Any object with `observe` is told of the attempt's name, outcome and seconds, once."""
    observations = Observations()
    await end(ending, measure_attempts(observations))
    assert observations.seen == [("work", ending.outcome)]


async def test_prometheus_counts_by_name_and_outcome() -> None:
    """The histogram has a series for each name and outcome, in the registry it was given."""
    registry = CollectorRegistry()
    measured = measure_attempts(PrometheusMetrics(registry))
    for ending in (ENDINGS["returned"], ENDINGS["returned"], ENDINGS["unrecoverable"]):
        await end(ending, measured)
    counts = {
        outcome: registry.get_sample_value("workers_attempt_seconds_count", {"name": "work", "outcome": outcome})
        for outcome in ("completed", "failed", "retried")
    }
    assert counts == {"completed": 2, "failed": 1, "retried": None}


async def test_prometheus_shows_backlog_and_oldest_wait() -> None:
    """By queue and state, as of the last look; a queue that cannot be looked at has no numbers, and others have."""
    registry = CollectorRegistry()
    storage, faults = faulty(MemoryStorage(queue="mail"))
    mail, other = Queue(storage), Queue(MemoryStorage(queue="other"))
    gauges = QueueGauges(mail, other, registry=registry)

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    async with mail, other:
        faults.requests_lost["counts"] = 1
        await gauges.update()  # nothing is known yet
        assert shown("workers_jobs", queue="mail", state="queued") is None
        await mail.enqueue_many([JobSpec(payload=1), JobSpec(payload=2), JobSpec(payload=3, delay=timedelta(hours=1))])
        await gauges.update()
        assert shown("workers_jobs", queue="mail", state="queued") == 2
        assert shown("workers_jobs", queue="mail", state="scheduled") == 1
        oldest = shown("workers_oldest_waiting_seconds", queue="mail")
        assert oldest is not None
        assert oldest > 0
        assert shown("workers_oldest_waiting_seconds", queue="other") == 0
        faults.requests_lost["counts"] = 1
        await gauges.update()
        assert shown("workers_jobs", queue="mail", state="queued") is None
        assert shown("workers_oldest_waiting_seconds", queue="mail") is None
        assert shown("workers_jobs", queue="other", state="queued") == 0


async def test_prometheus_shows_what_limits_keep_back() -> None:
    """By queue and limit, those that keep nothing back too; a limit that is removed has no number any more."""
    registry = CollectorRegistry()
    queue = Queue(
        MemoryStorage(queue="mail"),
        options=QueueOptions(limits={"send": Limit(concurrency=1), "other": Limit(concurrency=1)}),
    )
    gauges = QueueGauges(queue, registry=registry)

    def held(limit: str) -> float | None:
        return registry.get_sample_value("workers_jobs_held_back", {"queue": "mail", "limit": limit})

    async with queue:
        await queue.enqueue_many([JobSpec(payload=at, name="send") for at in range(3)])
        await steps.claim(queue.storage, 3)
        await gauges.update()
        assert (held("send"), held("other")) == (2, 0)
        await queue.manage.remove_limit("send")
        await gauges.update()
        assert (held("send"), held("other")) == (None, 0)


class Noted(JobMeter):
    """Remembers what is counted."""

    def __init__(self) -> None:
        self.counted: list[tuple[object, ...]] = []
        self.waits: list[float | None] = []

    def enqueued(self, queue: str, name: str, jobs: int) -> None:
        self.counted.append(("enqueued", queue, name, jobs))

    def claimed(self, queue: str, name: str, waited: float | None) -> None:
        self.counted.append(("claimed", queue, name))
        self.waits.append(waited)

    def ended(self, queue: str, name: str, outcome: Outcome, jobs: int) -> None:
        self.counted.append(("ended", queue, name, outcome.value, jobs))

    def lost(self, queue: str, name: str) -> None:
        self.counted.append(("lost", queue, name))


async def _counted(meter: JobMeter) -> None:
    """Two jobs of one call and two alone were enqueued; one ended at its second attempt, one failed, one was lost."""
    mail = Queue(
        MemoryStorage(queue="mail"),
        options=QueueOptions(observers=[meter], retry=RetryPolicy(initial=timedelta(0), jitter=0)),
    )
    removed = asyncio.Event()

    async def work(job: Job) -> None:
        if job.name == "lost":
            await mail.delete_job_chains([job.id])
            removed.set()
            await job.signal.wait()
        if job.name == "fails":
            raise UnrecoverableError("no")
        if job.name == "again" and job.attempt == 1:
            raise Retry("once more", delay=timedelta(0))

    mail.execute(work)
    async with mail:
        await mail.enqueue_many([JobSpec(payload=1, name="again", id="a"), JobSpec(payload=1, name="again", id="b")])
        await asyncio.gather(*(mail.wait_for_job_chain_completion(each) for each in "ab"))
        with pytest.raises(JobFailedError):
            await mail.enqueue_and_wait(1, name="fails")
        await mail.enqueue(1, name="lost")
        await removed.wait()


async def test_jobs_are_counted_from_the_enqueue_to_the_end() -> None:
    """Each claim, each end, and each lease that was lost; how long a job waited is told with its first claim."""
    meter = Noted()
    await _counted(meter)
    assert Counter(meter.counted) == {
        ("enqueued", "mail", "again", 2): 1,
        ("enqueued", "mail", "fails", 1): 1,
        ("enqueued", "mail", "lost", 1): 1,
        ("claimed", "mail", "again"): 4,
        ("claimed", "mail", "fails"): 1,
        ("claimed", "mail", "lost"): 1,
        ("ended", "mail", "again", "completed", 1): 2,
        ("ended", "mail", "fails", "failed", 1): 1,
        ("lost", "mail", "lost"): 1,
    }
    waits = [each for each in meter.waits if each is not None]
    assert len(waits) == 4
    assert all(0 <= each < PATIENCE for each in waits)


async def test_jobs_that_no_worker_ended_are_counted() -> None:
    """Those that a reaper failed, without a name; and an enqueue that the storage refused is none."""
    meter = Noted()
    meter(WorkerEvent(kind=Kind.FAILED, queue="mail", worker_id="w", job_ids=("a", "b")))
    assert meter.counted == [("ended", "mail", "", "failed", 2)]
    storage, faults = faulty(MemoryStorage(queue="mail"))
    faults.requests_lost["enqueue"] = 1
    with pytest.raises(StorageUnavailable):
        await Queue(storage, options=QueueOptions(observers=[meter])).enqueue(1)
    assert len(meter.counted) == 1


async def test_a_meter_that_fails_leaves_the_enqueue_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """The job is stored: its producer must not take it for lost, and enqueue it again."""

    class Broken(Noted):
        def enqueued(self, queue: str, name: str, jobs: int) -> None:
            raise OSError("no such place")

    queue = Queue(MemoryStorage(), options=QueueOptions(observers=[Broken()]))
    stored = await queue.enqueue(1)
    assert await queue.get_status(stored.id) is not None
    assert "a meter failed on an enqueue in queue" in caplog.text


async def test_prometheus_has_these_numbers() -> None:
    """Under the names that the page on OpenTelemetry and Prometheus gives."""
    registry = CollectorRegistry()
    await _counted(JobCounters(registry))

    def shown(name: str, job: str, **more: str) -> float | None:
        return registry.get_sample_value(name, {"queue": "mail", "name": job, **more})

    assert shown("workers_jobs_enqueued_total", "again") == 2
    assert shown("workers_jobs_claimed_total", "again") == 4
    assert shown("workers_jobs_ended_total", "again", outcome="completed") == 2
    assert shown("workers_jobs_ended_total", "fails", outcome="failed") == 1
    assert shown("workers_leases_lost_total", "lost") == 1
    assert shown("workers_job_wait_seconds_count", "again") == 2


async def test_opentelemetry_has_these_numbers() -> None:
    """As counters and a histogram, by queue and name."""
    reader = InMemoryMetricReader()
    await _counted(JobInstruments(MeterProvider([reader])))
    data = reader.get_metrics_data()
    assert data is not None
    [scope] = data.resource_metrics[0].scope_metrics
    shown = {
        (metric.name, *sorted(str(value) for value in dict(point.attributes or {}).values())): getattr(
            point, "value", getattr(point, "count", None)
        )
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert shown["workers.jobs.enqueued", "again", "mail"] == 2
    assert shown["workers.jobs.claimed", "again", "mail"] == 4
    assert shown["workers.jobs.ended", "again", "completed", "mail"] == 2
    assert shown["workers.jobs.ended", "failed", "fails", "mail"] == 1
    assert shown["workers.leases.lost", "lost", "mail"] == 1
    assert shown["workers.job.wait", "again", "mail"] == 2


async def test_gauges_are_updated_by_themselves() -> None:
    """Until they are stopped."""
    registry = CollectorRegistry()
    storage, calls = counting(MemoryStorage())
    async with Queue(storage) as queue:
        gauges = QueueGauges(queue, registry=registry, interval=timedelta(milliseconds=1))
        async with steps.background(asyncio.create_task(gauges.run())):
            await until(lambda: calls["waiting_since"] > 2)


async def traced(ending: Ending) -> ReadableSpan:
    """The one span of an attempt that ended so."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    await end(ending, trace_attempts(provider))
    [span] = exporter.get_finished_spans()
    return span


async def test_a_span_says_which_attempt_it_is() -> None:
    """Kind and attributes are those of messaging, with the attempt and its outcome beside them."""
    span = await traced(ENDINGS["returned"])
    assert (span.name, span.kind, span.parent) == ("process mail", SpanKind.CONSUMER, None)
    assert dict(span.attributes or {}) == {
        "messaging.system": "workers",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.client.id": "w1",
        "messaging.message.id": "job",
        "workers.job.name": "work",
        "workers.job.attempt": 1,
        "workers.job.max_attempts": 2,
        "workers.job.outcome": "completed",
    }


@every_ending
async def test_a_span_tells_failures_by_type(ending: Ending) -> None:
    """A failure sets the status and records the exception's type; its message, which may quote the payload, never."""
    span = await traced(ending)
    assert (span.attributes or {})["workers.job.outcome"] == ending.outcome.value
    assert span.status.status_code is (StatusCode.UNSET if ending.error is None else StatusCode.ERROR)
    assert (span.attributes or {}).get("error.type") == ending.error
    assert [dict(event.attributes or {}) for event in span.events] == (
        [] if ending.error is None else [{"exception.type": ending.error}]
    )
    assert SECRET not in span.to_json()


def test_what_a_lost_lease_returned_does_not_count() -> None:
    """An attempt whose lease is lost has that for its outcome, however its handler ended."""
    job = Job(id="1", name="work", payload=None, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    assert outcome_of(job, ValueError()) is Outcome.FAILED
    job.signal.fire(SignalReason.LEASE_LOST, LossReason.TAKEN)
    assert outcome_of(job, None) is outcome_of(job, ValueError()) is Outcome.LEASE_LOST
