"""Sealed envelopes: text that only one server can read.

X25519 with a one-time key and HSalsa20 (together NaCl's `crypto_box_beforenm`), HKDF-SHA256, AES-256-GCM without
associated data. The parameters are those of Sipher's federation layer, version 1.
"""

from __future__ import annotations

import os
from typing import ClassVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl import bindings
from nacl.exceptions import CryptoError

from federation.protocol.encodings import decode_base64, decode_base64_sized, encode_base64, encode_text
from federation.protocol.errors import EnvelopeError, KeyMaterialError
from federation.protocol.keys import ENCRYPTION_SECRET_BYTES, PUBLIC_KEY_BYTES, KeyRing, OwnKeys
from federation.protocol.values import Value

ENVELOPE_MEMBERS = ("ephemeralPublicKey", "iv", "ciphertext", "authTag")
IV_BYTES = 12
AUTH_TAG_BYTES = 16

_SALT = b"sipher-federation-v1-salt"
_INFO = b"sipher-federation-v1-aes"
_AES_KEY_BYTES = 32


class Envelope(Value, frozen=True, kw_only=True):
    """The four raw parts of a sealed text; `from_wire` checks their sizes."""

    unshown: ClassVar = frozenset({"ephemeral_public_key", "iv", "ciphertext", "auth_tag"})

    ephemeral_public_key: bytes
    iv: bytes
    ciphertext: bytes
    auth_tag: bytes

    def to_wire(self) -> dict[str, str]:
        """Return the JSON object that a peer reads."""
        return {
            "ephemeralPublicKey": encode_base64(self.ephemeral_public_key),
            "iv": encode_base64(self.iv),
            "ciphertext": encode_base64(self.ciphertext),
            "authTag": encode_base64(self.auth_tag),
        }

    @classmethod
    def from_wire(cls, value: object) -> Envelope:
        """Return the envelope in a parsed JSON value; other members are ignored.

        Only strict base64 and the exact sizes pass: short GCM tags, which Sipher accepts, would be forgeable.

        Raises:
            EnvelopeError: names the first member that is missing or malformed.
        """
        if not isinstance(value, dict):
            raise EnvelopeError("", "an envelope is a JSON object of four base64 strings")
        return cls(
            ephemeral_public_key=_member(value, "ephemeralPublicKey", PUBLIC_KEY_BYTES),
            iv=_member(value, "iv", IV_BYTES),
            ciphertext=_member(value, "ciphertext", None),
            auth_tag=_member(value, "authTag", AUTH_TAG_BYTES),
        )


class SealingKey:
    """A one-time key pair's public half, and the cipher that it makes with one recipient's key.

    The secret half is forgotten at once: this can only seal to that recipient, and read what it sealed. Only test
    vectors may choose the `secret`.

    Raises:
        KeyMaterialError: the recipient's key has another size, or is a low-order point, so anybody could open what is
            sealed to it.
    """

    __slots__ = ("_cipher", "_ephemeral_public_key")

    def __init__(self, recipient_key: bytes, *, secret: bytes | None = None) -> None:
        secret = secret or os.urandom(ENCRYPTION_SECRET_BYTES)
        try:
            shared = bindings.crypto_box_beforenm(recipient_key, secret)
        except CryptoError:
            raise KeyMaterialError(["recipient encryption key: not a usable X25519 key"]) from None
        self._cipher = AESGCM(_aes_key(shared))
        self._ephemeral_public_key = bindings.crypto_scalarmult_base(secret)

    def seal(self, plaintext: str | bytes, *, iv: bytes | None = None) -> Envelope:
        """Seal *plaintext* with a fresh nonce: one that is used twice breaks the cipher, so only tests may choose *iv*.

        Raises:
            PayloadError: the text has lone surrogates and therefore no UTF-8 form.
        """
        raw = encode_text(plaintext) if isinstance(plaintext, str) else plaintext
        iv = iv or os.urandom(IV_BYTES)
        sealed = self._cipher.encrypt(iv, raw, None)
        return Envelope(
            ephemeral_public_key=self._ephemeral_public_key,
            iv=iv,
            ciphertext=sealed[:-AUTH_TAG_BYTES],
            auth_tag=sealed[-AUTH_TAG_BYTES:],
        )


def seal(plaintext: str | bytes, recipient_key: bytes) -> Envelope:
    """Seal *plaintext* to *recipient_key*, a raw X25519 public key, with a key and a nonce of its own.

    Raises:
        KeyMaterialError: as `SealingKey`.
        PayloadError: the text has lone surrogates and therefore no UTF-8 form.
    """
    return SealingKey(recipient_key).seal(plaintext)


def open_envelope(envelope: Envelope, secret: bytes) -> str:
    """Return the text sealed to *secret*'s public key; *secret* is a raw X25519 scalar.

    Raises:
        EnvelopeError: low-order ephemeral key; altered or sealed to another key; the content is not UTF-8.
    """
    try:
        shared = bindings.crypto_box_beforenm(envelope.ephemeral_public_key, secret)
    except CryptoError:
        raise EnvelopeError("ephemeralPublicKey", "not a usable X25519 key") from None
    sealed = envelope.ciphertext + envelope.auth_tag
    try:
        plaintext = AESGCM(_aes_key(shared)).decrypt(envelope.iv, sealed, None)
    except InvalidTag:
        raise EnvelopeError("authTag", "does not open: altered, or sealed to another key") from None
    try:
        return plaintext.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EnvelopeError("ciphertext", f"opens, but is not UTF-8 at byte {error.start}") from None


def open_with_any(envelope: Envelope, ring: KeyRing) -> tuple[str, OwnKeys]:
    """Return the text sealed to one of our pairs, and that pair: an envelope does not say which one it is for.

    Raises:
        EnvelopeError: it opens with none of them.
    """
    tried: list[OwnKeys] = []
    for now in (False, True):
        for pair in ring.pairs(now=now):
            if pair in tried:
                continue
            tried.append(pair)
            try:
                return open_envelope(envelope, pair.encryption.secret), pair
            except EnvelopeError as error:
                failure = error
    raise failure


# The names that the delivery API uses.
encrypt_payload = seal
decrypt_payload = open_envelope


def _aes_key(shared: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=_AES_KEY_BYTES, salt=_SALT, info=_INFO).derive(shared)


def _member(value: dict[object, object], name: str, size: int | None) -> bytes:
    if name not in value:
        raise EnvelopeError(name, "missing")
    try:
        return decode_base64(value[name]) if size is None else decode_base64_sized(value[name], size)
    except ValueError as error:
        raise EnvelopeError(name, str(error)) from None
