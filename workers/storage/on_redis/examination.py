"""What a Redis or Valkey server says of itself: whether it keeps what it acknowledges, and what time it has.

Theory of operation. A server that evicts keys, or keeps nothing on disk, acknowledges jobs as any other does, and loses
them in silence. So it is asked for its settings when it is first connected to, and now and then later, because it may
have been replaced by another. Each fault is logged once per server and process. What a server does not tell, as many
that are rented do not, counts as unknown and never as right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from workers.errors import StorageError, StorageUnavailable
from workers.storage.abilities import ServerFault, Severity
from workers.storage.base import Capabilities
from workers.storage.redis_urls import take_parameter

Command: TypeAlias = tuple[str | bytes | int | float, ...]
Reply: TypeAlias = Any  # the answer of a command; each reader here knows its shape

QUESTIONS: Final[tuple[Command, ...]] = (
    ("TIME",),
    ("INFO", "server"),
    ("INFO", "memory"),
    ("INFO", "persistence"),
    ("CONFIG", "GET", "save"),
)
LOOK_SECONDS: Final = 60.0
"""How often a server is looked at, at most."""
NOTICED_SECONDS: Final = 1.0
"""A clock that is off by more is told, and so is a change by more."""
ALLOWS_OOM: Final = 7
"""The first version of Redis whose scripts may say that they run on a full server; Valkey counts from there."""
ALMOST_FULL: Final = 0.9
MOST_TOLD: Final = 1_000
CLOCK_ADVICE: Final = "set both by NTP: with BullMQ, the delays of jobs go by each client's clock"

_LEVELS: Final = {Severity.ERROR: logging.WARNING, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What one server answered. None stands for what it does not tell."""

    server: str = ""
    """Which server it is: another one after each restart."""
    version: int | None = None
    policy: str | None = None
    max_memory: int | None = None
    used_memory: int | None = None
    appends: bool | None = None
    """Whether it writes every change to a file."""
    snapshots: bool | None = None
    publishes: bool | None = None
    """Whether our user may publish on the channels of the queue that was asked for; None if that uses none."""
    clock_offset: float = 0.0
    """By how many seconds its clock is certainly ahead of ours; 0.0 if the two may agree."""

    @property
    def durable(self) -> bool | None:
        """Whether jobs survive the server's end; None also where snapshots keep all but the last minutes."""
        if self.appends:
            return True
        return False if (self.appends, self.snapshots) == (False, False) else None

    @property
    def works_when_full(self) -> bool:
        """Whether scripts may say that they run on a full server; assumed of one that does not tell its version."""
        return self.version is None or self.version >= ALLOWS_OOM

    def known(self, capabilities: Capabilities) -> Capabilities:
        """Return the capabilities with what is known of this server."""
        works_when_full = capabilities.works_when_full and self.works_when_full
        return replace(capabilities, durable=self.durable, works_when_full=works_when_full)

    def faults(self, *, allow_eviction: bool) -> list[ServerFault]:
        """Return what is wrong, the gravest first."""
        found = [*self.settings(allow_eviction=allow_eviction), self._memory()]
        order = list(Severity)
        return sorted(filter(None, found), key=lambda fault: order.index(fault.severity))

    def settings(self, *, allow_eviction: bool) -> list[ServerFault]:
        """Return what is wrong with how the server is set up."""
        found = (self._eviction(allow_eviction), self._persistence(), self._channels())
        return [each for each in found if each is not None]

    def _eviction(self, allowed: bool) -> ServerFault | None:
        if self.policy == "noeviction":
            return None
        if self.policy is None:
            text = "the Redis server does not tell its maxmemory-policy"
            return ServerFault(severity=Severity.NOTE, found=text, advice="make sure that it is noeviction")
        text = f"the Redis server evicts keys when its memory is full (maxmemory-policy {self.policy})"
        if self.max_memory == 0:
            text += ", which has no limit yet (maxmemory 0)"
        severity = Severity.WARNING if self.max_memory == 0 else Severity.ERROR
        return ServerFault(
            severity=Severity.NOTE if allowed else severity,
            found=f"{text}: acknowledged jobs and running jobs' locks may vanish",
            advice="set its maxmemory-policy to noeviction",
        )

    def _memory(self) -> ServerFault | None:
        if not self.max_memory or self.used_memory is None or self.used_memory < ALMOST_FULL * self.max_memory:
            return None
        return ServerFault(
            severity=Severity.WARNING,
            found=f"the Redis server uses {self.used_memory:,} of the {self.max_memory:,} bytes of its maxmemory",
            advice="raise its maxmemory, or find out what fills it: when it is full, it takes no more jobs",
        )

    def _persistence(self) -> ServerFault | None:
        if self.appends:
            return None
        if self.durable is False:
            text = "the Redis server keeps nothing on disk (appendonly no, no save points): its end is that of all jobs"
            return ServerFault(severity=Severity.WARNING, found=text, advice="set its appendonly to yes")
        if self.snapshots:
            text = "the Redis server only takes snapshots (appendonly no): a crash loses the jobs since the last one"
            return ServerFault(severity=Severity.NOTE, found=text, advice="set its appendonly to yes")
        text = "the Redis server does not tell whether it keeps jobs on disk"
        return ServerFault(severity=Severity.NOTE, found=text, advice="make sure that its appendonly is yes")

    def _channels(self) -> ServerFault | None:
        if self.publishes is not False:
            return None
        text = (
            "the Redis server does not let our user publish on the queue's channels: workers find jobs and cancels"
            " only as they look, seconds later, and who waits for a result may hear of none"
        )
        advice = "allow it +publish, +subscribe and the channels, of which a new user has none (ACL SETUSER ... &*)"
        return ServerFault(severity=Severity.WARNING, found=text, advice=advice)


def read(replies: Sequence[Reply], *, asked: float, answered: float, published: Reply | None = None) -> Examination:
    """Return what the replies to `QUESTIONS` say, and that to a message, if one was published.

    asked and answered are the times of our clock before and after.
    """
    clock, *infos, save = replies
    fields: dict[str, str] = {}
    for info in infos:
        fields |= _fields(info)
    return Examination(
        server=fields.get("run_id", ""),
        version=_whole(fields.get("redis_version", "").partition(".")[0]),
        policy=fields.get("maxmemory_policy"),
        max_memory=_whole(fields.get("maxmemory")),
        used_memory=_whole(fields.get("used_memory")),
        appends=_flag(fields.get("aof_enabled")),
        snapshots=None if isinstance(save, StorageError) or len(save) != 2 else bool(save[1]),
        publishes=None if published is None else not isinstance(published, StorageError),
        clock_offset=_offset(clock, asked, answered),
    )


def _fields(info: Reply) -> Mapping[str, str]:
    if isinstance(info, StorageError):
        return {}
    text = info.decode(errors="replace") if isinstance(info, bytes) else str(info)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _flag(text: str | None) -> bool | None:
    return None if text is None else text != "0"


def _offset(clock: Reply, asked: float, answered: float) -> float:
    """Return the least by which the server's clock may be off: it was read at some moment between the two."""
    if isinstance(clock, StorageError):
        return 0.0
    seconds, micros = clock
    server = int(seconds) + int(micros) / 1e6
    return max(server - answered, 0.0) + min(server - asked, 0.0)


def clock_text(offset: float) -> str:
    """Say in words that the server's clock is so many seconds ahead of ours."""
    way = "behind" if offset > 0 else "ahead of"
    return f"this machine's clock is {abs(offset):.1f} s {way} the Redis server's"


class Teller:
    """Logs what concerns servers: each fault once, and a difference of the clocks once per change."""

    def __init__(self) -> None:
        self._faults: set[tuple[str, ServerFault]] = set()
        self._offsets: dict[str, float] = {}

    def tell_settings(self, seen: Examination, *, allow_eviction: bool) -> None:
        """Log the faults of the server's settings that were not logged before."""
        for fault in seen.settings(allow_eviction=allow_eviction):
            if (seen.server, fault) not in self._faults:
                if len(self._faults) >= MOST_TOLD:
                    self._faults.clear()
                self._faults.add((seen.server, fault))
                _LOG.log(_LEVELS[fault.severity], "%s; %s", fault.found, fault.advice)

    def tell_clock(self, seen: Examination) -> None:
        """Log that the clocks differ, or that they agree again."""
        told = self._offsets.get(seen.server, 0.0)
        offset = seen.clock_offset if abs(seen.clock_offset) > NOTICED_SECONDS else 0.0
        if offset == told or (offset and abs(offset - told) <= NOTICED_SECONDS):
            return
        if len(self._offsets) >= MOST_TOLD:
            self._offsets.clear()
        self._offsets[seen.server] = offset
        if offset:
            _LOG.warning("%s; %s", clock_text(offset), CLOCK_ADVICE)
        else:
            _LOG.warning("this machine's clock agrees with the Redis server's again")


TELLER: Final = Teller()
"""That of this process."""


class Lookout:
    """Looks at one server now and then, for all storages that share its connections."""

    def __init__(self) -> None:
        self.seen = Examination()
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def look(
        self, ask: Callable[[Sequence[Command]], Awaitable[list[Reply]]], *, channel: bytes | None = None
    ) -> None:
        """Ask the server, unless that was done a moment ago; one that does not answer is asked again next time.

        Something is published on the *channel*, to which nobody listens.
        """
        clock = asyncio.get_running_loop().time
        async with self._looking:
            if clock() - self._looked_at < LOOK_SECONDS:
                return
            asked = time.time()
            with suppress(StorageUnavailable):
                probe: list[Command] = [] if channel is None else [("PUBLISH", channel, "")]
                replies = await ask([*QUESTIONS, *probe])
                published = replies.pop() if probe else None
                self.seen = read(replies, asked=asked, answered=time.time(), published=published)
                self._looked_at = clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """What a storage cares about in its server."""

    allow_eviction: bool = False
    """Whether the server may evict keys."""
    channel: bytes | None = None
    """One on which the storage could publish; None if it publishes nothing."""
    clients_clocks: bool = False
    """Whether clients' clocks count, so that a difference from the server's is told."""

    def tell(self, seen: Examination) -> None:
        """Log what was not logged before."""
        TELLER.tell_settings(seen, allow_eviction=self.allow_eviction)
        if self.clients_clocks:
            TELLER.tell_clock(seen)


_WORDS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def take_eviction(url: str) -> tuple[str, bool]:
    """Return the URL without its `?allow_eviction=`, and whether that allows it.

    Raises:
        StorageError: it says neither yes nor no.
    """
    target, said = take_parameter(url, "allow_eviction")
    if said is None:
        return url, False
    if said not in _WORDS:
        raise StorageError("?allow_eviction= must be true or false")
    return target, _WORDS[said]
