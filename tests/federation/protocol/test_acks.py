"""Acknowledgments in every shape a peer answers with."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.acks import (
    MAX_ACK_BYTES,
    Ack,
    FollowAck,
    PostAck,
    ack_response,
    find_ack,
    follow_ack,
    parse_ack_body,
    post_ack,
)
from federation.protocol.encodings import parse_model
from federation.protocol.errors import AckMissing, EnvelopeError, NotJson, PayloadError
from federation.protocol.keys import sign_message
from federation.protocol.sealing import seal
from tests.federation.protocol.vectors import FOLLOW_ACK, A, B

MOMENT = datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
INLINE: dict[str, Any] = {
    "method": "PROXY_RESPONSE",
    "status": "acknowledged",
    "data": FOLLOW_ACK.envelope,
    "signature": FOLLOW_ACK.signature,
}
NO_ACK = {"status": "acknowledged", "accepted": True}


def _read(body: object) -> Ack:
    return find_ack(parse_ack_body(json.dumps(body).encode()))


@pytest.mark.parametrize(
    "body",
    [
        INLINE,
        {"method": "PROXY_RESPONSE", "payload": INLINE},
        {"payload": INLINE},
        {**NO_ACK, "payload": INLINE},
        {**INLINE, "payload": INLINE},
        {**INLINE, "payload": None},
        {**INLINE, "payload": NO_ACK},
        {**INLINE, "payload": "text"},
        {**INLINE, "payload": [INLINE]},
        {**INLINE, "data": None, "signature": None, "payload": INLINE},
        {**INLINE, "accepted": False, "extra": {}},
    ],
    ids=[
        "inline-ack",
        "relayed",
        "nested-ack",
        "nested in a legacy body",
        "both-ack",
        "null payload",
        "payload without method",
        "text payload",
        "array payload",
        "nested wins",
        "extra members",
    ],
)
def test_found_opened_verified(body: dict[str, Any]) -> None:
    """Our node finds B's known acknowledgment in every accepted shape, opens it and verifies it."""
    ack = _read(body)
    text = ack.open(A.keys)
    assert text == FOLLOW_ACK.plaintext
    assert ack.is_signed(text, B.env["FEDERATION_PUBLIC_KEY"])
    following = parse_model(FollowAck, text).following
    assert following.accepted is True
    assert (following.follower_id, following.following_id) == ("user-a", "user-b")
    assert following.created_at == MOMENT


@pytest.mark.parametrize(
    "body",
    [
        {},
        None,
        [],
        [INLINE],
        7,
        "PROXY_RESPONSE",
        True,
        NO_ACK,
        {**INLINE, "method": "FEDERATE"},
        {**INLINE, "method": None},
        {**INLINE, "method": ["PROXY_RESPONSE"]},
        {"payload": NO_ACK},
        {"payload": {"payload": INLINE}},
        {"data": INLINE},
    ],
    ids=[
        "no-ack",
        "json-null",
        "json-array",
        "array of acks",
        "json-scalar",
        "json-string",
        "json-true",
        "legacy-ack",
        "other method",
        "null method",
        "array method",
        "nested legacy",
        "nested too deep",
        "elsewhere",
    ],
)
def test_no_ack(body: object) -> None:
    """JSON that holds no acknowledgment in either place is reported as such."""
    with pytest.raises(AckMissing):
        _read(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"<!doctype html><title>marker</title>",
        b'{"method":"PROXY_RESPONSE"',
        b"{'marker':1}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'"\xff"',
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"payload":' * 100_000,
        b"1" * 5_000,
        b" " * MAX_ACK_BYTES + b"{}",
    ],
    ids=[
        "empty",
        "blank",
        "html",
        "bad-json",
        "single quotes",
        "NaN",
        "Infinity",
        "invalid UTF-8",
        "UTF-16",
        "deep array",
        "deep object",
        "digits",
        "huge",
    ],
)
def test_not_json(body: bytes) -> None:
    """A complete body that `JSON.parse` or our bounds refuse is not JSON, and is not quoted."""
    with pytest.raises(NotJson) as caught:
        parse_ack_body(body)
    assert "marker" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_byte_order_mark_is_skipped() -> None:
    """A leading byte order mark is skipped, as by browsers."""
    assert parse_ack_body(b"\xef\xbb\xbf{}") == {}


def test_largest_body() -> None:
    """A body of exactly the limit is still read."""
    assert parse_ack_body(b"{}".ljust(MAX_ACK_BYTES)) == {}


@pytest.mark.parametrize("data", [None, 1, "x", [], {}, {**FOLLOW_ACK.envelope, "authTag": "AAAA"}])
def test_unusable_data(data: object) -> None:
    """An acknowledgment whose data is no envelope is found, but does not open."""
    with pytest.raises(EnvelopeError):
        _read({**INLINE, "data": data}).open(A.keys)


def test_wrong_key() -> None:
    """An acknowledgment sealed to somebody else does not open."""
    sealed = seal(FOLLOW_ACK.plaintext, B.keys.encryption.public).to_wire()
    with pytest.raises(EnvelopeError, match="does not open"):
        _read({**INLINE, "data": sealed}).open(A.keys)


@pytest.mark.parametrize(
    "signature",
    [
        None,
        "",
        7,
        [],
        "A" * 86 + "==",
        sign_message(FOLLOW_ACK.plaintext, A.keys.signing.secret),
        sign_message(FOLLOW_ACK.plaintext + " ", B.keys.signing.secret),
    ],
    ids=["no-signature", "empty", "number", "array", "bad-signature", "wrong-signer", "other text"],
)
def test_bad_signature(signature: object) -> None:
    """An acknowledgment that opens but is not signed by its server does not verify."""
    ack = _read({**INLINE, "signature": signature})
    assert not ack.is_signed(ack.open(A.keys), B.keys.signing.public)


def _inner(**changes: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(FOLLOW_ACK.plaintext)
    value["following"] |= changes
    return value


@pytest.mark.parametrize(("accepted", "expected"), [(True, True), (False, False), (None, None)])
def test_accepted(accepted: bool | None, expected: bool | None) -> None:
    """A follow is accepted, refused, or (null) undecided."""
    assert parse_model(FollowAck, json.dumps(_inner(accepted=accepted))).following.accepted is expected


def test_accepted_absent() -> None:
    """A missing decision is no decision."""
    value = _inner()
    del value["following"]["accepted"]
    assert parse_model(FollowAck, json.dumps(value)).following.accepted is None


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (_inner(accepted="true"), "following.accepted"),
        (_inner(accepted=1), "following.accepted"),
        (_inner(followerId=None), "following.followerId"),
        (_inner(followingId=3), "following.followingId"),
        (_inner(id=None), "following.id"),
        (_inner(createdAt="soon"), "following.createdAt"),
        (_inner(followerServerUrl=7), "following.followerServerUrl"),
        (_inner() | {"federationUrl": None}, "federationUrl"),
        (_inner() | {"method": "FEDERATE_POST"}, "method"),
        (_inner() | {"following": None}, "following"),
        ([], "payload"),
        (None, "payload"),
    ],
)
def test_bad_inner(value: object, where: str) -> None:
    """A follow's acknowledgment with a wrong member is refused, with its path."""
    with pytest.raises(PayloadError, match=rf"^{where}: "):
        parse_model(FollowAck, json.dumps(value))


def test_follow_ack_builder_matches_the_known_text() -> None:
    """A built acknowledgment of a follow is byte for byte the known plaintext."""
    text = follow_ack(
        sender_url="https://a.example",
        follow_id="33333333-3333-4333-8333-333333333333",
        created_at=MOMENT,
        follower_id="user-a",
        following_id="user-b",
        accepted=True,
    )
    assert text == FOLLOW_ACK.plaintext


def test_post_ack_builder() -> None:
    """A built acknowledgment of a post reads back."""
    text = post_ack(own_url="https://b.example", post_id="theirs", federation_post_id="ours")
    assert json.loads(text) == {
        "post": {"id": "theirs", "federationPostId": "ours"},
        "federationUrl": "https://b.example",
        "method": "FEDERATE_POST",
    }
    assert parse_model(PostAck, text).post.federation_post_id == "ours"


@pytest.mark.parametrize("accepted", [True, False, None])
def test_response_in_both_shapes(accepted: bool | None) -> None:
    """Our answer holds the same acknowledgment inline and nested; a follow's state stands in the clear as well."""
    body = ack_response(
        FOLLOW_ACK.plaintext,
        recipient_key=A.keys.encryption.public,
        signing_secret=B.keys.signing.secret,
        accepted=accepted,
    )
    assert body["payload"] == {name: body[name] for name in INLINE}
    assert body.get("accepted") is accepted
    assert ("accepted" in body) == (accepted is not None)
    inline = {name: value for name, value in body.items() if name != "payload"}
    for shape in (body, inline, {"payload": body["payload"]}, {"method": "PROXY_RESPONSE", "payload": body}):
        ack = _read(shape)
        assert ack.open(A.keys) == FOLLOW_ACK.plaintext
        assert ack.is_signed(FOLLOW_ACK.plaintext, B.keys.signing.public)


def test_repr_shows_no_content() -> None:
    """An acknowledgment in a log line shows neither data nor signature."""
    assert repr(_read(INLINE)) == "Ack()"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("PROXY_RESPONSE"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["method", "payload", "data", "signature", "x"]), inner)
    ),
    max_leaves=10,
)


@given(body=st.binary() | _json.map(lambda value: json.dumps(value).encode()))
def test_fuzzed_bodies(body: bytes) -> None:
    """Any body ends in one of three errors: junk neither opens nor raises anything else."""
    try:
        ack = find_ack(parse_ack_body(body))
        assert isinstance(ack.is_signed("text", B.keys.signing.public), bool)
        ack.open(A.keys)
    except (NotJson, AckMissing, EnvelopeError):
        return
    pytest.fail("nobody but B can make this")


@given(
    text=st.text() | _json.map(json.dumps), changes=st.dictionaries(st.sampled_from(list(_inner()["following"])), _json)
)
def test_fuzzed_plaintexts(text: str, changes: dict[str, Any]) -> None:
    """Any plaintext is a follow's acknowledgment or a `PayloadError`."""
    for candidate in (text, json.dumps(_inner(**changes))):
        with contextlib.suppress(PayloadError):
            assert parse_model(FollowAck, candidate).method == "FEDERATE"
