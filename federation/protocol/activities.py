"""Activities: the plaintext of deliveries, and the request that carries one.

A sender builds a text once, then signs and seals that same text: there is no canonical form to fall back on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, JsonValue

from federation.protocol.encodings import (
    MAX_PAYLOAD_BYTES,
    Identifier,
    Moment,
    ServerUrl,
    Text,
    WireModel,
    dump_json,
    encode_text,
    format_moment,
    parse_json,
    parse_moment,
)
from federation.protocol.errors import NotJson, PayloadError, UrlError
from federation.protocol.sealing import ENVELOPE_MEMBERS, Envelope
from federation.protocol.skimming import Leaf, Members
from federation.protocol.values import Value

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_SCHEMES_WITH_HOST = frozenset({"http", "https", "ws", "wss", "ftp"})


def _absolute(url: str) -> str:
    """Accept what JavaScript's `new URL` parses without a base: any scheme, and a host where the scheme needs one.

    `javascript:` passes, as with every peer; whoever renders a post follows http and https only.
    """
    match = _SCHEME.match(url.strip())
    if match is None:
        raise ValueError("must be an absolute URL")
    if match[0][:-1].lower() in _SCHEMES_WITH_HOST and not url.strip()[match.end() :].strip("/\\"):
        raise ValueError("must name a host")
    urlsplit(url)  # raises ValueError on a malformed IPv6 host
    return url


def _finite(number: int | float) -> int | float:
    try:
        finite = math.isfinite(float(number))
    except OverflowError:  # an integer that JavaScript would read as Infinity
        finite = False
    if not finite:
        raise ValueError("must be finite")
    return number


AbsoluteUrl = Annotated[Text, AfterValidator(_absolute)]
Count = Annotated[int | float, Field(ge=0), AfterValidator(_finite)]


class TextBlock(WireModel):
    type: Literal["text"]
    value: Annotated[Text, Field(min_length=1)]


class ImageBlock(WireModel):
    type: Literal["image", "video"]
    url: AbsoluteUrl
    size: Count
    index: Count


class AudioBlock(WireModel):
    type: Literal["audio"]
    url: AbsoluteUrl
    size: Count


class LinkBlock(WireModel):
    type: Literal["link"]
    url: AbsoluteUrl


Block = Annotated[TextBlock | ImageBlock | AudioBlock | LinkBlock, Field(discriminator="type")]
# FailFast: a megabyte of wrong blocks must not become a megabyte of errors.
Content = Annotated[list[Block], Field(min_length=1), FailFast()]


MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""The largest body of a delivery that a receiver accepts; a sealed payload of `MAX_PAYLOAD_BYTES` fits."""


class ActivityMethod(StrEnum):
    """The activities a delivery may carry."""

    FEDERATE = "FEDERATE"
    FEDERATE_POST = "FEDERATE_POST"
    INSERT = "INSERT"
    UNFOLLOW = "UNFOLLOW"


def parse_method(payload: str) -> ActivityMethod:
    """Return the method of a job's payload, and check that the payload is a JSON object with a UTF-8 form.

    Raises:
        PayloadError: longer than `MAX_PAYLOAD_BYTES`, lone surrogates, not JSON, nested too deeply, not an object, or
            its `method` is not one that we carry.
    """
    if len(encode_text(payload)) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"payload: more than {MAX_PAYLOAD_BYTES} bytes of UTF-8")
    try:
        value = parse_json(payload, limit=MAX_PAYLOAD_BYTES)
    except NotJson as error:
        raise PayloadError(f"payload: {error}") from None
    if not isinstance(value, dict):
        raise PayloadError("payload: expected a JSON object")
    return _method(value, "payload")


def _method(value: Mapping[object, object], where: str) -> ActivityMethod:
    if "method" not in value:
        raise PayloadError(f"{where}: method is missing")
    method = value["method"]
    if not isinstance(method, str):
        raise PayloadError(f"{where}: method is not a string")
    try:
        return ActivityMethod(method)
    except ValueError:
        raise PayloadError(f"{where}: method is not one of {', '.join(ActivityMethod)}") from None


class Following(WireModel):
    """One user's request to follow another."""

    id: Identifier
    created_at: Moment
    follower_id: Identifier
    following_id: Identifier
    accepted: bool
    follower_server_url: ServerUrl | None


class FollowActivity(WireModel):
    """`FEDERATE`, as a receiver reads it."""

    method: Literal["FEDERATE"]
    federation_url: ServerUrl
    following: Following


class EndedFollowing(WireModel):
    """A follow that is over, and when its user ended it; earlier versions send neither its id nor the time."""

    id: Identifier | None = None
    created_at: Moment | None = None
    follower_id: Identifier
    following_id: Identifier


class UnfollowActivity(WireModel):
    """`UNFOLLOW`, as a receiver reads it: an extension that Sipher does not know."""

    method: Literal["UNFOLLOW"]
    federation_url: ServerUrl
    following: EndedFollowing


def _parse_published(value: object) -> datetime:
    if not isinstance(value, str):
        raise ValueError("expected a date as text")
    return parse_moment(value)


class Post(WireModel):
    id: Identifier
    content: Content
    author_id: Identifier
    published: Annotated[datetime, BeforeValidator(_parse_published)]
    is_private: bool

    def content_json(self) -> list[dict[str, JsonValue]]:
        """Return the blocks as JSON values, without the members that no peer knows."""
        return [block.model_dump(mode="json") for block in self.content]


class PostName(WireModel):
    id: Identifier


class NamedPostActivity(WireModel):
    """`FEDERATE_POST`, reduced to which post it is."""

    method: Literal["FEDERATE_POST"]
    post: PostName


class PostActivity(WireModel):
    """`FEDERATE_POST`, as a receiver reads it."""

    method: Literal["FEDERATE_POST"]
    federation_url: ServerUrl
    post: Post


def follow_activity(
    *,
    federation_url: str,
    follow_id: str,
    created_at: datetime,
    follower_id: str,
    following_id: str,
    follower_server_url: str | None,
    requester_signature: str | None = None,
) -> str:
    """Return the payload of a follow request.

    *federation_url* is our own URL. *follower_server_url* is the recipient's, despite its name: Sipher stores it like
    that on the follower's side, and receivers ignore it.
    """
    following = {
        "id": follow_id,
        "followerId": follower_id,
        "followingId": following_id,
        "accepted": False,
        "createdAt": format_moment(created_at),
        "followerServerUrl": follower_server_url,
        "followingServerUrl": None,
        "acknowledged": False,
        "requesterSignature": requester_signature,
        "responderSignature": None,
    }
    return dump_json({"following": following, "federationUrl": federation_url, "method": ActivityMethod.FEDERATE})


def unfollow_activity(
    *,
    federation_url: str,
    follower_id: str,
    following_id: str,
    follow_id: str | None = None,
    ended_at: datetime | None = None,
) -> str:
    """Return the payload that ends a follow; *federation_url* is our own URL.

    *follow_id* is the id with which the follow was requested, *ended_at* is when its user ended it. By them, receivers
    distinguish a repeated message from a new one; receivers that know neither ignore them.
    """
    following = {
        **({} if follow_id is None else {"id": follow_id}),
        **({} if ended_at is None else {"createdAt": format_moment(ended_at)}),
        "followerId": follower_id,
        "followingId": following_id,
    }
    return dump_json({"following": following, "federationUrl": federation_url, "method": ActivityMethod.UNFOLLOW})


def post_activity(
    *,
    federation_url: str,
    post_id: str,
    content: Sequence[Mapping[str, JsonValue]],
    author_id: str,
    published: datetime,
    is_private: bool | None,
) -> str:
    """Return the payload of a post; *federation_url* is our own URL.

    An unset *is_private* is sent as false: receivers refuse null.
    """
    post = {
        "id": post_id,
        "content": list(content),
        "authorId": author_id,
        "published": format_moment(published),
        "isPrivate": bool(is_private),
    }
    return dump_json({"method": ActivityMethod.FEDERATE_POST, "federationUrl": federation_url, "post": post})


DELIVERY_MEMBERS: Final = Members(
    shapes={
        "method": Leaf.SCALAR,
        "payload": Members(shapes=dict.fromkeys(ENVELOPE_MEMBERS, Leaf.SCALAR)),
        "signature": Leaf.SCALAR,
    }
)
"""The members of a body that `DeliveryRequest` reads."""


class DeliveryRequest(Value, frozen=True, kw_only=True):
    """The body of a delivery: which activity, sealed to the recipient, signed by the sender."""

    unshown: ClassVar = frozenset({"signature"})

    method: ActivityMethod
    payload: Envelope
    signature: str

    def to_bytes(self) -> bytes:
        """Return the HTTP body."""
        body = {"method": self.method, "payload": self.payload.to_wire(), "signature": self.signature}
        return msgspec.json.encode(body)  # all of it is ASCII; the bytes are those of `dump_json`

    @classmethod
    def from_wire(cls, value: object) -> DeliveryRequest:
        """Return the request in a parsed HTTP body; its signature may be any string, and is still to be verified.

        Raises:
            PayloadError: not an object, an unknown method, or a signature that is not a string.
            EnvelopeError: the payload is no envelope.
        """
        if not isinstance(value, dict):
            raise PayloadError("body: expected a JSON object")
        method = _method(value, "body")
        signature = value.get("signature")
        if not isinstance(signature, str):
            raise PayloadError("body: signature is missing or not a string")
        return cls(method=method, payload=Envelope.from_wire(value.get("payload")), signature=signature)


def delivery_headers(*, own_url: str, target_url: str) -> dict[str, str]:
    """Return the headers of a delivery. There is never a cookie: with one, Sipher enforces browser rules.

    Raises:
        UrlError: one of the two URLs cannot stand in a header.
    """
    for name, url in (("own URL", own_url), ("target URL", target_url)):
        if not url.isascii() or not url.isprintable() or " " in url:
            raise UrlError(f"{name}: percent-encode everything but visible ASCII")
    return {
        "Content-Type": "application/json",
        "Origin": own_url,
        "X-Federation-Origin": own_url,
        "X-Federation-Target": target_url,
    }
