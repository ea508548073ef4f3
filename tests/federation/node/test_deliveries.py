"""What both inboxes refuse, with the status and code peers expect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import pytest

from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from federation.protocol.activities import MAX_REQUEST_BYTES
from federation.protocol.encodings import encode_base64
from tests.federation.node.conftest import Node, serving
from tests.federation.node.remote_server import RemoteServer

Events = list[MutableMapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """One of the two endpoints: a good activity for it, and how it calls a malformed one."""

    path: str
    method: str
    write: Callable[[RemoteServer], str]
    malformed: str
    text_member: str


FOLLOWS = Inbox(
    path=FOLLOWS_PATH, method="FEDERATE", write=RemoteServer.follow, malformed="VALIDATION_ERROR", text_member="message"
)
POSTS = Inbox(
    path=POSTS_PATH,
    method="FEDERATE_POST",
    write=RemoteServer.post,
    malformed="INVALID_FEDERATED_POST_PAYLOAD",
    text_member="error",
)
both_inboxes = pytest.mark.parametrize("inbox", [FOLLOWS, POSTS], ids=["follows", "posts"])


async def nothing_stored(node: Node) -> bool:
    return not await node.follows() and not await node.posts()


BODIES = {
    "empty": b"",
    "not JSON": b"follow me",
    "cut off": b'{"method":"FEDERATE"',
    "not UTF-8": b'{"method":"\xff"}',
    "null": b"null",
    "array": b"[]",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "no method": b"{}",
    "unknown method": b'{"method":"DELETE","payload":{},"signature":""}',
    "unwelcome method": b'{"method":"INSERT","payload":{},"signature":""}',
    "no signature": b'{"method":"FEDERATE","payload":{}}',
    "no envelope": b'{"method":"FEDERATE","payload":"x","signature":""}',
}


@both_inboxes
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_no_delivery_is_malformed(
    node: Node, peer: RemoteServer, inbox: Inbox, body: bytes
) -> None:
    """400 with the endpoint's own code, and a text that says where."""
    response = await node.send(inbox.path, body, peer.headers())

    assert (response.status_code, response.json()["code"]) == (400, inbox.malformed)
    assert response.json()[inbox.text_member].startswith("[body")


@both_inboxes
async def test_a_welcome_method_of_the_other_inbox_is_malformed(node: Node, peer: RemoteServer, inbox: Inbox) -> None:
    """A sound delivery at the wrong endpoint is refused, not stored."""
    wrong = POSTS if inbox is FOLLOWS else FOLLOWS

    response = await node.send(inbox.path, peer.delivery(wrong.write(peer), wrong.method, node.keys), peer.headers())

    assert (response.status_code, response.json()["code"]) == (400, inbox.malformed)
    assert await nothing_stored(node)


@both_inboxes
@pytest.mark.parametrize("member", ["ephemeralPublicKey", "iv", "ciphertext", "authTag"])
async def test_an_altered_envelope_is_malformed(node: Node, peer: RemoteServer, inbox: Inbox, member: str) -> None:
    """One flipped character, and nothing opens."""
    delivery = json.loads(peer.delivery(inbox.write(peer), inbox.method, node.keys))
    text = delivery["payload"][member]
    delivery["payload"][member] = ("B" if text[0] == "A" else "A") + text[1:]

    response = await node.send(inbox.path, json.dumps(delivery).encode(), peer.headers())

    assert (response.status_code, response.json()["code"]) == (400, inbox.malformed)
    assert response.json()[inbox.text_member].startswith("[body.payload] ")


@both_inboxes
@pytest.mark.parametrize("plaintext", ["", "no JSON", "[]", "{}", "[" * 10_000], ids=range(5))
async def test_a_plaintext_that_is_no_activity_is_malformed(
    node: Node, peer: RemoteServer, inbox: Inbox, plaintext: str
) -> None:
    """Sealed and signed nonsense is nonsense."""
    response = await node.send(inbox.path, peer.delivery(plaintext, inbox.method, node.keys), peer.headers())

    assert (response.status_code, response.json()["code"]) == (400, inbox.malformed)


@both_inboxes
async def test_a_plaintext_of_another_method_than_the_body_is_malformed(
    node: Node, peer: RemoteServer, inbox: Inbox
) -> None:
    """The method outside the envelope is not signed; the one inside decides."""
    plaintext = inbox.write(peer).replace(inbox.method, "INSERT")

    response = await node.send(inbox.path, peer.delivery(plaintext, inbox.method, node.keys), peer.headers())

    assert (response.status_code, response.json()["code"]) == (400, inbox.malformed)


@pytest.mark.parametrize("published", ["yesterday", "9999999-01-01"])
async def test_a_post_without_a_readable_date_is_malformed(node: Node, peer: RemoteServer, published: str) -> None:
    """400, where other servers fail with 500."""
    plaintext = peer.post().replace("2026-01-02T03:04:05.678Z", published)

    response = await node.deliver(peer, plaintext, "FEDERATE_POST")

    assert (response.status_code, response.json()["code"]) == (400, "INVALID_FEDERATED_POST_PAYLOAD")


@both_inboxes
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
async def test_another_content_type_is_unsupported(
    node: Node, peer: RemoteServer, inbox: Inbox, media_type: str
) -> None:
    """415 before the body is looked at."""
    headers = {**peer.headers(), "Content-Type": media_type}

    response = await node.send(inbox.path, b"no JSON", headers)

    assert (response.status_code, response.json()["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


async def test_a_charset_beside_the_content_type_is_fine(node: Node, peer: RemoteServer) -> None:
    """JSON by any spelling of its media type is JSON."""
    response = await node.deliver(
        peer, peer.follow(), "FEDERATE", **{"Content-Type": "Application/JSON; charset=utf-8"}
    )

    assert response.status_code == 200


@both_inboxes
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_too_large(
    node: Node, peer: RemoteServer, inbox: Inbox, announced: bool
) -> None:
    """413 by the announced length, and by counting where none is announced."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 1024 * 1024

    content = b" " * (MAX_REQUEST_BYTES + 1) if announced else chunks()
    response = await node.client.post(inbox.path, content=content, headers=peer.headers())

    assert (response.status_code, response.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")


async def test_a_large_post_within_the_limit_is_stored(node: Node, peer: RemoteServer) -> None:
    """A mebibyte of text is a long post, not an attack."""
    response = await node.deliver(peer, peer.post(text="☃" * 350_000), "FEDERATE_POST")

    assert response.status_code == 200
    [row] = await node.posts()
    assert row.content[0] == {"type": "text", "value": "☃" * 350_000}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were parsed as JSON."""
    texts: list[str] = []
    decode = json.JSONDecoder.decode

    def note(decoder: json.JSONDecoder, text: str) -> Any:
        texts.append(text)
        return decode(decoder, text)

    monkeypatch.setattr(json.JSONDecoder, "decode", note)
    return texts


def with_junk(body: bytes, size: int) -> bytes:
    """*body* with a member that nobody reads."""
    return b'{"junk":[' + b"{}," * (size // 3) + b"{}]," + body[1:]


@both_inboxes
async def test_what_nobody_reads_of_a_delivery_is_never_built(
    node: Node, peer: RemoteServer, inbox: Inbox, parsed: list[str]
) -> None:
    """Neither of its body nor of its plaintext: thirty times the memory, and everything else would wait."""
    plaintext = with_junk(inbox.write(peer).encode(), 100_000).decode()
    body = with_junk(peer.delivery(plaintext, inbox.method, node.keys), 100_000)

    response = await node.send(inbox.path, body, peer.headers())

    assert response.status_code == 200
    assert not any("{}," in text for text in parsed)


@both_inboxes
@pytest.mark.parametrize("headers", [{}, {"Origin": "https://c.example"}, {"X-Federation-Origin": "nonsense"}])
async def test_more_than_64_kib_are_read_only_in_a_registered_name(
    node: Node, peer: RemoteServer, inbox: Inbox, headers: dict[str, str]
) -> None:
    """403 as for every stranger, before the body is there, and the connection is not used again."""
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 16_384
            yield b" " * 16_384

    claimed = {"Content-Type": "application/json", **headers}
    streamed = await node.client.post(inbox.path, content=chunks(), headers=claimed)
    announced = await node.client.post(inbox.path, content=b" " * 100_000, headers=claimed)

    for response in (streamed, announced):
        assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")
        assert response.headers["Connection"] == "close"
    assert read < 128 * 1024


@both_inboxes
async def test_a_large_delivery_is_read_only_if_the_claimed_server_signed_it(
    node: Node, peer: RemoteServer, inbox: Inbox, parsed: list[str]
) -> None:
    """403: whoever writes a registered name without its key has us unseal, and no more."""
    nonsense = "[" + "{}," * 40_000 + "{}]"
    stranger = RemoteServer(url=peer.url, keys=node.keys)

    response = await node.send(inbox.path, stranger.delivery(nonsense, inbox.method, node.keys), peer.headers())

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")
    assert nonsense not in parsed


@both_inboxes
async def test_an_unregistered_server_is_unknown(node: Node, other: RemoteServer, inbox: Inbox) -> None:
    """403 with the code that tells a sender to register first."""
    response = await node.deliver(other, inbox.write(other), inbox.method)

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")
    assert await nothing_stored(node)


@pytest.mark.parametrize("url", ["", "nonsense", "https://b.example", "javascript:alert(1)", "https://user@a.example"])
async def test_a_federation_url_that_names_no_peer_is_unknown(node: Node, peer: RemoteServer, url: str) -> None:
    """Neither nonsense nor our own name is a server we know."""
    sender = RemoteServer(url=url, keys=peer.keys)
    body = peer.delivery(sender.follow(), "FEDERATE", node.keys)

    response = await node.send(FOLLOWS_PATH, body, {"Content-Type": "application/json"})

    assert (response.status_code, response.json()["code"]) == (403, "UNKNOWN_FEDERATION_SERVER_INTERACTION")


async def test_a_server_another_process_has_just_registered_is_known(
    node: Node, other: RemoteServer, database_url: str
) -> None:
    """That it was unknown a moment ago is not remembered against it."""
    assert (await node.follow(other)).status_code == 403
    async with serving(database_url) as second:
        await second.know(other)

    assert (await node.follow(other)).status_code == 200


async def test_a_server_is_known_by_any_spelling_of_its_url(node: Node, peer: RemoteServer) -> None:
    """What is stored is the canonical spelling."""
    sender = RemoteServer(url="HTTPS://A.Example:443/", keys=peer.keys)

    assert (await node.post(sender)).status_code == 200
    assert (await node.follow(sender)).status_code == 200

    assert [row.federation_url for row in await node.posts()] == [peer.url]
    assert [row.following_server_url for row in await node.follows()] == [peer.url]


@both_inboxes
@pytest.mark.parametrize("kind", ["none", "junk", "other text", "other server"])
async def test_a_signature_that_is_not_the_senders_is_refused(
    node: Node, peer: RemoteServer, other: RemoteServer, inbox: Inbox, kind: str
) -> None:
    """403 for a missing signature, a malformed one, one of another text, and one by another registered server."""
    await node.know(other)
    plaintext = inbox.write(peer)
    signatures = {
        "none": "",
        "junk": "AAAA",
        "other text": json.loads(peer.delivery(plaintext + " ", inbox.method, node.keys))["signature"],
        "other server": json.loads(other.delivery(plaintext, inbox.method, node.keys))["signature"],
    }
    body = peer.delivery(plaintext, inbox.method, node.keys, signature=signatures[kind])

    response = await node.send(inbox.path, body, peer.headers())

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")
    assert await nothing_stored(node)


@both_inboxes
@pytest.mark.parametrize("header", ["Origin", "X-Federation-Origin"])
@pytest.mark.parametrize("claimed", ["https://c.example", "null"])
async def test_a_header_that_names_another_server_than_the_author_is_refused(
    node: Node, peer: RemoteServer, inbox: Inbox, header: str, claimed: str
) -> None:
    """A soundly signed delivery that somebody else brings is not taken from them."""
    response = await node.deliver(peer, inbox.write(peer), inbox.method, **{header: claimed})

    assert (response.status_code, response.json()["code"]) == (403, "INVALID_SIGNATURE")
    assert await nothing_stored(node)


@both_inboxes
async def test_a_delivery_needs_no_origin_headers(node: Node, peer: RemoteServer, inbox: Inbox) -> None:
    """The signed text names its author."""
    body = peer.delivery(inbox.write(peer), inbox.method, node.keys)

    response = await node.send(inbox.path, body, {"Content-Type": "application/json"})

    assert peer.read_ack(response, node.keys)


@both_inboxes
async def test_what_cannot_be_acknowledged_is_not_stored(
    node: Node, other: RemoteServer, inbox: Inbox, events: Events
) -> None:
    """Nothing can be sealed to a low-order key, which earlier versions registered: 409, no row, no stack in the log."""
    low_order = encode_base64(bytes(32))
    await node.registry.register(
        url=other.url, public_key=other.keys.signing.public_text, encryption_public_key=low_order
    )

    response = await node.deliver(other, inbox.write(other), inbox.method)

    assert response.status_code == 409
    assert await nothing_stored(node)
    assert [event["event"] for event in events] == ["inbound_refused"]


async def test_refusals_are_logged_without_what_was_sent(node: Node, peer: RemoteServer, events: Events) -> None:
    """One line per refusal, with its code and who claims to have sent it; neither text nor keys."""
    await node.deliver(peer, peer.post(text="a secret thought") + "junk", "FEDERATE_POST")
    await node.deliver(peer, peer.follow(followed="a-secret-user"), "FEDERATE")

    lines = [event for event in events if event["event"] == "inbound_refused"]
    assert [(line["code"], line["claimed_origin"], line["path"]) for line in lines] == [
        ("INVALID_FEDERATED_POST_PAYLOAD", peer.url, POSTS_PATH),
        ("USER_NOT_FOUND", peer.url, FOLLOWS_PATH),
    ]
    assert "secret" not in repr(events)
    assert peer.keys.signing.public_text not in repr(events)
