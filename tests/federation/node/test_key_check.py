"""`DISCOVER`: a server asks which keys of it we hold, and what it seems to show."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from federation.protocol.encodings import dump_json
from federation.protocol.keys import OwnKeys, fingerprint, generate_own_keys
from federation.protocol.sealing import seal
from tests.federation.node.conftest import Node
from tests.federation.node.remote_server import RemoteServer
from tests.federation.protocol import vectors
from tests.misbehaving import MisbehavingServer, reset, respond


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as running:
        yield running


@pytest.fixture
async def remote(server: MisbehavingServer, node: Node) -> RemoteServer:
    """A registered peer on loopback that shows its keys, as long as `server` is not told otherwise."""
    peer = RemoteServer(url=server.url, keys=generate_own_keys())
    server.routes["/discover"] = respond(body=peer.document())
    await node.know(peer)
    return peer


def question(peer: RemoteServer, to: OwnKeys, **claims: object) -> dict[str, object]:
    claim = {
        "url": peer.url,
        "publicKeyFingerprint": fingerprint(peer.keys.signing.public),
        "encryptionPublicKeyFingerprint": fingerprint(peer.keys.encryption.public),
        **claims,
    }
    return {
        "method": "DISCOVER",
        "publicKey": peer.keys.signing.public_text,
        "encryptionPublicKey": peer.keys.encryption.public_text,
        "envelope": seal(dump_json(claim), to.encryption.public).to_wire(),
    }


def encode(body: dict[str, object]) -> bytes:
    return dump_json(body).encode()


async def test_a_known_key_that_is_still_shown_is_confirmed(node: Node, remote: RemoteServer) -> None:
    """Both answers are yes."""
    response = await node.discover(encode(question(remote, node.keys)))

    assert (response.status_code, response.json()) == (200, {"sameKeyOnServer": True, "sameKeyOnFetch": True})


@pytest.mark.parametrize("shown", [b"{}", b"[]", b'{"publicKey":"AAAA"}'])
async def test_a_known_key_that_is_no_longer_shown_is_told(
    node: Node, remote: RemoteServer, server: MisbehavingServer, shown: bytes
) -> None:
    """The registry still has it, the server's own document does not."""
    server.routes["/discover"] = respond(body=shown)

    response = await node.discover(encode(question(remote, node.keys)))

    assert response.json() == {"sameKeyOnServer": True, "sameKeyOnFetch": False}


async def test_another_key_on_the_server_is_told(node: Node, remote: RemoteServer, server: MisbehavingServer) -> None:
    """The server shows new keys, and asks with the old ones."""
    server.routes["/discover"] = respond(body=RemoteServer(url=remote.url, keys=generate_own_keys()).document())

    response = await node.discover(encode(question(remote, node.keys)))

    assert response.json() == {"sameKeyOnServer": True, "sameKeyOnFetch": False}


@pytest.mark.parametrize(
    ("claims", "member"),
    [
        ({"publicKeyFingerprint": vectors.B.signing_fingerprint}, "publicKeyFingerprint"),
        ({"encryptionPublicKeyFingerprint": vectors.B.encryption_fingerprint}, "encryptionPublicKeyFingerprint"),
        ({"publicKeyFingerprint": 5}, "envelope"),
        ({"encryptionPublicKeyFingerprint": None}, "envelope"),
        ({"url": ""}, "envelope"),
        ({"url": None}, "envelope"),
    ],
)
async def test_fingerprints_have_to_match_the_submitted_keys(
    node: Node, remote: RemoteServer, server: MisbehavingServer, claims: dict[str, object], member: str
) -> None:
    """400 with an issue that names the member, and nobody is asked."""
    response = await node.discover(encode(question(remote, node.keys, **claims)))

    assert response.status_code == 400
    [issue] = json.loads(response.json()["error"])
    assert issue["path"] == [member]
    assert server.hits == 0


@pytest.mark.parametrize("sealed_to", ["somebody else", "nobody"])
async def test_an_envelope_that_does_not_open_is_invalid(node: Node, remote: RemoteServer, sealed_to: str) -> None:
    """400, issue Invalid envelope."""
    body = question(remote, remote.keys) if sealed_to == "somebody else" else {**question(remote, node.keys)}
    if sealed_to == "nobody":
        del body["envelope"]

    response = await node.discover(encode(body))

    assert response.status_code == 400
    [issue] = json.loads(response.json()["error"])
    assert issue["message"].startswith("Invalid envelope")


@pytest.mark.parametrize("key", ["AAAA", "", None])
async def test_submitted_keys_have_to_be_keys(node: Node, remote: RemoteServer, key: str | None) -> None:
    """400 for anything that is not 32 bytes of base64."""
    response = await node.discover(encode({**question(remote, node.keys), "publicKey": key}))

    assert response.status_code == 400
    assert json.loads(response.json()["error"])


async def test_a_key_nobody_registered_is_not_found(node: Node, other: RemoteServer) -> None:
    """404."""
    response = await node.discover(encode(question(other, node.keys)))

    assert response.status_code == 404


async def test_the_key_of_a_blacklisted_server_is_refused(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """It named itself nowhere, but its key does."""
    await node.blacklist(remote.url)

    response = await node.discover(encode(question(remote, node.keys)))

    assert (response.status_code, server.hits) == (403, 0)


async def test_a_stored_url_that_may_not_be_asked_is_refused(node: Node, other: RemoteServer) -> None:
    """The registry of an existing node may hold what the guard refuses today."""
    inside = RemoteServer(url="http://10.0.0.1", keys=other.keys)
    await node.know(inside)

    response = await node.discover(encode(question(inside, node.keys)))

    assert (response.status_code, response.json()["error"]) == (400, "Stored server URL is blocked")


async def test_a_server_that_does_not_answer_is_a_bad_gateway(
    node: Node, remote: RemoteServer, server: MisbehavingServer
) -> None:
    """502 with the network error's code, or without one if the answer is no JSON."""
    server.routes["/discover"] = reset()
    broken = await node.discover(encode(question(remote, node.keys)))
    server.routes["/discover"] = respond(body=b"<html>")
    html = await node.discover(encode(question(remote, node.keys)))

    assert (broken.status_code, broken.json()["code"]) == (502, "CONN_RESET")
    assert (html.status_code, set(html.json())) == (502, {"error"})
