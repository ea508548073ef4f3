"""Requests to a relay, and what it passes on.

A request that cannot reach its server directly is sealed to that server as a whole (`TARGETED`) and handed to a peer
(`PROXY`), which cannot read it and passes it on. What is sealed inside was sealed already, so it grows by 16/9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue

from federation.protocol.encodings import ServerUrl, Text, WireModel, dump_json
from federation.protocol.errors import UrlError
from federation.protocol.keys import OwnKeys, sign_message
from federation.protocol.sealing import Envelope, seal
from federation.protocol.urls import canonical_origin

RELAY_PATH: Final = "/proxy"
MAX_RELAYED_BYTES: Final = 256 * 1024
"""The longest body that a relay accepts."""

PROXY: Final = "PROXY"
TARGETED: Final = "TARGETED"
PING: Final = "PING"
TARGET_HEADER: Final = "X-Federation-Target"
ORIGIN_HEADER: Final = "X-Federation-Origin"


class SealedPayload(WireModel):
    """The shape of an envelope. Whether it really is one shows when it is opened."""

    ephemeral_public_key: Text
    iv: Text
    ciphertext: Text
    auth_tag: Text

    def to_wire(self) -> dict[str, object]:
        """Return the JSON object as it came, without unknown members."""
        return self.model_dump(by_alias=True)


class ProxyRequest(WireModel):
    """`PROXY`, as a relay reads it. Its signature covers what only the target can read, so it is left out."""

    method: Literal["PROXY"]
    target_url: ServerUrl
    public_signing_key: Annotated[str, Field(min_length=1)]
    public_encryption_key: Annotated[str, Field(min_length=1)]
    payload: SealedPayload


class TargetedRequest(WireModel):
    """`TARGETED`, as a target reads it."""

    method: Literal["TARGETED"]
    payload: SealedPayload


class RelayedRequest(WireModel):
    """The plaintext of a `TARGETED` envelope: a whole request, not yet believed. Header names are case-sensitive."""

    target_url: ServerUrl
    method: Text
    headers: Annotated[dict[str, str], Field(max_length=100)]
    body: str

    def header(self, name: str) -> str:
        """Return the header of exactly this name, or an empty text if there is none."""
        return self.headers.get(name, "")


class Ping(WireModel):
    """The plaintext of a `TARGETED` envelope that asks for nothing but its nonce."""

    method: Literal["PING"]
    nonce: JsonValue = None


def relayed_request(*, url: str, method: str, headers: Mapping[str, str], body: str) -> str:
    """Return the text that stands for a whole request when sealed to its target."""
    return dump_json({"targetUrl": url, "method": method, "headers": dict(headers), "body": body})


def proxy_request(text: str, *, target: str, target_key: bytes, keys: OwnKeys) -> bytes:
    """Return the body that asks a peer to pass *text* on to *target*, the origin whose raw encryption key is given.

    Raises:
        KeyMaterialError: the key is unusable.
        PayloadError: the text has no UTF-8 form.
    """
    body = {
        "method": PROXY,
        "targetUrl": target + RELAY_PATH,
        "publicSigningKey": keys.signing.public_text,
        "publicEncryptionKey": keys.encryption.public_text,
        "payload": seal(text, target_key).to_wire(),
        "signature": sign_message(text, keys.signing.secret),
    }
    return dump_json(body).encode("utf-8")


def targeted_request(payload: Envelope | SealedPayload) -> bytes:
    """Return the body that carries a sealed request to its target."""
    return dump_json({"method": TARGETED, "payload": payload.to_wire()}).encode("utf-8")


def relay_target(url: str) -> str:
    """Return the origin whose `/proxy` the *url* names.

    Raises:
        UrlError: no URL of a server, or another path: a relay must not be used to reach other endpoints.
    """
    origin = canonical_origin(url)
    if urlsplit(url).path.rstrip("/") != RELAY_PATH:
        raise UrlError(f"the path is not {RELAY_PATH}")
    return origin
