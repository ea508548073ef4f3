"""What a process tells Prometheus, and that strangers cannot make it tell more and more."""

from __future__ import annotations

import ast
import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.routing import Route
from structlog.testing import capture_logs

import federation.delivery
from db import AttemptOutcome, BlacklistedServer, Database, DeliveryJob, RunOutcome, SchedulerJob, Server, new_id
from federation.app import Federation
from federation.http.threat_policy import NetworkErrorCode
from federation.monitoring.endpoints import HEALTH_PATH, READY_PATH
from federation.monitoring.labels import ATTEMPT_CODES, ENDPOINTS, code_label
from federation.monitoring.monitor import watch
from federation.monitoring.numbers import read_numbers
from federation.monitoring.prometheus import ProcessMetrics
from tests.patience import PATIENCE_SECONDS
from workers import Claim, Job, Queue, WorkerEvent, WorkerEventKind
from workers.jobs import DROP
from workers.storage.memory import MemoryStorage
from workers.testing.faults import faulty

NOW = datetime.now(UTC)


async def watched(metrics: ProcessMetrics, database: Database, queues: list[Queue], *, until: str) -> str:
    """What is exposed once `until` is in it."""
    watching = asyncio.create_task(watch(metrics, database, queues))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while until not in (text := metrics.render().decode()):
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    return text


def samples(metrics: ProcessMetrics, name: str) -> dict[tuple[str, ...], float]:
    """The values of the series of one name, by their labels' values in order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


async def test_attempts_and_waiting_jobs_are_counted(federation: Federation) -> None:
    """Events by kind, durations by outcome, jobs by state, and how long the oldest has been able to run."""
    metrics = ProcessMetrics()
    done = asyncio.Event()
    queue = Queue(MemoryStorage(queue="mail"), observers=[metrics])

    async def handle(job: Job) -> None:
        if job.payload == "last":
            done.set()

    queue.execute({"wanted": handle})
    async with queue:
        await queue.enqueue("first", name="wanted")
        await queue.enqueue("last", name="wanted")
        await queue.enqueue("nobody's", name="unwanted")
        await done.wait()
    await watched(metrics, federation.database, [queue], until='source="database"')
    await queue.stop()

    assert samples(metrics, "federation_worker_events_total")["completed", "mail"] == 2
    assert samples(metrics, "federation_attempt_seconds_count") == {("completed", "mail"): 2}
    assert samples(metrics, "federation_jobs")["mail", "queued"] == 1
    assert samples(metrics, "federation_oldest_ready_seconds")[("mail",)] > 0
    assert samples(metrics, "federation_attempts_in_flight") == {("mail",): 0}


async def test_an_outage_is_logged_and_leaves_the_last_numbers(federation: Federation) -> None:
    """A queue that cannot be counted keeps nobody from counting the rest."""
    storage, faults = faulty(MemoryStorage(queue="mail"))
    faults.requests_lost["counts"] = 1
    queue, metrics = Queue(storage), ProcessMetrics()
    with capture_logs() as logs:
        text = await watched(metrics, federation.database, [queue], until='source="database"')
    await queue.stop()
    assert [(entry["event"], entry["queue"]) for entry in logs] == [("queue_depth_unknown", "mail")]
    assert 'source="mail"' not in text


def event(kind: WorkerEventKind, job_id: str) -> WorkerEvent:
    claim = Claim(
        job_id=job_id,
        name="n",
        payload=b"",
        token="t",
        worker_id="w",
        lease=timedelta(seconds=30),
        attempt=1,
        max_attempts=1,
        created_at=NOW,
        keep_completed=DROP,
        keep_failed=DROP,
    )
    return WorkerEvent(kind=kind, queue="q", worker_id="w", claim=claim)


def test_attempts_in_flight_are_those_that_have_not_ended() -> None:
    """However often an end is told, as of a lost lease."""
    metrics = ProcessMetrics()
    told = [
        (WorkerEventKind.ACTIVE, "1"),
        (WorkerEventKind.ACTIVE, "2"),
        (WorkerEventKind.LEASE_LOST, "1"),
        (WorkerEventKind.RELEASED, "1"),
    ]
    for kind, job_id in told:
        metrics(event(kind, job_id))
    assert samples(metrics, "federation_attempts_in_flight") == {("q",): 1}


def test_what_strangers_send_makes_no_series() -> None:
    """Codes, statuses and paths that are not ours are counted together."""
    metrics = ProcessMetrics()
    for number in range(1000):
        metrics.attempt(AttemptOutcome.RETRYABLE, f"CODE_{number}", relayed=False)
        metrics.attempt(AttemptOutcome.RETRYABLE, f"HTTP_{number}", relayed=False)
        metrics.relay_refused(f"https://{number}.example")
        metrics.inbound(f"/discover\n{number}", number)

    codes = samples(metrics, "federation_delivery_attempts_total")
    classes = {f"HTTP_{first}xx" for first in range(1, 6)}
    assert {labels[0] for labels in codes} == {"other", *classes}
    assert codes["HTTP_4xx", "retryable", "direct"] == 100
    assert sum(codes.values()) == 2000
    assert samples(metrics, "federation_relay_refusals_total") == {("other",): 1000}
    assert len(samples(metrics, "federation_inbound_requests_total")) == 6


def test_every_code_of_ours_has_its_own_series() -> None:
    """Whatever the delivering code raises with a literal code, or maps a network failure to, is known."""
    raised = {
        call.args[0].value
        for path in Path(federation.delivery.__path__[0]).glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("PermanentFailure", "RetryableFailure")
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(raised) > 10
    assert raised | set(NetworkErrorCode) | {"PARKED"} == ATTEMPT_CODES
    assert {code_label(code) for code in ATTEMPT_CODES} == ATTEMPT_CODES


def test_every_endpoint_has_its_own_series(federation: Federation) -> None:
    """Those of the inbound side, without those for whoever watches it."""
    paths = {route.path for route in federation.node_app().routes if isinstance(route, Route)}
    assert paths - {HEALTH_PATH, READY_PATH} == ENDPOINTS


async def test_the_database_tells_of_servers_rules_deliveries_and_jobs(database: Database) -> None:
    """By state; a delivery without a job counts once it is old, and not one of a Node producer or one attempted."""
    old = NOW - timedelta(hours=1)

    def server(number: int, *, healthy: bool) -> Server:
        return Server(
            url=f"https://{number}.example",
            public_key=f"k{number}",
            encryption_public_key=f"e{number}",
            last_seen=NOW,
            created_at=NOW,
            updated_at=NOW,
            is_healthy=healthy,
        )

    def delivery(**columns: object) -> DeliveryJob:
        return DeliveryJob(
            **{
                "id": new_id(),
                "target_url": "https://b.example/inbox",
                "payload": "{}",
                "created_at": old,
                "job_name": "deliver-post",
                **columns,
            }
        )

    async with database.transaction() as session:
        session.add_all([server(1, healthy=True), server(2, healthy=True), server(3, healthy=False)])
        for expires_at in (None, NOW + timedelta(hours=1), old):
            rule = BlacklistedServer(server_url="*.x.example", created_at=NOW, reason="r", expires_at=expires_at)
            session.add(rule)
        session.add_all(
            [
                delivery(),
                delivery(created_at=datetime.now(UTC)),
                delivery(queued_at=old),
                delivery(job_name=None, created_at=old - timedelta(days=1)),
                delivery(last_attempted_at=old),
                delivery(settled_at=NOW, created_at=old - timedelta(days=1)),
            ]
        )
        session.add(SchedulerJob(name="purge", token=1, outcome=RunOutcome.DONE, finished_at=old))
        session.add(SchedulerJob(name="sweep", token=1, outcome=RunOutcome.FAILED, finished_at=NOW))

    numbers = await read_numbers(database)

    assert (numbers.healthy, numbers.unhealthy, numbers.blacklist_rules) == (2, 1, 2)
    assert (numbers.owed, numbers.without_job) == (4, 1)
    assert numbers.oldest_owed_seconds(NOW) == pytest.approx(3600)
    assert {name: round((NOW - at).total_seconds()) for name, at in numbers.successes.items()} == {"purge": 3600}
    metrics = ProcessMetrics()
    metrics.set_database(numbers, at=NOW)
    assert samples(metrics, "federation_servers") == {("healthy",): 2, ("unhealthy",): 1}
    assert samples(metrics, "federation_deliveries_without_job") == {(): 1}


async def test_an_empty_database_owes_nothing(database: Database) -> None:
    """And is no error."""
    numbers = await read_numbers(database)
    assert (numbers.owed, numbers.oldest_owed_seconds(NOW), numbers.healthy) == (0, 0, 0)
