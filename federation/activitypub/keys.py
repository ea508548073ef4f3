"""Keys of our actors: made, sealed under the node's own keys, and found when something is to be signed or shown.

Theory of operation. A private key lies in the database only sealed, under a secret that is derived from the node's
signing key: a copy of the database alone signs nothing. `Actors` writes the rows, in whatever process. All others read
them once a minute, and decide by the clock that they share which key is in use: a rotation names the moment, ten
minutes ahead, so that every process knows it long before, and from then on signs with the new key and shows it.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
)
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox
from sqlalchemy import bindparam, select

from db import ActivityKey, Database
from federation.activitypub.signatures import SigningKey
from federation.base.cache import LoadingCache
from federation.protocol.encodings import encode_base64
from federation.protocol.keys import KeyRing
from workers.clock import Clock

SIZES: Final = (2048, 3072, 4096)
KEPT: Final = timedelta(minutes=1)
"""How old what a process knows of an actor's keys may be; a rotation comes into force only long after it."""
MOST_KEPT: Final = 1_000

_SEALED_FOR: Final = b"federation: private key of an ActivityPub actor, 1"
_TABLE: Final = ActivityKey.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_COLUMNS: Final = tuple(_TABLE.c[name] for name in ("key_id", "private", "public_pem", "use_from", "retired_at"))
KEYS: Final = select(*_COLUMNS).where(_TABLE.c.actor_id == bindparam("actor_id"))


class NoActorKey(Exception):
    """The actor has no key here."""


class KeyUnreadable(Exception):
    """A sealed key cannot be opened with the keys of this process. Most likely they are another node's."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key pair of an actor, as it is stored; in the order of the columns of `KEYS`."""

    key_id: str
    private: str = field(repr=False)
    public_pem: str
    use_from: datetime
    retired_at: datetime | None


@dataclass(frozen=True, slots=True)
class ServedKey:
    """The public key that an actor shows now. At `changes_at` another one takes its place, if one is to."""

    key_id: str
    public_pem: str
    changes_at: datetime | None


def make_private_key(bits: int) -> bytes:
    """Return a new RSA key in DER. It takes 0.1 s, and more than a second for the largest.

    Raises:
        ValueError: it is none of the sizes that others accept.
    """
    if bits not in SIZES:
        raise ValueError(f"a key has {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]} bits, not {bits}")
    key = rsa.generate_private_key(public_exponent=65537, key_size=bits)
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def public_pem(der: bytes) -> str:
    """Return the public half, as an actor's document shows it."""
    public = _parsed(der).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def seal(der: bytes, secret: bytes) -> str:
    """Seal a key under the signing key of a node."""
    return encode_base64(bytes(SecretBox(_derived(secret)).encrypt(der)))


def open_sealed(text: str, secrets: Iterable[bytes]) -> bytes:
    """Open what was sealed under one of these signing keys.

    Raises:
        KeyUnreadable: it was sealed under none of them.
    """
    for secret in secrets:
        try:
            return SecretBox(_derived(secret)).decrypt(binascii.a2b_base64(text, strict_mode=True))
        except (ValueError, CryptoError):
            continue
    raise KeyUnreadable("the actor's key was sealed under keys that this process does not have")


def secrets_of(ring: KeyRing | None, *, now: bool = False) -> list[bytes]:
    """Return the signing keys under which keys of actors may be sealed, the present one first."""
    return [] if ring is None else [pair.signing.secret for pair in ring.pairs(now=now)]


def in_use(keys: Sequence[StoredKey], now: datetime) -> StoredKey | None:
    """Return the key that signs and is shown now: of those that are not retired, the newest that has begun.

    The first one has begun in any case: the clock of who made it may be ahead.
    """
    left = sorted((key for key in keys if key.retired_at is None or key.retired_at > now), key=lambda it: it.use_from)
    begun = [key for key in left if key.use_from <= now]
    if begun:
        return begun[-1]
    return left[0] if left else None


def successor(keys: Sequence[StoredKey], now: datetime) -> StoredKey | None:
    """Return the key that a rotation made and that has not begun yet."""
    present = in_use(keys, now)
    later = (key for key in keys if key is not present and key.use_from > now and key.retired_at is None)
    return min(later, key=lambda it: it.use_from, default=None)


class ActorKeys:
    """Finds the keys of our actors. *ring* opens them; without one, nothing can be signed."""

    def __init__(self, database: Database, ring: KeyRing | None, clock: Clock) -> None:
        self._database = database
        self._ring = ring
        self._clock = clock
        self._rows = LoadingCache(self._load, ttl=KEPT, max_entries=MOST_KEPT)
        self._opened = lru_cache(MOST_KEPT)(self._open)

    async def signing_key(self, actor_id: str) -> SigningKey:
        """Return the key with which the actor signs now.

        Raises:
            NoActorKey: it has none here.
            KeyUnreadable: this process cannot open it.
            SQLAlchemyError: the database failed.
        """
        key = in_use(await self._rows.get(actor_id), self._clock.now())
        if key is None:
            raise NoActorKey(f"{actor_id} has no key in use")
        return SigningKey(key.key_id, self._opened(key.private))

    async def served(self, actor_id: str) -> ServedKey | None:
        """Return the key that the actor shows now, or None if it has none here. Nothing is opened for that.

        Raises:
            SQLAlchemyError: the database failed.
        """
        now = self._clock.now()
        try:
            keys = await self._rows.get(actor_id)
        except NoActorKey:
            return None
        key, following = in_use(keys, now), successor(keys, now)
        if key is None:
            return None
        return ServedKey(key.key_id, key.public_pem, changes_at=None if following is None else following.use_from)

    async def close(self) -> None:
        """End what is being read."""
        await self._rows.close()

    async def _load(self, actor_id: str) -> tuple[StoredKey, ...]:
        """Read an actor's keys. That there are none is not remembered: they may be made at any moment."""
        rows = await self._database.rows(KEYS, {"actor_id": actor_id})
        if not rows:
            raise NoActorKey(f"{actor_id} has no key here")
        return tuple(StoredKey(*row) for row in rows)

    def _open(self, private: str) -> rsa.RSAPrivateKey:
        try:
            return _parsed(open_sealed(private, secrets_of(self._ring)))
        except KeyUnreadable:
            return _parsed(open_sealed(private, secrets_of(self._ring, now=True)))


def _parsed(der: bytes) -> rsa.RSAPrivateKey:
    # We made it ourselves, and nobody could change it under its seal: OpenSSL's check takes 49 ms, the rest 21 µs.
    key = load_der_private_key(der, password=None, unsafe_skip_rsa_key_validation=True)
    assert isinstance(key, rsa.RSAPrivateKey), "no other kind is made"
    return key


@lru_cache(maxsize=4)
def _derived(secret: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=SecretBox.KEY_SIZE, salt=None, info=_SEALED_FOR).derive(secret)
