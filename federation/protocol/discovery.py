"""`/discover`: what a server says of itself, and how one server introduces itself to another."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator

from federation.protocol.encodings import ServerUrl, WireModel, dump_json, parse_json, validate
from federation.protocol.errors import KeyMaterialError, ProtocolError, UrlError
from federation.protocol.keys import OwnKeys, decode_key, is_sealing_key, is_signing_key
from federation.protocol.urls import canonical_origin

MAX_DISCOVER_BYTES: Final = 256 * 1024


def _signs(text: str) -> str:
    if not is_signing_key(_raw(text)):
        raise ValueError("not a usable Ed25519 key")
    return text


def _seals(text: str) -> str:
    if not is_sealing_key(_raw(text)):
        raise ValueError("not a usable X25519 key")
    return text


def _raw(text: str) -> bytes:
    try:
        return decode_key(text, what="key")
    except KeyMaterialError as error:
        raise ValueError(str(error)) from None


SigningKeyText = Annotated[str, AfterValidator(_signs)]
"""A public Ed25519 key in strict base64, 32 bytes; no point of small order, for which anybody could sign."""
SealingKeyText = Annotated[str, AfterValidator(_seals)]
"""A public X25519 key in strict base64, 32 bytes; no point of low order, to which nothing can be sealed."""


class DiscoverDocument(WireModel):
    """The part of `/discover` that identifies a server."""

    url: ServerUrl
    public_key: SigningKeyText
    encryption_public_key: SealingKeyText

    @property
    def origin(self) -> str | None:
        """The canonical form of `url`, or None if it has none."""
        try:
            return canonical_origin(self.url)
        except UrlError:
            return None


def parse_discover_document(body: bytes) -> DiscoverDocument:
    """Return the document in a response body.

    Raises:
        NotJson: over 256 KiB, or not JSON.
        PayloadError: a member is missing, or a key is not 32 bytes of strict base64, or unusable.
    """
    return validate(DiscoverDocument, parse_json(body, limit=MAX_DISCOVER_BYTES))


def shows_key(body: bytes, public_key: str) -> bool:
    """Tell whether a response body is a document with this signing key."""
    try:
        return parse_discover_document(body).public_key == public_key
    except ProtocolError:
        return False


def own_document(url: str, keys: OwnKeys) -> dict[str, object]:
    """Return the part of `/discover` that identifies us."""
    return {"url": url, "publicKey": keys.signing.public_text, "encryptionPublicKey": keys.encryption.public_text}


def register_request(*, url: str, keys: OwnKeys) -> bytes:
    """Return the body that asks a server to register us."""
    return dump_json({"method": "REGISTER", **own_document(url, keys)}).encode()
