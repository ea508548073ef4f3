"""The Lua of the Bull storage: one script per transition, each assembled from the files in `lua`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from workers.storage.on_redis.scripts import CONFIRMED, Script, ScriptCall, assembled
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.wire import Reply

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("look", "cancel", "retry", "promote", "remove", "complete", "drain", "clean", "sweep", "keep", "stranded"), ()
    ),
    **dict.fromkeys(
        ("pause", "paused", "counts", "since", "result", "workers", "progress", "page", "adopt", "cancelled"), ()
    ),
    "farewell": (),
    "unread": (),
    "read": ("shown",),
    "whole": ("shown",),
    "enqueue": ("add",),
    "claim": ("quarantine", "drop", "due"),
    "recover": ("quarantine", "drop", "due", "failures"),
    "renew": ("hold",),
    "settle": ("add", "hold", "failures"),
}
"""Every script, and the files it needs beside `batched.lua`, `states.lua`, `foreign.lua`, `keys.lua` and `queue.lua`,
which come first. `mend` and `owner` are not listed: they look at what keeps the others from starting.
"""

EMITTER: Final = "8e0d4a52-5a0b-4c7e-9f43-7b1f6c1d2e90"
"""The common name of our processes to Node, whose processes hear only what others publish."""


@cache
def scripts() -> Mapping[str, Script]:
    """Return every script, by its name."""
    working = {name: assembled(__package__, "keys", "queue", *parts, name) for name, parts in PARTS.items()}
    mend = assembled(__package__, "keys", "quarantine", "mend")
    return working | {"mend": mend, "owner": assembled(__package__, "keys", "sample", "owner")}


def loaded_scripts() -> Sequence[Script]:
    """Return the scripts that a server has to know before it is used."""
    return tuple(scripts().values())


class BullScripts:
    """The scripts of one queue on one server. All its keys begin with `base`, which ends with a colon."""

    def __init__(self, server: RedisServer, base: bytes, queue: str, dialect: str) -> None:
        self.server = server
        self.queue = queue
        self.dialect = dialect
        self.base = base
        self._scripts = scripts()

    def own_channel(self, name: str) -> bytes:
        """Return a channel that Node does not know; one per database, because pub/sub has no databases."""
        return self.base + b"workers:%b@%d" % (name.encode(), self.server.database)

    async def run_all(self, *calls: ScriptCall) -> list[Reply]:
        """Run several scripts in one round trip, each for itself; one that failed answers a `StorageError`."""
        about = (self.base, self.server.database, self.queue, self.dialect, EMITTER)
        return await self.server.run(
            [("EVALSHA", self._scripts[name].sha, 1, *about, *arguments) for name, arguments in calls]
        )

    async def run(self, name: str, *arguments: str | bytes | int) -> Reply:
        """Run the script and return its answer; see `RedisServer.call` for errors."""
        about = (self.server.database, self.queue, self.dialect, EMITTER)
        return await self.server.call(self._scripts[name], self.base, *about, *arguments, confirmed=name in CONFIRMED)
