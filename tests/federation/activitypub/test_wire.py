"""What becomes of an activity by each answer: its row, the link, the inbox, the log, and what an operator is told."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_der_private_key

from db import AttemptNote, AttemptOutcome, DeliveryState, HoldReason, LinkState
from federation.activitypub.signatures import SignatureKind, verify
from federation.base.settings.settings import Settings
from tests.federation.activitypub.scene import ATTEMPTS, INBOX, Scene, kind_of, private_key, scene, takes
from tests.federation.conftest import MakeSettings
from tests.misbehaving import close, respond

CAVAGE, RFC9421 = SignatureKind.CAVAGE, SignatureKind.RFC9421
FAILED, HELD = DeliveryState.FAILED, DeliveryState.HELD
PAGE = b"<!doctype html><title>for sale</title>"


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(federation_delivery_attempts=ATTEMPTS)


@pytest.fixture
async def stage(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Scene]:
    async with scene(settings, ssl_context) as found:
        yield found


async def test_an_activity_is_posted_as_receivers_want_it(stage: Scene) -> None:
    """Its bytes as they are, signed in the actor's name, by a program that says whose it is."""
    stage.peer.default = respond(202, body=b"")
    text = stage.activity().replace('"object"', '  "object"')
    fate = await stage.fate(await stage.owe(payload=text))

    assert (fate.row, fate.codes) == (None, [None])
    (attempt,) = fate.log
    assert (attempt.method, attempt.http_status, attempt.request_bytes) == ("Create", 202, len(text))
    (request,) = stage.peer.requests
    assert (request.method, request.path, request.body) == ("POST", INBOX, text.encode())
    assert request.headers["content-type"] == request.headers["accept"] == "application/activity+json"
    assert request.headers["user-agent"].startswith("federation-delivery/")
    assert request.headers["user-agent"].endswith(" (+https://a.example)")
    key = load_der_private_key(private_key(), password=None)
    assert isinstance(key, rsa.RSAPrivateKey)
    signed_by = verify(
        method="POST",
        url=stage.peer.url + INBOX,
        headers=request.headers,
        body=request.body,
        public=key.public_key(),
        now=stage.clock.now(),
        window=timedelta(minutes=1),
    )
    assert signed_by == f"{stage.actor}#main-key"
    assert (await stage.link()).acknowledged
    assert await stage.inbox() is None
    assert "Deliveries to it are sent." in await stage.why()


@pytest.mark.parametrize("status", [200, 201, 202, 204, 409])
async def test_what_is_taken_is_over(stage: Scene, status: int) -> None:
    """A 409 says that it is there already."""
    stage.peer.default = respond(status, body=b"")
    fate = await stage.fate()
    assert (fate.row, fate.codes) == (None, [None])
    assert (await stage.link()).acknowledged


@pytest.mark.parametrize("status", [403, 405, 406, 413, 415, 418, 422, 451, 501])
async def test_a_refusal_fails_and_is_no_evidence_against_the_server(stage: Scene, status: int) -> None:
    stage.peer.default = respond(status, body=b'{"error":"we do not like you\\u0007"}')
    fate = await stage.fate()

    assert fate.row is not None
    code = f"HTTP_{status}"
    assert (fate.row.state, fate.row.error_code, fate.codes) == (FAILED, code, [code] * ATTEMPTS)
    assert fate.row.last_error == f"the server answered {status}: we do not like you"
    assert [attempt.remote_code for attempt in fate.log] == ["we do not like you"] * ATTEMPTS
    assert fate.log[-1].note is AttemptNote.GIVEN_UP
    link = await stage.link()
    assert (link.state, link.evidence) == (LinkState.UP, 0)
    assert stage.peer.hits == ATTEMPTS
    assert await stage.inbox() is None
    assert f"1 {code}" in await stage.why()


async def test_a_400_by_both_kinds_of_signature_is_a_refusal(stage: Scene) -> None:
    """An attempt counts once, whatever it knocked."""
    stage.peer.default = respond(400)
    fate = await stage.fate()

    assert fate.row is not None
    assert (fate.row.state, fate.codes) == (FAILED, ["HTTP_400"] * ATTEMPTS)
    assert [kind_of(request) for request in stage.peer.requests] == [CAVAGE, RFC9421] * ATTEMPTS
    link = await stage.link()
    assert (link.state, link.evidence, link.signature) == (LinkState.UP, 0, None)


async def test_what_lemmy_has_already_is_over(stage: Scene) -> None:
    """It took it by an answer that was lost: by one knock, and for the record as others say it."""
    stage.peer.default = respond(400, body=b'{"error":"unknown","message":""}')
    fate = await stage.fate()
    assert (fate.row, fate.codes, stage.peer.hits) == (None, [None], 1)
    assert [attempt.http_status for attempt in fate.log] == [409]


@pytest.mark.parametrize("status", [408, 425, 500, 502, 504, 599, 301, 302, 303, 304])
async def test_a_server_that_could_not_judge_gets_it_later(stage: Scene, status: int) -> None:
    stage.peer.default = respond(status, {"Location": "https://c.example/inbox"}, b"")
    fate = await stage.fate()

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (HELD, HoldReason.SERVER)
    assert fate.codes == [f"HTTP_{status}"] * ATTEMPTS
    link = await stage.link()
    assert (link.state, link.reason) == (LinkState.DOWN, f"HTTP_{status}")
    assert link.moved_to == ("https://c.example" if status in (301, 302, 303) else None)
    assert stage.peer.hits == ATTEMPTS
    told = await stage.why()
    assert "It is down" in told
    assert ("https://c.example" in told) == (link.moved_to is not None)


async def test_a_server_that_is_not_there_gets_it_later(stage: Scene) -> None:
    stage.peer.default = close()
    fate = await stage.fate()
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (HELD, HoldReason.SERVER)
    assert [attempt.http_status for attempt in fate.log] == [None] * ATTEMPTS
    assert (await stage.link()).state is LinkState.DOWN


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_asks_for_a_rest_gets_it(stage: Scene, status: int) -> None:
    stage.peer.default = respond(status, {"Retry-After": "600"}, b"")
    fate = await stage.fate()

    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.codes) == (HELD, HoldReason.REST, [f"HTTP_{status}"])
    assert fate.row.next_attempt_at == stage.clock.now() + timedelta(minutes=10)
    assert (await stage.link()).rest_until == fate.row.next_attempt_at
    assert stage.peer.hits == 1
    assert "asked for a pause" in await stage.why()


async def test_an_inbox_that_is_gone_takes_all_that_is_owed_to_it_along(stage: Scene) -> None:
    """At once, and nothing else of its server's."""
    stage.peer.routes[INBOX] = respond(410)
    stage.peer.routes["/users/carol/inbox"] = respond(202)
    await stage.links.rests(stage.peer.url, timedelta(hours=1))
    first, second = await stage.owe(), await stage.owe()
    other = await stage.owe(f"{stage.peer.url}/users/carol/inbox")
    await stage.fate(second)
    await stage.links.release(stage.peer.url)
    stage.clock.advance(timedelta(hours=2))
    fate = await stage.fate()

    assert fate.row is not None
    assert (fate.row.state, fate.row.error_code) == (FAILED, "INBOX_GONE")
    (attempt,) = fate.log
    assert (attempt.outcome, attempt.error_code, attempt.http_status, attempt.note) == (
        AttemptOutcome.PERMANENT,
        "INBOX_GONE",
        410,
        AttemptNote.GIVEN_UP,
    )
    rows = {row.id: row for row in await stage.rows()}
    assert {rows[each].error_code for each in (first, second)} == {"INBOX_GONE"}
    assert {rows[each].state for each in (first, second)} == {FAILED}
    assert rows[other].state is not FAILED
    inbox = await stage.inbox()
    assert inbox is not None
    assert (inbox.gone_at, inbox.gone_code, inbox.server_url) == (stage.clock.now(), 410, stage.peer.url)
    link = await stage.link()
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    assert "3 INBOX_GONE" in await stage.why()


async def test_an_inbox_that_is_not_found_is_tried_again_alone(stage: Scene) -> None:
    """After 10 minutes, an hour, and six, and then it has failed. Its server is not blamed."""
    stage.peer.default = respond(404)
    delivery = await stage.owe()
    fate = await stage.fate(delivery)
    noted = stage.clock.now()
    for series, wait in enumerate((timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6)), 1):
        assert fate.row is not None
        assert (fate.row.state, fate.row.held_reason) == (HELD, HoldReason.ALONE)
        assert fate.row.next_attempt_at == stage.clock.now() + wait
        fate = await stage.later(delivery, series, wait)

    assert fate.row is not None
    assert (fate.row.state, fate.codes) == (FAILED, ["HTTP_404"] * ATTEMPTS * 4)
    link = await stage.link()
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    inbox = await stage.inbox()
    assert inbox is not None
    assert (inbox.missing_since, inbox.gone_at) == (noted, None)
    assert inbox.missing_last == stage.clock.now()
    assert "1 HTTP_404" in await stage.why()


async def test_an_inbox_that_takes_an_activity_is_as_if_nothing_had_been(stage: Scene) -> None:
    stage.peer.default = respond(404)
    await stage.fate()
    stage.peer.default = respond(202)
    await stage.fate()
    assert await stage.inbox() is None


async def test_an_inbox_that_was_not_found_for_a_week_is_gone(stage: Scene) -> None:
    stage.peer.default = respond(404)
    await stage.fate()
    stage.clock.advance(timedelta(days=6))
    fate = await stage.fate()

    assert fate.row is not None
    assert fate.row.state is HELD  # it found out, and goes its own way
    inbox = await stage.inbox()
    assert inbox is not None
    assert (inbox.gone_at, inbox.gone_code) == (stage.clock.now(), 404)
    assert [row.error_code for row in await stage.rows() if row.state is FAILED] == ["INBOX_GONE"]


async def test_a_page_in_place_of_an_acknowledgment_is_somebody_elses(stage: Scene) -> None:
    """Where the first one was none: a parked domain answers 200 to everything."""
    stage.peer.default = respond(202, body=b"")
    assert (await stage.fate()).row is None
    stage.peer.default = respond(200, body=PAGE)
    fate = await stage.fate()

    assert fate.row is not None
    assert set(fate.codes) == {"FOREIGN_ANSWER"}
    assert fate.row.state is HELD
    assert not (await stage.link()).first_answer_was_page


async def test_a_server_that_always_answered_by_pages_may(stage: Scene) -> None:
    """Others than the first page are no news, and cost no write."""
    stage.peer.default = respond(200, body=PAGE)
    fates = [await stage.fate() for _ in range(2)]
    assert [fate.codes for fate in fates] == [[None], [None]]
    assert (await stage.link()).first_answer_was_page


async def test_a_server_that_had_the_first_activity_already_may_answer_by_pages(stage: Scene) -> None:
    """How it answered when it took that one was lost."""
    stage.peer.default = respond(409)
    assert (await stage.fate()).codes == [None]
    stage.peer.default = respond(200, body=PAGE)
    assert (await stage.fate()).codes == [None]


async def test_an_actor_without_a_key_is_our_fault(stage: Scene) -> None:
    """Nothing is sent; it waits, for the key may be made or set."""
    fate = await stage.fate(await stage.owe(payload=stage.activity().replace("alice", "nobody")))
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.codes) == (HELD, HoldReason.OURS, ["NO_OWN_KEYS"])
    assert stage.peer.hits == 0


async def test_a_text_that_is_no_activity_is_refused_at_the_enqueue(stage: Scene) -> None:
    with pytest.raises(ValueError, match="actor"):
        await stage.owe(payload='{"id":"https://a.example/1","type":"Create"}')


async def test_a_401_while_our_actor_is_not_to_be_seen_is_our_fault(stage: Scene) -> None:
    """It is held until that ends, however long it takes, and arrives."""
    stage.own.default = respond(404)
    stage.peer.default = respond(401)
    delivery = await stage.owe()
    fate = await stage.fate(delivery)
    for series, minutes in enumerate((1, 2, 4, 8, 16), 1):
        assert fate.row is not None
        assert (fate.row.state, fate.row.held_reason) == (HELD, HoldReason.OURS)
        assert fate.row.error_code == "OWN_ACTOR_UNREACHABLE"
        assert fate.row.next_attempt_at == stage.clock.now() + timedelta(minutes=minutes)
        fate = await stage.later(delivery, series, timedelta(minutes=minutes))
    link = await stage.link()
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    assert stage.own.hits == 1, "one look in ten minutes"
    assert set(fate.codes) == {"HTTP_401", "OWN_ACTOR_UNREACHABLE"}

    stage.shows_actor()
    stage.peer.default = respond(202)
    assert (await stage.later(delivery, 6, timedelta(minutes=32))).row is None


async def test_a_401_although_our_actor_is_to_be_seen_is_a_refusal_in_the_end(stage: Scene) -> None:
    """Receivers remember for a while that they could not fetch a key, so it is tried after 15 min, 2 h and 12 h."""
    stage.shows_actor()
    stage.peer.default = respond(401)
    delivery = await stage.owe()
    fate = await stage.fate(delivery)
    for series, wait in enumerate((timedelta(minutes=15), timedelta(hours=2), timedelta(hours=12)), 1):
        assert fate.row is not None
        assert (fate.row.state, fate.row.held_reason, fate.row.error_code) == (HELD, HoldReason.OURS, "HTTP_401")
        assert fate.row.next_attempt_at == stage.clock.now() + wait
        fate = await stage.later(delivery, series, wait)
    assert fate.row is not None
    assert (fate.row.state, fate.codes) == (FAILED, ["HTTP_401"] * ATTEMPTS * 4)
    assert [kind_of(request) for request in stage.peer.requests] == [CAVAGE, RFC9421] * ATTEMPTS * 4
    link = await stage.link()
    assert (link.state, link.rejections) == (LinkState.UP, 0)


@pytest.mark.parametrize(
    "changes", [{"id": "https://a.example/other"}, {"publicKeyPem": "another"}, {"publicKeyPem": None}]
)
async def test_an_actor_that_shows_another_key_is_not_to_be_seen(stage: Scene, changes: dict[str, object]) -> None:
    stage.shows_actor(**changes)
    stage.peer.default = respond(401)
    fate = await stage.fate()
    assert fate.row is not None
    assert fate.row.error_code == "OWN_ACTOR_UNREACHABLE"


async def test_a_delivery_after_an_outage_goes_ahead_of_the_others(stage: Scene) -> None:
    """The canary is the probe: nothing else is asked of the server, and by it the others are released."""
    stage.peer.default = respond(502)
    ids = [await stage.owe() for _ in range(3)]
    for each in ids:
        await stage.fate(each)
    assert (await stage.link()).state is LinkState.DOWN
    hits = stage.peer.hits
    stage.clock.advance(timedelta(minutes=1))
    await stage.federation.link_probes.tick()
    canary = next(row for row in await stage.rows() if row.canary_at is not None)
    await stage.site.ended(f"{canary.id}.1")
    assert stage.peer.hits == hits + 1

    stage.peer.default = takes(CAVAGE)
    stage.clock.advance(timedelta(minutes=10))
    await stage.federation.link_probes.tick()
    ready = next(row for row in await stage.rows() if row.state is DeliveryState.READY)
    await stage.site.ended(f"{ready.id}.{ready.series}")
    link = await stage.link()
    assert (link.state, link.release_at) == (LinkState.UP, stage.clock.now())
    assert stage.peer.hits == hits + 2
    assert {request.method for request in stage.peer.requests} == {"POST"}


async def test_both_databases_keep_what_inboxes_answer(
    make_settings: MakeSettings, database_url: str, ssl_context: ssl.SSLContext
) -> None:
    """An inbox that was missing takes one, is gone with all that is owed to it, and is remembered."""
    settings = make_settings(database_url=database_url, federation_delivery_attempts=ATTEMPTS)
    async with scene(settings, ssl_context) as stage:
        stage.peer.upcoming += [*[respond(404)] * ATTEMPTS, respond(202), respond(410)]
        first = await stage.owe()
        assert (await stage.fate(first)).codes == ["HTTP_404"] * ATTEMPTS
        assert (await stage.fate()).row is None
        assert await stage.inbox() is None
        assert (await stage.fate()).codes == ["INBOX_GONE"]
        assert {row.error_code for row in await stage.rows()} == {"INBOX_GONE"}
        assert {row.state for row in await stage.rows()} == {FAILED}
        inbox = await stage.inbox()
        assert inbox is not None
        assert (inbox.gone_code, inbox.is_shared) == (410, False)
