"""What an administrator does with the servers we know: list, show, probe and forget them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Select, delete, exists, func, or_, select
from sqlmodel import col

from db import (
    DEFAULT_WIRE,
    AcceptedKey,
    Database,
    DeliveryJob,
    DeliveryState,
    Follow,
    LinkState,
    Server,
    ServerHealth,
    ServerHealthEvent,
    ServerLink,
    ServerScorecard,
)
from federation.base.audit import Order, noted, recorded
from federation.protocol.encodings import decode_base64_sized
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.registry import KnownServer
from federation.servers.link_rules import LONGEST_REST

if TYPE_CHECKING:
    from federation.runtime.composition import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """One row of the registry; `updated_at` is when its health was last checked, or changed."""

    url: str
    is_healthy: bool
    unhealthy_reason: str | None
    health_check_attempts: int
    last_seen: datetime
    created_at: datetime
    updated_at: datetime
    public_key: str
    encryption_public_key: str
    knows_key: str | None
    rotation_tried_at: datetime | None
    rotation_problem: str | None

    @property
    def known(self) -> KnownServer:
        """What deliveries know of the server."""
        return KnownServer(**{column.name: getattr(self, column.name) for column in fields(KnownServer)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """The state of deliveries to a server by one wire, and how many are held for it.

    To an unknown server they are sent. `signature` is the kind that it takes, where it has refused another.
    """

    wire: str
    state: LinkState
    since: datetime | None
    reason: str | None
    relayed: bool
    operator_hold: bool
    held: int
    next_probe_at: datetime | None
    rest_until: datetime | None
    profile: str | None
    signature: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorecard:
    """What the analytics say of a server, about the `window_days` days up to and including `as_of`."""

    window_days: int
    as_of: date
    score: float | None
    availability: float | None
    trend: str | None
    action: str
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """One change of a server's health."""

    at: datetime
    state: ServerHealth
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPage:
    """Part of a list; `after` continues it, None at its end.

    `others` are URLs of servers that need no registry: those of other wires than that of servers with keys.
    """

    servers: tuple[ServerRow, ...]
    others: tuple[str, ...]
    after: str | None

    @property
    def urls(self) -> list[str]:
        """The URLs of all of them, in order."""
        return sorted([*(each.url for each in self.servers), *self.others])


_UNKNOWN_LINK: Final[dict[str, Any]] = {
    "wire": DEFAULT_WIRE,
    "state": LinkState.UP,
    "since": None,
    "reason": None,
    "relayed": False,
    "operator_hold": False,
    "next_probe_at": None,
    "rest_until": None,
    "profile": None,
    "signature": None,
}


def server_url(text: str) -> str:
    """Return the canonical URL of the server that *text* names, which may be a bare host name.

    Raises:
        UrlError: it names none.
    """
    return canonical_origin(whole_url(text))


def whole_url(text: str) -> str:
    """Return a URL that may have been typed without its scheme."""
    return text if "://" in text else f"https://{text}"


async def list_servers(
    database: Database, *, healthy: bool | None = None, limit: int = 100, after: str | None = None
) -> ServerPage:
    """Return up to *limit* servers by URL, from where the page before ended.

    With *healthy* True or False, only servers of the registry that are healthy, or are not, are returned.
    """
    query = _rows().order_by(col(Server.url)).limit(limit + 1)
    if healthy is not None:
        query = query.where(col(Server.is_healthy).is_(healthy))
    if after is not None:
        query = query.where(col(Server.url) > after)
    other = [] if healthy is not None else await database.rows(_others(limit + 1, after))
    found = {row.url: ServerRow(**row._mapping) for row in await database.rows(query)}
    urls = sorted([*found, *(row.server_url for row in other)])
    shown = urls[:limit]
    return ServerPage(
        servers=tuple(found[url] for url in shown if url in found),
        others=tuple(url for url in shown if url not in found),
        after=shown[-1] if len(urls) > limit else None,
    )


def _others(limit: int, after: str | None) -> Select[*tuple[str]]:
    """Return the query for servers that have a link by another wire, and are not in the registry."""
    url = col(ServerLink.server_url)
    is_registered = exists().where(col(Server.url) == url)
    query = select(url).where(col(ServerLink.wire) != DEFAULT_WIRE, ~is_registered).distinct().order_by(url)
    return (query if after is None else query.where(url > after)).limit(limit)


async def show(database: Database, url: str) -> ServerRow | None:
    """Return the registry's row of *url*, or None if there is none."""
    async with database.read() as session:
        row = (await session.execute(_rows().where(col(Server.url) == url))).one_or_none()
    return None if row is None else ServerRow(**row._mapping)


async def links(database: Database, urls: Sequence[str]) -> dict[str, LinkRow]:
    """Return the links to these servers: of several wires, that which is not up. What is held is so by any wire."""
    found = await links_by_wire(database, urls)
    rows = {url: next((each for each in of if each.state is not LinkState.UP), of[0]) for url, of in found.items()}
    return {url: replace(row, held=sum(each.held for each in found[url])) for url, row in rows.items()}


async def links_by_wire(database: Database, urls: Sequence[str]) -> dict[str, Sequence[LinkRow]]:
    """Return the links to these servers by each wire by which something is known of them; at least one."""
    names = [column.name for column in fields(LinkRow) if column.name != "held"]
    columns = (getattr(ServerLink, name) for name in names)
    query = select(col(ServerLink.server_url), *columns).where(col(ServerLink.server_url).in_(urls))
    server, wire = col(DeliveryJob.server_url), col(DeliveryJob.wire)
    held = (
        select(server, wire, func.count().label("number"))
        .where(col(DeliveryJob.state) == DeliveryState.HELD, server.in_(urls))
        .group_by(server, wire)
    )
    async with database.read() as session:
        known = {(row.server_url, row.wire): dict(row._mapping) for row in await session.execute(query)}
        counts = {(row.server_url, row.wire): int(row.number) for row in await session.execute(held)}
    now = datetime.now(UTC)
    found: dict[str, list[LinkRow]] = {url: [] for url in urls}
    for url, by in sorted(known.keys() | counts.keys()):
        found[url].append(_link_row(known.get((url, by), {"wire": by}), counts.get((url, by), 0), now))
    return {url: rows or [_link_row({}, 0, now)] for url, rows in found.items()}


def _link_row(values: dict[str, Any], held: int, now: datetime) -> LinkRow:  # Any: values of columns of any type
    values = {**_UNKNOWN_LINK, **values}
    values.pop("server_url", None)
    rest_until = values["rest_until"]
    is_over = rest_until is None or not now < rest_until <= now + LONGEST_REST
    return LinkRow(**values | {"rest_until": None if is_over else rest_until, "held": held})


async def health_events(database: Database, url: str, *, limit: int = 5) -> Sequence[HealthEvent]:
    """Return the last changes of the server's health, the latest first."""
    query = (
        select(col(ServerHealthEvent.at), col(ServerHealthEvent.to_state), col(ServerHealthEvent.reason))
        .where(col(ServerHealthEvent.server_url) == url)
        .order_by(col(ServerHealthEvent.at).desc(), col(ServerHealthEvent.id).desc())
        .limit(limit)
    )
    async with database.read() as session:
        return [HealthEvent(at=at, state=state, reason=reason) for at, state, reason in await session.execute(query)]


async def scorecards(database: Database, urls: Sequence[str], *, window_days: int = 7) -> dict[str, Scorecard]:
    """Return the latest scorecards of these servers. Before the analytics have run there are none.

    The advice is the same in all windows of a server.
    """
    columns = (getattr(ServerScorecard, column.name) for column in fields(Scorecard))
    query = select(col(ServerScorecard.server_url), *columns).where(
        col(ServerScorecard.server_url).in_(urls), col(ServerScorecard.window_days) == window_days
    )
    async with database.read() as session:
        found = [dict(row._mapping) for row in await session.execute(query)]
    return {row.pop("server_url"): Scorecard(**row) for row in found}


async def probe(federation: Federation, server: ServerRow, *, order: Order | None = None) -> str | None:
    """Ask the server for `/discover`. Return why it is not well; if it is, note that in the registry and its link.

    Where something is held for the server, only a delivery can show whether it takes deliveries again: one is sent
    ahead now. A failed probe is not counted: the planned looks go on. A blacklisted server is not asked.
    """
    async with recorded(federation.database, order) as record:
        problem = await _probe(federation, server)
        if problem is None:
            await federation.database.transact(lambda connection: record.add(connection, 1))
    return problem


async def _probe(federation: Federation, server: ServerRow) -> str | None:
    if await federation.registry.is_blacklisted(server.url):
        return "it is blacklisted here, and was not asked"
    problem = (await federation.probe.look(server.known)).problem
    if problem is not None:
        return problem
    link = await federation.links.find(server.url)
    if link.state is not LinkState.UP:
        await federation.link_probes.look(link)
    elif not server.is_healthy:
        await federation.registry.mark_healthy(server.url, reason="probe")
    return None


async def set_profile(federation: Federation, url: str, profile: str | None, *, order: Order | None = None) -> None:
    """Note which implementation the server is known to run; None forgets it."""

    def note(connection: Connection) -> None:
        if order is not None:
            connection.execute(noted(order, affected=1))

    await federation.links.set_profile(url, profile, also=note)


async def discover(federation: Federation, url: str, *, order: Order | None = None) -> KnownServer:
    """Ask the server who it is, and register it.

    Raises:
        DiscoveryError, OutboundError: it did not answer, or not properly.
    """
    async with recorded(federation.database, order) as record:
        server = await federation.discovery(url)
        await federation.database.transact(lambda connection: record.add(connection, 1))
    return server


async def count_follows(database: Database, url: str) -> int:
    """Count the follows that name the server, and would be deleted with it."""
    named = or_(col(Follow.follower_server_url) == url, col(Follow.following_server_url) == url)
    async with database.read() as session:
        return int((await session.execute(select(func.count()).select_from(Follow).where(named))).scalar_one())


async def accept_key(database: Database, url: str, *, order: Order | None = None) -> bool:
    """Note that the keys that are registered for a server are its own. Return False if it is not in the registry.

    The analytics report them no longer as shared, changed or not shown. Keys that it gets later are judged anew, and so
    is what is signed with others later.
    """
    keys = select(col(Server.public_key), col(Server.encryption_public_key)).where(col(Server.url) == url)
    async with database.transaction() as session:
        found = (await session.execute(keys)).first()
        if found is None:
            return False
        known = select(col(AcceptedKey.fingerprint)).where(col(AcceptedKey.server_url) == url)
        accepted = set((await session.execute(known)).scalars())
        new = [each for each in {_fingerprint(key) for key in found} - accepted if each is not None]
        now = datetime.now(UTC)
        session.add_all(AcceptedKey(server_url=url, fingerprint=each, accepted_at=now) for each in new)
        if order is not None:
            await session.execute(noted(order, affected=len(new)))
    return True


def _fingerprint(key: str) -> str | None:
    """Return the SHA-256 of a key in hex, as the analytics have it, or None for a malformed one."""
    try:
        return hashlib.sha256(decode_base64_sized(key, 32)).hexdigest()
    except ValueError:
        return None


async def forget(database: Database, url: str, *, order: Order | None = None) -> bool:
    """Delete the server from the registry, together with the follows that name it. Return False if it was not there.

    It is discovered anew when something is to be delivered to it, or when it introduces itself.
    """
    gone = delete(Server).where(col(Server.url) == url).returning(col(Server.id))
    async with database.transaction() as session:
        was_there = (await session.execute(gone)).first() is not None
        if was_there and order is not None:
            await session.execute(noted(order, affected=1))
    return was_there


def _rows() -> Select[tuple[object, ...]]:
    return select(*(getattr(Server, column.name) for column in fields(ServerRow)))
