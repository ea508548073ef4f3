"""How an application tests its federation: a node for the time of a test, and remote servers that it talks to.

Those whose names begin with `Sync` are for tests without `async`. `federation.testing.pytest_plugin` has fixtures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.testing.activity_server import Arrival, RemoteActor, SignedRequest
    from federation.testing.asynchronous import FakeRemote, FakeSealedRemote, FederationNode
    from federation.testing.clock import MovableClock
    from federation.testing.door import NotTaken
    from federation.testing.engine import OwedActivity
    from federation.testing.loopback import RemoteAnswer, Trouble
    from federation.testing.sealed_server import SealedArrival
    from federation.testing.synchronous import SyncFakeRemote, SyncFakeSealedRemote, SyncFederationNode

__all__ = [
    "Arrival",
    "FakeRemote",
    "FakeSealedRemote",
    "FederationNode",
    "MovableClock",
    "NotTaken",
    "OwedActivity",
    "RemoteActor",
    "RemoteAnswer",
    "SealedArrival",
    "SignedRequest",
    "SyncFakeRemote",
    "SyncFakeSealedRemote",
    "SyncFederationNode",
    "Trouble",
]

_HOMES = {
    **dict.fromkeys(("Arrival", "RemoteActor", "SignedRequest"), "activity_server"),
    **dict.fromkeys(("FakeRemote", "FakeSealedRemote", "FederationNode"), "asynchronous"),
    **dict.fromkeys(("RemoteAnswer", "Trouble"), "loopback"),
    **dict.fromkeys(("SyncFakeRemote", "SyncFakeSealedRemote", "SyncFederationNode"), "synchronous"),
    "MovableClock": "clock",
    "NotTaken": "door",
    "OwedActivity": "engine",
    "SealedArrival": "sealed_server",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import names when they are first used, as `federation` does: a test run may ask for no node at all."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
