"""Acknowledgments: which shapes complete a delivery, which fail it, and what a follow's changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest

from db import AttemptOutcome, DeliveryJob, DeliveryState, HoldReason, LinkState
from federation.protocol.keys import generate_own_keys
from tests.federation.delivery.harness import Site
from tests.misbehaving import Canned
from tests.peer import Answer, Peer, Render, both, inline, json_answer, nested
from workers import JobState

pytestmark = [pytest.mark.usefixtures("queue_settings"), pytest.mark.spread("queue_settings")]

ABSENT = object()
STRANGER = generate_own_keys()


def with_following(**changes: object) -> Callable[[Answer], str]:
    """An acknowledgment's plaintext with members of `following` replaced, or taken out."""

    def change(answer: Answer) -> str:
        plaintext = json.loads(answer.plaintext)
        following = {**plaintext["following"], **changes}
        plaintext["following"] = {name: value for name, value in following.items() if value is not ABSENT}
        return json.dumps(plaintext)

    return change


def without(member: str) -> Render:
    return lambda answer: json_answer({name: value for name, value in answer.ack().items() if name != member})


def replacing(member: str, value: object) -> Render:
    return lambda answer: json_answer({**answer.ack(), member: value})


def raw(body: bytes, content_type: str = "application/json") -> Render:
    return lambda _: Canned(headers={"Content-Type": content_type}, body=body)


def bad_inner(text: str) -> Render:
    return lambda answer: json_answer(answer.ack(plaintext=text))


def hidden_inline(answer: Answer) -> Canned:
    """A `payload` that is no acknowledgment in front of an inline one that is."""
    return json_answer({**answer.ack(), "payload": {"method": "SOMETHING_ELSE"}})


ACCEPTABLE: dict[str, Render] = {
    "nested": nested,
    "inline": inline,
    "both": both,
    "hidden-inline": hidden_inline,
    "extra-members": replacing("x-new", [1]),
}
PAGES: dict[str, Render] = {
    "json-null": raw(b"null"),
    "json-array": raw(b"[]"),
    "json-scalar": raw(b"42"),
    "html": raw(b"<html>hello</html>", "text/html"),
    "empty": raw(b""),
    "bad-json": raw(b'{"method":'),
    "not-utf8": raw(b'{"method":"\xff"}'),
    "deeply-nested": raw(b"[" * 100_000),
}
"""Whatever is no JSON object."""
WITHOUT_ACK: dict[str, Render] = {
    "no-ack": raw(b'{"status":"ok"}'),
    "legacy": raw(b'{"status":"acknowledged","accepted":true}'),
    "wrong-method": replacing("method", "PROXY"),
}
UNPROVEN: dict[str, tuple[Render, str]] = {
    "bad-signature": (replacing("signature", "AAAA"), "INVALID_ACK_SIGNATURE"),
    "no-signature": (without("signature"), "INVALID_ACK_SIGNATURE"),
    "wrong-signer": (
        lambda answer: json_answer(answer.ack(signing_secret=STRANGER.signing.secret)),
        "INVALID_ACK_SIGNATURE",
    ),
    "wrong-key": (
        lambda answer: json_answer(answer.ack(recipient_key=STRANGER.encryption.public)),
        "INVALID_ACK",
    ),
    "no-data": (without("data"), "INVALID_ACK"),
    "data-no-envelope": (replacing("data", "AAAA"), "INVALID_ACK"),
    "bad-inner-not-json": (bad_inner("not json"), "INVALID_ACK"),
    "bad-inner-null": (bad_inner("null"), "INVALID_ACK"),
    "bad-inner-shape": (bad_inner('{"following":{},"federationUrl":"x","method":"FEDERATE"}'), "INVALID_ACK"),
}


@pytest.mark.parametrize("shape", ACCEPTABLE)
async def test_an_accepted_follow_is_accepted_here(site: Site, peer: Peer, shape: str) -> None:
    """Wherever the acknowledgment sits, the delivery completes, its row is gone and the follow is accepted."""
    peer.render = ACCEPTABLE[shape]

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)
    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (True, False)
    assert len(peer.applied) == 1


@pytest.mark.parametrize("shape", ACCEPTABLE)
async def test_a_post_completes(site: Site, peer: Peer, shape: str) -> None:
    """A post's delivery completes at its first attempt, and the log tells of one."""
    peer.render = ACCEPTABLE[shape]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)
    (attempt,) = fate.log
    assert (attempt.outcome, attempt.error_code, attempt.http_status) == (AttemptOutcome.DELIVERED, None, 200)
    assert attempt.request_bytes == len(peer.deliveries[0].body)
    assert (attempt.response_bytes or 0) > 100
    assert 0 <= attempt.duration_ms < 60_000
    assert (attempt.method, attempt.job_name, attempt.server_url) == ("FEDERATE_POST", "deliver-post", peer.url)
    assert len(peer.applied) == 1
    assert not (await site.federation.links.find(peer.url)).relayed


async def test_what_is_sent_is_the_payload_itself(site: Site, peer: Peer) -> None:
    """The peer opens the very text that was owed, with the headers a receiver needs and no cookie."""
    delivery = await site.owe_post(peer)
    async with site.federation.database.read() as session:
        row = await session.get(DeliveryJob, delivery)
    assert row is not None

    await site.outcome(delivery)

    assert [arrived.plaintext for arrived in peer.arrived] == [row.payload]
    headers = peer.deliveries[0].headers
    assert headers["content-type"] == "application/json"
    assert headers["origin"] == headers["x-federation-origin"] == "https://a.example"
    assert headers["x-federation-target"] == row.target_url
    assert "cookie" not in headers


@pytest.mark.parametrize("accepted", [False, None, ABSENT], ids=["false", "null", "absent"])
async def test_a_follow_without_a_yes_is_only_acknowledged(site: Site, peer: Peer, accepted: object) -> None:
    """Refused, undecided or left out: the follow is known to be received, and not accepted."""
    peer.render = lambda answer: json_answer(answer.ack(plaintext=with_following(accepted=accepted)(answer)))

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (False, True)


async def test_a_private_user_acknowledges_only(site: Site, peer: Peer) -> None:
    """A peer whose user is private says so, and our follow stays open."""
    peer.private_users = frozenset({"user-b"})

    await site.outcome(await site.owe_follow(peer))

    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (False, True)


@pytest.mark.parametrize("shape", PAGES)
async def test_a_page_is_nobodys_answer(site: Site, peer: Peer, shape: str) -> None:
    """Also of a server that has never acknowledged anything: a proxy answers for it, and the delivery is held."""
    peer.render = PAGES[shape]

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.codes) == (None, ["FOREIGN_ANSWER"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    link = await site.federation.links.find(peer.url)
    assert (link.state, link.acknowledged) == (LinkState.DOWN, False)


@pytest.mark.parametrize("shape", WITHOUT_ACK)
async def test_an_answer_without_an_acknowledgment_is_permanent(site: Site, peer: Peer, shape: str) -> None:
    """One attempt, and the row stays, failed, for somebody to look at."""
    peer.render, code = WITHOUT_ACK[shape], "NO_ACK"

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 1)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.FAILED, None)
    assert fate.row.settled_at is not None
    assert (fate.row.attempts, fate.row.outcome, fate.row.last_error) == (1, "permanent", fate.reason)
    assert fate.reason
    (attempt,) = fate.log
    assert (attempt.outcome, attempt.error_code, attempt.http_status) == (AttemptOutcome.PERMANENT, code, 200)
    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (False, False)


@pytest.mark.parametrize("shape", ["html", "json-null", "no-ack", "wrong-method"])
async def test_an_answer_without_an_acknowledgment_of_a_server_that_gave_one_before_is_not_its_own(
    site: Site, peer: Peer, shape: str
) -> None:
    """Somebody answers for it, as a maintenance page does: the delivery is tried again, and held in the end."""
    assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED
    peer.render = {**PAGES, **WITHOUT_ACK}[shape]

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.codes) == (None, ["FOREIGN_ANSWER"] * 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason) == (DeliveryState.HELD, HoldReason.SERVER)
    assert (await site.federation.links.find(peer.url)).state is LinkState.DOWN


def compressed(encoding: str, *, cut: int = 0) -> Render:
    """The acknowledgment, gzipped without its last bytes, and said to be encoded in this way."""

    def render(answer: Answer) -> Canned:
        body = gzip.compress(inline(answer).body)
        return Canned(headers={"Content-Encoding": encoding}, body=body[: len(body) - cut])

    return render


async def test_an_acknowledgment_may_come_compressed(site: Site, peer: Peer) -> None:
    """A proxy may compress what it was not asked to."""
    peer.render = compressed("gzip")

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)


@pytest.mark.parametrize(("encoding", "cut"), [("br", 0), ("gzip", 1)], ids=["unknown", "truncated"])
@pytest.mark.parametrize("acknowledged", [True, False])
async def test_an_encoding_that_cannot_be_undone_is_named(
    site: Site, peer: Peer, acknowledged: bool, encoding: str, cut: int
) -> None:
    """The operator reads why there is no JSON, whether or not the server acknowledged deliveries before."""
    if acknowledged:
        assert (await site.outcome(await site.owe_post(peer))).state is JobState.COMPLETED
    peer.render = compressed(encoding, cut=cut)

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.codes[0] == "FOREIGN_ANSWER"
    assert fate.row is not None
    assert fate.row.last_error is not None
    assert fate.row.last_error.endswith(f"(its Content-Encoding, which we did not ask for: {encoding})")


@pytest.mark.parametrize("shape", UNPROVEN)
async def test_an_unproven_acknowledgment_fails_a_follow(site: Site, peer: Peer, shape: str) -> None:
    """One attempt, the row stays, failed, for somebody to look at, and the follow is as it was."""
    peer.render, code = UNPROVEN[shape]

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 1)
    assert "acknowledgment" in fate.reason
    assert fate.row is not None
    assert (fate.row.state, fate.row.outcome, fate.row.error_code) == (DeliveryState.FAILED, "permanent", code)
    assert fate.row.last_error == fate.reason
    (attempt,) = fate.log
    assert (attempt.outcome, attempt.error_code) == (AttemptOutcome.PERMANENT, code)
    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (False, False)


@pytest.mark.parametrize("shape", UNPROVEN)
async def test_an_unproven_acknowledgment_completes_a_post(site: Site, peer: Peer, shape: str) -> None:
    """Nobody reads a post's acknowledgment beyond its method."""
    peer.render, _ = UNPROVEN[shape]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)


async def test_an_acknowledgment_of_another_follow_changes_nothing(site: Site, peer: Peer) -> None:
    """A proven acknowledgment of a follow that is not stored here completes the delivery, and that is all."""
    peer.render = lambda answer: json_answer(answer.ack(plaintext=with_following(followingId="someone")(answer)))

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    follow = await site.follow()
    assert follow is not None
    assert (follow.accepted, follow.acknowledged) == (False, False)


async def test_an_unknown_job_name_is_delivered_and_its_acknowledgment_ignored(site: Site, peer: Peer) -> None:
    """Only a job named as a follow's has its acknowledgment read."""
    peer.render = UNPROVEN["bad-signature"][0]

    fate = await site.outcome(await site.owe_post(peer, name="deliver-something-new"))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert len(peer.applied) == 1
