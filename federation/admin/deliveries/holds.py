"""What an administrator does with the way to a server: hold its deliveries, and release held ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ColumnElement, Connection, or_, select
from sqlmodel import col

from db import DeliveryJob, DeliveryState, HoldReason, LinkState, ServerLink
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import is_in
from federation.base.audit import UNRECORDED, Order, Record, noted, recorded
from federation.delivery.rows import OwedRow, made_ready

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

BATCH: Final = 1_000

_PACED: Final = (HoldReason.SERVER, HoldReason.REST)
"""Reasons after which the nodes send by themselves once the link is up, oldest first and slowly at first."""

Progress = Callable[[int], None]
"""Called with the number of further rows that have been dealt with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo:
    """How many held deliveries go out now; `in_order` ones wait for an older one of their ordering key."""

    released: int
    in_order: int


def _unwatched(_rows: int) -> None:
    pass


async def hold(federation: Federation, url: str, *, order: Order | None = None) -> int:
    """Hold deliveries to the server until `release`. Return how many are owed to it. Attempts under way go on."""
    owed = await deliveries.count(federation.database, _of(url, is_in(DeliveryState.READY), is_in(DeliveryState.HELD)))

    def note(connection: Connection) -> None:
        if order is not None:
            connection.execute(noted(order, affected=owed))

    await federation.links.hold(url, also=note)
    return owed


async def release(federation: Federation, url: str, *, order: Order | None = None) -> LetGo:
    """Bring the server's link up, whatever is known of it, and release what is held for it, at the nodes' pace.

    Raises:
        SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
    """
    async with recorded(federation.database, order) as record:
        paced = await _count(federation, _of(url, _held_for(*_PACED)))

        def note(connection: Connection) -> None:
            record.add(connection, paced)

        await federation.links.release(url, also=note)
        # Deliveries that may crash workers go out by themselves, in ever smaller groups.
        soon = _held_for(HoldReason.BUSY, HoldReason.OURS, HoldReason.ALONE) & col(DeliveryJob.suspect).is_(None)
        others = await _ready(federation, _of(url, soon), _unwatched, record)
    return LetGo(released=paced + others, in_order=await _count(federation, _of(url, _held_for(HoldReason.ORDER))))


async def release_all(federation: Federation, *, progress: Progress = _unwatched, order: Order | None = None) -> LetGo:
    """Bring every link up, end every operator's hold, and add the jobs of all held deliveries to the queue at once.

    Raises:
        SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
    """
    async with recorded(federation.database, order) as record:
        for url in await _closed(federation):
            await federation.links.release(url)
        everything = _held_for(*(reason for reason in HoldReason if reason is not HoldReason.ORDER))
        released = await _ready(federation, [everything], progress, record)
    return LetGo(released=released, in_order=await _count(federation, [_held_for(HoldReason.ORDER)]))


async def expire(federation: Federation, *, order: Order | None = None) -> int:
    """Give up what is held for longer than it may be, and let things expire and be purged again. Return how many.

    Raises:
        SQLAlchemyError, WorkersError: the database or the queue failed; repeating it does the rest.
    """
    async with recorded(federation.database, order) as record:
        await federation.sweeps.believe(federation.clock.now())
        await federation.delivery_queues.start()
        total = 0
        while count := await federation.held_sweeper.expire():
            total += count
            await federation.database.transact(partial(record.add, number=count))
    return total


async def _closed(federation: Federation) -> Sequence[str]:
    """Return the servers whose link is down, or held, or that asked for a pause which is not over."""
    is_closed = or_(
        col(ServerLink.state) != LinkState.UP,
        col(ServerLink.operator_hold).is_(True),
        col(ServerLink.rest_until) > federation.clock.now(),
    )
    return [row[0] for row in await federation.database.rows(select(col(ServerLink.server_url)).where(is_closed))]


async def _ready(
    federation: Federation,
    chosen: Sequence[ColumnElement[bool]],
    progress: Progress,
    record: Record = UNRECORDED,
) -> int:
    """Make the chosen held deliveries ready, the oldest first, and add their jobs to the queue. Return how many."""
    # Without this, deliveries that a worker holds again meanwhile would be released again and again.
    held_before = col(DeliveryJob.held_at) <= federation.clock.now()
    oldest = select(col(DeliveryJob.id)).where(*chosen, held_before).order_by(col(DeliveryJob.created_at)).limit(BATCH)

    def change(connection: Connection) -> list[OwedRow]:
        rows = made_ready(connection, connection.execute(oldest).scalars().all(), federation.clock.now())
        record.add(connection, len(rows))
        return rows

    await federation.delivery_queues.start()
    total = 0
    while rows := await federation.database.transact(change):
        await federation.delivery_queues.add_bulk([row.job() for row in rows])
        total += len(rows)
        progress(len(rows))
    return total


async def _count(federation: Federation, chosen: Sequence[ColumnElement[bool]]) -> int:
    return await deliveries.count(federation.database, chosen)


def _held_for(*reasons: HoldReason) -> ColumnElement[bool]:
    return is_in(DeliveryState.HELD) & col(DeliveryJob.held_reason).in_(reasons)


def _of(url: str, *either: ColumnElement[bool]) -> list[ColumnElement[Any]]:
    return [col(DeliveryJob.server_url) == url, or_(*either)]
