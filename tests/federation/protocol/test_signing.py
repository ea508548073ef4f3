"""Signatures against known answers; anything malformed is simply no signature."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.errors import KeyMaterialError, PayloadError
from federation.protocol.keys import sign_message, verify_signature
from tests.federation.protocol.vectors import FOLLOW, MESSAGES, A, B, Message

A_KEY = A.env["FEDERATION_PUBLIC_KEY"]
every_message = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)


@every_message
def test_known_signatures(message: Message) -> None:
    """Signing gives the known signature, which verifies with the key as text and as bytes."""
    keys = message.sender.keys.signing
    assert sign_message(message.plaintext, keys.secret) == message.signature
    assert verify_signature(message.plaintext, message.signature, keys.public)
    assert verify_signature(message.plaintext, message.signature, keys.public_text)


@every_message
def test_one_character_more(message: Message) -> None:
    """The signature covers the text to its last byte."""
    assert not verify_signature(message.plaintext + " ", message.signature, message.sender.keys.signing.public)


@every_message
def test_wrong_signer(message: Message) -> None:
    """The recipient's key does not verify the sender's signature."""
    assert not verify_signature(message.plaintext, message.signature, message.recipient.keys.signing.public)


@pytest.mark.parametrize("position", [0, 31, 32, 63])
def test_one_flipped_bit(position: int) -> None:
    """Each half of the signature matters."""
    raw = bytearray(base64.b64decode(FOLLOW.signature))
    raw[position] ^= 1
    assert not verify_signature(FOLLOW.plaintext, base64.b64encode(raw).decode(), A_KEY)


@pytest.mark.parametrize(
    "signature", [None, 0, [], {}, b"", "", "AAAA", FOLLOW.signature[:-1], FOLLOW.signature + "\n", "é", "\ud800"]
)
def test_malformed_signature(signature: object) -> None:
    """A malformed signature is invalid, never an error."""
    assert verify_signature(FOLLOW.plaintext, signature, A_KEY) is False


@pytest.mark.parametrize(
    "key",
    ["", "AAAA", A_KEY[:-1], b"", bytes(31), bytes(32), A.keys.signing.public + bytes(1), "é", B.keys.signing.public],
)
def test_malformed_key(key: str | bytes) -> None:
    """A malformed, foreign or low-order key verifies nothing, and is never an error."""
    assert verify_signature(FOLLOW.plaintext, FOLLOW.signature, key) is False


def test_lone_surrogates() -> None:
    """Text without a UTF-8 form cannot be signed and has no valid signature."""
    with pytest.raises(PayloadError, match="lone surrogate"):
        sign_message("\ud800", A.keys.signing.secret)
    assert verify_signature("\ud800", FOLLOW.signature, A_KEY) is False


def test_secret_of_wrong_size() -> None:
    """A bare seed is not taken for a secret key."""
    with pytest.raises(KeyMaterialError, match="expected 64 bytes, got 32"):
        sign_message("text", A.keys.signing.secret[:32])


@given(text=st.text(), signature=st.text() | st.binary(max_size=80), key=st.text() | st.binary(max_size=40))
def test_fuzzed_verification(text: str, signature: object, key: str | bytes) -> None:
    """No combination of texts verifies or raises."""
    assert verify_signature(text, signature, key) is False
