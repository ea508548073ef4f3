"""Everything of ours that reads what strangers wrote, each as a function of bytes that refuses by an error of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from pydantic import BaseModel, ValidationError

from federation.admin.blacklist.csv_lists import CsvError, read_csv
from federation.base.queues.job_data import FederationDeliveryJob
from federation.http.messages import Response
from federation.protocol.acks import Ack, FollowAck, find_ack, is_unsigned_follow_ack, parse_ack_body
from federation.protocol.activities import (
    DeliveryRequest,
    FollowActivity,
    PostActivity,
    UnfollowActivity,
    parse_method,
)
from federation.protocol.discovery import parse_discover_document, shows_key
from federation.protocol.encodings import dump_json, format_moment, parse_json, parse_model, parse_moment, validate
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import sign_message, verify_signature
from federation.protocol.refusals import refusal_code
from federation.protocol.relaying import Ping, ProxyRequest, RelayedRequest, TargetedRequest, relay_target
from federation.protocol.rotation import ConfirmRequest, Proofs, RotationRequest, solved
from federation.protocol.sealing import Envelope, open_with_any, seal
from federation.protocol.urls import canonical_origin, host_of
from federation.sealed.outbound.answers import post_ack_mismatch
from federation.servers.blacklist_rules import canonical_rule, rules_covering
from tests.federation.protocol.vectors import FOLLOW, FOLLOW_ACK, POST, A, B
from tests.security.activity_readers import ACTIVITY_READERS
from tests.security.queue_readers import QUEUE_READERS
from tests.security.reading import LARGEST, NOW, Reader, text_of


def _json(data: bytes) -> None:
    value = parse_json(data, limit=LARGEST)
    assert parse_json(dump_json(value), limit=2 * LARGEST) == value


def _request(data: bytes) -> None:
    DeliveryRequest.from_wire(parse_json(data, limit=LARGEST))


def _envelope(data: bytes) -> None:
    open_with_any(Envelope.from_wire(parse_json(data, limit=LARGEST)), B.keys)


def _signature(data: bytes) -> None:
    text, _, signature = text_of(data).partition("\n")
    assert not verify_signature(text, signature, A.keys.signing.public_text)


def _model(model: type[BaseModel]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        parse_model(model, text_of(data))

    return read


def _member(model: type[BaseModel]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        validate(model, parse_json(data, limit=LARGEST))

    return read


def _ack(data: bytes) -> None:
    body = parse_ack_body(data)
    is_unsigned_follow_ack(body)
    ack = find_ack(body)
    ack.is_signed(ack.open(A.keys), B.keys.signing.public_text)


def _post_ack(data: bytes) -> None:
    """Of an acknowledgment that opens: what it says is a stranger's all the same."""
    sealed, signature = (
        seal(data, A.keys.encryption.public),
        sign_message(data.decode("utf-8", "replace"), B.keys.signing.secret),
    )
    ack = Ack(data=sealed.to_wire(), signature=signature)
    post_ack_mismatch(
        ack, "https://b.example", payload=POST.plaintext, keys=A.keys, public_key=B.keys.signing.public_text
    )


def _discovery(data: bytes) -> None:
    shows_key(data, B.keys.signing.public_text)
    parse_discover_document(data)


def _challenges(data: bytes) -> None:
    solved(data, new=B.keys, ring=A.keys)


def _url(data: bytes) -> None:
    text = text_of(data)
    assert list(rules_covering(text, labels=5))
    origin = canonical_origin(text)
    assert canonical_origin(origin) == origin
    assert origin.isascii()
    assert host_of(origin) in origin


def _rule(data: bytes) -> None:
    rule = canonical_rule(text_of(data))
    assert canonical_rule(rule) == rule


def _relay_target(data: bytes) -> None:
    relay_target(text_of(data))


def _moment(data: bytes) -> None:
    moment = parse_moment(parse_json(data, limit=LARGEST))
    assert abs(parse_moment(format_moment(moment)) - moment) < timedelta(milliseconds=1)


def _pause(data: bytes) -> None:
    pause = Response(status=429, headers={"retry-after": text_of(data)}, body=b"").retry_after(NOW)
    assert pause is None or pause >= timedelta(0)


def _blacklist(data: bytes) -> None:
    read_csv(io.BytesIO(data))


def _refusal(data: bytes) -> None:
    refusal_code(data)


def _job(data: bytes) -> None:
    FederationDeliveryJob.model_validate(parse_json(data, limit=LARGEST))


def _follow_ack(data: bytes) -> None:
    parse_model(FollowAck, text_of(data))


def _method(data: bytes) -> None:
    parse_method(text_of(data))


def _wire(**members: object) -> bytes:
    return json.dumps(members).encode()


_SEALED: Final = FOLLOW.envelope
_SHOWN: Final = {
    "publicKey": A.keys.signing.public_text,
    "encryptionPublicKey": A.keys.encryption.public_text,
}
_NEW: Final = {"newSigningPublicKey": _SHOWN["publicKey"], "newEncryptionPublicKey": _SHOWN["encryptionPublicKey"]}
_DELIVERY: Final = _wire(method="FEDERATE", payload=_SEALED, signature=FOLLOW.signature)
_CHALLENGE: Final = "6a3f0c3e-7e0e-4f7e-9d0e-2f6f3f2b1c11"
_INNER: Final = {"X-Federation-Origin": "https://a.example", "Origin": "https://a.example"}

READERS: Final = {
    "json": Reader(_json, (b'{"a": [1, 2.5e3, "\\u00e9", null, true]}', FOLLOW.plaintext.encode())),
    "delivery": Reader(_request, (_DELIVERY,)),
    "envelope": Reader(_envelope, (json.dumps(_SEALED).encode(),), costly=True),
    "signature": Reader(_signature, (f"text\n{POST.signature}".encode(),), costly=True),
    "method": Reader(_method, (FOLLOW.plaintext.encode(),)),
    "follow": Reader(_model(FollowActivity), (FOLLOW.plaintext.encode(),)),
    "unfollow": Reader(
        _model(UnfollowActivity),
        (
            _wire(
                method="UNFOLLOW",
                federationUrl="https://a.example",
                following={"followerId": "user-a", "followingId": "user-b"},
            ),
        ),
    ),
    "post": Reader(_model(PostActivity), (POST.plaintext.encode(),)),
    "ack": Reader(
        _ack,
        (
            _wire(
                method="PROXY_RESPONSE",
                status="acknowledged",
                data=FOLLOW_ACK.envelope,
                signature=FOLLOW_ACK.signature,
            ),
        ),
        costly=True,
    ),
    "follow ack": Reader(_follow_ack, (FOLLOW_ACK.plaintext.encode(),)),
    "post ack": Reader(
        _post_ack, (b'{"federationUrl": "https://b.example", "post": {"federationPostId": "p"}}',), costly=True
    ),
    "discover": Reader(_discovery, (_wire(url="https://a.example", peers=[], **_SHOWN),)),
    "rotation": Reader(_member(RotationRequest), (_wire(url="https://a.example", **_NEW),)),
    "confirm": Reader(_member(ConfirmRequest), (_wire(serverUrl="https://a.example", envelope=_SEALED),)),
    "proofs": Reader(
        _member(Proofs),
        (_wire(signingOldSignature="", signingNewSignature="", encryptionOldPlaintext="", encryptionNewPlaintext=""),),
    ),
    "challenges": Reader(
        _challenges,
        (
            _wire(
                signingOldChallenge=_CHALLENGE,
                signingNewChallenge=_CHALLENGE,
                encryptionOldChallenge=seal(_CHALLENGE, A.keys.encryption.public).to_wire(),
                encryptionNewChallenge=seal(_CHALLENGE, B.keys.encryption.public).to_wire(),
            ),
        ),
        costly=True,
    ),
    "proxy": Reader(
        _member(ProxyRequest),
        (
            _wire(
                method="PROXY",
                targetUrl="https://c.example/proxy",
                publicSigningKey=_SHOWN["publicKey"],
                publicEncryptionKey=_SHOWN["encryptionPublicKey"],
                payload=_SEALED,
                signature="",
            ),
        ),
    ),
    "targeted": Reader(_member(TargetedRequest), (_wire(method="TARGETED", payload=_SEALED),)),
    "relayed": Reader(
        _member(RelayedRequest),
        (
            _wire(
                targetUrl="https://b.example/x",
                method="POST",
                headers={**_INNER, "X-Federation-Target": "https://b.example/x"},
                body=_DELIVERY.decode(),
            ),
        ),
    ),
    "ping": Reader(_member(Ping), (b'{"method": "PING", "nonce": [1]}',)),
    "relay target": Reader(_relay_target, (b"https://c.example/proxy",)),
    "refusal": Reader(_refusal, (b'{"error": "no", "code": "USER_NOT_FOUND"}',)),
    "url": Reader(_url, (b"https://a.example:8443/x", b"http://[::ffff:1.2.3.4]", b"https://b\xc3\xbccher.example")),
    "rule": Reader(_rule, (b"*.evil.example", b"https://evil.example:8080")),
    "moment": Reader(_moment, (b'"2026-01-02T03:04:05.678Z"', b"1767323045678"), (ProtocolError, ValueError)),
    "pause": Reader(_pause, (b"120", b"Fri, 02 Jan 2026 03:04:05 GMT")),
    "blacklist": Reader(
        _blacklist,
        (b"server_url,reason\nhttps://evil.example,spam\n", b"#domain,#severity\nx.example,suspend\n"),
        (CsvError,),
    ),
    "job": Reader(
        _job,
        (_wire(deliveryJobId="1", targetUrl="https://b.example/x", serverUrl="https://b.example", payload="{}"),),
        (ProtocolError, ValidationError),
    ),
    **ACTIVITY_READERS,
    **QUEUE_READERS,
}
