"""Deliveries to the first implementation of this wire: what its answers mean with its profile, and without."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import AttemptOutcome, DeliveryJob, DeliveryState
from federation.base.queues.job_data import UNFOLLOW_JOB
from federation.protocol.activities import unfollow_activity
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import FOLLOWED, FOLLOWER, Fate, Site, job_data, post_payload
from tests.misbehaving import Behaviour, reset, respond, respond_with
from tests.peer import FOLLOWS_PATH, POSTS_PATH, OriginalPeer, Peer, both, json_answer
from workers import JobState

DELIVERED, RETRYABLE, PERMANENT = AttemptOutcome.DELIVERED, AttemptOutcome.RETRYABLE, AttemptOutcome.PERMANENT


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with OriginalPeer() as running:
        yield running


@pytest.fixture
async def profile(federation: Federation, peer: Peer) -> str:
    """The peer's profile is set, as an operator would."""
    await federation.links.set_profile(peer.url, "original")
    return "original"


async def follow_state(site: Site) -> tuple[bool, bool]:
    """Whether the one follow is accepted, and whether it is acknowledged."""
    follow = await site.follow()
    assert follow is not None
    return follow.accepted, follow.acknowledged


async def owe_unfollow(site: Site, peer: Peer) -> str:
    """An unfollow is owed to the peer, whatever became of the follow; the delivery's id."""
    assert site.federation.own_url is not None
    payload = unfollow_activity(federation_url=site.federation.own_url, follower_id=FOLLOWER, following_id=FOLLOWED)
    async with site.federation.outbox.transaction() as session:
        return await site.federation.outbox.enqueue_delivery(
            session, UNFOLLOW_JOB, peer.url + FOLLOWS_PATH, peer.url, payload
        )


async def owe_again(site: Site, peer: Peer) -> str:
    """Another delivery of a post that the peer has stored already; its id."""
    payload = post_payload("post-1")
    for turn in range(2):
        async with site.federation.outbox.transaction() as session:
            delivery = await site.federation.outbox.enqueue_delivery(
                session, "deliver-post", peer.url + POSTS_PATH, peer.url, payload
            )
        if turn == 0:
            await site.outcome(delivery)
    return delivery


def conflict(code: str) -> Behaviour:
    return respond_with(lambda _: json_answer({"error": "no", "code": code}, status=409))


def attempts(fate: Fate) -> list[tuple[AttemptOutcome, str | None, int | None]]:
    return [(attempt.outcome, attempt.error_code, attempt.http_status) for attempt in fate.log]


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("private", [False, True], ids=["public", "private"])
async def test_a_follow_is_acknowledged_and_never_accepted(site: Site, peer: Peer, private: bool) -> None:
    """Its answer is not signed, so what it says of being accepted is nobody's word; it is delivered all the same."""
    peer.private_users = frozenset({FOLLOWED} if private else ())

    fate = await site.outcome(await site.owe_follow(peer))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert attempts(fate) == [(DELIVERED, None, 200)]
    assert await follow_state(site) == (False, True)
    assert (await site.federation.links.find(peer.url)).acknowledged


@pytest.mark.usefixtures("profile")
async def test_a_signed_answer_counts_for_more(site: Site, peer: Peer) -> None:
    """A server that has learned to sign since is believed, whatever its profile says."""
    peer.render = both

    await site.outcome(await site.owe_follow(peer))

    assert await follow_state(site) == (True, False)


@pytest.mark.parametrize("name", [None, "of-another-version"])
@pytest.mark.parametrize("acknowledged", [False, True], ids=["stranger", "has-acknowledged"])
async def test_without_the_profile_a_follow_fails(site: Site, peer: Peer, name: str | None, acknowledged: bool) -> None:
    """At once, with the way out in its error; and it is no sign that somebody else answers in the server's place."""
    await site.federation.links.set_profile(peer.url, name)
    if acknowledged:
        await site.outcome(await site.owe_post(peer))

    fate = await site.outcome(await site.owe_follow(peer))

    assert fate.state is JobState.FAILED
    assert fate.row is not None
    assert fate.row.state is DeliveryState.FAILED
    assert "profile `original`" in fate.reason
    assert attempts(fate) == [(PERMANENT, "NO_ACK", 200)]
    assert await follow_state(site) == (False, False)


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    "body",
    [
        {"status": "acknowledged"},
        {"status": "acknowledged", "accepted": None},
        {"status": "ok", "accepted": True},
        {"method": "PROXY", "status": "acknowledged", "accepted": True},
    ],
)
async def test_another_answer_to_a_follow_is_none(site: Site, peer: Peer, body: object) -> None:
    """The profile is for one shape of answer, not for any."""
    peer.render = lambda _: json_answer(body)

    fate = await site.outcome(await site.owe_follow(peer))

    assert attempts(fate) == [(PERMANENT, "NO_ACK", 200)]
    assert await follow_state(site) == (False, False)


@pytest.mark.usefixtures("profile")
async def test_a_post_needs_a_signature_still(site: Site, peer: Peer) -> None:
    """What is good enough for a follow is not for a post, which the original does sign."""
    peer.render = lambda _: json_answer({"status": "acknowledged", "accepted": True})

    fate = await site.outcome(await site.owe_post(peer))

    assert attempts(fate) == [(PERMANENT, "NO_ACK", 200)]


@pytest.mark.usefixtures("profile")
async def test_a_post_whose_acknowledgment_was_lost_is_delivered(site: Site, peer: Peer) -> None:
    """The second attempt hears that the post is there, which is on record as it was said, and heals the server."""
    peer.server.upcoming += [peer.after_applying(reset())]

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert attempts(fate) == [(RETRYABLE, "CONN_RESET", None), (DELIVERED, None, 409)]
    assert fate.log[1].remote_code == "FEDERATED_POST_ALREADY_EXISTS"
    assert len(peer.applied) == 1
    server, link = await site.server(peer.url), await site.federation.links.find(peer.url)
    assert server is not None
    assert (server.is_healthy, link.acknowledged, link.evidence) == (True, True, 0)


async def test_without_the_profile_a_repeated_post_fails(site: Site, peer: Peer) -> None:
    """It is refused until its attempts are used up, and kept."""
    peer.server.upcoming += [peer.after_applying(reset())]

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.state is JobState.FAILED
    assert fate.row is not None
    assert attempts(fate) == [(RETRYABLE, "CONN_RESET", None)] + [(RETRYABLE, "HTTP_409", 409)] * 4


@pytest.mark.usefixtures("profile")
async def test_at_the_first_attempt_it_is_a_refusal(site: Site, peer: Peer) -> None:
    """Nothing of this delivery can be there yet; the next attempt hears the same, and is a repeat."""
    fate = await site.outcome(await owe_again(site, peer))

    assert fate.state is JobState.COMPLETED
    assert attempts(fate) == [(RETRYABLE, "HTTP_409", 409), (DELIVERED, None, 409)]


@pytest.mark.usefixtures("profile")
async def test_an_attempt_of_an_earlier_job_makes_a_repeat(site: Site, peer: Peer) -> None:
    """The row knows of the attempt, where the job is a new one: after a hold, say."""
    delivery = await owe_again(site, peer)
    async with site.federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == delivery).values(attempts=1))

    fate = await site.outcome(delivery)

    assert attempts(fate) == [(DELIVERED, None, 409)]


@pytest.mark.usefixtures("profile")
async def test_a_job_without_a_row_can_be_a_repeat(site: Site, peer: Peer) -> None:
    """Its own attempts are all that is known of it."""
    peer.server.upcoming += [peer.after_applying(respond(500))]
    data = job_data("no-row", peer.url, payload=post_payload("post-1"))

    fate = await site.outcome(await site.owe_raw(data), row="no-row")

    assert fate.state is JobState.COMPLETED
    assert attempts(fate) == [(RETRYABLE, "HTTP_500", 500), (DELIVERED, None, 409)]


@pytest.mark.usefixtures("profile")
async def test_a_follow_that_is_there_already_is_acknowledged(site: Site, peer: Peer) -> None:
    """A repeated follow may be refused like a post."""
    peer.server.upcoming += [peer.after_applying(respond(500)), conflict("FOLLOW_ALREADY_EXISTS")]

    fate = await site.outcome(await site.owe_follow(peer))

    assert attempts(fate) == [(RETRYABLE, "HTTP_500", 500), (DELIVERED, None, 409)]
    assert await follow_state(site) == (False, True)


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("code", ["FOLLOW_ALREADY_EXISTS", "USER_NOT_FOUND", "somewhere"])
async def test_a_conflict_of_another_kind_is_a_refusal(site: Site, peer: Peer, code: str) -> None:
    """Another code, or that of another activity, says nothing of a post."""
    peer.server.upcoming += [peer.after_applying(respond(500)), conflict(code)]

    fate = await site.outcome(await site.owe_post(peer))

    assert fate.codes == ["HTTP_500", "HTTP_409", None]


@pytest.mark.usefixtures("profile")
async def test_an_unfollow_is_not_retried(site: Site, peer: Peer) -> None:
    """One attempt, and it is kept as failed; nobody looks at the server's keys for it, or holds it against the link."""
    fate = await site.outcome(await owe_unfollow(site, peer))

    assert fate.state is JobState.FAILED
    assert fate.row is not None
    assert (fate.row.state, fate.row.error_code) == (DeliveryState.FAILED, "NO_RECEIVER")
    assert attempts(fate) == [(PERMANENT, "NO_RECEIVER", 400)]
    assert fate.reason == "the server takes no unfollows: the server answered 400: VALIDATION_ERROR"
    assert peer.discoveries == []
    assert (await site.federation.links.find(peer.url)).rejections == 0


async def test_without_the_profile_an_unfollow_is_retried(site: Site, peer: Peer) -> None:
    """A refusal like any other: five attempts, and a look at the server's keys."""
    fate = await site.outcome(await owe_unfollow(site, peer))

    assert fate.state is JobState.FAILED
    assert attempts(fate) == [(RETRYABLE, "HTTP_400", 400)] * 5
    assert peer.discoveries == ["GET"]
    assert (await site.federation.links.find(peer.url)).rejections == 1


@pytest.mark.usefixtures("profile")
async def test_an_unfollow_that_is_refused_otherwise_is_retried(site: Site, peer: Peer) -> None:
    """Only a 400 says that there is no receiver; a server that has one by now may take it."""
    peer.render = both
    peer.server.upcoming += [respond(403), respond(500), respond_with(lambda request: Peer.answer(peer, request))]

    fate = await site.outcome(await owe_unfollow(site, peer))

    assert fate.codes == ["HTTP_403", "HTTP_500", None]
