"""Envelopes against known answers and against tampering."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl import bindings

from federation.protocol.errors import EnvelopeError, KeyMaterialError, PayloadError
from federation.protocol.sealing import (
    Envelope,
    SealingKey,
    _aes_key,
    decrypt_payload,
    encrypt_payload,
    open_envelope,
    seal,
)
from tests.federation.protocol.vectors import FOLLOW, MESSAGES, A, B, Message

LOW_ORDER_POINTS = [bytes(32), b"\x01" + bytes(31), bytes.fromhex("ec" + "ff" * 30 + "7f")]
every_message = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)


@every_message
def test_known_intermediate_values(message: Message) -> None:
    """Point, shared key and AES key are the known ones, from either side."""
    secret, public = bytes.fromhex(message.ephemeral_secret), message.recipient.keys.encryption.public
    own, ephemeral = message.recipient.keys.encryption.secret, bindings.crypto_scalarmult_base(secret)
    for mine, theirs in ((secret, public), (own, ephemeral)):
        assert bindings.crypto_scalarmult(mine, theirs).hex() == message.point
        shared = bindings.crypto_box_beforenm(theirs, mine)
        assert shared.hex() == message.shared
        assert _aes_key(shared).hex() == message.aes


@every_message
def test_seals_the_known_bytes(message: Message) -> None:
    """With the known one-time key and nonce, sealing gives the known envelope."""
    assert hashlib.sha256(message.plaintext.encode()).hexdigest() == message.sha256
    key = SealingKey(message.recipient.keys.encryption.public, secret=bytes.fromhex(message.ephemeral_secret))
    envelope = key.seal(message.plaintext, iv=base64.b64decode(message.envelope["iv"]))
    assert envelope.to_wire() == message.envelope


@every_message
def test_opens_the_known_bytes(message: Message) -> None:
    """The recipient opens the known envelope to the exact plaintext."""
    text = open_envelope(Envelope.from_wire(message.envelope), message.recipient.keys.encryption.secret)
    assert text == message.plaintext


@every_message
def test_another_server_cannot_open(message: Message) -> None:
    """The sender's own key does not open what it sealed to the recipient."""
    with pytest.raises(EnvelopeError, match=r"^authTag: does not open"):
        open_envelope(Envelope.from_wire(message.envelope), message.sender.keys.encryption.secret)


@pytest.mark.parametrize("member", ["authTag", "ciphertext", "iv", "ephemeralPublicKey"])
@pytest.mark.parametrize("position", [0, -1])
def test_one_flipped_bit(member: str, position: int) -> None:
    """A single changed bit anywhere keeps the envelope shut."""
    raw = bytearray(base64.b64decode(FOLLOW.envelope[member]))
    raw[position] ^= 1
    damaged = Envelope.from_wire(FOLLOW.envelope | {member: base64.b64encode(raw).decode()})
    with pytest.raises(EnvelopeError):
        open_envelope(damaged, B.keys.encryption.secret)


@pytest.mark.parametrize(
    ("member", "size"),
    [("authTag", 4), ("authTag", 15), ("authTag", 17), ("iv", 11), ("iv", 16), ("ephemeralPublicKey", 31)],
)
def test_wrong_size(member: str, size: int) -> None:
    """Each member has one size; a 4-byte tag in particular is refused though its bytes are right."""
    raw = (base64.b64decode(FOLLOW.envelope[member]) * 2)[:size]
    with pytest.raises(EnvelopeError, match=rf"^{member}: expected \d+ bytes, got {size}$") as caught:
        Envelope.from_wire(FOLLOW.envelope | {member: base64.b64encode(raw).decode()})
    assert caught.value.member == member


@pytest.mark.parametrize("member", ["authTag", "ciphertext", "iv", "ephemeralPublicKey"])
@pytest.mark.parametrize("value", [None, 1, [], {}, "!", "AA", "AA==\n", "A A A A=", "-_-_", "é", "\ud800"])
def test_junk_member(member: str, value: object) -> None:
    """Junk in a member is named after it, and not quoted."""
    with pytest.raises(EnvelopeError, match=rf"^{member}: "):
        Envelope.from_wire({**FOLLOW.envelope, member: value})


@pytest.mark.parametrize("member", ["authTag", "ciphertext", "iv", "ephemeralPublicKey"])
def test_missing_member(member: str) -> None:
    """A missing member is named."""
    with pytest.raises(EnvelopeError, match=rf"^{member}: missing$"):
        Envelope.from_wire({name: value for name, value in FOLLOW.envelope.items() if name != member})


@pytest.mark.parametrize("value", [None, True, 1, "x", [], [FOLLOW.envelope]])
def test_no_object(value: object) -> None:
    """Only a JSON object is an envelope."""
    with pytest.raises(EnvelopeError, match="four base64 strings"):
        Envelope.from_wire(value)


def test_unknown_members_are_ignored() -> None:
    """A later version's extra member does not matter."""
    assert Envelope.from_wire({**FOLLOW.envelope, "v": 2}) == Envelope.from_wire(FOLLOW.envelope)


@pytest.mark.parametrize("point", LOW_ORDER_POINTS)
def test_low_order_points(point: bytes) -> None:
    """Keys that make every shared secret zero are refused on both sides."""
    with pytest.raises(KeyMaterialError, match="recipient encryption key"):
        seal("text", point)
    envelope = Envelope.from_wire(FOLLOW.envelope | {"ephemeralPublicKey": base64.b64encode(point).decode()})
    with pytest.raises(EnvelopeError, match=r"^ephemeralPublicKey: "):
        open_envelope(envelope, B.keys.encryption.secret)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_recipient_key_of_wrong_size(size: int) -> None:
    """A recipient key of another size is bad key material."""
    with pytest.raises(KeyMaterialError):
        seal("text", bytes(size))


def test_content_that_is_no_text() -> None:
    """An envelope that opens to something else than UTF-8 is an envelope error, without the bytes."""
    envelope = seal(b"marker\xff", B.keys.encryption.public)
    with pytest.raises(EnvelopeError, match="not UTF-8 at byte 6") as caught:
        open_envelope(envelope, B.keys.encryption.secret)
    assert "marker" not in str(caught.value)


def test_lone_surrogate_cannot_be_sealed() -> None:
    """Text without a UTF-8 form is refused before anything is encrypted, without being quoted."""
    with pytest.raises(PayloadError, match="lone surrogate at character 6") as caught:
        seal("marker\ud800", B.keys.encryption.public)
    assert "marker" not in str(caught.value)


def test_every_sealing_differs() -> None:
    """Key and nonce are fresh each time."""
    first, second = (seal("same", B.keys.encryption.public) for _ in range(2))
    assert first.ephemeral_public_key != second.ephemeral_public_key
    assert first.iv != second.iv
    assert first.ciphertext != second.ciphertext


def test_a_kept_key_never_uses_a_nonce_twice() -> None:
    """Its envelopes share the one-time key and nothing else, and each opens by itself."""
    key = SealingKey(B.keys.encryption.public)
    envelopes = [key.seal("same") for _ in range(100)]
    assert len({each.ephemeral_public_key for each in envelopes}) == 1
    assert len({each.iv for each in envelopes}) == len({each.ciphertext for each in envelopes}) == 100
    assert {open_envelope(each, B.keys.encryption.secret) for each in envelopes} == {"same"}


def test_repr_shows_no_content() -> None:
    """An envelope in a log line is only a type name."""
    assert repr(seal("text", B.keys.encryption.public)) == "Envelope()"


@given(text=st.text())
def test_round_trip(text: str) -> None:
    """Every text with a UTF-8 form, empty included, survives sealing, the wire and opening."""
    wire = encrypt_payload(text, A.keys.encryption.public).to_wire()
    assert decrypt_payload(Envelope.from_wire(wire), A.keys.encryption.secret) == text


_members = st.sampled_from(list(FOLLOW.envelope))
_values = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=100),
    st.binary(max_size=64).map(lambda raw: base64.b64encode(raw).decode()),
    st.binary(min_size=32, max_size=32).map(lambda raw: base64.b64encode(raw).decode()),
)


@given(changes=st.dictionaries(_members, _values, min_size=1), base=st.sampled_from([{}, FOLLOW.envelope]))
def test_fuzzed_envelopes(changes: dict[str, Any], base: dict[str, str]) -> None:
    """Whatever a peer puts into an envelope, the only outcomes are the text and `EnvelopeError`."""
    try:
        text = open_envelope(Envelope.from_wire({**base, **changes}), B.keys.encryption.secret)
    except EnvelopeError:
        return
    assert text == FOLLOW.plaintext
