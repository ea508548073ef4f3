"""Nonces that prove possession: who is asked, and what an answer shows."""

from __future__ import annotations

import json

import pytest

from federation.protocol.discovery import DiscoverDocument
from federation.protocol.encodings import encode_base64, validate
from federation.protocol.errors import PayloadError
from federation.protocol.keys import generate_own_keys
from federation.protocol.possession import (
    NO_PROOF,
    REFUTED,
    Proof,
    asks_for_possession,
    names_first,
    pong,
    possession_nonce,
    read_pong,
)
from tests.federation.protocol.vectors import A, B

OURS, THEIRS = "https://a.example", "https://b.example"
NONCE = f"possession:{THEIRS}:{OURS}:r4nd0m"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(THEIRS, OURS), ("https://b.example:8443", "http://127.0.0.1:4000"), ("http://[2001:db8::1]:80", OURS)],
)
def test_a_nonce_names_the_server_asked_first(theirs: str, ours: str) -> None:
    """Ports and addresses do not confuse it; the other one is not asked, and no nonce comes twice."""
    nonce = possession_nonce(theirs, ours)

    assert asks_for_possession(nonce)
    assert names_first(nonce, "http://[2001:db8::1]" if "[" in theirs else theirs)
    assert not names_first(nonce, ours)
    assert nonce != possession_nonce(theirs, ours)


@pytest.mark.parametrize(
    "nonce",
    [
        f"possession:{THEIRS}",
        f"possession:{THEIRS}:{OURS}",
        f"possession:{THEIRS}:{OURS}:",
        f"possession:{THEIRS}:8443:{OURS}:r",
        f"possession:{THEIRS}:mallory:r",
        f"possession:{THEIRS}/:{OURS}:r",
        f"possession:{THEIRS}@c.example:{OURS}:r",
        f"possession:{THEIRS}:{OURS}:r:more",
        f"possession:{THEIRS}:{OURS}:r\n",
        f"possession: {THEIRS}:{OURS}:r",
        f"possession:{OURS}:{THEIRS}:r",
        "possession:",
    ],
)
def test_what_is_not_of_the_form_asks_nobody(nonce: str) -> None:
    """Nor what names another server first: it is not sent back at all."""
    assert asks_for_possession(nonce)
    assert not names_first(nonce, THEIRS)


@pytest.mark.parametrize("nonce", [None, 1, "", "a possession:", ["possession:"], "Possession:x"])
def test_other_nonces_ask_for_nothing(nonce: object) -> None:
    """They are sent back as ever."""
    assert not asks_for_possession(nonce)


def answer(**changes: object) -> bytes:
    body = {**pong(NONCE, B.keys.signing.secret), **changes}
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("body", "status", "proof"),
    [
        (answer(), 200, Proof(opened=True, signed=True)),
        (answer(signature=None), 200, Proof(opened=True)),
        (answer(signature=pong(NONCE, A.keys.signing.secret)["signature"]), 200, REFUTED),
        (answer(signature=7), 200, REFUTED),
        (answer(nonce="another"), 200, REFUTED),
        (answer(nonce=None), 200, REFUTED),
        (answer(nonce="\ud800"), 200, REFUTED),
        (b'{"error":"","code":"DECRYPT_FAILED"}', 400, REFUTED),
        (b'{"error":"","code":"INVALID_TARGETED_DATA"}', 400, NO_PROOF),
        (b'{"error":"","code":"UNKNOWN_FEDERATION_SERVER_INTERACTION"}', 403, NO_PROOF),
        (answer(), 500, NO_PROOF),
        (answer(method="PONG"), 200, NO_PROOF),
        (b"{}", 200, NO_PROOF),
        (b"[]", 200, NO_PROOF),
        (b"<html>", 200, NO_PROOF),
        (b" " * 20_000, 200, NO_PROOF),
    ],
)
def test_what_an_answer_shows(body: bytes, status: int, proof: Proof) -> None:
    """Only who answers pings can prove or fail to; everything else says nothing."""
    assert read_pong(body, status=status, nonce=NONCE, public_key=B.keys.signing.public_text) == proof


def test_the_signature_is_of_the_key_that_is_shown() -> None:
    """Opening shows nothing of it."""
    shown = generate_own_keys().signing.public_text

    assert read_pong(answer(), status=200, nonce=NONCE, public_key=shown) == REFUTED


X25519_LOW_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000080",
]
ED25519_UNUSABLE = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "0200000000000000000000000000000000000000000000000000000000000000",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
"""Of small order, on no curve, or not as the encoding demands."""


@pytest.mark.parametrize(
    ("member", "keys"), [("publicKey", ED25519_UNUSABLE), ("encryptionPublicKey", X25519_LOW_ORDER)]
)
def test_a_key_that_proves_nothing_is_in_no_document(member: str, keys: list[str]) -> None:
    """Anybody could sign or open for it."""
    shown = {
        "url": THEIRS,
        "publicKey": B.keys.signing.public_text,
        "encryptionPublicKey": B.keys.encryption.public_text,
    }
    assert validate(DiscoverDocument, shown)
    for key in keys:
        with pytest.raises(PayloadError, match="not a usable"):
            validate(DiscoverDocument, {**shown, member: encode_base64(bytes.fromhex(key))})
