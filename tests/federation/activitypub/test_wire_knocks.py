"""How often a server is knocked at, by which kind of signature, and where its redirects and other answers may lead."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from db import DeliveryState, HoldReason, LinkState
from federation.activitypub import wire as module
from federation.activitypub.signatures import SignatureKind
from federation.admin.doctor import checks
from federation.admin.why import explain
from federation.base.settings.settings import Settings
from federation.http import connection
from tests.federation.activitypub.scene import INBOX, Scene, kind_of, scene, takes
from tests.federation.conftest import MakeSettings
from tests.misbehaving import (
    Behaviour,
    Exchange,
    MisbehavingServer,
    Received,
    close,
    drip_body,
    hang,
    huge_body,
    huge_headers,
    redirect,
    reset,
    reset_mid_body,
    respond,
    send_raw,
    stall_body,
    truncate,
)

CAVAGE, RFC9421 = SignatureKind.CAVAGE, SignatureKind.RFC9421
BOTH = (CAVAGE, RFC9421)


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(federation_delivery_attempts=1)


@pytest.fixture
async def stage(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Scene]:
    async with scene(settings, ssl_context) as found:
        yield found


def kinds(stage: Scene) -> list[SignatureKind]:
    """By which the peer was knocked at since this was asked last."""
    found = [kind_of(request) for request in stage.peer.requests]
    stage.peer.requests.clear()
    return found


@pytest.mark.parametrize("refusal", [400, 401])
@pytest.mark.parametrize(
    ("first_knock", "taken", "first", "further"),
    [
        (CAVAGE, (CAVAGE,), [CAVAGE], [CAVAGE]),
        (CAVAGE, (RFC9421,), [CAVAGE, RFC9421], [RFC9421]),
        (CAVAGE, BOTH, [CAVAGE], [CAVAGE]),
        (RFC9421, (CAVAGE,), [RFC9421, CAVAGE], [CAVAGE]),
        (RFC9421, (RFC9421,), [RFC9421], [RFC9421]),
    ],
)
async def test_what_got_through_is_the_first_knock_from_then_on(
    settings: Settings,
    ssl_context: ssl.SSLContext,
    first_knock: SignatureKind,
    taken: Sequence[SignatureKind],
    first: list[SignatureKind],
    further: list[SignatureKind],
    refusal: int,
) -> None:
    """One, two or one requests for the first activity, and one for each further, after a restart too."""
    async with scene(settings, ssl_context, first_knock=first_knock) as before:
        before.peer.default = takes(*taken, refusal=refusal)
        for expected in (first, further):
            assert (await before.fate()).row is None
            assert kinds(before) == expected
        link = await before.link()
        assert link.signature == (None if len(first) == 1 else taken[0])
        await before.site.stop()
        async with scene(settings, ssl_context, first_knock=first_knock, own=before.own, peer=before.peer) as after:
            assert (await after.fate()).row is None
            assert kinds(after) == further


@pytest.mark.parametrize("status", [202, 403, 404, 409, 410, 422, 429, 500, 503])
async def test_any_other_answer_is_one_request(stage: Scene, status: int) -> None:
    stage.peer.default = respond(status)
    await stage.fate()
    assert kinds(stage) == [CAVAGE]


async def test_a_server_that_forbids_what_it_cannot_read_is_knocked_at_again(
    settings: Settings, ssl_context: ssl.SSLContext
) -> None:
    """PeerTube does, for the newer kind; once it is known what it takes, a 403 is one."""
    async with scene(settings, ssl_context, first_knock=RFC9421) as stage:
        stage.peer.default = takes(CAVAGE, refusal=403)
        for expected in ([RFC9421, CAVAGE], [CAVAGE]):
            assert (await stage.fate()).row is None
            assert kinds(stage) == expected
        stage.peer.default = respond(403)
        await stage.fate()
        assert kinds(stage) == [CAVAGE]


async def test_the_log_tells_which_kind_got_through_and_how_many_were_tried(stage: Scene) -> None:
    """None got through where both were refused."""
    told = []
    for taken in ((CAVAGE,), (RFC9421,), ()):
        stage.peer.default = takes(*taken)
        with capture_logs() as logs:
            await stage.fate()
        (line,) = (entry for entry in logs if entry["event"] == "delivery_attempt")
        assert line["activity"].startswith(stage.actor)
        told.append((line.get("signature"), line["knocks"]))
    assert told == [("cavage", 1), ("rfc9421", 2), (None, 2)]


async def test_what_is_remembered_and_refused_is_knocked_the_other_way_once(stage: Scene) -> None:
    stage.peer.default = takes(RFC9421)
    await stage.fate()
    kinds(stage)
    stage.peer.default = takes(CAVAGE)
    assert (await stage.fate()).row is None
    assert kinds(stage) == [RFC9421, CAVAGE]
    assert (await stage.link()).signature == CAVAGE
    assert (await stage.fate()).row is None
    assert kinds(stage) == [CAVAGE]


async def test_a_bad_request_of_a_remembered_kind_is_a_bad_request(stage: Scene) -> None:
    stage.peer.default = takes(RFC9421)
    await stage.fate()
    kinds(stage)
    stage.peer.default = respond(400)
    fate = await stage.fate()
    assert (kinds(stage), fate.codes) == ([RFC9421], ["HTTP_400"])


async def test_a_server_that_is_busy_at_the_second_knock_is_busy(stage: Scene) -> None:
    """The signature is not what it minds. Nothing is remembered of it."""
    stage.peer.upcoming += [respond(401), respond(503)]
    fate = await stage.fate()
    assert (fate.codes, (await stage.link()).signature) == (["HTTP_503"], None)


async def test_both_knocks_share_one_deadline(stage: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one attempt. The answer to the first counts if there is none to the second."""
    monkeypatch.setattr(module, "DELIVERY_TIMEOUT", timedelta(seconds=0.4))
    stage.shows_actor()
    stage.peer.upcoming += [respond(401), hang()]
    fate = await stage.fate()
    assert fate.codes == ["HTTP_401"]
    assert fate.log[0].duration_ms < 5_000
    assert kinds(stage) == [CAVAGE, RFC9421]


@pytest.mark.parametrize("refusal", [400, 401])
@pytest.mark.parametrize("trouble", [close(), reset()], ids=["closed", "reset"])
async def test_a_second_knock_that_nobody_answers_says_nothing_against_the_server(
    stage: Scene, refusal: int, trouble: Behaviour
) -> None:
    """It has answered the first: its link stays up, and the log has that answer."""
    stage.shows_actor()
    stage.peer.upcoming.append(respond(refusal))
    stage.peer.default = trouble
    with capture_logs() as logs:
        fate = await stage.fate()
    assert (fate.codes, fate.log[0].http_status) == ([f"HTTP_{refusal}"], refusal)
    assert [entry["knocks"] for entry in logs if entry["event"] == "delivery_attempt"] == [2]
    link = await stage.link()
    assert (link.state, link.evidence, link.signature) == (LinkState.UP, 0, None)


async def refuse_and_stall(request: Received, exchange: Exchange) -> None:
    """The head of a 401, and silence."""
    await exchange.send_head(401, {"Content-Length": "100"})
    await asyncio.Event().wait()


async def test_a_server_that_took_all_the_time_for_the_first_is_not_knocked_at_again(
    stage: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one answer counts."""
    monkeypatch.setattr(module, "DELIVERY_TIMEOUT", timedelta(seconds=0.4))
    monkeypatch.setattr(connection, "BODY_PATIENCE", timedelta(seconds=0.5))
    stage.shows_actor()
    stage.peer.default = refuse_and_stall
    fate = await stage.fate()
    assert (fate.codes, kinds(stage)) == (["HTTP_401"], [CAVAGE])


@pytest.mark.parametrize(
    "challenge",
    ['sig1=("@method");created;keyid="x"', "(((((", "\t\t", "x" * 8_000, "sig1=", '"', "sig=?1;" * 500],
)
async def test_a_challenge_is_never_more_than_a_second_knock(stage: Scene, challenge: str) -> None:
    """Whatever a stranger writes there."""
    stage.shows_actor()
    stage.peer.default = respond(401, {"Accept-Signature": challenge})
    fate = await stage.fate()
    assert fate.codes == ["HTTP_401"]
    assert kinds(stage) == [CAVAGE, RFC9421]


async def test_redirects_to_itself_are_followed_and_signed_anew(stage: Scene) -> None:
    """The link and the inbox go by the URL that is owed to."""
    stage.peer.routes[INBOX] = redirect("/new/inbox?from=old", 308)
    stage.peer.routes["/new/inbox"] = redirect(f"{stage.peer.url}/newest/inbox")
    stage.peer.routes["/newest/inbox"] = respond(202)
    fate = await stage.fate()

    assert fate.row is None
    assert [request.path for request in stage.peer.requests] == [INBOX, "/new/inbox?from=old", "/newest/inbox"]
    assert {request.method for request in stage.peer.requests} == {"POST"}
    assert len({request.body for request in stage.peer.requests}) == 1
    assert len({request.headers["signature"] for request in stage.peer.requests}) == 3


async def test_redirects_in_a_circle_end(stage: Scene) -> None:
    stage.peer.default = redirect(INBOX)
    fate = await stage.fate()
    assert (fate.codes, stage.peer.hits) == (["HTTP_307"], 3)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_to_others_are_answers(stage: Scene, status: int) -> None:
    async with MisbehavingServer() as other:
        stage.peer.default = redirect(other.url + INBOX, status)
        fate = await stage.fate()
        assert (fate.codes, other.hits) == ([f"HTTP_{status}"], 0)
        assert (await stage.link()).moved_to == other.url
        assert other.url in await stage.why()


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2/inbox",
        "http://10.0.0.1/inbox",
        "http://169.254.169.254/latest/meta-data",
        "https://[::1]/inbox",
        "gopher://127.0.0.1/inbox",
        "\\\\127.0.0.1\\inbox",
        "",
    ],
)
async def test_redirects_to_private_places_lead_nowhere(stage: Scene, location: str) -> None:
    """Nothing is dialled, and the row is not lost over it."""
    stage.peer.default = redirect(location)
    fate = await stage.fate()
    assert fate.row is not None
    assert (fate.row.state, fate.codes, stage.peer.hits) == (DeliveryState.HELD, ["HTTP_307"], 1)


@pytest.mark.parametrize("inbox", ["http://10.0.0.1/inbox", "http://[::1]/inbox", "http://169.254.169.254/inbox"])
async def test_private_inboxes_are_never_dialled(stage: Scene, inbox: str) -> None:
    """Whoever put the row there."""
    origin = inbox.removesuffix("/inbox")
    stage.peer.port = 0
    outbox = stage.federation.outbox
    async with outbox.transaction() as session:
        delivery = await outbox.enqueue_delivery(session, "deliver-activity", inbox, origin, stage.activity())
    fate = await stage.fate(delivery)
    assert (fate.row, fate.codes) == (None, ["BLOCKED_URL"])


async def test_a_public_inbox_on_plain_http_needs_a_setting(stage: Scene) -> None:
    """It waits for that, as who owed it had the setting; operators are told which one it is."""
    outbox = stage.federation.outbox
    async with outbox.transaction() as session:
        delivery = await outbox.enqueue_delivery(
            session, "deliver-activity", "http://c.example/inbox", "http://c.example", stage.activity()
        )
    fate = await stage.fate(delivery)
    assert fate.codes == ["PLAIN_HTTP"]
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.OURS)
    assert fate.row.next_attempt_at == stage.clock.now() + timedelta(minutes=1)
    link = await stage.links.find("http://c.example")
    assert (link.state, link.evidence, link.rejections) == (LinkState.UP, 0, 0)
    told = "\n".join((await explain(stage.federation, "http://c.example")).sentences())
    found = await checks.backlog(stage.federation)
    assert (found.verdict, "1 delivery is to go to plain http" in found.found) == (checks.Verdict.WARNING, True)
    for each in (told, found.advice, fate.row.last_error or ""):
        assert "FEDERATION_ACTIVITYPUB_HTTP=1" in each


ANSWERS: dict[str, Behaviour] = {
    "endless": huge_body(),
    "announced as endless": huge_body(announced=True),
    "dripping": drip_body(),
    "stalled": stall_body(),
    "closed half-way": truncate(),
    "reset half-way": reset_mid_body(),
    "nonsense that is said to be compressed": respond(202, {"Content-Encoding": "br, gzip"}, b"nonsense"),
    "none at all": send_raw(b"HTTP/1.1 202 Accepted\r\n\r\n"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_the_status_decides_whatever_the_body_is(
    stage: Scene, monkeypatch: pytest.MonkeyPatch, answer: Behaviour
) -> None:
    monkeypatch.setattr(connection, "BODY_PATIENCE", timedelta(seconds=0.2))
    stage.peer.default = answer
    fate = await stage.fate()
    assert (fate.row, fate.codes, stage.peer.hits) == (None, [None], 1)
    assert fate.log[0].response_bytes is not None
    assert fate.log[0].response_bytes <= 64 * 1024


async def test_headers_without_end_are_no_answer(stage: Scene) -> None:
    stage.peer.default = huge_headers()
    fate = await stage.fate()
    assert fate.row is not None
    assert (fate.row.state, fate.log[0].http_status) == (DeliveryState.HELD, None)


async def test_a_reason_that_no_terminal_should_see_is_told_without_it(stage: Scene) -> None:
    stage.peer.default = respond(422, {}, b'{"error":"\\u001b[2J' + b"no " * 100 + b'"}')
    fate = await stage.fate()
    assert fate.log[0].remote_code == ("[2J" + "no " * 100)[:80]
