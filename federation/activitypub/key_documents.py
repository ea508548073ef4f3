"""Documents of other servers that show the keys of actors, and which of them are believed: rules without I/O.

Only the document of a key's owner says that the key is his: it names itself by the URL where it is, or by which its
server led there, and lists the key. Anything else at the key's own URL, such as the key alone or a shortened actor,
only says who the owner is; the key alone also says what it is, if the owner's document lists no more than its URL. A
document that has another type than activities have may be a file that somebody uploaded.

Keys are read from `publicKey`, and those of Multikey, which have to say whose they are, from `assertionMethod`
(FEP-521a): as Mastodon does, for HTTP signatures by the key's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from email.message import Message
from itertools import chain
from typing import Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from federation.activitypub.documents import ACTIVITY_CONTEXT
from federation.activitypub.multikeys import end_of, pem_of
from federation.activitypub.signatures import LARGEST_RSA_BITS, SMALLEST_RSA_BITS, VerifyingKey
from federation.http.errors import BlockedUrl
from federation.http.guard import parse_target
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin

LONGEST_CONTENT_TYPE: Final = 256
"""`email.message` takes quadratic time for the parameters of one."""
PAGE: Final = "text/html"
"""What maintenance is told by, a cache shows that knows no `Accept`, or who asks whether we are human: it may pass."""
MOST_OF_PEM: Final = 16 * 1024
MOST_KEYS: Final = 20
"""Of a document, and as many of `assertionMethod`."""
MULTIKEY: Final = "Multikey"
MOST_OF_EXPONENT_BITS: Final = 64
"""A check takes as long as the exponent is, and all that are in use have 17 bits."""


class KeyRefused(Exception):
    """A key is not to be had, or not to be believed. The message names the rule, and quotes nothing."""


class KeyGone(KeyRefused):
    """What showed a key is no more, by its server's word."""


class Document(msgspec.Struct):
    """What we read of an actor, or of a key alone."""

    id: Any = None
    type: Any = None
    owner: Any = None
    controller: Any = None
    publicKey: Any = None  # noqa: N815 - as it is called there
    publicKeyPem: Any = None  # noqa: N815 - as it is called there
    assertionMethod: Any = None  # noqa: N815 - as it is called there
    publicKeyMultibase: Any = None  # noqa: N815 - as it is called there
    revoked: Any = None
    expires: Any = None

    def listed(self, key_id: str) -> Key | None:
        """Return the key with this id; an actor's only one may also be named by the actor's own id."""
        keys = [key for key in map(_key, _several(self.publicKey)[:MOST_KEYS]) if key is not None]
        if is_same(self.id, key_id) and len(keys) == 1:
            return keys[0]
        multikeys = map(_multikey, _several(self.assertionMethod)[:MOST_KEYS])
        return next((key for key in chain(keys, multikeys) if key is not None and is_same(key.id, key_id)), None)

    def alone(self, key_id: str) -> Key | None:
        """Return the key if this is the document of that, and of nobody's other things."""
        if not is_same(self.id, key_id):
            return None
        told = msgspec.structs.asdict(self)
        return _key(told) if self.publicKeyMultibase is None else _multikey(told)

    @property
    def is_tombstone(self) -> bool:
        """Whether it stands for what is no more."""
        return "Tombstone" in _several(self.type)


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a document shows, or only names: then there is neither `pem` nor `multikey`."""

    id: object
    owner: object
    pem: object
    multikey: Mapping[str, object] | None = None

    @property
    def is_named_only(self) -> bool:
        """Whether another document has to show it."""
        return self.pem is None and self.multikey is None

    @property
    def text(self) -> str | None:
        """The key itself, if it is shown."""
        if self.multikey is None:
            return self.pem if isinstance(self.pem, str) else None
        return pem_of(self.multikey.get("publicKeyMultibase"))

    @property
    def expires_at(self) -> datetime | None:
        """When it ends, if it says so."""
        return None if self.multikey is None else end_of(self.multikey)


def _key(told: object) -> Key | None:
    if isinstance(told, str):
        return Key(told, None, None)
    if not isinstance(told, dict):
        return None
    return Key(told.get("id"), _owner(told.get("owner"), told.get("controller")), told.get("publicKeyPem"))


def _multikey(told: object) -> Key | None:
    """Return a key of `assertionMethod`, which may also have a document of its own."""
    if isinstance(told, str):
        return Key(told, None, None)
    if not isinstance(told, dict) or MULTIKEY not in _several(told.get("type")):
        return None
    owner = _owner(None, told.get("controller"))
    return None if owner is None else Key(told.get("id"), owner, None, told)


def _owner(owner: object, controller: object) -> object:
    """Return the owner of a key, by either name that there is for it, and in any of the forms of JSON-LD."""
    told = _several(controller if owner is None else owner)
    if not told:
        return None
    first = told[0] if len(told) == 1 else told
    return first.get("id", first) if isinstance(first, dict) else first


def _several(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


_DOCUMENT: Final = msgspec.json.Decoder(Document)


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A key as its owner shows it, until it ends."""

    owner: str
    pem: str
    expires_at: datetime | None = None


def is_activity(content_type: str) -> bool:
    """Tell whether a document has a type that activities and actors have."""
    if len(content_type) > LONGEST_CONTENT_TYPE:
        return False
    header = Message()
    header["Content-Type"] = content_type
    kind, profile = header.get_content_type(), header.get_param("profile")
    if kind == "application/ld+json":
        return isinstance(profile, str) and ACTIVITY_CONTEXT in profile.split()
    return kind == "application/activity+json"


def is_posted(content_type: str) -> bool:
    """Tell whether what is sent to an inbox has a type of activities: there is nobody who could have uploaded it."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("application/activity+json", "application/ld+json") and len(content_type) <= LONGEST_CONTENT_TYPE


def read_document(body: bytes) -> Document:
    """Return what a document says; nothing is built of the rest.

    Raises:
        KeyRefused: it is no JSON object, or its keys are none.
    """
    try:
        return _DOCUMENT.decode(body)
    except (ValueError, RecursionError):
        raise KeyRefused("the document is no actor's") from None


def shown_by_owner(
    document: Document, urls: AbstractSet[str], key_id: str, *, now: datetime, own: Document | None = None
) -> ShownKey | None:
    """Return the key as its owner's document shows it, or None if this is not that.

    *urls* are where the document was asked for, and where it is. It may only name a key that has a document of its
    *own*, which names the owner.
    """
    key, owner = document.listed(key_id), document.id
    if key is None or not isinstance(owner, str) or not any(is_same(owner, url) for url in urls):
        return None
    if key.owner not in (None, owner):
        return None
    if key.is_named_only and own is not None:
        key = own.alone(key_id)
        if key is None or key.owner != owner:
            return None
    text, end = key.text, key.expires_at
    return None if text is None or (end is not None and end <= now) else ShownKey(owner, text, end)


def owner_named(document: Document, key_id: str) -> str:
    """Return the owner that a document names which is not his; it is on the key's own origin.

    Raises:
        KeyRefused: it names none; `KeyGone` if it stands for what is no more.
    """
    if document.is_tombstone:
        raise KeyGone("the document is a tombstone")
    key = document.listed(key_id) or document.alone(key_id)
    if key is None or not isinstance(key.owner, str) or not is_on_origin(key.owner, canonical_origin(key_id)):
        raise KeyRefused("the document does not show the key, or an owner elsewhere")
    return key.owner


def is_same(told: object, url: str) -> bool:
    """Tell whether a document means this URL: what is not ASCII may be written as it is, or by escapes."""
    if not isinstance(told, str) or told.isascii():
        return told == url
    try:
        return _spelt(told) == _spelt(url)
    except BlockedUrl:
        return False


def _spelt(url: str) -> tuple[str, str]:
    return str(parse_target(url).url), url.partition("#")[2]


def is_on_origin(url: str, origin: str) -> bool:
    """Tell whether a URL is there."""
    try:
        return canonical_origin(url) == origin
    except UrlError:
        return False


def public_key(pem: str) -> VerifyingKey:
    """Return the key that a text holds.

    Raises:
        KeyRefused: it is none by which we verify.
    """
    try:
        key = load_pem_public_key(pem.encode("ascii")) if len(pem) <= MOST_OF_PEM and "\0" not in pem else None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    if not isinstance(key, rsa.RSAPublicKey) or not SMALLEST_RSA_BITS <= key.key_size <= LARGEST_RSA_BITS:
        raise KeyRefused("the key is neither RSA of 2048 to 8192 bits nor Ed25519")
    if key.public_numbers().e.bit_length() > MOST_OF_EXPONENT_BITS:
        raise KeyRefused("the key has an exponent that nobody uses")
    return key
