"""A fake server of the fediverse: what it believes, takes, answers and sends."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial

import httpx
import pytest

from db import DeliveryState
from federation import activitypub
from federation.activitypub.handlers import HANDLERS, IncomingActivity
from federation.activitypub.received import ATTEMPTS
from federation.activitypub.signatures import SignatureKind, sign
from federation.testing import FakeRemote, FederationNode, NotTaken, RemoteAnswer, Trouble
from federation.testing.network import ENDLESS
from federation.testing.server import SHORT
from tests.federation.testing.application import alice_of, join, note_of, post
from workers.background import background

HOUR = timedelta(hours=1)


async def test_who_follows_gets_the_accept_and_what_is_posted(
    federation_node: FederationNode, remote: FakeRemote
) -> None:
    """Both are signed in her name, and the remote has verified that."""
    alice = await join(federation_node)
    bob = remote.actor()
    await remote.follow(alice)
    await federation_node.receive()
    assert [owed.type for owed in federation_node.owed()] == ["Accept"]
    await post(federation_node)
    await federation_node.deliver()
    assert federation_node.owed() == []
    accept, create = remote.received
    assert (accept.type, accept.actor, accept.inbox) == ("Accept", alice, bob.inbox)
    assert (create.type, create.actor, create.inbox) == ("Create", alice, bob.recipient.shared_inbox)
    assert create.activity["object"]["content"] == "note 1"


async def test_each_server_gets_its_own(federation_node: FederationNode, remote: FakeRemote) -> None:
    """Two remotes at once, each with followers of several names."""
    alice = await join(federation_node)
    async with FakeRemote(federation_node) as other:
        await remote.follow(alice, by=remote.actor("bob"))
        await remote.follow(alice, by=remote.actor("carol"))
        await other.follow(alice, by=other.actor("dora"))
        await federation_node.receive()
        await post(federation_node)
        await federation_node.deliver()
        assert [each.type for each in remote.received].count("Create") == 1, "they share an inbox"
        assert [each.type for each in other.received].count("Create") == 1


@pytest.mark.parametrize("kind", [*SignatureKind])
async def test_a_server_may_refuse_a_kind_of_signature(
    federation_node: FederationNode, remote: FakeRemote, kind: SignatureKind
) -> None:
    """The node knocks a second time, by the other one."""
    await join(federation_node)
    remote.refuses(kind)
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver()
    assert federation_node.owed() == []
    assert [each.signature for each in remote.received] == [other for other in SignatureKind if other is not kind]


async def test_what_is_owed_while_it_is_away_arrives_later(federation_node: FederationNode, remote: FakeRemote) -> None:
    """It is held after a while. Nobody waits for any of that."""
    await join(federation_node)
    remote.away()
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver()
    [owed] = federation_node.owed()
    assert (owed.type, owed.state, owed.attempts, owed.server) == ("Create", DeliveryState.READY, 1, remote.url)
    assert "CONN_REFUSED" in str(owed.error)
    await federation_node.deliver(within=HOUR)
    assert [each.state for each in federation_node.owed()] == [DeliveryState.HELD]
    remote.back()
    await federation_node.deliver(within=HOUR)
    assert federation_node.owed() == []
    assert [each.type for each in remote.received] == ["Create"]


@pytest.mark.parametrize("told", [503, RemoteAnswer(429, {"Retry-After": "60"}), Trouble.HANGS])
async def test_what_it_did_not_take_is_sent_again_in_its_time(
    federation_node: FederationNode, remote: FakeRemote, told: int | RemoteAnswer | Trouble
) -> None:
    """Not before."""
    await join(federation_node)
    remote.answers_in_turn(told)
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver()
    await federation_node.deliver()
    assert [each.status for each in remote.requests] == [None if told is Trouble.HANGS else remote.requests[0].status]
    assert len(federation_node.owed()) == 1
    await federation_node.deliver(within=HOUR)
    assert federation_node.owed() == []
    assert [each.is_taken for each in remote.requests] == [False, True]


@pytest.mark.parametrize("told", [Trouble.DRIPS, Trouble.RESETS])
async def test_a_broken_answer_ends_in_time(federation_node: FederationNode, remote: FakeRemote, told: Trouble) -> None:
    """A body without end took it, and a reset is one failure more."""
    await join(federation_node)
    remote.answers_in_turn(told)
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver(within=HOUR)
    assert federation_node.owed() == []
    assert len(remote.received) == 1


async def test_nobody_waits_long_for_a_server_that_hangs(federation_node: FederationNode, remote: FakeRemote) -> None:
    """And as long as ever for one that answers."""
    network, waits = federation_node.network, []
    for told in (Trouble.HANGS, Trouble.DRIPS, 503, None):
        remote.answers(told)
        waits.append(network.patience(remote.url))
    assert waits == [SHORT[Trouble.HANGS], SHORT[Trouble.DRIPS], ENDLESS, ENDLESS]
    assert network.patience("https://b.example") == ENDLESS


async def test_what_is_refused_for_good_is_given_up(federation_node: FederationNode, remote: FakeRemote) -> None:
    """As `owed` says, until the answer is withdrawn."""
    await join(federation_node)
    remote.answers(400)
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver(within=HOUR)
    [given_up] = federation_node.owed()
    assert (given_up.state, given_up.inbox) == (DeliveryState.FAILED, f"{remote.url}/inbox")
    remote.answers()
    await post(federation_node, remote.actor().recipient, number=2)
    await federation_node.deliver()
    assert [each.activity["id"] for each in remote.received] == [note_of(alice_of(federation_node), 2)["id"]]


async def test_it_believes_no_others(federation_node: FederationNode, remote: FakeRemote) -> None:
    """What was changed on its way, or meant for another server, or signed by another actor, or by nobody."""
    alice = await join(federation_node)
    inbox, body = f"{remote.url}/inbox", json.dumps(note_of(alice)).encode()
    parts = federation_node.engine.node.activitypub
    assert parts is not None
    key = background.run(partial(parts.keys.signing_key, alice))

    def signed(url: str, content: bytes = body) -> dict[str, str]:
        at = federation_node.clock.now()
        kind, media = SignatureKind.CAVAGE, "application/activity+json"
        return sign(kind, method="POST", url=url, body=content, content_type=media, at=at, key=key)

    others = json.dumps(note_of(f"{alice}s")).encode()
    requests = [
        (body, signed(inbox)),
        (body + b" ", signed(inbox)),
        (body, signed("https://b.example/inbox")),
        (others, signed(inbox, others)),
        (body, dict(remote.signed(note_of(alice), inbox=inbox).headers)),
        (body, {}),
    ]
    async with httpx.AsyncClient() as client:
        statuses = [(await client.post(inbox, content=body, headers=told)).status_code for body, told in requests]
    assert statuses == [202, *5 * [401]]
    assert [each.refused for each in remote.requests] == [
        None,
        "the digest is not the body's",
        "it is not this key's signature of this request",
        "the actor is not the owner of the key",
        "the key is not one of the node's",
        "there is no signature",
    ]
    assert len(remote.received) == 1


async def test_an_application_that_shows_no_actor_is_told_so(
    federation_node: FederationNode, remote: FakeRemote
) -> None:
    """The remote asks the application itself, where a test names it."""

    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})  # type: ignore[operator] # ASGI
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator] # ASGI

    alice = await join(federation_node)
    federation_node.app = app
    await post(federation_node, remote.actor().recipient)
    await federation_node.deliver()
    [first, _] = remote.requests
    assert first.refused == (
        f"{alice} is answered with 404: does the application serve its actors, by `activitypub.asgi` or `respond`?"
    )
    with pytest.raises(NotTaken, match="404"):
        await remote.follow(alice)
    await federation_node.deliver(within=HOUR)
    [owed] = federation_node.owed()
    assert "does not show the actor's key by our public name" in str(owed.error)


async def test_nothing_leaves_the_machine(federation_node: FederationNode) -> None:
    """An address that is no remote's of the test is not even looked up."""
    await join(federation_node)
    await post(federation_node, activitypub.Recipient(id="https://b.example/bob", inbox="https://b.example/inbox"))
    await federation_node.deliver()
    [owed] = federation_node.owed()
    assert "a test reaches no server but those on this machine" in str(owed.error)


async def test_a_function_of_the_application_gets_what_it_sends(
    federation_node: FederationNode, remote: FakeRemote
) -> None:
    """Once it is received, and no earlier."""
    seen: list[str] = []

    @HANDLERS.on("Testing")
    async def remember(_: object, activity: IncomingActivity, actor: str) -> None:
        seen.append(f"{actor} {activity.object}")

    await remote.send({"type": "Testing", "object": "hello"})
    assert seen == []
    await federation_node.receive()
    await federation_node.receive()
    assert seen == [f"{remote.actor().id} hello"]


async def test_what_a_function_raises_is_raised(federation_node: FederationNode, remote: FakeRemote) -> None:
    """Each time that it is called: it is called again once its time has come."""
    called = []

    @HANDLERS.on("Failing")
    async def fail(*_: object) -> None:
        called.append(1)
        raise LookupError("no such thread")

    await remote.send({"type": "Failing", "object": "hello"})
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            await federation_node.receive()
        assert [str(each) for each in caught.value.exceptions] == ["no such thread"]
        await federation_node.receive()
        federation_node.clock.advance(timedelta(minutes=1))
    assert len(called) == 2


async def test_the_last_failure_of_one_is_raised_beside_the_first_of_another(
    federation_node: FederationNode, remote: FakeRemote
) -> None:
    """None hides another, though the job that has tried an activity for the last time ends without an error."""

    @HANDLERS.on("FailingAgain")
    async def fail(_: object, activity: IncomingActivity, actor: str) -> None:
        raise LookupError(activity.object)

    await remote.send({"type": "FailingAgain", "object": "first"})
    for number in range(ATTEMPTS):
        if number == ATTEMPTS - 1:
            await remote.send({"type": "FailingAgain", "object": "second"}, by=remote.actor("carol"))
        with pytest.raises(ExceptionGroup) as caught:
            await federation_node.receive()
        federation_node.clock.advance(timedelta(minutes=3))
    told = sorted(str(each) for each in caught.value.exceptions)
    assert told == [f"LookupError: first (attempt {ATTEMPTS})", "second"]


async def test_the_node_believes_no_forgery(federation_node: FederationNode, remote: FakeRemote) -> None:
    """An activity in the name of somebody else is refused, and says why."""
    forged = {"type": "Create", "actor": f"{remote.url}/users/carol", "object": "hello"}
    with pytest.raises(NotTaken, match="not the owner of the key") as caught:
        await remote.send(forged, by=remote.actor("bob"))
    assert caught.value.status == 422


async def test_it_shows_its_actors(federation_node: FederationNode, remote: FakeRemote) -> None:
    """And says where they are; of others it knows nothing."""
    bob = remote.actor("bob")
    async with httpx.AsyncClient(base_url=remote.url) as client:
        document = (await client.get("/users/bob")).json()
        found = await client.get("/.well-known/webfinger", params={"resource": f"acct:bob@{remote.url[7:]}"})
        missing = [(await client.get(path)).status_code for path in ("/users/eve", "/.well-known/webfinger")]
        missing.append((await client.post("/users/eve/inbox", json={})).status_code)
    assert (document["id"], document["inbox"]) == (bob.id, bob.inbox)
    assert found.json()["links"][0]["href"] == bob.id
    assert missing == [404, 404, 404]
