"""Which peers to ask for a relay: healthy ones of different domains, or else sick ones that turn out to be well.

Those that the nightly analytics ranked come first. The others are considered by what they did, never by what a stranger
can repeat: first those that accepted a delivery directly, then the rest, each group by the time of first contact. So a
server gains nothing by introducing itself again, and a new network, in which nobody has delivered yet, finds relays all
the same. The servers of one owner, however many, never fill a selection: the first of every domain comes before the
second of any.

Servers probably have one owner if they are of one domain that somebody had to register, or of one network. This uses a
simple rule, not the list of public suffixes: the last two labels of a name. Hosts below a suffix of two labels, such as
`a.co.uk` and `b.co.uk`, count as one owner, which costs a candidate; but the owner of one domain never counts as two.
An IPv4 address, also one wrapped in IPv6, stands for its /24, an IPv6 address for its /48. Ports are ignored: whoever
has a host has all of its ports.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, Row, Select, and_, case, or_, select
from sqlmodel import col

from db import DEFAULT_WIRE, Database, RelayCandidate, Server, ServerLink
from federation.base.cache import LoadingCache, SingleFlight
from federation.http.addresses import embedded_ipv4
from federation.http.client import FederationClient
from federation.http.errors import OutboundError
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.protocol.discovery import shows_key
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin, host_of
from federation.sealed.peers.registry import Registry
from workers.clock import Clock, SystemClock, monotonic

_LABELS = 2
_IPV4_PREFIX, _IPV6_PREFIX = 24, 48


def registrable_domain(origin: str) -> str:
    """Return the domain, or the network, that a canonical *origin* belongs to."""
    host = host_of(origin)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.split(".")[-_LABELS:])
    if isinstance(address, ipaddress.IPv6Address):
        address = embedded_ipv4(address) or address
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))


def first_of_each_domain(origins: Iterable[str]) -> list[str]:
    """Return the *origins* without those whose domain an earlier one has."""
    firsts: dict[str, str] = {}
    for origin in origins:
        firsts.setdefault(registrable_domain(origin), origin)
    return list(firsts.values())


def spread_over_domains(origins: Iterable[str]) -> list[str]:
    """Return the first of each domain in the order given, then the second of each, and so on."""
    before: Counter[str] = Counter()
    turns: list[tuple[int, str]] = []
    for origin in origins:
        domain = registrable_domain(origin)
        turns.append((before[domain], origin))
        before[domain] += 1
    return [origin for _, origin in sorted(turns, key=lambda turn: turn[0])]


log = structlog.get_logger(__name__)

MAX_RANKED: Final = 50
MAX_AGE: Final = timedelta(days=7)
"""An older ranking says little about today."""
TTL: Final = timedelta(minutes=1)
MAX_CONSIDERED: Final = 50
_ROWS_READ: Final = 1000
"""How many rows are read: to be alone in a selection, an owner needs a thousand servers, all known for longer."""


class RelayRanking:
    """Callable: returns the peers that a delivery could go through, the best first.

    The ranking is at most a minute old, and empty without analytics of the last week.
    """

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._ranking = LoadingCache(self._load, ttl=TTL, max_entries=1)

    async def __call__(self) -> Sequence[str]:
        return await self._ranking.get("")

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._ranking.close()

    async def _load(self, _key: str) -> Sequence[str]:
        oldest = (self._clock.now() - MAX_AGE).date()
        query = (
            select(col(RelayCandidate.server_url))
            .where(col(RelayCandidate.as_of) >= oldest)
            .order_by(col(RelayCandidate.rank))
            .limit(MAX_RANKED)
        )
        async with self._database.read() as session:
            return list((await session.execute(query)).scalars())


async def healthy_by_merit(database: Database) -> Sequence[str]:
    """Return the registered URLs of healthy servers, best first, 50 at most."""
    return await _considered(database, _HEALTHY)


async def sick_by_merit(database: Database) -> Sequence[str]:
    """Return the registered URLs of unhealthy servers that a direct probe may find well, best first, 50 at most."""
    return await _considered(database, _SICK)


async def _considered(database: Database, query: Select[*tuple[Any, ...]]) -> Sequence[str]:
    urls: dict[str, str] = {}  # by origin: rows of the original implementation may be spelled otherwise
    for row in await database.rows(query, {}):
        if origin := _origin(row):
            urls.setdefault(origin, row.url)
    return [urls[origin] for origin in spread_over_domains(urls)[:MAX_CONSIDERED]]


def _origin(row: Row[*tuple[Any, ...]]) -> str | None:
    try:
        return canonical_origin(row.url)
    except UrlError:
        return None


def _by_merit(which: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    delivered = and_(col(ServerLink.acknowledged), col(ServerLink.relayed).is_(False))
    is_link = (col(ServerLink.server_url) == col(Server.url)) & (col(ServerLink.wire) == DEFAULT_WIRE)
    return (
        select(col(Server.url))
        .outerjoin(ServerLink, is_link)
        .where(which)
        .order_by(case((delivered, 0), else_=1), col(Server.created_at), col(Server.url))
        .limit(_ROWS_READ)
    )


_HOPELESS: Final = [code for code in NetworkErrorCode if not get_threat_policy(code).direct_health_checkable]
_REASON = col(Server.unhealthy_reason)
_HEALTHY: Final = _by_merit(col(Server.is_healthy).is_(True))
_SICK: Final = _by_merit(and_(col(Server.is_healthy).is_(False), or_(_REASON.is_(None), _REASON.not_in(_HOPELESS))))


MAX_CANDIDATES: Final = 3
MAX_SWEPT: Final = 20
"""How many sick servers one sweep probes in all."""
MAX_PROBES: Final = 10
"""How many sick servers are probed at once."""
SWEEP_PROBE_TIMEOUT: Final = timedelta(seconds=2)
SWEEP_PAUSE: Final = timedelta(seconds=30)
"""The least time from the end of one sweep to the start of the next."""
ORDER_TTL: Final = timedelta(seconds=30)
"""How old the order of candidates may be. Their health and the blacklist are checked at each choice."""

Ranking = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of servers that have proven good relays, best first."""


async def unranked() -> Sequence[str]:
    """Return an empty ranking: no server has proven anything."""
    return ()


class RelayPeers:
    """Finds relays in the registry: first those of `ranking`, in its order, then the others by merit."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        client: FederationClient,
        *,
        own_url: str,
        ranking: Ranking = unranked,
    ) -> None:
        self._database = database
        self._registry = registry
        self._client = client
        self._own_url = own_url
        self._ranking = ranking
        self._by_merit = LoadingCache(lambda _: healthy_by_merit(database), ttl=ORDER_TTL, max_entries=1)
        self._sweeps: SingleFlight[list[str]] = SingleFlight()
        self._rest_until = 0.0

    async def healthy(self, target: str, *, without: Collection[str] = ()) -> list[str]:
        """Return the origins of up to three healthy servers that may relay to *target*.

        Each is of another domain, and none is blacklisted.
        """
        ranked = list(await self._ranking())[:MAX_CONSIDERED]
        found: dict[str, str] = {}  # by domain
        for url in dict.fromkeys([*ranked, *await self._by_merit.get("")]):
            origin = self._foreign_origin(url, target)
            if origin is None or origin in without or registrable_domain(origin) in found:
                continue
            standing = await self._registry.standing(url)
            if standing.server is not None and standing.server.is_healthy and not standing.blacklisted:
                found[registrable_domain(origin)] = origin
                if len(found) == MAX_CANDIDATES:
                    break
        if not found:
            self._by_merit.drop("")  # a server that is healthy next time may be missing in this order
        return list(found.values())

    async def sweep(self, target: str) -> list[str]:
        """Probe unhealthy servers. Return the origins of up to three that answered, best first, each of another domain.

        It asks at most 20 of those whose health a direct probe may tell, ten at a time, two seconds each. All callers
        share one sweep, and within 30 s after one there is no other: the sick servers must not be flooded by everything
        that waits for a relay.
        """
        healed = await self._sweeps.run("", lambda: self._sweep(target))
        return first_of_each_domain(origin for origin in healed if origin != target)[:MAX_CANDIDATES]

    async def close(self) -> None:
        """Cancel the sweep and everything that is being read, and wait for their end."""
        await self._sweeps.close()
        await self._by_merit.close()

    async def _sweep(self, target: str) -> list[str]:
        if monotonic() < self._rest_until:
            return []
        try:
            sick = await self._sick(target)
            slots = asyncio.Semaphore(MAX_PROBES)
            async with asyncio.TaskGroup() as group:
                probes = {url: group.create_task(self._heals(url, slots)) for url in sick}
        finally:
            self._rest_until = monotonic() + SWEEP_PAUSE.total_seconds()
        healed = [canonical_origin(url) for url, probe in probes.items() if probe.result()]
        if healed:
            log.info("relay_sweep", probed=len(sick), healed=len(healed))
        else:
            log.warning("relay_stranded", probed=len(sick))
        return healed

    async def _sick(self, target: str) -> list[str]:
        urls = [url for url in await sick_by_merit(self._database) if self._foreign_origin(url, target)]
        return [url for url in urls if not await self._registry.is_blacklisted(url)][:MAX_SWEPT]

    async def _heals(self, url: str, slots: asyncio.Semaphore) -> bool:
        server = (await self._registry.standing(url)).server
        if server is None:
            return False
        async with slots:
            try:
                response = await self._client.fetch(f"{canonical_origin(url)}/discover", timeout=SWEEP_PROBE_TIMEOUT)
            except OutboundError:
                return False
        if not (response.ok and shows_key(response.body, server.public_key)):
            return False
        await self._registry.mark_healthy(url, reason="sweep")
        return True

    def _foreign_origin(self, url: str, target: str) -> str | None:
        """Return the origin of the server at *url*, or None if it is this node, the target or no valid URL."""
        try:
            origin = canonical_origin(url)
        except UrlError:
            return None
        return None if origin in (self._own_url, target) else origin
