"""Key material, our own two pairs from the environment, other servers' public keys from the wire; and signatures.

Secrets stay out of reprs, errors and pickles: a pair prints only its public half, and refuses to be copied.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, SupportsIndex

from nacl import bindings
from nacl.exceptions import CryptoError

from federation.protocol.encodings import decode_base64_sized, encode_base64, encode_text
from federation.protocol.errors import KeyMaterialError

PUBLIC_KEY_BYTES = 32
SIGNING_SECRET_BYTES = 64
SIGNATURE_BYTES = 64
SIGNING_SEED_BYTES = 32
ENCRYPTION_SECRET_BYTES = 32

_PROBE = bytes([1]) + bytes(31)
"""Any scalar shows whether a point is of low order; clamped, it is a multiple of eight."""

SIGNING_PUBLIC_VARIABLE = "FEDERATION_PUBLIC_KEY"
SIGNING_SECRET_VARIABLE = "FEDERATION_PRIVATE_KEY"  # noqa: S105 - the variable's name, not its value
ENCRYPTION_PUBLIC_VARIABLE = "FEDERATION_ENCRYPTION_PUBLIC_KEY"
ENCRYPTION_SECRET_VARIABLE = "FEDERATION_ENCRYPTION_PRIVATE_KEY"  # noqa: S105 - as above


def fingerprint(raw: bytes) -> str:
    """Return the lower-case hex SHA-256 of a raw public key."""
    return hashlib.sha256(raw).hexdigest()


def decode_key(text: object, *, what: str) -> bytes:
    """Return the 32 raw bytes of a public key in strict base64; *what* names it in the error.

    Raises:
        KeyMaterialError: not strict base64, or another size.
    """
    try:
        return decode_base64_sized(text, PUBLIC_KEY_BYTES)
    except ValueError as error:
        raise KeyMaterialError([f"{what}: {error}"]) from None


def is_signing_key(raw: bytes) -> bool:
    """Tell whether 32 bytes are an Ed25519 public key, and no point of small order: anybody could sign for those."""
    return bool(bindings.crypto_core_ed25519_is_valid_point(raw))


def is_sealing_key(raw: bytes) -> bool:
    """Tell whether 32 bytes are an X25519 public key, and no point of low order: anybody could open for those."""
    try:
        bindings.crypto_scalarmult(_PROBE, raw)
    except RuntimeError:  # libsodium's binding raises this for a low-order point
        return False
    return True


class _StaysHere:
    """A value that holds a secret and therefore refuses to be pickled or copied."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a secret key and is not pickled or copied")


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKeyPair(_StaysHere):
    """An Ed25519 pair; *secret* is the 32-byte seed followed by the public key (NaCl's layout)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKeyPair:
        """Return the pair that a 32-byte seed determines."""
        public, secret = bindings.crypto_sign_seed_keypair(seed)
        return cls(public=public, secret=secret)

    @property
    def public_text(self) -> str:
        return encode_base64(self.public)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionKeyPair(_StaysHere):
    """An X25519 pair; *secret* is the scalar as stored, clamped only in use."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> EncryptionKeyPair:
        """Return the pair that a 32-byte scalar determines."""
        return cls(public=bindings.crypto_scalarmult_base(secret), secret=secret)

    @property
    def public_text(self) -> str:
        return encode_base64(self.public)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """The two key pairs that are this node's identity."""

    signing: SigningKeyPair
    encryption: EncryptionKeyPair

    @classmethod
    def from_base64(
        cls, *, signing_public: str, signing_secret: str, encryption_public: str, encryption_secret: str
    ) -> OwnKeys:
        """Return the keys in the four environment values, after checking that each pair belongs together.

        Raises:
            KeyMaterialError: every problem at once, each with its variable's name and never its value.
        """
        problems: list[str] = []
        signing = _signing_pair(signing_public, signing_secret, problems)
        encryption = _encryption_pair(encryption_public, encryption_secret, problems)
        if problems or signing is None or encryption is None:
            raise KeyMaterialError(problems)
        return cls(signing=signing, encryption=encryption)

    def pairs(self, *, now: bool = False) -> tuple[OwnKeys, ...]:
        """Return this one only: a node that never changed its keys has no others."""
        return (self,)

    def to_env(self) -> dict[str, str]:
        """Return the four variables, **secrets included**, as a `.env` file holds them."""
        return {
            SIGNING_PUBLIC_VARIABLE: self.signing.public_text,
            SIGNING_SECRET_VARIABLE: encode_base64(self.signing.secret),
            ENCRYPTION_PUBLIC_VARIABLE: self.encryption.public_text,
            ENCRYPTION_SECRET_VARIABLE: encode_base64(self.encryption.secret),
        }


class KeyRing(Protocol):
    """All key pairs that a node may be known by. There are two while it changes them."""

    def pairs(self, *, now: bool = False) -> tuple[OwnKeys, ...]:
        """Return at least one pair, the newest first. They may be a second old, unless `now` is set."""
        ...


class FixedKeys(KeyRing):
    """Pairs that do not change, the newest first."""

    def __init__(self, *pairs: OwnKeys) -> None:
        self._pairs = pairs

    def pairs(self, *, now: bool = False) -> tuple[OwnKeys, ...]:
        return self._pairs


def pair_known_by(ring: KeyRing, public_key: str | None) -> OwnKeys | None:
    """Return the pair with that public signing key, or for None the oldest.

    Return None if this process has no such pair.
    """
    if public_key is None:
        return ring.pairs()[-1]
    for now in (False, True):
        for pair in ring.pairs(now=now):
            if pair.signing.public_text == public_key:
                return pair
    return None


def generate_own_keys() -> OwnKeys:
    """Generate two new pairs from the operating system's randomness."""
    return OwnKeys(
        signing=SigningKeyPair.from_seed(os.urandom(SIGNING_SEED_BYTES)),
        encryption=EncryptionKeyPair.from_secret(os.urandom(ENCRYPTION_SECRET_BYTES)),
    )


def _signing_pair(public_text: str, secret_text: str, problems: list[str]) -> SigningKeyPair | None:
    public = _decode(SIGNING_PUBLIC_VARIABLE, public_text, PUBLIC_KEY_BYTES, problems)
    secret = _decode(SIGNING_SECRET_VARIABLE, secret_text, SIGNING_SECRET_BYTES, problems)
    if secret is None:
        return None
    pair = SigningKeyPair.from_seed(secret[:SIGNING_SEED_BYTES])
    if pair.secret != secret:
        problems.append(f"{SIGNING_SECRET_VARIABLE}: the second half is not the public key of the seed before it")
    elif public not in (None, pair.public):
        problems.append(f"{SIGNING_PUBLIC_VARIABLE}: not the public half of {SIGNING_SECRET_VARIABLE}")
    return pair


def _encryption_pair(public_text: str, secret_text: str, problems: list[str]) -> EncryptionKeyPair | None:
    public = _decode(ENCRYPTION_PUBLIC_VARIABLE, public_text, PUBLIC_KEY_BYTES, problems)
    secret = _decode(ENCRYPTION_SECRET_VARIABLE, secret_text, ENCRYPTION_SECRET_BYTES, problems)
    if secret is None:
        return None
    pair = EncryptionKeyPair.from_secret(secret)
    if public not in (None, pair.public):
        problems.append(f"{ENCRYPTION_PUBLIC_VARIABLE}: not the public half of {ENCRYPTION_SECRET_VARIABLE}")
    return pair


def _decode(variable: str, text: str, size: int, problems: list[str]) -> bytes | None:
    try:
        return decode_base64_sized(text, size)
    except ValueError as error:
        problems.append(f"{variable}: {error}")
        return None


def sign_message(text: str, secret: bytes) -> str:
    """Sign *text* with *secret*, 64 bytes in NaCl's layout, and return the signature in base64.

    Raises:
        KeyMaterialError: the secret has another size.
        PayloadError: the text has lone surrogates and therefore no UTF-8 form.
    """
    if len(secret) != SIGNING_SECRET_BYTES:
        raise KeyMaterialError([f"signing secret: expected {SIGNING_SECRET_BYTES} bytes, got {len(secret)}"])
    return encode_base64(bindings.crypto_sign(encode_text(text), secret)[:SIGNATURE_BYTES])


def verify_signature(text: str, signature: object, public_key: str | bytes) -> bool:
    """Tell whether *signature* is *public_key*'s over *text*. Malformed values simply do not verify.

    *signature* and a textual key are strict base64; a key in bytes is raw.
    """
    try:
        raw_signature = decode_base64_sized(signature, SIGNATURE_BYTES)
        raw_key = public_key if isinstance(public_key, bytes) else decode_base64_sized(public_key, PUBLIC_KEY_BYTES)
        if len(raw_key) != PUBLIC_KEY_BYTES:  # libsodium would read past the end
            return False
        bindings.crypto_sign_open(raw_signature + encode_text(text), raw_key)
    except (ValueError, CryptoError):
        return False
    return True
