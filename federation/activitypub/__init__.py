"""ActivityPub: the second wire of the delivery engine, and what applications call to owe activities by it.

`send` owes an activity inside the application's transaction; `federation.sync.activitypub` has the same calls for
synchronous code. `on` declares what is done with activities that others send. `asgi` and `respond` serve the actors in
whose names activities are signed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.activitypub.activities import PUBLIC, accept, create, delete, follow, reject, undo
    from federation.activitypub.actors import Actor
    from federation.activitypub.application import asgi, respond
    from federation.activitypub.calls import (
        add_actor,
        answer_follow,
        follow_actor,
        gone,
        remove_actor,
        send,
        unfollow_actor,
    )
    from federation.activitypub.documents import Software, Usage
    from federation.activitypub.follows import FOLLOWERS
    from federation.activitypub.handlers import FollowDecision, IncomingActivity, on, on_follow
    from federation.activitypub.inboxes import GoneInbox
    from federation.activitypub.outbound import AUTO, Recipient, Sent, Skipped, SkipReason

__all__ = [
    "AUTO",
    "FOLLOWERS",
    "PUBLIC",
    "Actor",
    "FollowDecision",
    "GoneInbox",
    "IncomingActivity",
    "Recipient",
    "Sent",
    "SkipReason",
    "Skipped",
    "Software",
    "Usage",
    "accept",
    "add_actor",
    "answer_follow",
    "asgi",
    "create",
    "delete",
    "follow",
    "follow_actor",
    "gone",
    "on",
    "on_follow",
    "reject",
    "remove_actor",
    "respond",
    "send",
    "undo",
    "unfollow_actor",
]

_HOMES = {
    **dict.fromkeys(("PUBLIC", "accept", "create", "delete", "follow", "reject", "undo"), "activities"),
    **dict.fromkeys(("AUTO", "Recipient", "Sent", "SkipReason", "Skipped"), "outbound"),
    **dict.fromkeys(("asgi", "respond"), "application"),
    **dict.fromkeys(("FollowDecision", "IncomingActivity", "on", "on_follow"), "handlers"),
    "Actor": "actors",
    "FOLLOWERS": "follows",
    "GoneInbox": "inboxes",
    "Software": "documents",
    "Usage": "documents",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import names when they are first used, as `federation` does."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'calls')}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
