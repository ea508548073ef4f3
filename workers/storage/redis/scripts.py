"""The Lua of the Redis storage: one script per transition, each assembled from the files in `lua`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from workers.storage.on_redis.scripts import Script, assembled
from workers.storage.on_redis.server import RedisServer, Reply

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("renew", "look", "result", "counts", "retry"), ()),
    **dict.fromkeys(("clean", "pause", "paused", "keep", "progress"), ()),
    **dict.fromkeys(("cancel", "complete", "remove", "drain", "promote"), ("dependents",)),
    "enqueue": ("add",),
    "enqueue_once": ("marks", "add"),
    "enqueue_after": ("dependents", "marks", "after", "add"),
    "settle": ("dependents", "add"),
    "claim": ("dependents", "quarantine", "due", "corrupt"),
    "recover": ("dependents", "quarantine", "corrupt"),
    "read": ("show",),
    "page": ("show",),
    "workers": ("holders",),
    "sweep": ("holders", "dependents", "stranded"),
}
"""Every script, and the files it needs beside `batched.lua`, `states.lua`, `foreign.lua`, `keys.lua` and `queue.lua`,
with which all begin. `repair` is not listed: it mends what keeps the others from starting.
"""


@cache
def scripts() -> Mapping[str, Script]:
    """Return every script, by its name."""
    working = {name: assembled(__package__, "keys", "queue", *parts, name) for name, parts in PARTS.items()}
    return working | {"repair": assembled(__package__, "keys", "quarantine", "repair")}


def loaded_scripts() -> Sequence[Script]:
    """Return the scripts that a server has to know before it is used."""
    return tuple(scripts().values())


_CHANNELS: Final = (b"wake", b"events", b"cancels")


class RedisScripts:
    """The scripts of one queue on one server. All its keys begin with `base`, whose hash tag puts them in one slot."""

    def __init__(self, server: RedisServer, prefix: str, queue: str) -> None:
        self.server = server
        tag = _in_a_tag(queue).replace(":", "%3A")  # otherwise it could be read as the end of a longer prefix
        self.base = f"{{{_in_a_tag(prefix)}:{tag}}}".encode()
        self._scripts = scripts()

    @property
    def channels(self) -> tuple[bytes, bytes, bytes]:
        """The channels for wake-ups, events and cancel requests.

        There is one of each per database, because pub/sub has no databases.
        """
        wake, events, cancels = (self.base + b":%b@%d" % (name, self.server.database) for name in _CHANNELS)
        return wake, events, cancels

    async def run(self, name: str, *arguments: str | bytes | int) -> Reply:
        """Run the script and return its answer; see `RedisServer.call` for errors."""
        return await self.server.call(self._scripts[name], self.base, self.server.database, *arguments)


def _in_a_tag(text: str) -> str:
    """Escape the braces in the text, which would end the hash tag."""
    return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
