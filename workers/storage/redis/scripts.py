"""The Lua of the Redis storage: one script per transition, each assembled from the files in `lua`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from workers.errors import StorageDamaged, StorageError, StorageFull
from workers.storage.on_redis.errors import FULL
from workers.storage.on_redis.scripts import CONFIRMED, Script, ScriptCall, assembled, joined
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.wire import Reply

_SETTLING: Final = ("after", "add", "failures", "continue", "settling")
_CLAIMING: Final = ("quarantine", "due", "corrupt", "claiming")

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("renew", "look", "result", "counts", "since", "retry"), ()),
    **dict.fromkeys(("declare", "limits", "held_back", "followed", "followers", "outcomes"), ()),
    **dict.fromkeys(("clean", "pause", "paused", "keep", "progress", "wake", "farewell", "unread"), ()),
    **dict.fromkeys(("cancel", "complete", "remove", "drain", "promote"), ("dependents",)),
    "crons": ("recurring",),
    "replace_cron": ("recurring", "add"),
    "enqueue": ("add",),
    "enqueue_once": ("marks", "add"),
    "enqueue_after": ("dependents", "marks", "after", "add"),
    "settle": ("dependents", *_SETTLING),
    "go_on": ("dependents", "continue"),
    "claim": ("dependents", *_CLAIMING),
    "exchange": ("dependents", *_SETTLING, *_CLAIMING),
    "recover": ("dependents", "quarantine", "corrupt", "failures"),
    "read": ("show",),
    "whole": ("show",),
    "page": ("show",),
    "workers": ("holders",),
    "sweep": ("holders",),
}
"""Every script, and the files it needs beside `batched.lua`, `states.lua`, `foreign.lua`, `keys.lua`, `queue.lua`
and `holding.lua`, with which all begin. `repair` is not listed: it mends what keeps the others from starting.
"""


def _declaring(name: str) -> tuple[str, ...]:
    """Return the part of the one script that lets a queue have limits."""
    return ("limiting",) if name == "declare" else ()


@cache
def scripts() -> Mapping[str, Script]:
    """Return every script, by its name."""
    working = {
        name: assembled(__package__, "keys", "queue", *_declaring(name), "holding", *parts, name)
        for name, parts in PARTS.items()
    }
    alone = Script.of(joined(__package__, "alone") + working["enqueue"].text)
    return working | {"enqueue": alone, "repair": assembled(__package__, "keys", "quarantine", "repair")}


def loaded_scripts() -> Sequence[Script]:
    """Return the scripts that a server has to know before it is used."""
    return tuple(scripts().values())


ON_A_FULL_SERVER: Final = "#!lua flags=allow-oom\n"
TOO_OLD: Final = f"{FULL}; a server of Redis 7 or newer would let workers work it off"
DRAINING: Final = frozenset(PARTS) - {
    *("enqueue", "enqueue_once", "replace_cron", "settle", "exchange", "complete", "go_on", "progress", "declare")
}
"""The scripts that run on a full server. Each adds at most a few hundred bytes per job that is there already. What
settlements add is looked at first, see `fits` in `storage.py`."""


@cache
def _draining() -> Mapping[str, Script]:
    """Return the scripts that a server runs although its memory is full, which it can do since Redis 7."""
    return {name: Script.of(ON_A_FULL_SERVER + scripts()[name].text) for name in (*DRAINING, "settle")}


_CHANNELS: Final = (b"wake", b"events", b"cancels")


class RedisScripts:
    """The scripts of one queue on one server. All its keys begin with `base`."""

    def __init__(self, server: RedisServer, base: bytes) -> None:
        self.server = server
        self.base = base
        self._scripts = scripts()

    @property
    def channels(self) -> tuple[bytes, bytes, bytes]:
        """The channels for wake-ups, events and cancel requests.

        There is one of each per database, because pub/sub has no databases.
        """
        wake, events, cancels = (self.base + b":%b@%d" % (name, self.server.database) for name in _CHANNELS)
        return wake, events, cancels

    async def run(self, name: str, *arguments: str | bytes | int) -> Reply:
        """Run the script and return its answer; see `RedisServer.call` for errors.

        If the server's memory is full, a script that makes room, or needs none to speak of, runs all the same.
        """
        try:
            return await self._call(self._scripts[name], name, *arguments)
        except StorageFull:
            if name not in DRAINING:
                raise
        return await self.drain(name, *arguments)

    async def run_all(self, *calls: ScriptCall) -> list[Reply]:
        """Run several scripts in one round trip, each for itself; one that failed answers a `StorageError`."""
        about = (self.base, self.server.database)
        return await self.server.run(
            [("EVALSHA", self._scripts[name].sha, 1, *about, *arguments) for name, arguments in calls]
        )

    async def drain(self, name: str, *arguments: str | bytes | int) -> Reply:
        """Run the script on a server whose memory is full, where nothing of it has run.

        Raises:
            StorageFull: the server is too old for that.
        """
        seen = self.server.seen
        if not seen.works_when_full:
            raise StorageFull(TOO_OLD)
        try:
            return await self._call(_draining()[name], name, *arguments)
        except StorageDamaged:
            raise
        except StorageError as error:
            if seen.version is None:  # then it may not know the flag
                raise StorageFull(TOO_OLD) from error
            raise

    async def _call(self, script: Script, name: str, *arguments: str | bytes | int) -> Reply:
        about = (self.base, self.server.database)
        return await self.server.call(script, *about, *arguments, confirmed=name in CONFIRMED)


def base(prefix: str, queue: str) -> bytes:
    """Return what all keys of the queue begin with: a hash tag, which puts them in one slot."""
    tag = _in_a_tag(queue).replace(":", "%3A")  # otherwise it could be read as the end of a longer prefix
    return f"{{{_in_a_tag(prefix)}:{tag}}}".encode()


def _in_a_tag(text: str) -> str:
    """Escape the braces in the text, which would end the hash tag."""
    return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
