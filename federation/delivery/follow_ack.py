"""The acknowledgment of a follow: opens it, verifies it, and turns it into what changes in our own row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from federation.delivery.entries import FollowAnswer
from federation.delivery.errors import PermanentFailure
from federation.protocol.acks import Ack, FollowAck
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import KeyRing
from federation.protocol.models import parse_model

FindPublicKey: TypeAlias = Callable[[], Awaitable[str | None]]


async def read_follow_ack(
    ack: Ack, server_url: str, *, keys: KeyRing, cached_public_key: str | None, find_public_key: FindPublicKey
) -> FollowAnswer:
    """Return what the server says of our follow, once it is proven to come from that server.

    The key is `cached_public_key` if the registry had one when the attempt began, otherwise the one it has now. If the
    cached key does not fit, the present one is tried as well: the server may have changed its keys meanwhile.

    Raises:
        PermanentFailure: the acknowledgment does not open, has the wrong shape, or is not signed by that server.
    """
    try:
        plaintext = ack.open(keys)
        following = parse_model(FollowAck, plaintext).following
    except ProtocolError as error:
        raise PermanentFailure("INVALID_ACK", f"the follow's acknowledgment: {error}") from None
    public_key = cached_public_key or await find_public_key()
    if public_key is None:
        raise PermanentFailure(
            "NO_PUBLIC_KEY",
            f"{server_url} is no longer registered, its acknowledgment cannot be verified",
        )
    if not ack.is_signed(plaintext, public_key) and not await _is_signed_anew(ack, plaintext, find_public_key):
        raise PermanentFailure("INVALID_ACK_SIGNATURE", f"the follow's acknowledgment is not signed by {server_url}")
    return FollowAnswer(
        follower_id=following.follower_id,
        following_id=following.following_id,
        server_url=server_url,
        accepted=following.accepted is True,
    )


async def _is_signed_anew(ack: Ack, plaintext: str, find_public_key: FindPublicKey) -> bool:
    public_key = await find_public_key()
    return public_key is not None and ack.is_signed(plaintext, public_key)
