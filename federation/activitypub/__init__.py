"""ActivityPub: the second wire of the delivery engine, and what applications call to owe activities by it.

`send` owes an activity inside the application's transaction; `federation.sync.activitypub` has the same calls for
synchronous code. `asgi` and `respond` serve the actors in whose names activities are signed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.activitypub.activities import PUBLIC, accept, create, delete, follow, undo
    from federation.activitypub.actors import Actor
    from federation.activitypub.application import asgi, respond
    from federation.activitypub.calls import add_actor, gone, remove_actor, send
    from federation.activitypub.documents import Software
    from federation.activitypub.inboxes import GoneInbox
    from federation.activitypub.outbound import AUTO, Recipient, Sent, Skipped, SkipReason

__all__ = [
    "AUTO",
    "PUBLIC",
    "Actor",
    "GoneInbox",
    "Recipient",
    "Sent",
    "SkipReason",
    "Skipped",
    "Software",
    "accept",
    "add_actor",
    "asgi",
    "create",
    "delete",
    "follow",
    "gone",
    "remove_actor",
    "respond",
    "send",
    "undo",
]

_HOMES = {
    **dict.fromkeys(("PUBLIC", "accept", "create", "delete", "follow", "undo"), "activities"),
    **dict.fromkeys(("AUTO", "Recipient", "Sent", "SkipReason", "Skipped"), "outbound"),
    **dict.fromkeys(("asgi", "respond"), "application"),
    "Actor": "actors",
    "GoneInbox": "inboxes",
    "Software": "documents",
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
