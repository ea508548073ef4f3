"""What an operator can do about a server: in words, and as commands of ours to paste.

A server's URL is a stranger's text. It gets into a command only if it is an origin of plain characters, and quoted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from federation.analytics.frames import UNREGISTERED, Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from federation.analytics.report.findings import Server

_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9][a-z0-9.-]{0,252}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)


class Command(str):
    """A command to paste."""

    __slots__ = ()


class Look(StrEnum):
    """Where to look first: at the server, or at what we know of it."""

    PROBE = "probe"
    WHY = "why"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What an error code says about a server; with `ours`, about this node instead."""

    text: str
    look: Look = Look.PROBE
    ours: bool = False


_MEANINGS: Final[Mapping[str, Meaning]] = {
    "TIMEOUT": Meaning(text="it does not answer in time"),
    "CONN_REFUSED": Meaning(text="nothing listens at its address"),
    "CONN_RESET": Meaning(text="it breaks connections off"),
    "DNS_BLOCKED": Meaning(text="its name leads to no public address"),
    "TLS_ERROR": Meaning(text="its certificate or TLS set-up is broken"),
    "UNKNOWN": Meaning(text="no complete answer came, for a reason we cannot tell"),
    "INVALID_RESPONSE_FROM_TARGET": Meaning(text="it does not answer in HTTP"),
    "DISCOVERY": Meaning(text="it does not introduce itself at /discover"),
    "DISCOVERY_REFUSED": Meaning(text="it answers at /discover, but does not introduce itself"),
    "FOREIGN_ANSWER": Meaning(text="something else answers at its address, such as a hoster's page"),
    "KEY_MATERIAL": Meaning(text="the keys we registered for it are unusable"),
    "NOT_JSON": Meaning(text="it answers, but not with an acknowledgment", look=Look.WHY),
    "NO_ACK": Meaning(text="it answers, but not with an acknowledgment", look=Look.WHY),
    "BODY_TOO_LARGE": Meaning(text="its answers are larger than we accept", look=Look.WHY),
    "INVALID_ACK": Meaning(text="its acknowledgments are not valid", look=Look.WHY),
    "INVALID_ACK_SIGNATURE": Meaning(text="its acknowledgments are not signed with its key", look=Look.WHY),
    "NO_PUBLIC_KEY": Meaning(text="we hold no key to check its acknowledgments with", look=Look.WHY),
    "NO_RECEIVER": Meaning(text="it takes no unfollows, as its implementation has none", look=Look.WHY),
    "INBOX_GONE": Meaning(text="the inbox is no more; its server answers", look=Look.WHY),
    "BLACKLISTED": Meaning(text="it is on our blacklist", look=Look.WHY),
    "BLOCKED_URL": Meaning(text="its URL is one we never connect to", look=Look.WHY),
    "PARKED": Meaning(text="it is busy, so deliveries wait for their turn", look=Look.WHY),
    "INVALID_PAYLOAD": Meaning(text="what we wanted to send was malformed", look=Look.WHY, ours=True),
    "NO_OWN_URL": Meaning(text="this node's settings lack its URL (BETTER_AUTH_URL)", ours=True),
    "NO_OWN_KEYS": Meaning(text="this node's settings lack its keys (FEDERATION_*_KEY)", ours=True),
    "OWN_ACTOR_UNREACHABLE": Meaning(text="our actors are not to be seen at this node's URL", ours=True),
    "PLAIN_HTTP": Meaning(text="this node's settings forbid inboxes on plain http", ours=True),
    "DATABASE": Meaning(text="this node's database failed", ours=True),
    "INTERNAL": Meaning(text="a bug of this node; its log has the stack", ours=True),
    "STALLED": Meaning(text="workers of this node disappeared meanwhile; their log says why", ours=True),
    "HTTP_401": Meaning(text="it refuses us as a stranger", look=Look.WHY),
    "HTTP_403": Meaning(text="it refuses us; we may be on its blacklist", look=Look.WHY),
    "HTTP_404": Meaning(text="it has no inbox where we deliver"),
    "HTTP_410": Meaning(text="it says that it is gone"),
    "HTTP_429": Meaning(text="it asks us to slow down", look=Look.WHY),
}
_HTTP: Final[Mapping[str, Meaning]] = {
    "3": Meaning(text="it redirects, and redirects are not followed"),
    "4": Meaning(text="it refuses what we send", look=Look.WHY),
    "5": Meaning(text="it fails inside"),
}
_UNKNOWN: Final = Meaning(text="a code this version does not know", look=Look.WHY)

_INSTRUCTIONS: Final[Mapping[Action, Sequence[str | Command]]] = {
    Action.REVIEW: (
        "Somebody may pose as them. Ask their operators, by a way that does not lead over these keys. If the registered"
        " keys are right, ",
        Command("federation servers accept-key URL"),
        " ends this, also what was signed with another's key until then; a shared key is accepted for each server that"
        " has it. If not, refuse the server.",
    ),
    Action.PARK: (
        "Nothing gets there. Tell their operators: what is owed to them is held, and expires in the end. When one is"
        " back, the probe sees it, and what is held goes out.",
    ),
    Action.WATCH: ("Nothing to do yet; ask the operator of one that gets worse. The commands show what we see of it.",),
    Action.PRUNE: (
        "They will hardly return. Where the probe still finds nothing, drop what is owed to the server, for nobody will"
        " take it, and forget the server then: its follows end with it, and the next report is without it.",
    ),
    Action.KEEP: ("Nothing to do.",),
}
_REFUSAL: Final = "keys or answers that are not its own"


def meaning(code: str) -> Meaning:
    """Return what a code of `delivery_attempts` means."""
    if code.startswith("HTTP_") and code not in _MEANINGS:
        return _HTTP.get(code[5:6], _UNKNOWN)
    return _MEANINGS.get(code, _UNKNOWN)


def instruction(action: Action) -> Sequence[str | Command]:
    """Return what to do about servers with this advice, in words and commands."""
    return _INSTRUCTIONS[action]


def commands(server: Server) -> tuple[Command, ...]:
    """Return what to paste, one after the other, or nothing if the server's URL is not safe to paste."""
    url = server.url
    if not _ORIGIN.fullmatch(url):
        return ()
    probe, why = Command(f"federation servers probe {url}"), Command(f"federation why {url}")
    if server.state == UNREGISTERED:
        return why, Command(f"federation servers discover {url}")
    match server.action:
        case Action.REVIEW:
            return why, Command(f"federation blacklist add {url} --reason {shlex.quote(_REFUSAL)}")
        case Action.PRUNE:
            drop = Command(f"federation deliveries drop --server {url} --state open")
            return probe, *([drop] if server.owed else []), Command(f"federation servers forget {url}")
        case Action.PARK:
            return probe, why
    look = meaning(server.top_error).look if server.top_error else Look.WHY
    return (probe, why) if look is Look.PROBE else (why,)


def listing(url: str) -> Command | None:
    """Return the command that lists what is owed to a server."""
    return Command(f"federation deliveries list --server {url} --state open") if _ORIGIN.fullmatch(url) else None


def own_commands(codes: Iterable[str]) -> tuple[Command, ...]:
    """Return what to paste where this node itself failed attempts with these codes."""
    keys = (Command("federation keys show"),) if "NO_OWN_KEYS" in codes else ()
    return (Command("federation doctor"), *keys)
