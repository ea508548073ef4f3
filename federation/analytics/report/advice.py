"""What an operator can do about a server: in words, and as commands of ours to paste.

A server's URL is a stranger's text. It gets into a command only if it is an origin of plain characters, and quoted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.frames import UNREGISTERED, Action
from federation.analytics.report import wording

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime

    from federation.analytics.report.findings import Findings, Obligations, Server

_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9][a-z0-9.-]{0,252}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A command to paste, and in which case, or what for."""

    command: str
    when: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What an error code says about a server; with `ours`, about this node instead.

    With `probe`, asking the server tells more than what is known of it.
    """

    text: str
    probe: bool = True
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
    "NOT_JSON": Meaning(text="it answers, but not with an acknowledgment", probe=False),
    "NO_ACK": Meaning(text="it answers, but not with an acknowledgment", probe=False),
    "BODY_TOO_LARGE": Meaning(text="its answers are larger than we accept", probe=False),
    "INVALID_ACK": Meaning(text="its acknowledgments are not valid", probe=False),
    "INVALID_ACK_SIGNATURE": Meaning(text="its acknowledgments are not signed with its key", probe=False),
    "NO_PUBLIC_KEY": Meaning(text="we hold no key to check its acknowledgments with", probe=False),
    "NO_RECEIVER": Meaning(text="it takes no unfollows, as its implementation has none", probe=False),
    "INBOX_GONE": Meaning(text="the inbox is no more; its server answers", probe=False),
    "BLACKLISTED": Meaning(text="it is on our blacklist", probe=False),
    "BLOCKED_URL": Meaning(text="its URL is one we never connect to", probe=False),
    "PARKED": Meaning(text="it is busy, so deliveries wait for their turn", probe=False),
    "INVALID_PAYLOAD": Meaning(text="what we wanted to send was malformed", probe=False, ours=True),
    "NO_OWN_URL": Meaning(text="this node's settings lack its URL (BETTER_AUTH_URL)", ours=True),
    "NO_OWN_KEYS": Meaning(text="this node's settings lack its keys (FEDERATION_*_KEY)", ours=True),
    "OWN_ACTOR_UNREACHABLE": Meaning(text="our actors are not to be seen at this node's URL", ours=True),
    "PLAIN_HTTP": Meaning(text="this node's settings forbid inboxes on plain http", ours=True),
    "DATABASE": Meaning(text="this node's database failed", ours=True),
    "INTERNAL": Meaning(text="a bug of this node; its log has the stack", ours=True),
    "STALLED": Meaning(text="workers of this node disappeared meanwhile; their log says why", ours=True),
    "expired": Meaning(text="it was held until it was too old, and never attempted", probe=False),
    "failed": Meaning(text="it was given up, and nothing says why", probe=False),
    "HTTP_401": Meaning(text="it refuses us as a stranger", probe=False),
    "HTTP_403": Meaning(text="it refuses us; we may be on its blacklist", probe=False),
    "HTTP_404": Meaning(text="it has no inbox where we deliver"),
    "HTTP_410": Meaning(text="it says that it is gone"),
    "HTTP_429": Meaning(text="it asks us to slow down", probe=False),
}
_HTTP: Final[Mapping[str, Meaning]] = {
    "3": Meaning(text="it redirects, and redirects are not followed"),
    "4": Meaning(text="it refuses what we send", probe=False),
    "5": Meaning(text="it fails inside"),
}
_UNKNOWN: Final = Meaning(text="a code this version does not know", probe=False)

_REFUSAL: Final = "keys or answers that are not its own"
_TOO_LONG: Final = timedelta(days=3)
"""So long nothing waits at a node that sends."""
_OWN_SHARE: Final = 0.01
"""Of all failures: fewer of its own are no alert."""


def meaning(code: str) -> Meaning:
    """Return what a code of `delivery_attempts` means."""
    if code.startswith("HTTP_") and code not in _MEANINGS:
        return _HTTP.get(code[5:6], _UNKNOWN)
    return _MEANINGS.get(code, _UNKNOWN)


def steps(server: Server, until: datetime) -> tuple[Suggestion, ...]:
    """Return what to paste, one after the other, or nothing if the server's URL is not safe to paste."""
    return tuple(_steps(server, until)) if _ORIGIN.fullmatch(server.url) else ()


def _steps(server: Server, until: datetime) -> Iterator[Suggestion]:
    url = server.url
    probe, why = Suggestion(f"federation servers probe {url}"), Suggestion(f"federation why {url}")
    if server.state == UNREGISTERED:
        yield from (why, Suggestion(f"federation servers discover {url}"))
        return
    is_up = server.state == ServerHealth.HEALTHY
    match server.action:
        case Action.REVIEW:
            yield why
            yield Suggestion(f"federation servers accept-key {url}", when="if the registered keys are its own")
            refuse = f"federation blacklist add {url} --reason {shlex.quote(_REFUSAL)}"
            yield Suggestion(refuse, when="if they are not, and it has proved no others")
        case Action.PRUNE:
            yield probe
            if server.owed:
                yield Suggestion(
                    f"federation deliveries drop --server {url} --state open", when="if it is still not there"
                )
            yield Suggestion(
                f"federation servers forget {url}", when="then" if server.owed else "if it is still not there"
            )
        case Action.PARK:
            yield from (why,) if is_up else (probe, why)
            if is_up and server.held:
                yield Suggestion(f"federation deliveries release {url}", when="once it takes us: what is held")
        case _:
            if is_up and server.owed > server.held and server.owed_since and until - server.owed_since >= _TOO_LONG:
                yield Suggestion("federation doctor", when="whether this node is at fault")
            yield from (probe, why) if server.top_error and meaning(server.top_error).probe else (why,)
    if server.week.lost and server.action is not Action.PRUNE:
        yield Suggestion(
            f"federation deliveries retry --server {url}",
            when="once it takes them: what was lost in 7 days, to be sent again",
        )


def owed_steps(found: Obligations) -> Iterator[Suggestion]:
    """Yield what to paste to see what is owed, and what was lost."""
    yield Suggestion("federation deliveries stats", when="all of it by state and server")
    plain = (server.url for server in found.servers if server.owed and _ORIGIN.fullmatch(server.url))
    for url in islice(plain, 1):
        command = f"federation deliveries list --server {url} --state open"
        yield Suggestion(command, when="what waits for one server, held or not")
    for state, what in (("failed", "refused for good"), ("expired", "too old")) if found.lost_week else ():
        yield Suggestion(f"federation deliveries list --state {state}", when=f"what was lost in 7 days, {what}")


def own_trouble(found: Findings) -> list[str]:
    """Return when most servers failed together, or this node did nothing."""
    return [f"{wording.day(each.day)} {hours}" for each in found.days for hours in each.own_trouble]


def own_failures(found: Findings) -> dict[str, int]:
    """Return the codes of attempts that this node itself failed, and how many; none if they are few among all."""
    ours = {code: number for code, number in found.error_totals.items() if meaning(code).ours}
    many = sum(ours.values()) >= _OWN_SHARE * max(sum(found.error_totals.values()), 1)
    return ours if many else {}


def own_steps(codes: Iterable[str]) -> tuple[Suggestion, ...]:
    """Return what to paste where this node itself failed attempts with these codes."""
    keys = (Suggestion("federation keys show"),) if "NO_OWN_KEYS" in codes else ()
    return (Suggestion("federation doctor"), *keys)
