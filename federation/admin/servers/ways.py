"""The ways to a server, one by each wire: what their links say, what is held, and what happens next.

Its redirects may lead to another name: what is known here of that name, and what an operator can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Select, func, select
from sqlmodel import col

from db import DEFAULT_WIRE, Database, DeliveryJob, DeliveryState, LinkState
from federation.admin.deliveries.deliveries import DeliveryStats
from federation.admin.servers import servers
from federation.admin.servers.claims import Claim
from federation.admin.words import ago, counted, moment
from federation.servers.link_rules import Link

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

_MEANING: Final = {
    "DNS_BLOCKED": "its name resolves to no public address, or to none at all",
    "TIMEOUT": "it does not answer in time",
    "CONN_REFUSED": "nothing listens on its port",
    "CONN_RESET": "it breaks connections off",
    "TLS_ERROR": "its certificate is not valid, or it does not speak TLS",
    "INVALID_RESPONSE_FROM_TARGET": "what it answers is no HTTP, or not ours",
    "UNKNOWN": "the connection failed in a way we have no name for",
    "DISCOVERY": "it could not be asked who it is",
    "FOREIGN_ANSWER": "something answers there that is not the server",
    "KEY_MISMATCH": "it shows another signing key than the registered one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way to a server by one wire: its link, how many deliveries are held for it, and when the oldest was made."""

    wire: str
    link: Link
    held: int
    oldest_held: datetime | None

    def sentences(self, now: datetime, *, max_age: timedelta | None) -> Iterator[str]:
        """Yield what becomes of deliveries, and what happens next. Held ones expire after `max_age`."""
        yield self._state(now)
        plan = self._plan(now)
        yield f"{self._held(now, max_age)}; {plan}." if self.held else f"Nothing is held for it; {plan}."
        if self.link.signature is not None:
            yield f"It takes signatures of the kind {self.link.signature}, and refused the other."

    def is_free(self, now: datetime) -> bool:
        """Tell whether deliveries are sent by it at once, and always were."""
        link = self.link
        is_plain = link.state is LinkState.UP and not link.operator_hold and link.release_at is None
        return is_plain and link.hold(now) is None and not self.held and not link.evidence

    def _state(self, now: datetime) -> str:
        """Say what becomes of deliveries to the server, since when, and why."""
        link = self.link
        since = f"since {moment(link.since)} ({ago(now - link.since)})"
        if link.operator_hold:
            down = "" if link.state is LinkState.UP else f"; its link is {link.state.value}, because of {_cause(link)}"
            return f"Deliveries to it are held by an operator {since}{down}."
        match link.state:
            case LinkState.DOWN:
                return f"It is down {since}, because of {_cause(link)}; deliveries to it are held."
            case LinkState.REFUSING:
                last = f", the last with {link.reason}" if link.reason else ""
                return f"It refuses everything {since}: {counted(link.rejections)}{last}; deliveries to it are held."
            case LinkState.MISMATCH:
                return f"It shows another signing key than the registered one {since}; deliveries to it are held."
        hold = link.hold(now)
        if hold is not None and hold.until is not None:
            return f"It asked for a pause until {moment(hold.until)}; deliveries to it are held so long."
        how = " through other servers, not directly" if link.relayed else ""
        if link.release_at is not None:
            return f"It is up again {since}; what was held for it is being sent{how}, slowly at first."
        times = f", though it was not there in {link.evidence} of the last intervals of 10 s" if link.evidence else ""
        return f"Deliveries to it are sent{how}{times}."

    def _held(self, now: datetime, max_age: timedelta | None) -> str:
        assert self.oldest_held is not None
        is_one = self.held == 1
        expiry = f" and given up {_when(self.oldest_held + max_age, now)} at the latest" if max_age is not None else ""
        told = f"{counted(self.held)} {'is' if is_one else 'are'} held for it"
        return f"{told}, {'' if is_one else 'the oldest '}made {ago(now - self.oldest_held)} ago{expiry}"

    def _plan(self, now: datetime) -> str:
        """Say what happens next, and when."""
        link, url = self.link, self.link.server_url
        by_hand = f"`federation deliveries release {url}` sends what is held"
        probe_time = "soon" if link.next_probe_at is None else _when(link.next_probe_at, now)
        if link.operator_hold:
            return f"{by_hand}, and nothing else does"
        match link.state:
            case LinkState.DOWN if self.held:
                return f"one delivery is sent to it {probe_time}, to see if it takes it, and then the others"
            case LinkState.DOWN if self.wire != DEFAULT_WIRE:
                return "the next delivery is held, and soon sent to it, to see if it takes it"
            case LinkState.DOWN:
                return f"it is looked at {probe_time}, and once it is back everything held is sent"
            case LinkState.REFUSING:
                return f"one delivery is tried {probe_time}, and if it is taken the others follow"
            case LinkState.MISMATCH:
                return (
                    f"it is looked at {probe_time}, and once it shows the registered key, or has proved the new"
                    " one (`federation keys rotate` there), everything held is sent. If its operator says that the old"
                    f" key is lost, `federation servers forget {url}`, which ends the follows there and here, and"
                    f" `federation servers discover {url}` take the new one"
                )
        hold = link.hold(now)
        if hold is not None and hold.until is not None:
            return f"what waits goes out {_when(hold.until, now)}"
        if link.release_at is not None and self.held:
            return f"the next of what is held goes out {_when(link.release_at, now)}"
        return "what is held goes out when its time comes" if self.held else "new deliveries go out at once"


async def ways_to(federation: Federation, url: str, *, registered: bool, backlog: DeliveryStats) -> tuple[Way, ...]:
    """Return the ways to a server by each wire that it is known to speak; at least one.

    A registered one speaks the wire of the registry. An operator's hold and release are on all links, and tell of none.
    """
    links = [await federation.links.of(wire).find(url) for wire in federation.wires.names]
    known = [link for link in links if _tells(link) or (registered and link.wire == DEFAULT_WIRE)]
    if not known:
        owed_by = await _wire_of_one(federation.database, url) if len(links) > 1 else None
        held = (link for link in links if link.operator_hold)
        known = [link for link in links if link.wire == owed_by] or [next(held, links[0])]
    if len(known) == 1:
        return (Way(wire=known[0].wire, link=known[0], held=backlog.held, oldest_held=backlog.oldest_held),)
    counts = {row.wire: row for row in await federation.database.rows(_held_by_wire(url))}
    return tuple(
        Way(
            wire=link.wire,
            link=link,
            held=counts[link.wire].held if link.wire in counts else 0,
            oldest_held=counts[link.wire].oldest if link.wire in counts else None,
        )
        for link in known
    )


def is_on_record(link: Link) -> bool:
    """Tell whether anything is known of the link."""
    return link != Link(server_url=link.server_url, wire=link.wire, since=link.since)


def _tells(link: Link) -> bool:
    """Tell whether anything is known of the link but that an operator holds the server, or has let it go."""
    return is_on_record(replace(link, operator_hold=False, release_at=None))


async def _wire_of_one(database: Database, url: str) -> str | None:
    rows = await database.rows(select(col(DeliveryJob.wire)).where(col(DeliveryJob.server_url) == url).limit(1))
    return rows[0].wire if rows else None


def _held_by_wire(url: str) -> Select[*tuple[Any, ...]]:
    wire = col(DeliveryJob.wire)
    return (
        select(wire, func.count().label("held"), func.min(col(DeliveryJob.created_at)).label("oldest"))
        .where(col(DeliveryJob.server_url) == url, col(DeliveryJob.state) == DeliveryState.HELD)
        .group_by(wire)
    )


def _cause(link: Link) -> str:
    return "a reason that is not on record" if link.reason is None else explained(link.reason)


def explained(reason: str) -> str:
    """Say what a code means that is the reason of a link or of a server's health."""
    if reason.startswith("HTTP_3"):
        return f"{reason}: it redirects, and redirects are not followed"
    if reason.startswith("HTTP_"):
        return f"{reason}: something answers there, but not as the server should"
    return f"{reason}: {_MEANING.get(reason, 'a code this version does not know')}"


def _when(at: datetime, now: datetime) -> str:
    left = at - now
    return f"in {ago(left)} ({moment(at)})" if left > timedelta(0) else "now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The redirects of a server lead `to` another name, which says nothing of whose that is.

    `registered` says that a server is registered under that name, `claims_keys` that the server there shows a key with
    which the first one is registered.
    """

    to: str
    registered: bool
    claims_keys: bool

    def sentences(self, url: str, *, registered: bool, owed: int) -> Iterator[str]:
        """Yield what to do, for a server with the canonical URL *url* that *owed* deliveries are for."""
        yield f"Its last redirect led to {self.to}."
        forget = f"`federation servers forget {url}`"
        discover = f"`federation servers discover {self.to}`"
        if self.claims_keys:
            yield (
                f"The server there shows a key of this one: {forget}, which ends the follows that name it, and then"
                f" {discover} register it under that name."
            )
        elif self.registered and registered:
            yield (
                "A server is registered under that name, by other keys. If it replaces this one,"
                f" {forget} removes the old name, with the follows that name it."
            )
        elif self.registered:
            yield "A server is registered under that name."
        else:
            first = (
                f" If that says that a key is registered for another, {forget} comes first, which ends the follows."
                * registered
            )
            yield f"If this server has moved there, {discover} registers it under that name.{first}"
        if owed:
            yield (
                f"What is owed to {url} goes to no other name:"
                f" `federation deliveries drop --server {url}` gives it up before its time."
            )


async def move_of(database: Database, link: Link, claims: Sequence[Claim]) -> Move | None:
    """Return where the server's redirects lead, or None if it does not redirect, or no longer."""
    to = link.moved_to
    if to is None or (link.state is LinkState.UP and not link.evidence):
        return None
    return Move(
        to=to,
        registered=await servers.show(database, to) is not None,
        claims_keys=any((claim.holder, claim.claimed_by) == (link.server_url, to) for claim in claims),
    )
