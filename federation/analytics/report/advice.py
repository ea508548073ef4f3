"""What an operator can do about a server: in words, and as a command to paste if one helps.

A server's URL is a stranger's text. It gets into a command only if it is an origin of plain characters, and quoted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from federation.analytics.frames import Action

if TYPE_CHECKING:
    from collections.abc import Mapping

_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9][a-z0-9.-]{0,252}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)


class Look(StrEnum):
    """Where to look first."""

    DISCOVER = "discover"
    NAME = "name"
    CERTIFICATE = "certificate"
    ATTEMPTS = "attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What an error code says about a server; with `ours`, about this node instead."""

    text: str
    look: Look = Look.DISCOVER
    ours: bool = False


_MEANINGS: Final[Mapping[str, Meaning]] = {
    "TIMEOUT": Meaning(text="it does not answer in time"),
    "CONN_REFUSED": Meaning(text="nothing listens at its address"),
    "CONN_RESET": Meaning(text="it breaks connections off"),
    "DNS_BLOCKED": Meaning(text="its name leads to no public address", look=Look.NAME),
    "TLS_ERROR": Meaning(text="its certificate or TLS set-up is broken", look=Look.CERTIFICATE),
    "UNKNOWN": Meaning(text="no complete answer came, for a reason we cannot tell"),
    "INVALID_RESPONSE_FROM_TARGET": Meaning(text="it does not answer in HTTP"),
    "DISCOVERY": Meaning(text="it does not introduce itself at /discover"),
    "DISCOVERY_REFUSED": Meaning(text="it answers at /discover, but does not introduce itself"),
    "FOREIGN_ANSWER": Meaning(text="something else answers at its address, such as a hoster's page"),
    "KEY_MATERIAL": Meaning(text="the keys we registered for it are unusable"),
    "NOT_JSON": Meaning(text="it answers, but not with an acknowledgment", look=Look.ATTEMPTS),
    "NO_ACK": Meaning(text="it answers, but not with an acknowledgment", look=Look.ATTEMPTS),
    "BODY_TOO_LARGE": Meaning(text="its answers are larger than we accept", look=Look.ATTEMPTS),
    "INVALID_ACK": Meaning(text="its acknowledgments are not valid", look=Look.ATTEMPTS),
    "INVALID_ACK_SIGNATURE": Meaning(text="its acknowledgments are not signed with its key", look=Look.ATTEMPTS),
    "NO_PUBLIC_KEY": Meaning(text="we hold no key to check its acknowledgments with", look=Look.ATTEMPTS),
    "NO_RECEIVER": Meaning(text="it takes no unfollows, as its implementation has none", look=Look.ATTEMPTS),
    "BLACKLISTED": Meaning(text="it is on our blacklist", look=Look.ATTEMPTS),
    "BLOCKED_URL": Meaning(text="its URL is one we never connect to", look=Look.ATTEMPTS),
    "PARKED": Meaning(text="it is busy, so deliveries wait for their turn", look=Look.ATTEMPTS),
    "INVALID_PAYLOAD": Meaning(text="what we wanted to send was malformed", look=Look.ATTEMPTS, ours=True),
    "NO_OWN_URL": Meaning(text="this node's settings lack its URL (BETTER_AUTH_URL)", ours=True),
    "NO_OWN_KEYS": Meaning(text="this node's settings lack its keys (FEDERATION_*_KEY)", ours=True),
    "DATABASE": Meaning(text="this node's database failed", ours=True),
    "INTERNAL": Meaning(text="a bug of this node; its log has the stack", ours=True),
    "STALLED": Meaning(text="workers of this node disappeared meanwhile; their log says why", ours=True),
    "HTTP_401": Meaning(text="it refuses us as a stranger", look=Look.ATTEMPTS),
    "HTTP_403": Meaning(text="it refuses us; we may be on its blacklist", look=Look.ATTEMPTS),
    "HTTP_404": Meaning(text="it has no inbox where we deliver"),
    "HTTP_410": Meaning(text="it says that it is gone"),
    "HTTP_429": Meaning(text="it asks us to slow down", look=Look.ATTEMPTS),
}
_HTTP: Final[Mapping[str, Meaning]] = {
    "3": Meaning(text="it redirects, and redirects are not followed"),
    "4": Meaning(text="it refuses what we send", look=Look.ATTEMPTS),
    "5": Meaning(text="it fails inside"),
}
_UNKNOWN: Final = Meaning(text="a code this version does not know", look=Look.ATTEMPTS)

_INSTRUCTIONS: Final[Mapping[Action, str]] = {
    Action.REVIEW: "Read what became of attempts at them, and below which keys are suspicious; then decide: a row"
    " in blacklisted_servers refuses a server for good.",
    Action.PARK: "They are down. Tell their operators: deliveries to them are held, and expire in the end. A command"
    " shows whether one is back.",
    Action.WATCH: "Nothing to do yet; ask the operator of one that gets worse. A command shows what we see of it.",
    Action.PRUNE: "They will hardly return. Where the command still finds nothing, end the follows that lead there and"
    " remove the server.",
    Action.KEEP: "Nothing to do.",
}


def meaning(code: str) -> Meaning:
    """Return what a code of `delivery_attempts` means."""
    if code.startswith("HTTP_") and code not in _MEANINGS:
        return _HTTP.get(code[5:6], _UNKNOWN)
    return _MEANINGS.get(code, _UNKNOWN)


def instruction(action: Action) -> str:
    """Return what to do about servers with this advice."""
    return _INSTRUCTIONS[action]


def command(action: Action, url: str, top_error: str | None) -> str | None:
    """Return what to paste first if attempts mostly fail with `top_error`, or None if nothing is safe to paste."""
    if action is Action.REVIEW:
        return _command(Look.ATTEMPTS, url)
    return _command(meaning(top_error).look if top_error else Look.DISCOVER, url)


def _command(look: Look, url: str) -> str | None:
    if not _ORIGIN.fullmatch(url):
        return None
    parts = urlsplit(url)
    host = parts.hostname or ""
    match look:
        case Look.NAME:
            return f"getent ahosts {shlex.quote(host)}"
        case Look.CERTIFICATE:
            peer = shlex.quote(f"{parts.netloc if parts.port else f'{parts.netloc}:443'}")
            asked = f"openssl s_client -connect {peer} -servername {shlex.quote(host)} </dev/null"
            return f"{asked} | openssl x509 -noout -subject -issuer -dates"
        case Look.ATTEMPTS:
            columns = "outcome, error_code, count(*), max(started_at)"
            where = f"WHERE server_url = '{url}' GROUP BY outcome, error_code;"
            return f"SELECT {columns} FROM delivery_attempts {where}"  # noqa: S608 - shown, not run; the URL is plain
        case Look.DISCOVER:
            written = "'%{http_code} after %{time_total} s\\n'"
            return f"curl -sS -m 15 -o /dev/null -w {written} {shlex.quote(f'{url}/discover')}"
