"""Keys as Multikey has them (FEP-521a, W3C's Controlled Identifiers): text of a base, with a number for the kind.

Mastodon reads RSA and Ed25519 of these, and so do we.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

MOST_CHARACTERS: Final = 2048
"""More than the largest RSA key has, whose 1 038 bytes are 1 418 characters: base 58 takes quadratic time."""
ED25519: Final = b"\xed\x01"
RSA: Final = b"\x85\x24"
"""What a public key begins with, which for RSA goes on by PKCS #1."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_BASE_58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS: Final = {letter: digit for digit, letter in enumerate(_BASE_58)}


def pem_of(multibase: object) -> str | None:
    """Return the key that a `publicKeyMultibase` holds; None if it is none by which we verify."""
    if not isinstance(multibase, str) or not 2 <= len(multibase) <= MOST_CHARACTERS:
        return None
    try:
        return _key_of(_BASES[multibase[0]](multibase[1:]))
    except (KeyError, ValueError, UnsupportedAlgorithm):
        return None


def end_of(told: Mapping[str, object]) -> datetime | None:
    """Return when a key ends, if it says so. One that is revoked, or says it in a form that nobody reads, has ended."""
    expires = told.get("expires")
    if told.get("revoked") is not None or not isinstance(expires, str | None):
        return _LONG_AGO
    if expires is None:
        return None
    try:
        at = datetime.fromisoformat(expires)
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return _LONG_AGO


def _key_of(data: bytes) -> str | None:
    kind, bare = data[:2], data[2:]
    key: object = None
    if kind == ED25519:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bare)
    elif kind == RSA:
        key = load_der_public_key(bare)
    if not isinstance(key, ed25519.Ed25519PublicKey | rsa.RSAPublicKey):
        return None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _of_base_58(text: str) -> bytes:
    """Return the bytes of a text without leading zeros, which no kind of key begins with."""
    number = 0
    for letter in text:
        number = number * 58 + _DIGITS[letter]
    return number.to_bytes((number.bit_length() + 7) // 8)


def _of_base_64(text: str) -> bytes:
    """Return the bytes of base64 for URLs, without padding."""
    if not set("+/=").isdisjoint(text):
        raise ValueError("another alphabet")
    standard = text.translate(str.maketrans("-_", "+/"))
    return a2b_base64(standard + "=" * (-len(text) % 4), strict_mode=True)


_BASES: Final[Mapping[str, Callable[[str], bytes]]] = {"z": _of_base_58, "u": _of_base_64}
