"""The links to servers: which are up, and how every attempt and every probe changes them.

Theory of operation. A link is one row of `server_links`, the way to one server by one wire, so that any process acts on
it and a restart forgets nothing; `link_rules` decides how an event changes it. Every attempt reads its server's link,
through a cache of a few seconds. Writes are rare: a success writes only if there is something to forget, failures write
once per bucket and process. Each write locks the row, applies one rule, and stores what changed, so processes that
notice the same outage at once make one change of it. The registry's `is_healthy`, which Node reads, is written after
that; if a crash comes in between, the next change sets it right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final, Protocol, TypeAlias

import structlog
from sqlalchemy import Connection, Executable, Row, Select, and_, bindparam, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import col

from db import DEFAULT_WIRE, Database, LinkState, ServerLink, among
from federation.base.cache import LoadingCache
from federation.http.threat_policy import NetworkErrorCode
from federation.servers import link_rules
from federation.servers.link_rules import OPERATOR, Link
from workers.batching import Batcher
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

CACHE_TTL: Final = timedelta(seconds=5)
MAX_LOADED: Final = 200
MAX_REMEMBERED: Final = 10_000
Rule: TypeAlias = Callable[[Link], Link]
Also: TypeAlias = Callable[[Connection], None]
"""What else the transaction of a change writes: an operator's change is noted together with it."""


class HealthNotes(Protocol):
    """Where else it is noted whether servers are well; the registry's `is_healthy`, which Node reads."""

    async def mark_healthy(self, server_url: str, *, reason: str) -> None: ...

    async def mark_unhealthy(self, server_url: str, code: str, *, reason: str | None = None) -> None: ...


def nothing_else(_connection: Connection) -> None:
    """Write nothing."""


class Links:
    """Reads and writes the links of one wire, and keeps `health` in line with them. `of` has those of other wires."""

    def __init__(
        self,
        database: Database,
        health: HealthNotes | None,
        *,
        wire: str = DEFAULT_WIRE,
        clock: Clock | None = None,
        siblings: dict[str, Links] | None = None,
    ) -> None:
        self._database = database
        self._wire = wire
        self._by_wire = {} if siblings is None else siblings
        self._by_wire[wire] = self
        self._health = health
        self._clock = clock or SystemClock()
        self._cache = LoadingCache(Batcher(self._load, MAX_LOADED).ask, ttl=CACHE_TTL)
        self._first_successes = Batcher(self._acknowledge, MAX_LOADED)
        self._noted: dict[str, int] = {}  # the bucket in which this process last noted a failure of a server

    def of(self, wire: str) -> Links:
        """Return the links of a wire, on the same database. No others keep a health of servers."""
        found = self._by_wire.get(wire)
        return found or Links(self._database, None, wire=wire, clock=self._clock, siblings=self._by_wire)

    async def view(self, server_url: str) -> Link:
        """Return the link as it was a few seconds ago at most.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        return await self._cache.get(server_url)

    async def find(self, server_url: str) -> Link:
        """Return the link as it is now."""
        self._cache.drop(server_url)
        return await self._cache.get(server_url)

    async def close(self) -> None:
        """Stop reading, by any wire, and wait until nothing is being read any more."""
        for links in list(self._by_wire.values()):
            await links._cache.close()

    async def succeeded(self, server_url: str, *, relayed: bool = False) -> None:
        """Note an acknowledged delivery: the link is up, and earlier failures are forgotten."""
        known = await self.view(server_url)
        if known.has_nothing_to_forget() and not relayed:
            return
        if known == self._blank(server_url, known.since) and not relayed:
            self._cache.put(server_url, await self._first_successes.ask(server_url))
            return
        now = self._clock.now()
        await self._change(server_url, lambda link: link_rules.after_success(link, now, relayed=relayed), "delivered")

    async def unavailable(self, server_url: str, code: str, *, moved_to: str | None = None) -> None:
        """Note an attempt that the server was unable to judge; `moved_to` is the origin that its redirect named."""
        now = self._clock.now()
        known = await self.view(server_url)
        bucket = int(now.timestamp() // link_rules.BUCKET.total_seconds())
        if self._noted.get(server_url) == bucket:
            return
        if known.state is not LinkState.UP and moved_to in (None, known.moved_to):
            return
        await self._change(
            server_url, lambda link: link_rules.after_unavailable(link, now, code, moved_to=moved_to), code
        )
        self._note(server_url, bucket)

    async def exhausted(self, server_url: str, code: str, *, first_attempted_at: datetime) -> None:
        """Note that a delivery has used up its attempts on the unavailable server."""
        now = self._clock.now()
        await self._change(
            server_url,
            lambda link: link_rules.after_exhausted(link, now, code, first_attempted_at=first_attempted_at),
            code,
        )

    async def rejected(self, server_url: str, code: str) -> None:
        """Note that the server answered, and refused a delivery for good."""
        now = self._clock.now()
        await self._change(server_url, lambda link: link_rules.after_rejection(link, now, code), code)

    async def rests(self, server_url: str, pause: timedelta | None) -> datetime:
        """Note that the server asked to be left alone, for `pause` if it said how long.

        Return until when it will be.
        """
        now = self._clock.now()
        link = await self._change(server_url, lambda link: link_rules.after_rest(link, now, pause), "rest")
        assert link.rest_until is not None
        return link.rest_until

    async def mismatched(self, server_url: str) -> None:
        """Note that the server's `/discover` shows another signing key than the registered one."""
        now = self._clock.now()
        await self._change(server_url, lambda link: link_rules.after_mismatch(link, now), "KEY_MISMATCH")

    async def looked(self, server_url: str, *, interval: timedelta, takes: timedelta) -> bool:
        """Note that a look at the server's `/discover` begins, if it is time for one; see `may_look_at_keys`.

        Return whether to look now. Who does has to tell when the look has ended.
        """
        now = self._clock.now()
        is_due = partial(link_rules.may_look_at_keys, now=now, interval=interval, takes=takes)
        if not is_due(await self.view(server_url)):
            return False
        looks = False

        def look(link: Link) -> Link:
            nonlocal looks
            looks = is_due(link)
            return replace(link, looked_at=now) if looks else link

        await self._change(server_url, look, "look")
        return looks

    async def look_ended(self, server_url: str) -> None:
        """Note that a look at the server's `/discover` has had its effect."""
        now = self._clock.now()
        await self._change(server_url, lambda link: replace(link, look_ended_at=now), "look")

    async def returned(self, server_url: str, *, reason: str) -> Link:
        """Note that the server is back, as a probe showed or an operator says. Return the link as it is now."""
        now = self._clock.now()
        return await self._change(server_url, lambda link: link_rules.raised(link, now), reason)

    async def probe_failed(self, server_url: str) -> None:
        """Note that a look, be it at `/discover` or by a canary, showed that the server is not back."""
        now = self._clock.now()
        await self._change(server_url, lambda link: link_rules.after_failed_probe(link, now), "probe")

    async def canary_refused(self, server_url: str) -> None:
        """Note that the server refused a canary for itself: whether it takes others is still to be seen."""
        now = self._clock.now()
        await self._change(server_url, lambda link: link_rules.after_refused_canary(link, now), "canary")

    async def look_soon(self, server_url: str) -> None:
        """Have the server looked at now, because something makes that worth while; at most once a minute.

        For example, it was heard of and may be back, or a delivery is held for it where none was.
        """
        now = self._clock.now()
        known = await self.view(server_url)
        if known.state is not LinkState.UP and not link_rules.was_just_looked_at(known, now):
            await self._change(server_url, lambda link: link_rules.looked_at_soon(link, now), "heard")

    async def look_now(self, server_url: str) -> None:
        """Have the server looked at now, unless its link is up; for example, because its keys have changed."""
        now = self._clock.now()
        if (await self.find(server_url)).state is not LinkState.UP:
            await self._change(server_url, lambda link: link_rules.looked_at_now(link, now), "heard")

    async def hold(self, server_url: str, *, also: Also = nothing_else) -> None:
        """Hold deliveries to the server, by any wire, until `release`, as an operator wants."""
        now = self._clock.now()
        await self._change_all(server_url, partial(replace, operator_hold=True, release_at=None, since=now), also)

    async def release(self, server_url: str, *, also: Also = nothing_else) -> None:
        """Send what is held for the server, by any wire, whatever is known of it, as an operator wants."""
        now = self._clock.now()

        def let_go(link: Link) -> Link:
            link = link_rules.raised(replace(link, operator_hold=False, rest_until=None, rests=0), now)
            return replace(link, release_at=link.release_at or now)

        await self._change_all(server_url, let_go, also)

    async def release_held(self, server_url: str) -> None:
        """Release what is held for the server from now on, if it is up and no release is under way."""
        now = self._clock.now()
        await self._change(
            server_url,
            lambda link: replace(link, release_at=now) if link.is_open and link.release_at is None else link,
            "held",
        )

    async def set_profile(self, server_url: str, profile: str | None, *, also: Also = nothing_else) -> None:
        """Set the implementation that the server is known to run; None forgets it."""
        await self._change(server_url, lambda link: replace(link, profile=profile), "profile", also)

    async def set_signature(self, server_url: str, kind: str) -> None:
        """Set the kind of signature by which the server took a delivery; written only where it is another one."""
        if (await self.view(server_url)).signature != kind:
            await self._change(server_url, lambda link: replace(link, signature=kind), "signature")

    async def may_answer_by_page(self, server_url: str) -> bool:
        """Tell whether the server answers by a page when it takes a delivery, as it did the first time, or does now."""
        if (await self.view(server_url)).first_answer_was_page:
            return True
        return bool((await self._change(server_url, link_rules.after_page, "page")).first_answer_was_page)

    async def due_for_probe(self, limit: int, wires: Sequence[str] = (DEFAULT_WIRE,)) -> Sequence[Link]:
        """Return links of these wires whose next probe is due, the one due longest first."""
        return await self._due(_PROBE_DUE, limit, wires)

    async def due_for_release(self, limit: int, wires: Sequence[str] = (DEFAULT_WIRE,)) -> Sequence[Link]:
        """Return links of these wires whose held deliveries are due for release, the one waiting longest first."""
        return await self._due(_RELEASE_DUE, limit, wires)

    async def take_probe(self, link: Link) -> bool:
        """Reserve the probe of the server for this process. Return False if another process has it."""
        now = self._clock.now()
        taken = (
            update(_TABLE)
            .where(
                _TABLE.c.server_url == link.server_url,
                _TABLE.c.wire == link.wire,
                _TABLE.c.next_probe_at == link.next_probe_at,
            )
            .values(next_probe_at=now + link_rules.FIRST_PROBES[0], probed_at=now)
        )
        is_ours = await self._database.transact(lambda connection: connection.execute(taken).rowcount) == 1
        self.of(link.wire)._cache.drop(link.server_url)
        return is_ours

    def forget(self, server_url: str) -> None:
        """Drop what is cached of the link: the next reader sees it as it is."""
        self._cache.drop(server_url)
        self._noted.pop(server_url, None)

    async def _change(self, server_url: str, rule: Rule, reason: str, also: Also = nothing_else) -> Link:
        now = self._clock.now()

        def change(connection: Connection) -> tuple[Link, Link]:
            changed = _changed(connection, server_url, self._wire, rule, now)
            also(connection)
            return changed

        try:
            before, after = await self._database.transact(change)
        except BaseException:
            self.forget(server_url)
            raise
        await self._note_change(before, after, reason)
        return after

    async def _change_all(self, server_url: str, rule: Rule, also: Also) -> None:
        """Change the server's links by all wires, in one transaction, as an operator wants."""
        now = self._clock.now()

        def change(connection: Connection) -> list[tuple[Link, Link]]:
            connection.execute(_ALL_OF, {"url": server_url})  # nobody adds one now: see `locked`
            wires = {self._wire, *connection.execute(_WIRES_OF, {"url": server_url}).scalars()}
            changed = [_changed(connection, server_url, wire, rule, now) for wire in sorted(wires)]
            also(connection)
            return changed

        try:
            changed = await self._database.transact(change)
        finally:
            for links in list(self._by_wire.values()):
                links.forget(server_url)
        for before, after in changed:
            await self.of(after.wire)._note_change(before, after, OPERATOR)

    async def _note_change(self, before: Link, after: Link, reason: str) -> None:
        self._noted.pop(after.server_url, None)
        self._cache.put(after.server_url, after)
        if (before.state, before.operator_hold) != (after.state, after.operator_hold):
            await self._tell(before, after, reason)

    async def _tell(self, before: Link, after: Link, reason: str) -> None:
        level = log.info if after.is_open or reason == OPERATOR else log.warning
        level(
            "link_changed",
            server_url=after.server_url,
            wire=after.wire,
            was=before.state.value,
            state=after.state.value,
            operator_hold=after.operator_hold,
            reason=reason,
            next_probe_at=after.next_probe_at.isoformat() if after.next_probe_at else None,
        )
        if after.state is before.state or self._health is None:
            return
        if after.state is LinkState.UP:
            await self._health.mark_healthy(after.server_url, reason=reason)
        elif before.state is LinkState.UP:
            await self._health.mark_unhealthy(after.server_url, _health_code(reason), reason=reason)

    async def _due(self, query: Select[*tuple[Any, ...]], limit: int, wires: Sequence[str]) -> Sequence[Link]:
        now = self._clock.now()
        due = await self._database.rows(
            query,
            {
                "now": now,
                "latest": now + link_rules.LONGEST_WAIT,
                "ahead": now + link_rules.SKEW,
                "latest_batch": now + link_rules.LONGEST_BATCH,
                "most": limit,
                "wires": wires,
            },
        )
        return [link_rules.believed(_link(row), now) for row in due]

    async def _acknowledge(self, urls: Sequence[str]) -> list[Link]:
        """Note the first acknowledged delivery of servers of which nothing was known, in one statement."""
        now = self._clock.now()

        def insert(connection: Connection) -> list[Link]:
            held = set(connection.execute(_HELD_AMONG, {"urls": urls}).scalars())
            told = partial(replace, acknowledged=True, last_success_at=now)
            links = [told(self._blank(url, now), operator_hold=url in held) for url in urls]
            connection.execute(_inserts(connection.dialect.name).acknowledged, [_values(link) for link in links])
            return links

        return await self._database.transact(insert)

    async def _load(self, urls: Sequence[str]) -> list[Link]:
        links = [_link(row) for row in await self._database.rows(_KNOWN, {"urls": urls})]
        found = {link.server_url: link for link in links if link.wire == self._wire}
        held = {link.server_url for link in links if link.operator_hold}
        now = self._clock.now()
        return [
            link_rules.believed(found[url], now)
            if url in found
            else replace(self._blank(url, now), operator_hold=url in held)
            for url in urls
        ]

    def _blank(self, server_url: str, since: datetime) -> Link:
        return Link(server_url=server_url, wire=self._wire, since=since)

    def _note(self, server_url: str, bucket: int) -> None:
        if len(self._noted) > MAX_REMEMBERED:
            self._noted.clear()
        self._noted[server_url] = bucket


def locked(connection: Connection, server_url: str, now: datetime, *, wire: str = DEFAULT_WIRE) -> Link:
    """Return the link as it is, with its row locked until the transaction ends; make the row if there is none.

    If an operator holds the server, it is held by this wire, too.
    """
    key = {"url": server_url, "by": wire}
    row = connection.execute(_LOCKED, key).one_or_none()
    if row is None:
        others = connection.execute(_ALL_OF, {"url": server_url}).all()
        is_held = any(other.operator_hold for other in others)
        blank = _values(Link(server_url=server_url, wire=wire, since=now, operator_hold=is_held))
        connection.execute(_inserts(connection.dialect.name).blank, blank)
        row = connection.execute(_LOCKED, key).one()
    return link_rules.believed(_link(row), now)


def store(connection: Connection, link: Link) -> None:
    """Write `link` to its locked row."""
    connection.execute(_STORED, {f"new_{name}": value for name, value in _values(link).items()})


def closed_among(connection: Connection, server_urls: Sequence[str], wire: str = DEFAULT_WIRE) -> set[str]:
    """Return those of the servers to which nothing is sent now by that wire."""
    return set(connection.execute(_CLOSED, {"urls": server_urls, "by": wire}).scalars())


def _changed(connection: Connection, server_url: str, wire: str, rule: Rule, now: datetime) -> tuple[Link, Link]:
    """Apply the rule to the link, and return it as it was and as it is."""
    before = locked(connection, server_url, now, wire=wire)
    after = rule(before)
    if after != before:
        store(connection, after)
    return before, after


def _health_code(reason: str) -> str:
    """Return a reason that the original implementation knows, as it acts on them."""
    return reason if reason in set(NetworkErrorCode) else NetworkErrorCode.UNKNOWN


def _link(row: Row[*tuple[Any, ...]]) -> Link:
    return Link(**{name: row._mapping[name] for name in _COLUMNS})


def _values(link: Link) -> dict[str, object]:
    """Return the link's fields as `asdict` does, which copies each value and takes longer than a statement."""
    return {name: getattr(link, name) for name in _COLUMNS}


_COLUMNS: Final = tuple(field.name for field in fields(Link))
_TABLE = ServerLink.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_LOCKED = (
    select(_TABLE).where(_TABLE.c.server_url == bindparam("url"), _TABLE.c.wire == bindparam("by")).with_for_update()
)
_WIRES_OF = select(_TABLE.c.wire).where(_TABLE.c.server_url == bindparam("url"))
# Locked, so that an operator who changes all links of a server knows all of them.
_ALL_OF = (
    select(_TABLE.c.wire, _TABLE.c.operator_hold)
    .where(_TABLE.c.server_url == bindparam("url"))
    .order_by(_TABLE.c.wire)
    .with_for_update()
)
_STORED = (
    update(_TABLE)
    .where(_TABLE.c.server_url == bindparam("new_server_url"), _TABLE.c.wire == bindparam("new_wire"))
    .values({name: bindparam(f"new_{name}") for name in _COLUMNS if name not in ("server_url", "wire")})
)
# A time that no rule can have written by now was written by a wrong clock: it counts as due.
_PROBE_DUE = (
    select(_TABLE)
    .where(
        _TABLE.c.next_probe_at.is_not(None),
        among(_TABLE.c.wire, "wires"),
        or_(
            _TABLE.c.next_probe_at <= bindparam("now"),
            _TABLE.c.next_probe_at > bindparam("latest"),
            _TABLE.c.probed_at > bindparam("ahead"),
        ),
    )
    .order_by(_TABLE.c.next_probe_at)
    .limit(bindparam("most"))
)
_RELEASE_DUE = (
    select(_TABLE)
    .where(
        _TABLE.c.release_at.is_not(None),
        among(_TABLE.c.wire, "wires"),
        or_(
            _TABLE.c.release_at <= bindparam("now"),
            _TABLE.c.release_at > bindparam("latest"),
            and_(
                _TABLE.c.release_at > bindparam("latest_batch"),
                func.coalesce(_TABLE.c.rest_until != _TABLE.c.release_at, True),
            ),
        ),
    )
    .order_by(_TABLE.c.release_at)
    .limit(bindparam("most"))
)


@dataclass(frozen=True, slots=True)
class _Inserts:
    blank: Executable
    acknowledged: Executable


@cache
def _inserts(dialect: str) -> _Inserts:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(_TABLE)
    forgotten = {"acknowledged": True, "evidence": 0, "rejections": 0, "fell_at": None, "probes": 0, "moved_to": None}
    acknowledged = insert.on_conflict_do_update(
        index_elements=[_TABLE.c.server_url, _TABLE.c.wire],
        set_={**forgotten, "last_success_at": insert.excluded.last_success_at},
        where=_TABLE.c.state == LinkState.UP,
    )
    return _Inserts(blank=insert.on_conflict_do_nothing(), acknowledged=acknowledged)


_KNOWN = select(*(_TABLE.c[name] for name in _COLUMNS)).where(among(_TABLE.c.server_url, "urls"))
_HELD_AMONG = select(_TABLE.c.server_url).where(
    among(_TABLE.c.server_url, "urls"), col(ServerLink.operator_hold).is_(True)
)
_CLOSED = select(_TABLE.c.server_url).where(
    among(_TABLE.c.server_url, "urls"),
    or_(
        and_(_TABLE.c.wire == bindparam("by"), _TABLE.c.state != LinkState.UP),
        col(ServerLink.operator_hold).is_(True),
    ),
)
