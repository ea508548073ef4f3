"""`TARGETED`: what a relay brings is taken as if it had come directly, and nobody is believed who did not sign."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from db import Block, User
from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from federation.protocol.activities import unfollow_activity
from federation.protocol.encodings import dump_json
from tests.federation.node.conftest import OWN_URL, Node, on_both_databases
from tests.federation.node.remote_server import RemoteServer

Events = list[MutableMapping[str, Any]]

FOLLOWS = OWN_URL + FOLLOWS_PATH
POSTS = OWN_URL + POSTS_PATH
RELAY = "https://r.example"


def follow(node: Node, peer: RemoteServer, **users: str) -> str:
    """A follow of ours as a relayed request."""
    return peer.relayed(FOLLOWS, peer.delivery(peer.follow(**users), "FEDERATE", node.keys))


def post(node: Node, peer: RemoteServer, text: str = "hello") -> str:
    return peer.relayed(POSTS, peer.delivery(peer.post(text=text), "FEDERATE_POST", node.keys))


async def bring(node: Node, peer: RemoteServer, text: str) -> httpx.Response:
    """The answer to what a relay that nobody knows brings."""
    return await node.proxy(peer.targeted(text, node.keys), bearer=RELAY)


async def nothing_stored(node: Node) -> bool:
    return not await node.follows() and not await node.posts()


@on_both_databases
async def test_a_relayed_follow_is_stored_and_acknowledged(node: Node, peer: RemoteServer) -> None:
    """Filed under its server in the column of relayed follows, as other nodes on the same tables expect it."""
    response = await bring(node, peer, follow(node, peer))

    ack = peer.read_follow_ack(response, node.keys)
    [row] = await node.follows()
    assert (row.follower_id, row.following_id, row.accepted, row.acknowledged) == ("user-a", "user-b", True, True)
    assert (row.follower_server_url, row.following_server_url) == (peer.url, None)
    assert (ack.following.id, ack.following.accepted) == (row.id, True)
    body = response.json()
    assert (body["method"], body["status"]) == ("PROXY_RESPONSE", "acknowledged")


@on_both_databases
async def test_a_relayed_post_is_stored_and_acknowledged(node: Node, peer: RemoteServer) -> None:
    """As one that came directly."""
    ack = peer.read_post_ack(await bring(node, peer, post(node, peer)), node.keys)

    [row] = await node.posts()
    assert (ack.post.id, ack.post.federation_post_id) == (row.id, "post-1")
    assert (row.federation_url, row.federated_author_id) == (peer.url, "user-a")


async def test_a_server_may_bring_its_own(node: Node, peer: RemoteServer) -> None:
    """A sealed request needs no relay."""
    response = await node.proxy(peer.targeted(follow(node, peer), node.keys), bearer=peer.url)

    assert peer.read_follow_ack(response, node.keys)


@on_both_databases
async def test_repeats_are_acknowledged_whichever_way_they_come(node: Node, peer: RemoteServer) -> None:
    """Once relayed, once directly, and both again: one row each, and the same acknowledgment."""
    follows = [
        await bring(node, peer, follow(node, peer)),
        await node.follow(peer),
        await bring(node, peer, follow(node, peer)),
    ]
    posts = [await node.post(peer), await bring(node, peer, post(node, peer)), await node.post(peer)]

    assert {peer.read_follow_ack(each, node.keys).following.id for each in follows} == {
        row.id for row in await node.follows()
    }
    assert {peer.read_post_ack(each, node.keys).post.id for each in posts} == {row.id for row in await node.posts()}
    assert (len(await node.follows()), len(await node.posts())) == (1, 1)


async def test_a_relayed_unfollow_removes_the_follow(node: Node, peer: RemoteServer) -> None:
    """What our own nodes understand directly they understand through a relay."""
    await bring(node, peer, follow(node, peer))
    plaintext = unfollow_activity(federation_url=peer.url, follower_id="user-a", following_id="user-b")

    text = peer.relayed(FOLLOWS, peer.delivery(plaintext, "UNFOLLOW", node.keys))
    response = await bring(node, peer, text)

    assert peer.read_ack(response, node.keys)
    assert await node.follows() == []


async def test_another_post_under_a_known_id_is_a_conflict(node: Node, peer: RemoteServer) -> None:
    """409, with its status repeated in the body."""
    await bring(node, peer, post(node, peer))

    response = await bring(node, peer, post(node, peer, "changed"))

    assert response.status_code == 409
    assert (response.json()["code"], response.json()["status"]) == ("FEDERATED_POST_ALREADY_EXISTS", 409)


@pytest.mark.parametrize("member", ["ephemeralPublicKey", "iv", "ciphertext", "authTag"])
async def test_an_altered_envelope_does_not_open(node: Node, peer: RemoteServer, member: str) -> None:
    """One flipped character: 400 DECRYPT_FAILED."""
    body = json.loads(peer.targeted(follow(node, peer), node.keys))
    text = body["payload"][member]
    body["payload"][member] = ("B" if text[0] == "A" else "A") + text[1:]

    response = await node.proxy(json.dumps(body).encode())

    assert (response.status_code, response.json()["code"]) == (400, "DECRYPT_FAILED")


async def test_an_envelope_for_somebody_else_does_not_open(node: Node, peer: RemoteServer, other: RemoteServer) -> None:
    """400 DECRYPT_FAILED."""
    response = await node.proxy(peer.targeted(follow(node, peer), other.keys))

    assert (response.status_code, response.json()["code"]) == (400, "DECRYPT_FAILED")


HEADERS = {
    "Origin": "https://a.example",
    "X-Federation-Origin": "https://a.example",
    "X-Federation-Target": FOLLOWS,
}
SHAPES: dict[str, dict[str, object]] = {
    "no targetUrl": {"targetUrl": None},
    "targetUrl no URL": {"targetUrl": "nonsense"},
    "targetUrl unparseable": {"targetUrl": "https://[::1"},
    "no method": {"method": None},
    "no headers": {"headers": None},
    "a header no text": {"headers": {**HEADERS, "X": 1}},
    "lower case": {"headers": {name.lower(): value for name, value in HEADERS.items()}},
    "many headers": {"headers": HEADERS | {f"X-{number}": "" for number in range(200)}},
    "no target header": {"headers": {**HEADERS, "X-Federation-Target": ""}},
    "no origin header": {"headers": {**HEADERS, "X-Federation-Origin": ""}},
    "no browser's origin header": {"headers": {**HEADERS, "Origin": ""}},
    "another target": {"headers": {**HEADERS, "X-Federation-Target": "https://c.example/api/auth/social/follows"}},
    "target no URL": {"headers": {**HEADERS, "X-Federation-Target": "nonsense"}},
    "no body": {"body": None},
    "body an object": {"body": {}},
    "body no JSON": {"body": "follow me"},
    "body cut off": {"body": '{"method":"FEDERATE"'},
    "body nested": {"body": "[" * 20_000},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
async def test_what_is_no_relayed_request_is_invalid(
    node: Node, peer: RemoteServer, changes: dict[str, object]
) -> None:
    """400 INVALID_TARGETED_DATA, where others fail with 500."""
    text = peer.relayed(FOLLOWS, peer.delivery(peer.follow(), "FEDERATE", node.keys), **changes)

    response = await bring(node, peer, text)

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_TARGETED_DATA")
    assert await nothing_stored(node)


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "null", "{}", "[" * 10_000, "\ufeff{}"], ids=range(7))
async def test_a_plaintext_of_another_shape_is_invalid(node: Node, peer: RemoteServer, text: str) -> None:
    """Sealed nonsense is nonsense."""
    response = await bring(node, peer, text)

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_TARGETED_DATA")


async def test_a_blacklisted_sender_is_refused_whoever_brings_it(node: Node, peer: RemoteServer) -> None:
    """403 with a code, by any spelling of its name; the relay is a stranger."""
    await node.blacklist(peer.url)
    sender = RemoteServer(url="https://A.example:443", keys=peer.keys)

    for text in (follow(node, peer), follow(node, sender)):
        response = await bring(node, peer, text)

        assert (response.status_code, response.json()["code"]) == (403, "BLACKLISTED_FEDERATION_SERVER")
    assert await nothing_stored(node)


async def test_a_blacklisted_relay_is_refused_whatever_it_brings(node: Node, peer: RemoteServer) -> None:
    """403, as at every other endpoint."""
    await node.blacklist(RELAY)

    response = await bring(node, peer, follow(node, peer))

    assert response.status_code == 403
    assert response.json() == {"error": "Your server has been blacklisted."}


async def test_to_claim_our_own_name_exempts_nobody(node: Node, peer: RemoteServer) -> None:
    """Neither as the bearer nor inside."""
    await node.blacklist(peer.url)

    response = await node.proxy(peer.targeted(follow(node, peer), node.keys), bearer=OWN_URL)

    assert (response.status_code, response.json()["code"]) == (403, "BLACKLISTED_FEDERATION_SERVER")


async def test_an_unregistered_sender_is_unknown(node: Node, other: RemoteServer) -> None:
    """However soundly it signed."""
    response = await bring(node, other, follow(node, other))

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")


@pytest.mark.parametrize(
    ("url", "method"),
    [
        (OWN_URL + "/api/auth/social/likes", "FEDERATE"),
        (POSTS, "FEDERATE"),
        (FOLLOWS, "FEDERATE_POST"),
        (FOLLOWS, "INSERT"),
        (FOLLOWS, "DELETE"),
    ],
)
async def test_a_target_and_a_method_have_to_fit(node: Node, peer: RemoteServer, url: str, method: str) -> None:
    """400 INVALID_PAYLOAD."""
    body = json.loads(peer.delivery(peer.follow(), "FEDERATE", node.keys)) | {"method": method}

    response = await bring(node, peer, peer.relayed(url, json.dumps(body)))

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_PAYLOAD")


@pytest.mark.parametrize("body", ["[]", "null", '"FEDERATE"', '{"method":["FEDERATE"]}'])
async def test_a_body_without_a_method_fits_nowhere(node: Node, peer: RemoteServer, body: str) -> None:
    """400 INVALID_PAYLOAD."""
    response = await bring(node, peer, peer.relayed(FOLLOWS, body))

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_PAYLOAD")


@pytest.mark.parametrize(
    ("url", "method", "code"),
    [(FOLLOWS, "FEDERATE", "INVALID_FOLLOW_PAYLOAD"), (POSTS, "FEDERATE_POST", "INVALID_FEDERATED_POST_PAYLOAD")],
)
@pytest.mark.parametrize("kind", ["no envelope", "no signature", "not ours", "no activity", "another method"])
async def test_an_activity_that_does_not_open_is_invalid(
    node: Node, peer: RemoteServer, other: RemoteServer, url: str, method: str, code: str, kind: str
) -> None:
    """400 with the endpoint's own code."""
    wrong = peer.post() if method == "FEDERATE" else peer.follow()
    bodies: dict[str, object] = {
        "no envelope": {"method": method, "payload": {}, "signature": ""},
        "no signature": {"method": method, "payload": json.loads(peer.delivery("x", method, node.keys))["payload"]},
        "not ours": json.loads(peer.delivery(wrong, method, other.keys)),
        "no activity": json.loads(peer.delivery("{}", method, node.keys)),
        "another method": json.loads(peer.delivery(wrong, method, node.keys)),
    }

    response = await bring(node, peer, peer.relayed(url, json.dumps(bodies[kind])))

    assert (response.status_code, response.json()["code"]) == (400, code)


async def test_a_signature_that_is_not_the_senders_is_refused(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """403, also if another registered server signed."""
    await node.know(other)
    signed = json.loads(other.delivery(peer.follow(), "FEDERATE", node.keys))

    response = await bring(node, peer, peer.relayed(FOLLOWS, json.dumps(signed)))

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")
    assert await nothing_stored(node)


@pytest.mark.parametrize("kind", ["follow", "post"])
async def test_nobody_publishes_in_the_name_of_another(
    node: Node, peer: RemoteServer, other: RemoteServer, kind: str
) -> None:
    """A registered server's sound signature does not make it the author it names."""
    await node.know(other)
    plaintext, method, url = {
        "follow": (peer.follow(), "FEDERATE", FOLLOWS),
        "post": (peer.post(), "FEDERATE_POST", POSTS),
    }[kind]

    response = await bring(node, other, other.relayed(url, other.delivery(plaintext, method, node.keys)))

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")
    assert await nothing_stored(node)


async def test_a_relay_cannot_make_anothers_delivery_its_own(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """The header inside names the relay, the signed text its author: refused."""
    await node.know(other)
    body = peer.delivery(peer.post(), "FEDERATE_POST", node.keys)

    response = await bring(node, other, other.relayed(POSTS, body))

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")


@on_both_databases
async def test_refusals_of_users_repeat_their_status(node: Node, peer: RemoteServer) -> None:
    """Unknown, blocking, and local users, with the codes of relayed follows."""
    await node.add(
        User(id="blocked"), Block(blocker_id="user-b", blocked_user_id="blocked", created_at=datetime.now(UTC))
    )
    await node.add(User(id="local"))

    answers = [
        (await bring(node, peer, follow(node, peer, followed="nobody"))).json(),
        (await bring(node, peer, follow(node, peer, follower="blocked"))).json(),
        (await bring(node, peer, follow(node, peer, follower="local"))).json(),
    ]

    assert [(answer.get("code"), answer["status"]) for answer in answers] == [
        ("USER_NOT_FOUND", 404),
        ("USER_BLOCKED", 403),
        (None, 403),
    ]
    assert await node.follows() == []


NONCES = [None, 0, 1.5, "n", "ção ☃", [], {"a": [True]}]


@pytest.mark.parametrize("nonce", NONCES, ids=range(len(NONCES)))
async def test_a_ping_returns_its_nonce(node: Node, peer: RemoteServer, nonce: object) -> None:
    """Whatever JSON value it is; without one there is none."""
    text = dump_json({"method": "PING", "nonce": nonce, "more": 1})

    response = await node.proxy(peer.targeted(text, node.keys), bearer=peer.url)
    bare = await node.proxy(peer.targeted('{"method":"PING"}', node.keys), bearer=peer.url)

    assert response.json() == {"method": "PROXY_RESPONSE", "status": "pong", "nonce": nonce}
    assert bare.json() == {"method": "PROXY_RESPONSE", "status": "pong"}


@pytest.mark.parametrize("nonce", ["1e999", '"\\ud800"', "[" * 900 + "]" * 900], ids=["beyond", "surrogate", "nested"])
async def test_a_nonce_that_cannot_be_written_is_invalid(node: Node, peer: RemoteServer, nonce: str) -> None:
    """400, or the very value: never 500."""
    response = await node.proxy(peer.targeted(f'{{"method":"PING","nonce":{nonce}}}', node.keys), bearer=peer.url)

    assert (response.status_code, response.json().get("code")) in {(400, "INVALID_TARGETED_DATA"), (200, None)}


async def test_a_ping_needs_a_known_bearer(node: Node, peer: RemoteServer) -> None:
    """403: only registered servers may ask whether we are there."""
    response = await node.proxy(peer.targeted('{"method":"PING","nonce":1}', node.keys), bearer=RELAY)

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")


async def test_refusals_are_logged_without_what_was_sent(node: Node, peer: RemoteServer, events: Events) -> None:
    """One line with the code; neither texts nor keys."""
    await bring(node, peer, peer.relayed(POSTS, "a secret thought"))
    await bring(node, peer, peer.relayed(POSTS, peer.delivery("a secret thought", "FEDERATE_POST", node.keys)))

    assert [event["code"] for event in events if event["event"] == "inbound_refused"] == [
        "INVALID_TARGETED_DATA",
        "INVALID_FEDERATED_POST_PAYLOAD",
    ]
    assert "secret" not in repr(events)
    assert peer.keys.signing.public_text not in repr(events)
