"""Documents of other servers that show the keys of actors, and which of them are believed: rules without I/O.

Only the document of a key's owner says that the key is his: it names itself by the URL where it is, and lists the key.
Anything else at the key's own URL, such as the key alone or a shortened actor, only says who the owner is. A document
that has another type than activities have may be a file that somebody uploaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from federation.activitypub.documents import ACTIVITY_CONTEXT
from federation.activitypub.signatures import LARGEST_RSA_BITS, SMALLEST_RSA_BITS, VerifyingKey
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin

LONGEST_CONTENT_TYPE: Final = 256
"""`email.message` takes quadratic time for the parameters of one."""
MOST_OF_PEM: Final = 16 * 1024
MOST_OF_EXPONENT_BITS: Final = 64
"""A check takes as long as the exponent is, and all that are in use have 17 bits."""


class KeyRefused(Exception):
    """A key is not to be had, or not to be believed. The message names the rule, and quotes nothing."""


class KeyGone(KeyRefused):
    """What showed a key is no more, by its server's word."""


class Key(msgspec.Struct):
    """What we read of a key."""

    id: Any = None
    owner: Any = None
    publicKeyPem: Any = None  # noqa: N815 - as it is called there


class Document(msgspec.Struct):
    """What we read of an actor, or of a key alone."""

    id: Any = None
    owner: Any = None
    publicKey: Key | list[Key] | None = None  # noqa: N815 - as it is called there

    def listed(self, key_id: str) -> Key | None:
        """Return the key with this id."""
        keys = self.publicKey if isinstance(self.publicKey, list) else [self.publicKey]
        return next((key for key in keys if key is not None and key.id == key_id), None)


_DOCUMENT: Final = msgspec.json.Decoder(Document)


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A key as its owner shows it."""

    owner: str
    pem: str


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


def shown_by_owner(document: Document, url: str, key_id: str) -> ShownKey | None:
    """Return the key as the document at *url* shows it, or None if that is not its owner's."""
    key = document.listed(key_id)
    if key is None or document.id != url or key.owner != url or not isinstance(key.publicKeyPem, str):
        return None
    return ShownKey(url, key.publicKeyPem)


def owner_named(document: Document, key_id: str) -> str:
    """Return the owner that a document names which is not his; it is on the key's own origin.

    Raises:
        KeyRefused: it names none.
    """
    key = document.listed(key_id)
    owner = key.owner if key is not None else document.owner if document.id == key_id else None
    if not isinstance(owner, str) or not is_on_origin(owner, canonical_origin(key_id)):
        raise KeyRefused("the document does not show the key, or an owner elsewhere")
    return owner


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
