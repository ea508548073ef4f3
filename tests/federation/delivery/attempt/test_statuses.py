"""What an answer's status means: tried again, held until the server is back or as long as it asks, never followed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from structlog.testing import capture_logs

from db import AttemptNote, DeliveryState, HoldReason, LinkState
from federation.delivery.errors import RetryableFailure
from federation.runtime.composition import Federation
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.delivery.harness import Site
from tests.misbehaving import (
    MisbehavingServer,
    redirect,
    respond,
)
from tests.peer import Peer, acquaint
from workers import JobState

pytestmark = [pytest.mark.usefixtures("queue_settings"), pytest.mark.spread("queue_settings")]

REFUSALS = {status: respond(status) for status in (300, 400, 403, 404, 409, 410, 413, 500, 502, 503)}


@pytest.mark.parametrize("status", [408, 410, 500])
async def test_a_refusal_is_tried_again(site: Site, peer: Peer, status: int) -> None:
    """Two refusals, then the delivery completes, and the log has all three attempts."""
    peer.server.upcoming += [respond(status), respond(status)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 3, None)
    assert [attempt.outcome.value for attempt in fate.log] == ["retryable", "retryable", "delivered"]
    assert [attempt.attempt for attempt in fate.log] == [1, 2, 3]
    assert [attempt.http_status for attempt in fate.log] == [status, status, 200]
    assert {attempt.note for attempt in fate.log} == {None}
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
    """Five attempts, with doubling pauses, then the delivery is held without a job, and its server's link is down."""
    peer.server.default = respond(500)

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.state is None
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert (fate.row.attempts, fate.row.error_code, fate.row.last_error) == (5, "HTTP_500", "the server answered 500")
    assert (fate.row.settled_at, fate.row.outcome, fate.row.sending) == (None, None, None)
    assert fate.row.last_attempted_at is not None
    assert fate.row.held_at is not None
    assert fate.row.held_at >= fate.row.last_attempted_at
    assert fate.codes == ["HTTP_500"] * 5
    assert {attempt.note for attempt in fate.log} == {None}  # others follow once the server is back
    assert [event.delay for event in site.failing] == [timedelta(milliseconds=5 * 2**n) for n in range(4)]
    assert len(peer.deliveries) == 5
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.reason) == (LinkState.DOWN, "HTTP_500")
    server = await site.server(peer.url)
    assert server is not None
    assert not server.is_healthy


async def test_a_server_that_refuses_to_the_last_attempt_fails_the_delivery(site: Site, peer: Peer) -> None:
    """It could judge: the row is kept as failed, its last attempt says so, and the link has one refusal on record."""
    peer.server.default = respond(410)

    with capture_logs() as lines:
        fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 5, ["HTTP_410"] * 5)
    assert fate.reason == "the server answered 410"
    assert fate.row is not None
    assert (fate.row.state, fate.row.outcome, fate.row.last_error) == (DeliveryState.FAILED, "retryable", fate.reason)
    assert fate.row.settled_at is not None
    assert [attempt.note for attempt in fate.log] == [None] * 4 + [AttemptNote.GIVEN_UP]
    assert [line["note"] for line in lines if line["event"] == "delivery_attempt"] == [None] * 4 + ["given_up"]
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.rejections) == (LinkState.UP, 1)


@pytest.mark.parametrize("status", [413, 414, 431])
async def test_what_is_too_large_for_a_proxy_is_this_deliverys_affair(site: Site, peer: Peer, status: int) -> None:
    """It fails by itself, though a page says so and the server took others: nothing else is held for it."""
    assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED
    served, peer.server.default = peer.server.default, respond(status, body=b"<html>too large</html>")

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (JobState.FAILED, [f"HTTP_{status}"] * 5)
    assert (await site.federation.links.find(peer.url)).state is LinkState.UP
    peer.server.default = served
    assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED


@pytest.mark.parametrize("status", [401, 403, 404, 405, 410])
@pytest.mark.parametrize("acknowledged", [False, True], ids=["first", "acknowledged-before"])
async def test_a_page_of_a_proxy_is_no_refusal(site: Site, peer: Peer, acknowledged: bool, status: int) -> None:
    """A 4xx without JSON, also from a server that has never acknowledged anything: the delivery is held, not failed."""
    if acknowledged:
        assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED
    peer.server.default = respond(status, body=b"<html>gone fishing</html>")

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (None, [f"HTTP_{status}"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert (await site.federation.links.find(peer.url)).state is LinkState.DOWN


async def test_the_row_is_ready_between_attempts(make_settings: MakeSettings, peer: Peer) -> None:
    """After a failed attempt that is not the last, the row counts it, says why, and waits for the same job."""
    federation = Federation(make_settings(federation_delivery_backoff="30s"))
    await acquaint(federation, peer)
    peer.server.upcoming += [respond(500, {})]
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
        site.start()
        await site.until(lambda: site.failing)
        fate = await site.fate(delivery)
    await federation.close()

    assert fate.row is not None
    assert (fate.row.state, fate.row.job_id, fate.row.series) == (DeliveryState.READY, delivery, 0)
    assert (fate.row.attempts, fate.row.error_code, fate.row.sending) == (1, "HTTP_500", None)
    assert (fate.row.settled_at, fate.row.outcome) == (None, None)
    assert fate.state in (JobState.FAILING, JobState.SCHEDULED)


def _in(seconds: int) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("status", "headers", "at_least", "at_most"),
    [
        (429, {"Retry-After": "7"}, 7, 7),
        (503, {"Retry-After": "7"}, 7, 7),
        (429, {"X-Retry-After": "9"}, 9, 9),
        (503, {"X-Retry-After": "9"}, 9, 9),
        (429, {"Retry-After": "0"}, 1, 1),
        (429, {"Retry-After": "999999999999"}, 86_400, 86_400),
        (429, {"Retry-After": "@date"}, 25, 30),
        (429, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 1, 1),
        (429, {"Retry-After": "soon", "X-Retry-After": "3"}, 3, 3),
        (429, {"Retry-After": "-5"}, 60, 60),
        (429, {"Retry-After": "1e3"}, 60, 60),
        (429, {"Retry-After": ""}, 60, 60),
        (429, {}, 60, 60),
    ],
)
async def test_a_server_that_asks_for_a_pause_rests(
    site: Site, peer: Peer, status: int, headers: dict[str, str], at_least: float, at_most: float
) -> None:
    """A 429, or a 503 that says how long, holds the delivery, for a second to a day, a minute if it says nothing."""
    headers = {name: _in(30) if value == "@date" else value for name, value in headers.items()}
    peer.server.upcoming += [respond(status, headers)]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (None, [f"HTTP_{status}"])
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.REST)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.evidence, link.rejections, link.rest_until) == (
        LinkState.UP,
        0,
        0,
        fate.row.next_attempt_at,
    )
    assert link.rest_until is not None
    assert fate.row.last_attempted_at is not None
    pause = (link.rest_until - fate.row.last_attempted_at).total_seconds()
    assert at_least - 1 <= pause <= at_most + 5  # the attempt began a moment before the answer


async def test_a_resting_server_is_left_alone(site: Site, peer: Peer) -> None:
    """What is owed to it meanwhile is held at its first look, without an attempt, and so without one counted."""
    peer.server.upcoming += [respond(429, {"Retry-After": "3600"})]
    await site.outcome(await site.owe_post(peer))

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.log) == (None, [])
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.REST, 0)
    assert len(peer.deliveries) == 1


async def test_a_request_to_wait_with_another_status_means_nothing(site: Site, peer: Peer) -> None:
    """A 500 is tried again after the usual pause, whatever it asks."""
    peer.server.upcoming += [respond(500, {"Retry-After": "7"})]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.codes) == (JobState.COMPLETED, ["HTTP_500", None])
    assert [event.delay for event in site.failing] == [timedelta(milliseconds=5)]


async def test_a_redirect_is_not_followed(site: Site, peer: Peer) -> None:
    """A redirect is a refusal like any other; nothing ever reaches the place it points to."""
    async with MisbehavingServer() as trap:
        peer.server.upcoming += [redirect(f"{trap.url}/trap", status) for status in (301, 302, 307, 308)]

        fate = await site.outcome(await site.owe_post(peer))

    assert trap.hits == 0
    assert (fate.state, fate.job.attempt) == (JobState.COMPLETED, 5)
    assert fate.codes == ["HTTP_301", "HTTP_302", "HTTP_307", "HTTP_308", None]
    assert [str(event.error) for event in site.failing] == [
        f"the server answered {status} and names {trap.url}" for status in (301, 302, 307, 308)
    ]
    assert {event.error.moved_to for event in site.failing if isinstance(event.error, RetryableFailure)} == {trap.url}


@pytest.mark.parametrize(
    "location",
    [
        "/other/posts",
        OWN_URL,
        "https://x@new.example",
        "javascript://new.example",
        "https://new.example/" + "a" * 60_000,
    ],
    ids=["path", "ours", "user", "script", "long"],
)
async def test_a_redirect_that_names_no_other_server_says_nothing_of_it(site: Site, peer: Peer, location: str) -> None:
    """In the row and the failure; a refused `Location` is not quoted anywhere."""
    peer.server.default = redirect(location, 308)

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.row is not None
    assert (fate.row.held_reason, fate.row.last_error) == (HoldReason.SERVER, "the server answered 308")
    assert {event.error.moved_to for event in site.failing if isinstance(event.error, RetryableFailure)} == {None}
