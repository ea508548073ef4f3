"""The relay's requests: what fits into one, and which URLs a relay takes for a target."""

from __future__ import annotations

import json

import pytest

from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers
from federation.protocol.errors import UrlError
from federation.protocol.keys import sign_message, verify_signature
from federation.protocol.relaying import (
    MAX_RELAYED_BYTES,
    RelayedRequest,
    proxy_request,
    relay_target,
    relayed_request,
    targeted_request,
)
from federation.protocol.sealing import Envelope, open_envelope, seal
from tests.federation.protocol.vectors import A, B

TARGET = "https://b.example"
URL = f"{TARGET}/api/auth/social/posts"


def relayed(plaintext: str) -> tuple[str, bytes]:
    """A delivery of this text from A to B as a relayed request, and the body that asks a peer to relay it."""
    body = DeliveryRequest(
        method=ActivityMethod.FEDERATE_POST,
        payload=seal(plaintext, B.keys.encryption.public),
        signature=sign_message(plaintext, A.keys.signing.secret),
    ).to_bytes()
    headers = delivery_headers(own_url="https://a.example", target_url=URL)
    text = relayed_request(url=URL, method="POST", headers=headers, body=body.decode())
    return text, proxy_request(text, target=TARGET, target_key=B.keys.encryption.public, keys=A.keys)


def test_the_size_of_a_relayed_post_is_what_other_implementations_make_of_it() -> None:
    """146 769 bytes of text become 262 139, the most that fits; one byte more does not."""
    assert len(relayed("x" * 146_769)[1]) == 262_139
    assert len(relayed("x" * 146_770)[1]) > MAX_RELAYED_BYTES


def test_only_the_target_reads_what_is_relayed() -> None:
    """The envelope opens with its key alone, to the text that the sender signed."""
    text, body = relayed("Olá ☃")
    outer = json.loads(body)

    opened = open_envelope(Envelope.from_wire(outer["payload"]), B.keys.encryption.secret)

    assert opened == text
    assert verify_signature(opened, outer["signature"], A.keys.signing.public_text)
    inner = RelayedRequest.model_validate_json(opened)
    assert (inner.target_url, inner.method, inner.header("X-Federation-Target")) == (URL, "POST", URL)
    assert inner.header("x-federation-target") == ""
    assert json.loads(inner.body)["method"] == "FEDERATE_POST"
    assert json.loads(targeted_request(Envelope.from_wire(outer["payload"]))) == {
        "method": "TARGETED",
        "payload": outer["payload"],
    }


@pytest.mark.parametrize(
    "url", ["https://c.example/proxy", "https://C.example:443/proxy/", "https://c.example/proxy?x"]
)
def test_a_target_is_named_by_its_proxy(url: str) -> None:
    """In any spelling of the server."""
    assert relay_target(url) == "https://c.example"


@pytest.mark.parametrize(
    "path", ["", "/", "/proxyadmin", "/proxy/admin", "/proxy/../admin", "/proxy/%2e%2e/admin", "/x/proxy", "//proxy"]
)
def test_no_other_path_is_a_target(path: str) -> None:
    """A relay reaches nothing else of a server."""
    with pytest.raises(UrlError, match="path"):
        relay_target(f"https://c.example{path}")
