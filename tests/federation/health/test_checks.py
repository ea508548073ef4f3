"""Probes of sick servers: when each is due, whom it heals, whom it leaves alone, and what follows a failed one."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, select, update
from structlog.testing import capture_logs

from db import Server, ServerHealthEvent
from federation.admin import blacklist
from federation.base.queues.queue import health_check_queue
from federation.base.settings.settings import Settings
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.sealed.peers.health_checks import HealthSchedule, health_check_id
from federation.sealed.peers.probe import PROBE_TIMEOUT
from tests.federation.conftest import MakeSettings
from tests.misbehaving import Behaviour, garbage, redirect, reset, respond
from tests.peer import Peer, acquaint
from workers import Job, JobStatus, UnrecoverableError
from workers.storage.memory import MemoryStorage

STRANGER = generate_own_keys()


def probe_of(url: object) -> Job:
    """A job of the health-check queue."""
    payload = {"serverUrl": url}
    return Job(id="1", name="health-check", payload=payload, attempt=1, max_attempts=1, created_at=datetime.now(UTC))


async def make_sick(federation: Federation, peer: Peer, reason: str | None = "CONN_REFUSED", probes: int = 0) -> None:
    """The peer is registered and unhealthy; its probes so far are counted, and none is scheduled."""
    await acquaint(federation, peer)
    async with federation.database.transaction() as session:
        values = {"is_healthy": False, "unhealthy_reason": reason, "health_check_attempts": probes}
        await session.execute(update(Server).values(values))
    federation.registry.forget(peer.url)


async def server(federation: Federation) -> Server:
    async with federation.database.read() as session:
        return (await session.execute(select(Server))).scalar_one()


async def scheduled(federation: Federation, peer: Peer, attempt: int) -> JobStatus | None:
    return await federation.health_check_queue.get_status(health_check_id(peer.url, attempt))


async def nothing_scheduled(federation: Federation) -> bool:
    await federation.health_check_queue.start()
    return not any((await federation.health_check_queue.storage.counts()).values())


async def test_a_server_that_answers_with_its_own_key_is_healthy_again(federation: Federation, peer: Peer) -> None:
    """On record as healed by the probe, and not probed again."""
    await make_sick(federation, peer, probes=3)
    await federation.health_check_processor(probe_of(peer.url))
    row = await server(federation)
    assert (row.is_healthy, row.unhealthy_reason, row.health_check_attempts) == (True, None, 0)
    assert peer.discoveries == ["GET"]
    assert await nothing_scheduled(federation)
    async with federation.database.read() as session:
        event = (await session.execute(select(ServerHealthEvent))).scalar_one()
    assert (event.server_url, event.from_state, event.to_state, event.reason) == (
        peer.url,
        "unhealthy",
        "healthy",
        "probe",
    )


FAILURES = {
    "reset": reset(),
    "garbage": garbage(),
    "an error": respond(500, body=b"{}"),
    "a redirect": redirect("/elsewhere"),
    "no document": respond(200, body=b"<html>it works</html>"),
    "an empty object": respond(200, body=b"{}"),
    "a huge page": respond(200, body=b" " * (1024 * 1024 + 1)),
}


@pytest.mark.parametrize("behaviour", FAILURES.values(), ids=FAILURES.keys())
async def test_a_failed_probe_is_counted_and_the_next_one_scheduled(
    federation: Federation, peer: Peer, behaviour: Behaviour
) -> None:
    """Later than this one, by its number; the reason for being unhealthy stays what it was."""
    await make_sick(federation, peer, probes=1)
    peer.server.upcoming.append(behaviour)
    await federation.health_check_processor(probe_of(peer.url))
    row = await server(federation)
    assert (row.is_healthy, row.unhealthy_reason, row.health_check_attempts) == (False, "CONN_REFUSED", 2)
    status = await scheduled(federation, peer, 2)
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at == timedelta(hours=1, minutes=20)


async def test_a_server_that_is_down_fails_its_probe(federation: Federation, peer: Peer) -> None:
    """Its health is not marked anew: the counter goes on."""
    await make_sick(federation, peer, "TIMEOUT")
    await peer.server.stop()
    await federation.health_check_processor(probe_of(peer.url))
    row = await server(federation)
    assert (row.unhealthy_reason, row.health_check_attempts) == ("TIMEOUT", 1)
    assert await scheduled(federation, peer, 1) is not None
    assert await scheduled(federation, peer, 0) is None


@pytest.mark.parametrize("rule", [None, "*.127.0.0.1"], ids=["origin", "star"])
async def test_a_blacklisted_server_is_not_probed(federation: Federation, peer: Peer, rule: str | None) -> None:
    """It stays as it is, and no further probe is planned."""
    await make_sick(federation, peer, probes=1)
    await blacklist.add(federation.database, rule or peer.url, reason="spam")
    await federation.health_check_processor(probe_of(peer.url))
    row = await server(federation)
    assert (row.is_healthy, row.health_check_attempts) == (False, 1)
    assert peer.server.connections == 0
    assert await nothing_scheduled(federation)


async def test_a_stranger_at_the_servers_address_does_not_heal_it(federation: Federation, peer: Peer) -> None:
    """The page is fine, its signing key is not the registered one."""
    await make_sick(federation, peer)
    peer.keys = STRANGER
    with capture_logs() as logs:
        await federation.health_check_processor(probe_of(peer.url))
    assert not (await server(federation)).is_healthy
    (line,) = [entry for entry in logs if entry["event"] == "health_probe"]
    assert (line["healthy"], "another signing key" in line["problem"]) == (False, True)


async def test_the_last_probe_ends_the_series_with_a_warning(federation: Federation, peer: Peer) -> None:
    """After five in all nothing more is scheduled."""
    await make_sick(federation, peer, probes=4)
    peer.server.upcoming.append(respond(500))
    with capture_logs() as logs:
        await federation.health_check_processor(probe_of(peer.url))
    assert (await server(federation)).health_check_attempts == 5
    assert await nothing_scheduled(federation)
    (line,) = [entry for entry in logs if entry["event"] == "health_checks_exhausted"]
    assert (line["log_level"], line["server_url"], line["checks"]) == ("warning", peer.url, 5)


@pytest.mark.parametrize("reason", ["DNS_BLOCKED", "INVALID_RESPONSE_FROM_TARGET"])
async def test_a_server_that_probes_cannot_judge_is_left_alone(federation: Federation, peer: Peer, reason: str) -> None:
    """Not asked, not counted, not scheduled."""
    await make_sick(federation, peer, reason, probes=2)
    await federation.health_check_processor(probe_of(peer.url))
    assert (await server(federation)).health_check_attempts == 2
    assert peer.server.requests == []
    assert await nothing_scheduled(federation)


@pytest.mark.parametrize(
    "reason", [None, "TIMEOUT", "CONN_REFUSED", "CONN_RESET", "TLS_ERROR", "UNKNOWN", "OF_A_LATER_VERSION"]
)
async def test_every_other_reason_may_be_probed(federation: Federation, peer: Peer, reason: str | None) -> None:
    """An unknown or missing one too: such a row shall be able to heal."""
    await make_sick(federation, peer, reason)
    await federation.health_check_processor(probe_of(peer.url))
    assert (await server(federation)).is_healthy


async def test_a_server_that_is_gone_or_healthy_is_silently_done(federation: Federation, peer: Peer) -> None:
    """Neither is asked anything."""
    await acquaint(federation, peer)
    await federation.health_check_processor(probe_of(peer.url))
    async with federation.database.transaction() as session:
        await session.execute(delete(Server))
    await federation.health_check_processor(probe_of(peer.url))
    assert peer.server.requests == []
    assert await nothing_scheduled(federation)


@pytest.mark.parametrize("payload", [None, 7, [], {}, {"serverUrl": 7}, {"serverUrl": "x\x00"}, {"server": "x"}])
async def test_a_job_without_a_server_fails_for_good(federation: Federation, payload: object) -> None:
    """The error says which job and what it lacks."""
    job = Job(id="j7", name="health-check", payload=payload, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    with pytest.raises(UnrecoverableError, match=r"'j7'.*serverUrl"):
        await federation.health_check_processor(job)


async def test_a_probe_of_a_blocked_address_is_a_failed_one(make_settings: MakeSettings, peer: Peer) -> None:
    """The guard stands before probes too; nothing reaches the address."""
    federation = Federation(make_settings(dev_allowed_hostnames=""))
    try:
        await make_sick(federation, peer)
        await federation.health_check_processor(probe_of(peer.url))
        assert (await server(federation)).health_check_attempts == 1
    finally:
        await federation.close()
    assert peer.server.requests == []


def test_a_probe_takes_eight_seconds_at_most() -> None:
    """The budget other implementations use."""
    assert timedelta(seconds=8) == PROBE_TIMEOUT


async def test_the_job_of_another_implementation_is_understood(federation: Federation, peer: Peer) -> None:
    """Its data as it lies in Redis, and members we do not know."""
    await make_sick(federation, peer)
    payload = json.loads(json.dumps({"serverUrl": peer.url, "attempt": 3}))
    await federation.health_check_processor(
        Job(id="1", name="health-check", payload=payload, attempt=1, max_attempts=1, created_at=datetime.now(UTC))
    )
    assert (await server(federation)).is_healthy


@pytest.mark.parametrize("attempt", range(5))
async def test_probe_n_is_due_after_five_plus_ten_n_minutes(attempt: int) -> None:
    """5, 15, 25, 35 and 45 minutes; scheduling the same probe again does nothing."""
    queue = health_check_queue(Settings.from_values({}), MemoryStorage())
    schedule = HealthSchedule(queue, first_delay=timedelta(minutes=5), step=timedelta(minutes=10))
    for _ in range(2):
        await schedule("https://remote.example.com", attempt)
    status = await queue.get_status(f"health-check_d4b64e4b29f0e3be_{attempt}")
    assert status is not None
    assert status.next_run_at is not None
    assert status.next_run_at - status.created_at == timedelta(minutes=5 + 10 * attempt)
    assert (status.name, status.max_attempts) == ("health-check", 1)
    assert sum((await queue.storage.counts()).values()) == 1


def test_a_probe_has_an_id_of_its_own_per_server_and_attempt() -> None:
    """The check value shared with other implementations, and different ids for different servers."""
    assert health_check_id("https://remote.example.com", 0) == "health-check_d4b64e4b29f0e3be_0"
    assert health_check_id("https://remote.example.com/", 0) != health_check_id("https://remote.example.com", 0)
