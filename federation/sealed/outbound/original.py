"""How the first implementation of this protocol answers deliveries, where that falls short of what the protocol asks.

It acknowledges a follow without a signature: such a follow is known to be received, but nobody has proven more. It
refuses a post that it has stored already, so a delivery whose acknowledgment was lost is refused from then on. And it
has no receiver for unfollows. All of this applies only to servers that an operator has given its profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from federation.delivery.error_codes import STORED_ALREADY
from federation.protocol.activities import ActivityMethod, FollowActivity
from federation.protocol.errors import PayloadError
from federation.protocol.models import parse_model
from federation.sealed.outbound.follows import FollowAnswer

_STORED: Final[Mapping[ActivityMethod, str]] = {
    ActivityMethod.FEDERATE: "FOLLOW_ALREADY_EXISTS",
    ActivityMethod.FEDERATE_POST: "FEDERATED_POST_ALREADY_EXISTS",
}


def is_stored_already(method: ActivityMethod | None, status: int, remote_code: str | None) -> bool:
    """Tell whether the server refuses the activity because it already has it."""
    return method is not None and status == STORED_ALREADY and remote_code == _STORED.get(method, "")


def has_no_receiver(method: ActivityMethod | None, status: int) -> bool:
    """Tell whether the server refuses the activity because it knows no such kind, so that trying again is of no use."""
    return method is ActivityMethod.UNFOLLOW and status == 400


def received_follow(payload: str, server_url: str) -> FollowAnswer | None:
    """Return the follow that was sent as acknowledged and undecided, or None if no receiver could read the payload."""
    try:
        following = parse_model(FollowActivity, payload).following
    except PayloadError:
        return None
    return FollowAnswer(
        follower_id=following.follower_id,
        following_id=following.following_id,
        server_url=server_url,
        accepted=False,
    )
