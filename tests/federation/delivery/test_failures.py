"""Answers and network failures: what is tried again, what is not, and what stays on record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from sqlalchemy import text

from db import AttemptOutcome
from federation.app import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.misbehaving import (
    Behaviour,
    Exchange,
    MisbehavingServer,
    Received,
    bad_chunk,
    close,
    drip_body,
    drip_headers,
    garbage,
    hang,
    huge_body,
    redirect,
    reset,
    reset_mid_body,
    respond,
    stall_body,
    truncate,
)
from tests.peer import Peer, acquaint
from workers import JobState, WorkerEvent, WorkerEventKind

DEADLINE = timedelta(milliseconds=250)

REFUSALS = {status: respond(status) for status in (300, 400, 403, 404, 409, 410, 413, 429, 500, 502, 503)}
BROKEN: dict[str, tuple[Behaviour, str]] = {
    "reset": (reset(), "CONN_RESET"),
    "close": (close(), "UNKNOWN"),
    "reset-mid": (reset_mid_body(), "CONN_RESET"),
    "truncate": (truncate(), "CONN_RESET"),
    "bad-chunk": (bad_chunk(), "UNKNOWN"),
    "garbage": (garbage(), "UNKNOWN"),
}
SLOW: dict[str, Behaviour] = {
    "hang": hang(),
    "slow": stall_body(),
    "drip-headers": drip_headers(),
    "drip": drip_body(),
}


@pytest.fixture
async def hasty(federation: Federation, peer: Peer) -> AsyncIterator[Site]:
    """A site whose delivery deadline is short."""
    await acquaint(federation, peer)
    async with Site(federation, timeout=DEADLINE) as running:
        yield running


def failing(site: Site) -> list[WorkerEvent]:
    """The attempts so far that failed and are tried again."""
    return [event for event in site.events if event.kind is WorkerEventKind.FAILING]


def held(peer: Peer) -> tuple[asyncio.Event, Behaviour]:
    """An honest answer that waits for the event: a success at once would heal the server before anybody looked."""
    looked = asyncio.Event()

    async def behave(request: Received, exchange: Exchange) -> None:
        await looked.wait()
        await peer.server.default(request, exchange)

    return looked, behave


@pytest.mark.parametrize("status", [410, 429, 500])
async def test_a_refusal_is_tried_again(site: Site, peer: Peer, status: int) -> None:
    """Two refusals, then the delivery completes, and the log has all three attempts."""
    peer.server.upcoming += [respond(status), respond(status)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 3, None)
    assert [attempt.outcome.value for attempt in fate.log] == ["retryable", "retryable", "delivered"]
    assert [attempt.attempt for attempt in fate.log] == [1, 2, 3]
    assert [attempt.http_status for attempt in fate.log] == [status, status, 200]
    assert fate.codes == [f"HTTP_{status}", f"HTTP_{status}", None]
    assert len(peer.applied) == 1


@pytest.mark.parametrize("status", REFUSALS)
async def test_no_status_is_permanent(site: Site, peer: Peer, status: int) -> None:
    """Whatever the status, the delivery waits for another attempt; the server stays healthy: it answered."""
    peer.server.upcoming += [REFUSALS[status]]
    delivery = await site.owe_post(peer)
    site.start()

    await site.until(lambda: failing(site))

    (event,) = failing(site)
    assert str(event.error) == f"the server answered {status}"
    assert await site.first_probe(peer.url) is None
    assert (await site.fate(delivery)).log[0].error_code == f"HTTP_{status}"


async def test_attempts_run_out(site: Site, peer: Peer) -> None:
    """Five attempts, with doubling pauses, then the job has failed and its row tells why."""
    peer.server.default = respond(500)

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 5)
    assert fate.reason == "the server answered 500"
    assert fate.row is not None
    assert (fate.row.attempts, fate.row.outcome, fate.row.last_error) == (5, "retryable", "the server answered 500")
    assert fate.row.settled_at is not None
    assert fate.row.last_attempted_at is not None
    assert fate.row.settled_at >= fate.row.last_attempted_at
    assert fate.codes == ["HTTP_500"] * 5
    assert [event.delay for event in failing(site)] == [timedelta(milliseconds=5 * 2**n) for n in range(4)]
    assert len(peer.deliveries) == 5


async def test_the_row_is_open_between_attempts(site: Site, peer: Peer) -> None:
    """After a failed attempt that is not the last, the row counts it and is not settled."""
    peer.server.upcoming += [respond(500, {}), respond(503, {"Retry-After": "60"})]
    delivery = await site.owe_post(peer)
    site.start()

    await site.until(lambda: len(failing(site)) == 2)

    fate = await site.fate(delivery)
    assert fate.row is not None
    assert (fate.row.attempts, fate.row.settled_at, fate.row.outcome, fate.row.last_error) == (2, None, None, None)
    assert fate.state in (JobState.FAILING, JobState.SCHEDULED)


def _in(seconds: int) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("status", "headers", "at_least", "at_most"),
    [
        (429, {"Retry-After": "7"}, 7, 7),
        (503, {"Retry-After": "7"}, 7, 7),
        (429, {"X-Retry-After": "9"}, 9, 9),
        (429, {"Retry-After": "0"}, 1, 1),
        (429, {"Retry-After": "999999999999"}, 3600, 3600),
        (429, {"Retry-After": "@date"}, 25, 30),
        (429, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 1, 1),
        (429, {"Retry-After": "soon", "X-Retry-After": "3"}, 3, 3),
        (429, {"Retry-After": "-5"}, 0.005, 0.005),
        (429, {"Retry-After": "1e3"}, 0.005, 0.005),
        (429, {"Retry-After": ""}, 0.005, 0.005),
        (500, {"Retry-After": "7"}, 0.005, 0.005),
    ],
)
async def test_a_server_may_lengthen_the_pause(
    site: Site, peer: Peer, status: int, headers: dict[str, str], at_least: float, at_most: float
) -> None:
    """`Retry-After` of a 429 or 503 lengthens the pause within a second and an hour; junk and other statuses do not."""
    headers = {name: _in(30) if value == "@date" else value for name, value in headers.items()}
    peer.server.upcoming += [respond(status, headers)]
    delivery = await site.owe_post(peer)
    site.start()

    await site.until(lambda: failing(site))

    (pause,) = [event.delay for event in failing(site)]
    assert pause is not None
    assert at_least <= pause.total_seconds() <= at_most
    if at_least >= 1:
        assert (await site.fate(delivery)).job.attempt == 1


async def test_a_short_request_to_wait_does_not_shorten_the_pause(make_settings: MakeSettings, peer: Peer) -> None:
    """The back-off is the least there is."""
    federation = Federation(make_settings(federation_delivery_backoff="30s"))
    await acquaint(federation, peer)
    peer.server.upcoming += [respond(429, {"Retry-After": "2"})]
    async with Site(federation) as site:
        await site.owe_post(peer)
        site.start()
        await site.until(lambda: failing(site))
    await federation.close()

    assert [event.delay for event in failing(site)] == [timedelta(seconds=30)]


async def test_a_redirect_is_not_followed(site: Site, peer: Peer) -> None:
    """A redirect is a refusal like any other; nothing ever reaches the place it points to."""
    async with MisbehavingServer() as trap:
        peer.server.upcoming += [redirect(f"{trap.url}/trap", status) for status in (301, 302, 307, 308)]

        fate = await site.outcome(await site.owe_post(peer))

    assert trap.hits == 0
    assert (fate.state, fate.job.attempt) == (JobState.COMPLETED, 5)
    assert fate.codes == ["HTTP_301", "HTTP_302", "HTTP_307", "HTTP_308", None]


@pytest.mark.parametrize("kind", SLOW)
async def test_no_exchange_outlasts_the_deadline(hasty: Site, peer: Peer, kind: str) -> None:
    """Silence before or within the answer ends at the deadline, is tried again, and leaves the server unhealthy."""
    looked, next_attempt = held(peer)
    peer.server.upcoming += [SLOW[kind], next_attempt]
    delivery = await hasty.owe_post(peer)
    started = time.monotonic()
    hasty.start()
    await hasty.until(lambda: failing(hasty))

    assert time.monotonic() - started < 2
    server = await hasty.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason) == (False, "TIMEOUT")
    assert await hasty.first_probe(peer.url) is not None
    looked.set()
    fate = await hasty.outcome(delivery)
    assert fate.row is None
    assert (fate.state, fate.codes[0], fate.codes[-1]) == (JobState.COMPLETED, "TIMEOUT", None)
    assert DEADLINE.total_seconds() * 1000 <= fate.log[0].duration_ms < 2000
    assert (fate.log[0].http_status, fate.log[0].response_bytes) == (None, None)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_cap_is_permanent(site: Site, peer: Peer, announced: bool) -> None:
    """An endless answer is cut off at 1 MiB and cannot be an acknowledgment; the row is kept."""
    peer.server.upcoming += [huge_body(announced)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 1, ["BODY_TOO_LARGE"])
    assert fate.row is not None
    assert (fate.row.outcome, fate.row.last_error, fate.row.attempts) == ("permanent", fate.reason, 1)
    assert "1048576" in fate.reason


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_connection_is_tried_again(site: Site, peer: Peer, kind: str) -> None:
    """The server is unhealthy with the code, a probe of the fixed id is scheduled, and the next attempt heals it."""
    behaviour, code = BROKEN[kind]
    looked, next_attempt = held(peer)
    peer.server.upcoming += [behaviour, next_attempt]
    delivery = await site.owe_post(peer)
    site.start()
    await site.until(lambda: failing(site))

    server = await site.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason, server.health_check_attempts) == (False, code, 0)
    probe = await site.first_probe(peer.url)
    assert probe is not None
    assert (probe.state, probe.name) == (JobState.SCHEDULED, "health-check")

    looked.set()
    fate = await site.outcome(delivery)
    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.COMPLETED, 2, [code, None])
    server = await site.server(peer.url)
    assert server is not None
    assert (server.is_healthy, server.unhealthy_reason) == (True, None)


async def test_a_refused_connection_is_tried_again(site: Site, peer: Peer) -> None:
    """A server that is down costs all attempts; its row is kept and says so."""
    await peer.server.stop()

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 5, ["CONN_REFUSED"] * 5)
    assert fate.row is not None
    assert (fate.row.attempts, fate.row.outcome) == (5, "retryable")
    assert "CONN_REFUSED" in (fate.row.last_error or "")
    server = await site.server(peer.url)
    assert server is not None
    assert server.unhealthy_reason == "CONN_REFUSED"


async def test_a_lost_acknowledgment_heals(hasty: Site, peer: Peer) -> None:
    """The peer applied the follow and went silent; the second attempt is its replay, and nothing happened twice."""
    peer.server.upcoming += [peer.after_applying(hang())]

    fate = await hasty.outcome(await hasty.owe_follow(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 2, None)
    assert (len(peer.applied), peer.replayed) == (1, 1)
    follow = await hasty.follow()
    assert follow is not None
    assert follow.accepted


async def test_a_job_without_its_row_is_delivered(site: Site, peer: Peer) -> None:
    """A crash after the row's end and before the job's runs the job again: it is delivered, and completes."""
    delivery = await site.owe_post(peer)
    await site.federation.ledger.gone(delivery)

    fate = await site.outcome(delivery)

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert len(peer.applied) == 1


async def test_a_repeated_delivery_answers_as_before(site: Site, peer: Peer) -> None:
    """The same job twice, as after a crash: both complete, the peer has applied it once."""
    data = job_data("row-1", peer.url, payload=post_payload("post-1"))
    await site.add_row("row-1", target_url=str(data["targetUrl"]), payload=str(data["payload"]))

    first, second = await site.owe_raw(data), await site.owe_raw(data)
    await site.ended(first, second)

    assert (await site.fate(first, row="row-1")).state is JobState.COMPLETED
    assert (await site.fate(second, row="row-1")).row is None
    assert (len(peer.applied), peer.replayed) == (1, 1)


async def test_database_trouble_is_tried_again(make_settings: MakeSettings, peer: Peer) -> None:
    """An attempt that cannot record itself sends nothing, and runs again once the database takes it."""
    federation = Federation(make_settings(federation_delivery_backoff="100ms"))
    await acquaint(federation, peer)
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
        async with federation.database.transaction() as session:
            await session.execute(text("ALTER TABLE delivery_jobs RENAME TO hidden"))
        site.start()
        await site.until(lambda: failing(site))
        assert peer.deliveries == []
        async with federation.database.transaction() as session:
            await session.execute(text("ALTER TABLE hidden RENAME TO delivery_jobs"))

        fate = await site.outcome(delivery)
    await federation.close()

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert (fate.log[0].error_code, fate.log[0].outcome) == ("DATABASE", AttemptOutcome.RETRYABLE)


async def test_an_attempt_that_crashes_last_settles_its_row(site: Site, peer: Peer) -> None:
    """Trouble of our own on the last attempt leaves a row that says so, like any other failure."""
    async with site.federation.database.transaction() as session:
        await session.execute(
            text(
                "CREATE TRIGGER refuse_attempts BEFORE UPDATE OF last_attempted_at ON delivery_jobs "
                "BEGIN SELECT RAISE(FAIL, 'the disk is full'); END"
            )
        )

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 5)
    assert fate.row is not None
    assert (fate.row.outcome, fate.row.attempts) == ("retryable", 0)
    assert fate.row.settled_at is not None
    assert peer.deliveries == []


async def test_an_unusable_registered_key_is_tried_again(federation: Federation, peer: Peer) -> None:
    """Key material can be repaired: the attempts run out, and the row says which key."""
    await federation.registry.register(
        url=peer.url, public_key=peer.keys.signing.public_text, encryption_public_key="AAAA"
    )
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 5, ["KEY_MATERIAL"] * 5)
    assert fate.row is not None
    assert peer.url in (fate.row.last_error or "")
    assert peer.deliveries == []
