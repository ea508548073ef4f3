"""Acknowledgments: finding one in a response, reading it, and answering with one.

Peers put it in two places: at the top of the body, or under `payload` (what a relay returns, and all that old
releases know). We read both and write both at once.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from federation.protocol.activities import ActivityMethod
from federation.protocol.encodings import Identifier, Moment, ServerUrl, WireModel, dump_json, format_moment, parse_json
from federation.protocol.errors import AckMissing
from federation.protocol.keys import KeyRing, sign_message, verify_signature
from federation.protocol.sealing import Envelope, open_with_any, seal
from federation.protocol.values import Value

ACK_METHOD = "PROXY_RESPONSE"

MAX_ACK_BYTES = 1024 * 1024
"""The longest response body that can be an acknowledgment."""


class Ack(Value, frozen=True, kw_only=True):
    """What a peer claims in answer to a delivery: not yet read or verified, and of any JSON type."""

    unshown: ClassVar = frozenset({"data", "signature"})

    data: object
    signature: object

    def open(self, ring: KeyRing) -> str:
        """Return the plaintext sealed to one of our pairs.

        Raises:
            EnvelopeError: `data` is no envelope, or does not open.
        """
        return open_with_any(Envelope.from_wire(self.data), ring)[0]

    def is_signed(self, plaintext: str, public_key: str | bytes) -> bool:
        """Tell whether *public_key* signed the opened *plaintext*."""
        return verify_signature(plaintext, self.signature, public_key)


def parse_ack_body(body: bytes) -> object:
    """Return the JSON value of a complete 2xx response body.

    Raises:
        NotJson: empty, over `MAX_ACK_BYTES`, not UTF-8, or anything `JSON.parse` would refuse.
    """
    return parse_json(body, limit=MAX_ACK_BYTES)


def find_ack(body: object) -> Ack:
    """Return the acknowledgment in a parsed response body: the one under `payload`, else the body itself.

    A `payload` that is no acknowledgment does not hide an inline one.

    Raises:
        AckMissing: neither is an object whose `method` is `PROXY_RESPONSE`.
    """
    if not isinstance(body, dict):
        raise AckMissing("the response is JSON but no object, so it acknowledges nothing")
    for candidate in (body.get("payload"), body):
        if isinstance(candidate, dict) and candidate.get("method") == ACK_METHOD:
            return Ack(data=candidate.get("data"), signature=candidate.get("signature"))
    raise AckMissing(f"neither the response nor its payload has the method {ACK_METHOD}")


def is_unsigned_follow_ack(body: object) -> bool:
    """Tell whether a parsed response body is what the first implementation answers to a direct follow.

    It says that the follow is stored, and whether it is accepted, and proves neither.
    """
    if not isinstance(body, dict) or "method" in body:
        return False
    return body.get("status") == "acknowledged" and isinstance(body.get("accepted"), bool)


class AcknowledgedFollowing(WireModel):
    """The followed side's view of a follow; *accepted* is unset while it has not decided."""

    id: Identifier
    created_at: Moment
    follower_id: Identifier
    following_id: Identifier
    accepted: bool | None = None
    follower_server_url: ServerUrl | None


class FollowAck(WireModel):
    """The plaintext of a follow's acknowledgment; its *federation_url* names the reader, and nobody checks it."""

    method: Literal["FEDERATE"]
    federation_url: ServerUrl
    following: AcknowledgedFollowing


class AcknowledgedPost(WireModel):
    id: Identifier
    federation_post_id: Identifier


class PostAck(WireModel):
    """The plaintext of a post's acknowledgment; its *federation_url* names the author."""

    method: Literal["FEDERATE_POST"]
    federation_url: ServerUrl
    post: AcknowledgedPost


def follow_ack(
    *, sender_url: str, follow_id: str, created_at: datetime, follower_id: str, following_id: str, accepted: bool
) -> str:
    """Return the plaintext that acknowledges a follow from *sender_url*; *follow_id* is that of our row."""
    following = {
        "id": follow_id,
        "createdAt": format_moment(created_at),
        "followerId": follower_id,
        "followingId": following_id,
        "accepted": accepted,
        "followerServerUrl": sender_url,
        "acknowledged": True,
    }
    return dump_json({"following": following, "federationUrl": sender_url, "method": ActivityMethod.FEDERATE})


def post_ack(*, own_url: str, post_id: str, federation_post_id: str) -> str:
    """Return the plaintext that acknowledges a post; *post_id* is our row's, *federation_post_id* the sender's."""
    post = {"id": post_id, "federationPostId": federation_post_id}
    return dump_json({"post": post, "federationUrl": own_url, "method": ActivityMethod.FEDERATE_POST})


def ack_response(
    plaintext: str, *, recipient_key: bytes, signing_secret: bytes, accepted: bool | None = None
) -> dict[str, object]:
    """Return the response body that carries *plaintext* to its sender, inline and under `payload` at once.

    *accepted* repeats a follow's state in the clear, where the oldest readers look; leave it out for other acks.

    Raises:
        KeyMaterialError: *recipient_key*, the sender's raw encryption key, is unusable.
    """
    ack = {
        "method": ACK_METHOD,
        "status": "acknowledged",
        "data": seal(plaintext, recipient_key).to_wire(),
        "signature": sign_message(plaintext, signing_secret),
    }
    clear = {} if accepted is None else {"accepted": accepted}
    return {**ack, **clear, "payload": ack}
