"""The two workers of a process: start, stop, what they log, and the rows no processor can settle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from sqlalchemy import delete, select, text
from sqlmodel import col
from structlog.testing import capture_logs

from db import DeliveryJob, DeliveryPayload, DeliveryState, HoldReason, Server
from federation.base.settings.settings import Settings
from federation.delivery.ledger.statements import FIRST_SUSPECTS
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers, log_event
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.federation.protocol.vectors import A
from tests.misbehaving import hang, respond
from tests.patience import PATIENCE_SECONDS, until
from tests.peer import POSTS_PATH, Peer, acquaint
from tests.servers import free_port
from workers import JobState, StorageError
from workers.storage.base import ANY_NAME
from workers.worker.events import WorkerEvent, WorkerEventKind

pytestmark = pytest.mark.spread("queue_settings")

PAYLOAD = post_payload("p", text="s3cret")

Logs = Sequence[Mapping[str, object]]


def of(logs: Logs, event: str) -> Logs:
    return [entry for entry in logs if entry["event"] == event]


async def until_logged(logs: Logs, event: str, count: int = 1) -> Logs:
    async def is_there() -> bool:
        return len(of(logs, event)) >= count

    await until(is_there)
    return of(logs, event)


async def owe(federation: Federation, peer: Peer) -> str:
    async with federation.outbox.transaction() as session:
        return await federation.outbox.enqueue_delivery(
            session, "deliver-post", peer.url + POSTS_PATH, peer.url, PAYLOAD
        )


async def row(federation: Federation) -> DeliveryJob | None:
    async with federation.database.read() as session:
        return (await session.execute(select(DeliveryJob))).scalar_one_or_none()


@pytest.fixture
async def workers(federation: Federation) -> AsyncIterator[FederationWorkers]:
    """Not yet started."""
    pair = FederationWorkers(federation)
    yield pair
    pair.request_stop()
    await pair.stop()


async def test_starting_twice_gives_the_same_pair(workers: FederationWorkers) -> None:
    """Two workers, each with a stop of its own; once both have stopped a start makes new ones."""
    pair = workers.start()
    assert workers.start() is pair
    delivery, health_check = pair
    assert delivery.worker is not health_check.worker
    await delivery.stop()
    assert delivery.task.done()
    assert workers.start() is pair
    await health_check.stop()
    again = workers.start()
    assert again is not pair
    assert not any(running.task.done() for running in again)


async def test_stopping_is_idempotent_and_may_come_before_a_start(workers: FederationWorkers) -> None:
    """Nothing to stop is nothing to fail."""
    await workers.stop()
    pair = workers.start()
    await asyncio.gather(workers.stop(), workers.stop())
    await workers.stop()
    assert all(running.task.done() for running in pair)


async def test_a_workers_life_is_logged(make_settings: MakeSettings, queue_settings: dict[str, object]) -> None:
    """Each worker says when it is ready and when it has stopped, and of which queue it speaks."""
    federation = Federation(make_settings(**queue_settings))
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        workers.start()
        ready = await until_logged(logs, "worker_ready", 3)
        await workers.stop()
    await federation.close()
    queues = {"federation-delivery", "federation-discovery", "federation-health-check"}
    assert {entry["queue"] for entry in ready} == {entry["queue"] for entry in of(logs, "worker_stopped")} == queues
    assert {entry["log_level"] for entry in ready} == {"info"}


async def test_each_refused_attempt_is_logged_as_failing_and_the_last_one_as_failed(
    make_settings: MakeSettings, peer: Peer
) -> None:
    """With job, method, target, attempt, attempts left and error; without a word of the payload."""
    federation = Federation(make_settings(federation_delivery_attempts=3, federation_delivery_backoff="1ms"))
    await acquaint(federation, peer)
    peer.server.default = respond(410, body=b'{"error": "s3cret"}')
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        workers.start()
        delivery_id = await owe(federation, peer)
        (failed,) = await until_logged(logs, "worker_failed")
        failing = of(logs, "worker_failing")
        await workers.stop()
    await federation.close()
    expected = {
        "queue": "federation-delivery",
        "job_id": delivery_id,
        "job_name": "deliver-post",
        "method": "FEDERATE_POST",
        "target_url": peer.url + POSTS_PATH,
        "error_type": "RetryableFailure",
        "error": "the server answered 410",
    }
    for entry in [*failing, failed]:
        assert {name: entry[name] for name in expected} == expected
    assert [(entry["attempt"], entry["attempts_left"]) for entry in [*failing, failed]] == [(1, 2), (2, 1), (3, 0)]
    assert [entry["next_attempt_in"] for entry in failing] == [0.001, 0.002]
    assert (failing[0]["log_level"], failed["log_level"]) == ("warning", "error")
    assert "s3cret" not in str(logs)
    assert not any(secret in str(logs) for secret in A.env.values())


async def test_a_job_that_is_no_delivery_is_logged_too(federation: Federation, workers: FederationWorkers) -> None:
    """With what is known of it."""
    with capture_logs() as logs:
        workers.start()
        await federation.delivery_queue.add("deliver-post", {"payload": "s3cret"}, {"jobId": "odd"})
        (failed,) = await until_logged(logs, "worker_failed")
    assert (failed["job_id"], failed["error_type"], failed.get("method")) == ("odd", "PermanentFailure", None)
    assert "s3cret" not in str(logs)


@pytest.mark.parametrize(
    ("error", "queue", "told"),
    [
        (ValueError("s3cret"), "federation-health-check", None),
        (StorageError("no such table"), "federation-health-check", "no such table"),
        (ValueError("no such shop"), "federation-tasks", "no such shop"),
    ],
)
def test_only_words_of_ours_are_logged(error: Exception, queue: str, told: str | None) -> None:
    """Another library's message may quote what was sent; of a task's errors the application's own words are."""
    with capture_logs() as logs:
        log_event(WorkerEvent(kind=WorkerEventKind.ERROR, queue=queue, worker_id="w", error=error))
    assert [(entry["error_type"], entry["error"]) for entry in logs] == [(type(error).__name__, told)]


async def test_a_held_delivery_is_no_line_for_each(make_settings: MakeSettings, peer: Peer) -> None:
    """A backlog to a server that has fallen is looked at job by job; what is logged is the link."""
    federation = Federation(make_settings(federation_delivery_attempts=1))
    await acquaint(federation, peer)
    await peer.server.stop()
    for _ in range(5):
        await owe(federation, peer)
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        workers.start()

        async def are_held() -> bool:
            async with federation.database.read() as session:
                held = select(DeliveryJob).where(col(DeliveryJob.state) == DeliveryState.HELD)
                return len((await session.execute(held)).all()) == 5

        await until(are_held)
        await workers.stop()
    await federation.close()
    assert of(logs, "worker_failed") == of(logs, "worker_failing") == []
    assert len(of(logs, "link_changed")) == 1


async def test_a_delivery_whose_worker_disappears_too_often_is_held(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """Its job fails without being run again; the row is held for a fault of ours, by what the worker reports."""
    federation = Federation(make_settings(federation_max_stalls=0, federation_lease="200ms", **queue_settings))
    await acquaint(federation, peer)
    delivery_id = await owe(federation, peer)
    (claim,) = await federation.delivery_queue.storage.claim(
        "a worker that dies", leases={ANY_NAME: timedelta(milliseconds=1)}, limit=1
    )
    assert claim.job_id == delivery_id
    workers = FederationWorkers(federation)
    workers.start()

    async def is_held() -> bool:
        found = await row(federation)
        return found is not None and found.state is DeliveryState.HELD

    await until(is_held)
    await workers.stop()
    held = await row(federation)
    assert held is not None
    assert (held.id, held.held_reason, held.error_code) == (delivery_id, HoldReason.OURS, "STALLED")
    assert "its worker disappeared" in (held.last_error or "")
    assert held.held_at is not None
    assert (held.next_attempt_at, held.suspect) == (held.held_at, FIRST_SUSPECTS)
    assert peer.deliveries == []
    status = await federation.delivery_queue.get_status(delivery_id)
    assert status is not None
    assert status.state is JobState.FAILED
    await federation.close()


async def test_a_delivery_is_delivered_and_its_row_gone(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """The pair does what it is for."""
    federation = Federation(make_settings(**queue_settings))
    await acquaint(federation, peer)
    workers = FederationWorkers(federation)
    workers.start()
    await owe(federation, peer)

    async def is_gone() -> bool:
        return bool(peer.applied) and await row(federation) is None

    await until(is_gone)
    await workers.stop()
    await federation.close()
    assert [arrived.sender for arrived in peer.applied] == [OWN_URL]


async def test_a_delivery_whose_text_is_gone_is_over(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """There is nothing to send, and never will be: the job fails at once, and the row goes."""
    federation = Federation(make_settings(**queue_settings))
    await acquaint(federation, peer)
    async with federation.outbox.transaction() as session:
        (delivery_id,) = await federation.outbox.enqueue_fanout(
            session, "deliver-post", POSTS_PATH, [peer.url], PAYLOAD
        )
    async with federation.database.transaction() as session:
        await session.execute(delete(DeliveryPayload))
    workers = FederationWorkers(federation)
    workers.start()

    async def is_gone() -> bool:
        return await row(federation) is None

    await until(is_gone)
    await workers.stop()
    status = await federation.delivery_queue.get_status(delivery_id)
    await federation.close()
    assert status is not None
    assert (status.state, status.attempt) == (JobState.FAILED, 1)
    assert peer.deliveries == []


async def test_a_worker_that_fails_brings_the_other_to_a_stop(make_settings: MakeSettings) -> None:
    """Whoever waits learns what ended it; the log has it for those who do not."""
    federation = Federation(make_settings())
    async with federation.database.transaction() as session:
        await session.execute(text("DROP TABLE workers_payloads"))
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        pair = workers.start()
        with pytest.raises(ExceptionGroup) as error:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await workers.wait()
    assert error.group_contains(StorageError)
    assert all(running.task.done() for running in pair)
    assert {line["error_type"] for line in of(logs, "worker_died")} == {"StorageError"}
    await federation.close()


async def test_a_key_of_the_wrong_type_ends_nothing(
    make_settings: MakeSettings, redis_url: str, queue_prefix: str, peer: Peer
) -> None:
    """It is named in the log, again and again; the other queues are served, and its own once the key is gone."""
    federation = Federation(make_settings(redis_url=redis_url, federation_queue_prefix=queue_prefix))
    key = f"{queue_prefix}:federation-health-check:wait"
    async with Redis.from_url(redis_url) as redis:
        await redis.set(key, "somebody else's")
        workers = FederationWorkers(federation)
        with capture_logs() as logs:
            workers.start()
            await acquaint(federation, peer)
            await owe(federation, peer)
            await until(lambda: len(peer.deliveries) == 1)
            (line, *_) = await until_logged(logs, "worker_error")
            await redis.delete(key)
            job = await federation.health_check_queue.add("unknown", {})

            async def has_failed() -> bool:
                status = await federation.health_check_queue.get_status(job.id)
                return status is not None and status.state is JobState.FAILED

            await until(has_failed)
        await workers.stop()
    assert key in str(line["error"])
    await federation.close()


async def test_cancelling_the_wait_stops_both(workers: FederationWorkers) -> None:
    """As when another part of the process has failed."""
    pair = workers.start()
    waiting = asyncio.create_task(workers.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert [running.task.exception() for running in pair] == [None, None]


async def test_a_queue_that_is_down_is_logged_and_awaited(make_settings: MakeSettings) -> None:
    """The workers go on trying, and stop when asked."""
    federation = Federation(make_settings(redis_url=f"redis://127.0.0.1:{free_port()}"))
    workers = FederationWorkers(federation)
    with capture_logs() as logs:
        pair = workers.start()
        errors = await until_logged(logs, "worker_error", 4)
        assert not any(running.task.done() for running in pair)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await workers.stop()
    await federation.close()
    assert {entry["error_type"] for entry in errors} == {"StorageUnavailable"}


async def test_the_settings_reach_the_workers(make_settings: MakeSettings, peer: Peer) -> None:
    """Concurrency 10 and 3 by default; no more of a quick server's deliveries at once than `FEDERATION_PER_SERVER`."""
    settings: Settings = make_settings()
    federation = Federation(settings)
    await acquaint(federation, peer)
    workers = FederationWorkers(federation)
    delivery, health_check = workers.start()
    assert (delivery.worker._concurrency, health_check.worker._concurrency) == (10, 3)
    await owe(federation, peer)

    async def has_answered() -> bool:
        return bool(peer.applied) and await row(federation) is None

    await until(has_answered)
    peer.server.default = hang()
    for _ in range(6):
        await owe(federation, peer)

    async def are_three() -> bool:
        return len(peer.deliveries) == 1 + settings.federation_per_server

    await until(are_three)
    await asyncio.sleep(0.1)  # time for one too many
    assert len(peer.deliveries) == 1 + 3
    workers.request_stop()
    workers.request_stop()
    await workers.stop()
    async with federation.database.read() as session:
        assert (await session.execute(select(Server))).scalar_one().is_healthy
    await federation.close()
