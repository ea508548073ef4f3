"""What an answer's status means: tried again, later if the server asks for it, and never followed elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from federation.app import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import (
    MisbehavingServer,
    redirect,
    respond,
)
from tests.peer import Peer, acquaint
from workers import JobState

pytestmark = [pytest.mark.usefixtures("queue_settings"), pytest.mark.spread("queue_settings")]

REFUSALS = {status: respond(status) for status in (300, 400, 403, 404, 409, 410, 413, 429, 500, 502, 503)}


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

    await site.until(lambda: site.failing)

    (event,) = site.failing
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
    assert [event.delay for event in site.failing] == [timedelta(milliseconds=5 * 2**n) for n in range(4)]
    assert len(peer.deliveries) == 5


async def test_the_row_is_open_between_attempts(site: Site, peer: Peer) -> None:
    """After a failed attempt that is not the last, the row counts it and is not settled."""
    peer.server.upcoming += [respond(500, {}), respond(503, {"Retry-After": "60"})]
    delivery = await site.owe_post(peer)
    site.start()

    await site.until(lambda: len(site.failing) == 2)

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

    await site.until(lambda: site.failing)

    (pause,) = [event.delay for event in site.failing]
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
        await site.until(lambda: site.failing)
    await federation.close()

    assert [event.delay for event in site.failing] == [timedelta(seconds=30)]


async def test_a_redirect_is_not_followed(site: Site, peer: Peer) -> None:
    """A redirect is a refusal like any other; nothing ever reaches the place it points to."""
    async with MisbehavingServer() as trap:
        peer.server.upcoming += [redirect(f"{trap.url}/trap", status) for status in (301, 302, 307, 308)]

        fate = await site.outcome(await site.owe_post(peer))

    assert trap.hits == 0
    assert (fate.state, fate.job.attempt) == (JobState.COMPLETED, 5)
    assert fate.codes == ["HTTP_301", "HTTP_302", "HTTP_307", "HTTP_308", None]
