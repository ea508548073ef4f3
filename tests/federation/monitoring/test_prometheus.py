"""What a process tells Prometheus, and that strangers cannot make it tell more and more."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import insert, text
from starlette.routing import Route
from structlog.testing import capture_logs

from db import (
    ActivityInbox,
    AttemptOutcome,
    BlacklistedServer,
    Database,
    DeliveryJob,
    DeliveryState,
    HoldReason,
    LinkState,
    ReceivedActivity,
    ReceivedState,
    RunOutcome,
    SchedulerJob,
    Server,
    ServerLink,
    new_id,
)
from federation.activitypub.inbox import SHARED_INBOX
from federation.codes import CODES, LOGGED_CODES
from federation.delivery.error_codes import STALLED, FailureClass
from federation.monitoring.endpoints import HEALTH_PATH, READY_PATH
from federation.monitoring.monitor import watch
from federation.monitoring.numbers import ReceivedNumbers, age, read_numbers
from federation.monitoring.prometheus import ATTEMPT_CODES, ENDPOINTS, OWN_FAULTS, ProcessMetrics, code_label
from federation.runtime.composition import Federation
from tests.federation import rows_read
from tests.patience import PATIENCE_SECONDS
from workers import Job, Queue, QueueOptions
from workers.jobs import DROP, Claim
from workers.storage.memory import MemoryStorage
from workers.testing.faults import faulty
from workers.worker.events import WorkerEvent, WorkerEventKind

NOW = datetime.now(UTC)


async def watched(metrics: ProcessMetrics, database: Database, queues: list[Queue], *, until: str) -> str:
    """What is exposed once `until` is in it."""
    watching = asyncio.create_task(watch(metrics, database, queues, ()))
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
    queue = Queue(MemoryStorage(queue="mail"), options=QueueOptions(observers=[metrics]))

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
        metrics.second_knock(f"kind-{number}")
        metrics.activity_received(f"Type{number}", "stored")

    codes = {labels: n for labels, n in samples(metrics, "federation_delivery_attempts_total").items() if n}
    classes = {f"HTTP_{first}xx" for first in range(1, 6)}
    assert {labels[0] for labels in codes} == {"other", *classes}
    assert codes["HTTP_4xx", "retryable", "direct"] == 100
    assert sum(codes.values()) == 2000
    assert samples(metrics, "federation_relay_refusals_total") == {("other",): 1000}
    assert samples(metrics, "federation_second_knocks_total") == {("other",): 1000}
    assert samples(metrics, "federation_activities_received_total") == {("stored", "other"): 1000}
    assert len(samples(metrics, "federation_inbound_requests_total")) == 6


def test_every_code_of_ours_has_its_own_series() -> None:
    """Whatever the delivering code fails an attempt with, or notes of one that was given back."""
    assert set(CODES) | LOGGED_CODES[AttemptOutcome.PARKED] == ATTEMPT_CODES
    assert {code_label(code) for code in ATTEMPT_CODES} == ATTEMPT_CODES


def test_the_series_of_our_own_faults_are_there_before_the_first_one() -> None:
    """All that an attempt may fail with; an increase of a series that was not there yet is none to Prometheus."""
    ours = {code for code, told in CODES.items() if told.failure_class is FailureClass.OURS} - {
        STALLED
    }  # which has no attempt
    assert set(OWN_FAULTS) == ours
    assert all(code in LOGGED_CODES[outcome] for code, outcome in OWN_FAULTS.items())
    metrics = ProcessMetrics()
    series = {(code, outcome, "direct"): 0 for code, outcome in OWN_FAULTS.items()}
    assert samples(metrics, "federation_delivery_attempts_total") == series


def test_every_endpoint_has_its_own_series(federation: Federation) -> None:
    """Those of the inbound side, without those for whoever watches it."""
    paths = {route.path for route in federation.node_app().routes if isinstance(route, Route)}
    assert paths - {HEALTH_PATH, READY_PATH} | {SHARED_INBOX} == ENDPOINTS


async def test_the_database_tells_of_servers_rules_deliveries_and_jobs(database: Database) -> None:
    """By state; a delivery without a job counts once it is old, and not one of a Node producer or one attempted.

    The last success of a job that was turned off would only grow older, and ring for ever.
    """
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
        session.add(SchedulerJob(name="analytics", token=1, outcome=RunOutcome.DONE, finished_at=old))

    numbers = await read_numbers(database, recurring=("purge", "sweep"))

    assert (numbers.healthy, numbers.unhealthy, numbers.blacklist_rules) == (2, 1, 2)
    assert (numbers.owed, numbers.without_job) == (4, 1)
    assert age(numbers.oldest_ready, NOW) == pytest.approx(3600)
    assert {name: round((NOW - at).total_seconds()) for name, at in numbers.successes.items()} == {"purge": 3600}
    metrics = ProcessMetrics()
    metrics.set_database(numbers, at=NOW)
    assert samples(metrics, "federation_servers") == {("healthy",): 2, ("unhealthy",): 1}
    assert samples(metrics, "federation_deliveries_without_job") == {(): 1}


async def test_the_links_of_what_is_owed_are_looked_up(database: Database) -> None:
    """Very many servers may be away. A walk along all of them, for each delivery, would take minutes every time."""
    owed, away = 500, 6_000
    made = [{"id": new_id(), "target_url": "t", "payload": "", "created_at": NOW, "job_name": "n"} for _ in range(owed)]
    links = [{"server_url": f"https://s{n}.example", "since": NOW, "state": LinkState.DOWN} for n in range(away)]
    async with database.transaction() as session:
        rows = [{**row, "server_url": f"https://up{number}.example"} for number, row in enumerate(made)]
        await session.execute(insert(DeliveryJob), rows)
        await session.execute(insert(ServerLink), links)
        if session.get_bind().dialect.name == "postgresql":  # which analyzes by itself; SQLite does not
            await session.execute(text("ANALYZE"))
    with rows_read.watched() as queries:
        assert (await read_numbers(database, recurring=())).oldest_while_up == NOW
    assert await database.transact(partial(rows_read.cost, queries=queries, work_mem="64kB")) < 10 * (owed + away)


async def test_what_is_owed_to_a_server_that_is_away_by_one_wire_waits_for_that_link(database: Database) -> None:
    """Its link by the other wire is up, which says nothing about this one. An inbox that is gone is counted."""
    old, server = NOW - timedelta(days=1), "https://b.example"
    async with database.transaction() as session:
        for wire, created_at in (("activitypub", old), ("sealed", NOW)):
            session.add(
                DeliveryJob(
                    id=new_id(),
                    target_url=f"{server}/inbox",
                    payload="{}",
                    created_at=created_at,
                    job_name="n",
                    server_url=server,
                    wire=wire,
                )
            )
        session.add(ServerLink(server_url=server, wire="activitypub", since=NOW, state=LinkState.DOWN))
        session.add(ActivityInbox(url=f"{server}/inbox", server_url=server, gone_at=NOW, gone_code=410))
        session.add(ActivityInbox(url=f"{server}/other", server_url=server, missing_since=NOW))
    numbers = await read_numbers(database, recurring=())
    assert (numbers.ready, numbers.oldest_while_up, numbers.inboxes_gone) == (2, NOW, 1)


async def test_the_database_tells_of_activities_that_are_not_done(database: Database) -> None:
    """How many are to be handled, since when, and how many could not be; whatever lies beside them is not read."""
    states = {"a": ReceivedState.NEW, "b": ReceivedState.NEW, "c": ReceivedState.FAILED}
    done = {f"d{number}": ReceivedState.DONE for number in range(2_000)}
    made: dict[str, Any] = {"type": "Create", "actor": "https://b.example/bob", "text": "", "attempts": 0}
    ages = {"a": NOW, "b": NOW - timedelta(hours=1)}
    rows = [
        {**made, "activity_hash": name, "state": state, "received_at": ages.get(name, NOW - timedelta(days=1))}
        for name, state in {**states, **done}.items()
    ]
    async with database.transaction() as session:
        await session.execute(insert(ReceivedActivity), rows)
        await session.execute(text("ANALYZE"))
    with rows_read.watched() as queries:
        numbers = await read_numbers(database, recurring=())
    assert numbers.received == ReceivedNumbers(waiting=2, failed=1, oldest=NOW - timedelta(hours=1))
    of_received = [each for each in queries if "activitypub_received" in each[0]]
    assert await database.transact(partial(rows_read.cost, queries=of_received)) < 100
    metrics = ProcessMetrics()
    metrics.set_database(numbers, at=NOW)
    assert samples(metrics, "federation_activities_waiting") == {(): 2}
    assert samples(metrics, "federation_activities_failed") == {(): 1}
    assert samples(metrics, "federation_oldest_activity_waiting_seconds") == {(): 3600}


async def test_an_empty_database_owes_nothing(database: Database) -> None:
    """And is no error."""
    numbers = await read_numbers(database, recurring=("purge", "sweep"))
    assert (numbers.owed, age(numbers.oldest_ready, NOW), age(numbers.oldest_held, NOW)) == (0, 0, 0)
    assert numbers.links == {"up": 0, "down": 0, "refusing": 0, "mismatch": 0, "on_hold": 0}


async def test_the_database_tells_of_held_deliveries_and_links(database: Database) -> None:
    """By reason and by state; what a server that is up is owed has an age of its own, and a release begins it anew."""
    made = {"down": 9, "up": 5, "unknown": 4, "held": 8}

    def delivery(server: str, **columns: object) -> DeliveryJob:
        at = NOW - timedelta(hours=made[server])
        values = {"payload": "{}", "job_name": "n", "created_at": at, **columns}
        return DeliveryJob(target_url="t", server_url=f"https://{server}.example", **values)

    def held(server: str, reason: HoldReason) -> DeliveryJob:
        return delivery(server, state=DeliveryState.HELD, held_reason=reason)

    def link(server: str, **columns: object) -> ServerLink:
        return ServerLink(server_url=f"https://{server}.example", since=NOW, **{"state": LinkState.UP, **columns})

    async with database.transaction() as session:
        session.add_all([link("down", state=LinkState.DOWN), link("up"), link("held", operator_hold=True)])
        session.add_all([held("down", HoldReason.SERVER), held("down", HoldReason.SERVER), held("up", HoldReason.BUSY)])
        session.add_all([held("held", HoldReason.SERVER), delivery("unknown")])
        session.add(delivery("down", released_at=NOW - timedelta(hours=1)))
        session.add(delivery("down", state=DeliveryState.EXPIRED, settled_at=NOW))

    metrics = ProcessMetrics()
    metrics.set_database(await read_numbers(database, recurring=("purge", "sweep")), at=NOW)
    metrics.released(3)
    metrics.expired(2)

    assert samples(metrics, "federation_deliveries_owed") == {(): 6}
    held_for = {"server": 3, "order": 0, "rest": 0, "busy": 1, "ours": 0, "alone": 0}
    assert samples(metrics, "federation_deliveries_held") == {(reason,): n for reason, n in held_for.items()}
    states = {"up": 1, "down": 1, "refusing": 0, "mismatch": 0, "on_hold": 1}
    assert samples(metrics, "federation_links") == {(state,): number for state, number in states.items()}
    ages = samples(metrics, "federation_oldest_owed_seconds") | samples(
        metrics, "federation_oldest_owed_while_up_seconds"
    )
    assert ages == pytest.approx({("ready",): 4 * 3600, ("held",): 9 * 3600, (): 5 * 3600})
    assert samples(metrics, "federation_deliveries_released_total") == {(): 3}
    assert samples(metrics, "federation_deliveries_expired_total") == {(): 2}
