"""The HTTP body and headers of a delivery."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.acks import MAX_ACK_BYTES
from federation.protocol.activities import (
    MAX_REQUEST_BYTES,
    ActivityMethod,
    DeliveryRequest,
    delivery_headers,
    parse_method,
)
from federation.protocol.discovery import MAX_DISCOVER_BYTES
from federation.protocol.encodings import MAX_PAYLOAD_BYTES, dump_json, parse_json
from federation.protocol.errors import EnvelopeError, NotJson, PayloadError, ProtocolError, UrlError
from federation.protocol.keys import sign_message, verify_signature
from federation.protocol.relaying import MAX_RELAYED_BYTES
from federation.protocol.sealing import Envelope, open_envelope, seal
from tests.federation.protocol.vectors import FOLLOW, POST, A, B, Message


def parse(body: bytes) -> DeliveryRequest:
    """The request in *body*, read as a receiver reads it."""
    return DeliveryRequest.from_wire(parse_json(body, limit=MAX_REQUEST_BYTES))


BODY: dict[str, Any] = {"method": "FEDERATE", "payload": FOLLOW.envelope, "signature": FOLLOW.signature}


@pytest.mark.parametrize("message", [FOLLOW, POST], ids=["follow", "post"])
def test_known_request(message: Message) -> None:
    """A known envelope and signature make the body a peer expects, and read back from it."""
    method = parse_method(message.plaintext)
    request = DeliveryRequest(method=method, payload=Envelope.from_wire(message.envelope), signature=message.signature)
    wire = request.to_bytes()
    members = {"method": method.value, "payload": message.envelope, "signature": message.signature}
    assert wire == dump_json(members).encode()
    assert json.loads(wire) == {
        "method": method.value,
        "payload": message.envelope,
        "signature": message.signature,
    }
    assert parse(wire) == request
    text = open_envelope(parse(wire).payload, B.keys.encryption.secret)
    assert verify_signature(text, request.signature, A.keys.signing.public)


def test_largest_payload_fits() -> None:
    """The largest payload a sender takes is a request a receiver takes."""
    text = json.dumps({"method": "INSERT", "a": "x" * MAX_PAYLOAD_BYTES})[: MAX_PAYLOAD_BYTES - 2] + '"}'
    request = DeliveryRequest(
        method=parse_method(text),
        payload=seal(text, B.keys.encryption.public),
        signature=sign_message(text, A.keys.signing.secret),
    )
    assert parse(request.to_bytes()) == request


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", NotJson),
        (b"{", NotJson),
        (b"\xff\xfe{}", NotJson),
        (b'{"a":"\xff"}', NotJson),
        (b"[" * 100_000, NotJson),
        (b" " * (MAX_REQUEST_BYTES + 1), NotJson),
        (b"null", PayloadError),
        (b"[]", PayloadError),
        (b"{}", PayloadError),
        (json.dumps({**BODY, "method": "LIKE"}).encode(), PayloadError),
        (json.dumps({**BODY, "method": ["FEDERATE"]}).encode(), PayloadError),
        (json.dumps({**BODY, "signature": None}).encode(), PayloadError),
        (json.dumps({**BODY, "signature": 1}).encode(), PayloadError),
        (json.dumps({**BODY, "payload": None}).encode(), EnvelopeError),
        (json.dumps({**BODY, "payload": "x"}).encode(), EnvelopeError),
        (json.dumps({**BODY, "payload": {**FOLLOW.envelope, "authTag": "AAAA"}}).encode(), EnvelopeError),
    ],
)
def test_bad_request(body: bytes, error: type[ProtocolError]) -> None:
    """Each kind of bad body has its error, all of one family."""
    with pytest.raises(error) as caught:
        parse(body)
    assert isinstance(caught.value, ProtocolError)


def test_repr_shows_no_signature_or_content() -> None:
    """A request in a log line shows its method only."""
    assert repr(parse(json.dumps(BODY).encode())) == (
        f"DeliveryRequest(method={ActivityMethod.FEDERATE!r}, payload=Envelope())"
    )


def test_headers() -> None:
    """A delivery names its sender twice, its target in full, and carries no cookie."""
    target = "https://b.example/api/auth/social/follows"
    assert delivery_headers(own_url="https://a.example", target_url=target) == {
        "Content-Type": "application/json",
        "Origin": "https://a.example",
        "X-Federation-Origin": "https://a.example",
        "X-Federation-Target": target,
    }


@pytest.mark.parametrize("target", ["https://b.example/\r\nCookie: x", "https://b.example/é", "https://b.example/ x"])
def test_headers_cannot_be_injected(target: str) -> None:
    """A target that would break out of its header is refused."""
    with pytest.raises(UrlError, match="target URL"):
        delivery_headers(own_url="https://a.example", target_url=target)


@given(
    body=st.binary()
    | st.fixed_dictionaries({}, optional=dict.fromkeys(BODY, st.none() | st.text() | st.integers())).map(
        lambda changes: json.dumps({**BODY, **changes}).encode()
    )
)
def test_fuzzed_requests(body: bytes) -> None:
    """Any body is a request or one of the package's errors."""
    try:
        request = parse(body)
    except ProtocolError:
        return
    assert request.method in ActivityMethod


def test_how_large_messages_may_be() -> None:
    """Peers count on these sizes; a request has room for the largest payload in base64."""
    limits = [MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES, MAX_ACK_BYTES, MAX_DISCOVER_BYTES, MAX_RELAYED_BYTES]
    assert [limit / 2**20 for limit in limits] == [2, 4, 1, 0.25, 0.25]
