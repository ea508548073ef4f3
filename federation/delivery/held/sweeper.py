"""What becomes of held deliveries by itself: they are released in time, or given up when too old or forbidden.

Theory of operation. A held delivery has no job, so only a look at the database can move it. A sweep releases the
deliveries whose time has come, hands the rows of servers that are up again to the `Releaser`, fails deliveries to
blacklisted servers, and lets those expire that are older than an operator wants to send. An enqueue may commit after
the release for its server has passed, or after the delivery that it waits for has ended, and a process may die at any
point: whatever was missed, the next sweep finds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final, TypeAlias

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    bindparam,
    func,
    literal,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate
from sqlmodel import col

from db import DEFAULT_WIRE, AttemptOutcome, Database, DeliveryState, HoldReason, LinkState, ServerLink, among
from federation.base.meter import NO_METER, Meter
from federation.delivery.attempt.decision import ALONE_PAUSES, DOUBT_PAUSES, LONGEST_OWN_PAUSE
from federation.delivery.attempt.host_limits import LONGEST_BUSY
from federation.delivery.held.sweep_times import Sweeps
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.rows import OPEN_STATES, TABLE, OwedRow, made_ready, next_in_order, places_of
from federation.servers.blacklist import Blacklist
from federation.servers.link_rules import HEARD_INTERVAL, SKEW
from federation.servers.links import Links
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

BATCH: Final = 1_000
MAX_ROWS: Final = 20_000
"""How many rows of each kind one sweep changes at most."""

WAITS_FOR_SERVER: Final = (HoldReason.SERVER, HoldReason.REST)
"""Reasons to hold a delivery that the `Releaser` then sends, at its pace."""
LONGEST_PAUSES: Final = {
    HoldReason.BUSY: LONGEST_BUSY,
    HoldReason.OURS: LONGEST_OWN_PAUSE,
    HoldReason.ALONE: max(ALONE_PAUSES),
}
"""Reasons to hold a delivery until a time, and the longest that this may take."""
LONGEST_DOUBT: Final = max(DOUBT_PAUSES)
"""The same for a fault that is ours perhaps: such a delivery has counted its pauses."""
MOST_NEW: Final = 100

_Change: TypeAlias = Callable[[], Awaitable[tuple[int, Sequence[OwedRow]]]]
"""Returns how many rows changed, and those that are ready now."""


class HeldSweeper:
    """Sweeps held rows. One process at a time should; several do no harm. With a `max_age` of None nothing expires."""

    def __init__(
        self,
        database: Database,
        queues: DeliveryQueues,
        *,
        links: Links,
        blacklist: Blacklist,
        wires: tuple[str, ...] = (DEFAULT_WIRE,),
        max_age: timedelta | None,
        meter: Meter = NO_METER,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._queues = queues
        self._links = links
        self._blacklist = blacklist
        self._wires = wires
        self._sweeps = Sweeps(database)
        self._max_age = max_age
        self._meter = meter
        self._clock = clock or SystemClock()

    async def sweep(self) -> Mapping[str, object]:
        """Move on every held delivery whose time has come. Return how many there were of each kind.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue did not answer; the next sweep looks again.
        """
        await self._queues.start()
        swept = await self._sweeps.begin(self._clock.now())
        failed, releasing = await self._look_at_servers()
        return {
            "expired": 0 if swept.spares_seconds else await self.expire(as_of=swept.swept_at),
            "released": await self._release_due(),
            "suspects_released": await self._release_suspects(),
            "in_order": await self._in_batches(self._ready_in_order),
            "blacklisted": failed,
            "servers_to_release": releasing,
        }

    async def newly_held(self) -> Sequence[tuple[str, str]]:
        """Return servers and wires for which a delivery was owed just now, and nothing was held at the last look.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        now = self._clock.now()
        values = {"since": now - SKEW, "now": now, "looked_before": now - HEARD_INTERVAL, "most": MOST_NEW}
        found = await self._database.rows(_NEWLY_HELD, {**values, "wires": self._wires})
        return [(row.server_url, row.wire) for row in found]

    async def _release_due(self) -> int:
        count = await self._in_batches(self._ready_due)
        self._meter.released(count)
        return count

    async def _release_suspects(self) -> int:
        """Release the next group of deliveries that may crash workers, once none of the previous group is under way."""
        now, ours = self._clock.now(), {"wires": self._wires}

        def release(connection: Connection) -> list[OwedRow]:
            if connection.execute(_SUSPECTS_UNDER_WAY, ours).first() is not None:
                return []
            widest = connection.execute(_WIDEST_SUSPECTS, ours).scalar_one_or_none()
            if widest is None:
                return []
            chosen = connection.execute(_SUSPECTS, {**ours, "width": widest, "most": max(widest, 1)}).scalars().all()
            return made_ready(connection, chosen, now)

        rows = await self._database.transact(release)
        if rows:
            await self._queues.add_bulk([row.job() for row in rows])
            log.warning("suspects_released", count=len(rows), delivery_ids=[row.id for row in rows][:20])
        return len(rows)

    async def expire(self, *, as_of: datetime | None = None) -> int:
        """Give up what is older than `max_age` as of a moment, now by default, 20 000 deliveries at most.

        Return how many. A sweep gives the moment for which it found out whether the clock can be believed: the process
        may stand still for days, and go on.

        Raises:
            SQLAlchemyError, WorkersError: the database or the queue did not answer.
        """
        if self._max_age is None:
            return 0
        count = await self._in_batches(partial(self._expire_batch, as_of or self._clock.now()))
        self._meter.expired(count)
        if count:
            log.warning("deliveries_expired", count=count, max_age_seconds=self._max_age.total_seconds())
        return count

    async def _look_at_servers(self) -> tuple[int, int]:
        """Fail the held rows of blacklisted servers, and release those of servers that are back.

        Servers that are away are looked at soon, if something is held for them now and nothing was at their last look.

        Return how many rows failed, and how many servers are released.
        """
        failed = releasing = 0
        now, given_up = self._clock.now(), set[str]()
        values = {"now": now, "looked_before": now - HEARD_INTERVAL}
        for row in await self._database.rows(_held_servers(self._wires), values):
            if row.server_url in given_up:
                continue
            if await self._blacklist.covering(row.server_url) is not None:
                failed += await self._fail_blacklisted(row.server_url)
                given_up.add(row.server_url)
                continue
            links = self._links.of(row.wire)
            if row.is_new:
                await links.look_soon(row.server_url)
            if not row.is_back:
                continue
            link = await links.view(row.server_url)
            if link.release_at is None and link.hold(self._clock.now()) is None:
                await links.release_held(row.server_url)
                releasing += 1
        return failed, releasing

    async def _fail_blacklisted(self, server_url: str) -> int:
        async def fail() -> tuple[int, Sequence[OwedRow]]:
            now = self._clock.now()
            values = {"server": server_url, "at": now}
            return await self._database.transact(lambda connection: _give_up(connection, _BLACKLISTED, values, now))

        count = await self._in_batches(fail)
        log.warning("held_deliveries_failed", server_url=server_url, count=count, code="BLACKLISTED")
        return count

    async def _ready_due(self) -> tuple[int, Sequence[OwedRow]]:
        now = self._clock.now()

        def release(connection: Connection) -> tuple[int, Sequence[OwedRow]]:
            latest = {reason.value: now + longest + SKEW for reason, longest in LONGEST_PAUSES.items()}
            found = connection.execute(_DUE, {"now": now, **latest, "doubted": now + LONGEST_DOUBT + SKEW})
            # They are not counted as part of a returned server's release: they would use up its room.
            rows = made_ready(connection, found.scalars().all(), now, released=False)
            return len(rows), rows

        return await self._database.transact(release)

    async def _ready_in_order(self) -> tuple[int, Sequence[OwedRow]]:
        """Make deliveries ready that wait for an older one which no longer exists."""
        now = self._clock.now()

        def release(connection: Connection) -> tuple[int, Sequence[OwedRow]]:
            rows = next_in_order(connection, places_of(connection.execute(_FIRST_IN_ORDER).all()), now)
            return len(rows), rows

        return await self._database.transact(release)

    async def _expire_batch(self, now: datetime) -> tuple[int, Sequence[OwedRow]]:
        assert self._max_age is not None
        values = {"before": now - self._max_age, "at": now}
        return await self._database.transact(lambda connection: _give_up(connection, _EXPIRED, values, now))

    async def _in_batches(self, change: _Change) -> int:
        """Repeat `change` until it finds nothing more, or has changed enough; add the jobs of what it made ready."""
        total = 0
        while total < MAX_ROWS:
            count, ready = await change()
            if ready:
                await self._queues.add_bulk([row.job() for row in ready])
            total += count
            if count < BATCH:
                break
        return total


def _give_up(
    connection: Connection, statement: ReturningUpdate[Any], values: Mapping[str, object], now: datetime
) -> tuple[int, Sequence[OwedRow]]:
    rows = connection.execute(statement, values).all()
    return len(rows), next_in_order(connection, places_of([row for row in rows if row.ordering_key is not None]), now)


def _giving_up(
    state: DeliveryState, chosen: ColumnElement[bool], *, code: str | None, error: str
) -> ReturningUpdate[Any]:
    batch = select(TABLE.c.id).where(TABLE.c.state == DeliveryState.HELD, chosen).limit(BATCH)
    return (
        update(TABLE)
        .where(TABLE.c.id.in_(batch), TABLE.c.state == DeliveryState.HELD)
        .values(
            state=state,
            held_reason=None,
            held_at=None,
            next_attempt_at=None,
            settled_at=bindparam("at"),
            outcome=AttemptOutcome.PERMANENT,
            last_error=error,
            **({} if code is None else {"error_code": code}),
        )
        .returning(TABLE.c.server_url, TABLE.c.ordering_key)
    )


_BLACKLISTED = _giving_up(
    DeliveryState.FAILED,
    TABLE.c.server_url == bindparam("server"),
    code="BLACKLISTED",
    error="its server was blacklisted while the delivery was held",
)
# The code of the last failure stays on record: it says why the delivery was held.
_EXPIRED = _giving_up(
    DeliveryState.EXPIRED, TABLE.c.created_at < bindparam("before"), code=None, error="it was held until it was too old"
)


def _is_too_far_off(reason: HoldReason) -> ColumnElement[bool]:
    until = TABLE.c.next_attempt_at
    too_far = until > bindparam(reason.value)
    if reason is HoldReason.OURS:
        too_far = or_(and_(too_far, TABLE.c.alone == 0), until > bindparam("doubted"))
    return and_(TABLE.c.held_reason == reason, too_far)


_DUE = (
    select(TABLE.c.id)
    .where(
        TABLE.c.state == DeliveryState.HELD,
        TABLE.c.held_reason.in_(LONGEST_PAUSES),
        TABLE.c.suspect.is_(None),
        or_(
            TABLE.c.next_attempt_at <= bindparam("now"),
            # A time that lies further off than any such pause lasts was written by a wrong clock.
            *map(_is_too_far_off, LONGEST_PAUSES),
        ),
    )
    .limit(BATCH)
)
_SUSPECT = (
    TABLE.c.suspect.is_not(None),
    among(TABLE.c.wire, "wires"),  # one of a wire that is off would be under way for good
    TABLE.c.state == DeliveryState.HELD,
    TABLE.c.held_reason.in_((HoldReason.OURS, HoldReason.BUSY)),
)
_SUSPECTS_UNDER_WAY = (
    select(TABLE.c.id)
    .where(
        TABLE.c.suspect.is_not(None),
        among(TABLE.c.wire, "wires"),
        TABLE.c.state == DeliveryState.READY,
        TABLE.c.settled_at.is_(None),
    )
    .limit(1)
)
_WIDEST_SUSPECTS = select(func.max(TABLE.c.suspect)).where(*_SUSPECT)
_SUSPECTS = (
    select(TABLE.c.id)
    .where(*_SUSPECT, TABLE.c.suspect == bindparam("width"))
    .order_by(TABLE.c.id)
    .limit(bindparam("most"))
)
_OLDER = TABLE.alias("older")
_FIRST_IN_ORDER = (
    select(TABLE.c.server_url, TABLE.c.ordering_key)
    .where(
        TABLE.c.state == DeliveryState.HELD,
        TABLE.c.held_reason == HoldReason.ORDER,
        ~select(_OLDER.c.id)
        .where(
            _OLDER.c.ordering_key == TABLE.c.ordering_key,
            _OLDER.c.server_url == TABLE.c.server_url,
            _OLDER.c.ordering_position < TABLE.c.ordering_position,
            _OLDER.c.state.in_(OPEN_STATES),
        )
        .exists(),
    )
    .limit(BATCH)
)
# Finds each server once, by steps along the index: a million rows of one server cost one step.
_WAITING = and_(TABLE.c.state == DeliveryState.HELD, TABLE.c.held_reason.in_(WAITS_FOR_SERVER))
_STEPS = (
    select(func.min(TABLE.c.server_url).label("server_url"))
    .where(TABLE.c.state == DeliveryState.HELD)
    .cte("steps", recursive=True)
)
_NEXT = (
    select(func.min(TABLE.c.server_url))
    .where(TABLE.c.state == DeliveryState.HELD, TABLE.c.server_url > _STEPS.c.server_url)
    .scalar_subquery()
)
_ALL = _STEPS.union_all(select(_NEXT).where(_STEPS.c.server_url.is_not(None)))
# Most of them are away. Their links are left out here, as looking at each takes a query of its own.
_STAYS_HELD = or_(
    col(ServerLink.state) != LinkState.UP,
    col(ServerLink.operator_hold).is_(True),
    col(ServerLink.release_at).is_not(None),
)
_LINK = ServerLink.__table__.alias("link")  # type: ignore[attr-defined] # SQLModel adds it at run time
_FORMER = TABLE.alias("former")
_WAS_HELD_THEN = (
    select(_FORMER.c.id)
    .where(
        _FORMER.c.server_url == _LINK.c.server_url,
        _FORMER.c.wire == _LINK.c.wire,
        _FORMER.c.state == DeliveryState.HELD,
        _FORMER.c.held_reason == HoldReason.SERVER,
        # One that was sent ahead is held again only after its failure is noted, and so is the look.
        or_(_FORMER.c.held_at < _LINK.c.probed_at, _FORMER.c.canary_at <= _LINK.c.probed_at),
    )
    .exists()
)
_HAS_NEWS = and_(
    _LINK.c.state == LinkState.DOWN,
    _LINK.c.next_probe_at > bindparam("now"),
    _LINK.c.probed_at <= bindparam("looked_before"),
    ~_WAS_HELD_THEN,
)
"""Something is held for a server that is away, and nothing was at the last look."""
_NEWLY_HELD = (
    select(TABLE.c.server_url, TABLE.c.wire)
    .distinct()
    .join(_LINK, and_(_LINK.c.server_url == TABLE.c.server_url, _LINK.c.wire == TABLE.c.wire))
    .where(
        TABLE.c.state == DeliveryState.HELD,
        among(TABLE.c.wire, "wires"),
        TABLE.c.created_at > bindparam("since"),
        TABLE.c.held_reason == HoldReason.SERVER,
        _HAS_NEWS,
    )
    .limit(bindparam("most"))
)


@cache
def _held_servers(wires: tuple[str, ...]) -> Select[*tuple[Any, ...]]:
    """Select the servers for which something is held, each by each wire: is it new, and is the server back?"""
    by = union_all(*(select(literal(wire).label("wire")) for wire in wires)).cte("by")
    of_way = (TABLE.c.server_url == _ALL.c.server_url, TABLE.c.wire == by.c.wire)
    news = select(_LINK.c.server_url).where(
        _LINK.c.server_url == _ALL.c.server_url,
        _LINK.c.wire == by.c.wire,
        _HAS_NEWS,
        select(TABLE.c.id)
        .where(*of_way, TABLE.c.state == DeliveryState.HELD, TABLE.c.held_reason == HoldReason.SERVER)
        .limit(1)
        .exists(),
    )
    link = select(col(ServerLink.server_url)).where(
        col(ServerLink.server_url) == _ALL.c.server_url, col(ServerLink.wire) == by.c.wire, _STAYS_HELD
    )
    waits = select(TABLE.c.id).where(_WAITING, *of_way).limit(1)
    return (
        select(
            _ALL.c.server_url,
            by.c.wire,
            news.exists().label("is_new"),
            and_(waits.exists(), ~link.exists()).label("is_back"),
        )
        .select_from(_ALL.join(by, true()))
        .where(_ALL.c.server_url.is_not(None))
    )
