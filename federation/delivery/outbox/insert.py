"""What is inserted for a delivery that is owed, by statements alone, on the caller's connection.

Theory of operation. The caller may be a coroutine with an `AsyncSession` or synchronous code with a `Session`.
SQLAlchemy's asynchronous sessions are synchronous ones inside (`AsyncSession.run_sync`), so both run the same code
here. A `Connection` gets a session of its own for the moment of the call. Nothing here waits for anything but that
connection. What was planned in a session waits in its `Pending` for the commit, after which its jobs are added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, islice
from typing import Any, Final, TypeAlias

from sqlalchemy import event, insert, text
from sqlalchemy.orm import Session

from db import DeliveryJob, DeliveryPayload, DeliveryState, OwnDatabase, new_timed_id
from federation.base.database_clock import DatabaseClock
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.outbox.ordering import PlaceInOrder, stand, stand_apart
from federation.delivery.rows import PlannedJob, delivery_job
from federation.protocol.urls import canonical_origin
from workers.checks import check_text
from workers.clock import Clock, SystemClock
from workers.metadata import encode_meta

BATCH: Final = 1_000
"""Rows in one statement, and jobs in one round trip."""

CheckPayload: TypeAlias = Callable[[str, str], str]
"""Called with the name of a job and the text to be owed. Returns the name of the wire; raises ValueError for what could
never be delivered."""
Delivery: TypeAlias = tuple[str, str, str]
"""The delivery's id, target URL and server URL."""

Address: TypeAlias = tuple[str, str, str | None]
"""A target URL, its server URL, and the ordering key or None."""
_Placed: TypeAlias = tuple[Delivery, str | None, PlaceInOrder]
"""A delivery, its ordering key, and how it stands."""

_WRITE_LOCK: Final = text("UPDATE delivery_jobs SET attempts = attempts WHERE id IS NULL")
"""Changes nothing. On SQLite a transaction that has only read may fail to get the write lock later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Jobs of one name to add when `stored` is committed: per delivery its id, target URL and server URL.

    `payload_id` is the text they share, None where each row has its own; `owed` has the ids of all deliveries that were
    written, including those that have no job yet. `trace` is what the caller was doing, for the spans of attempts.
    """

    stored: object
    name: str
    deliveries: Sequence[Delivery]
    payload_id: str | None = None
    owed: tuple[str, ...] = ()
    trace: str | None = None

    def jobs(self) -> Iterator[PlannedJob]:
        for delivery_id, target_url, server_url in self.deliveries:
            yield delivery_job(
                self.name,
                delivery_id,
                target_url=target_url,
                server_url=server_url,
                payload_id=self.payload_id,
                trace=self.trace,
            )


class OutboxInserter:
    """Writes what is owed into the caller's transaction. `joins` says that the queue lives in that database, too."""

    def __init__(
        self,
        database: OwnDatabase,
        queues: DeliveryQueues,
        *,
        check: CheckPayload,
        joins: bool,
        clock: Clock | None = None,
        new_id: Callable[[], str] = new_timed_id,
    ) -> None:
        self._database = database
        self._queues = queues
        self._check = check
        self._joins = joins
        self._clock = clock or SystemClock()
        self._new_id = new_id

    def delivery(
        self,
        session: Session,
        name: str,
        target_url: str,
        server_url: str,
        payload: str,
        ordering_key: str | None = None,
    ) -> Planned:
        """Write the row of `Outbox.enqueue_delivery`; the caller still has to add the jobs."""
        check_text("job name", name)
        if ordering_key is not None:
            check_text("ordering key", ordering_key)
        wire = self._check(name, payload)
        server_url = canonical_origin(server_url)
        _check_target(target_url, server_url)
        delivery = (self._new_id(), target_url, server_url)
        # Checked here, so that a target URL which the job could not carry is refused before anything is written.
        _check_jobs(Planned(stored=None, name=name, deliveries=[delivery]))
        self.enter(session)
        now = self._clock.now()
        place = stand(session, [server_url], ordering_key, wire)[server_url]
        values = self._row_values((delivery, ordering_key, place), now)
        trace = _trace()
        row = DeliveryJob(payload=payload, created_at=now, job_name=name, wire=wire, trace=trace, **values)
        session.add(row)
        ready = [delivery] if row.state is DeliveryState.READY else []
        return Planned(stored=row, name=name, deliveries=ready, owed=(row.id,), trace=trace)

    def fanout(
        self,
        session: Session,
        name: str,
        path: str,
        server_urls: Iterable[str],
        payload: str,
        ordering_key: str | None = None,
    ) -> Planned | None:
        """Write the rows of `Outbox.enqueue_fanout`; the caller still has to add the jobs.

        Return None if there are no servers.
        """
        check_text("job name", name)
        wire = self._check(name, payload)
        if ordering_key is not None:
            check_text("ordering key", ordering_key)
        if not path.startswith("/"):
            raise ValueError(f"the path must begin with a slash, not {path[:100]!r}")
        servers = tuple(dict.fromkeys(map(canonical_origin, server_urls)))
        if not servers:
            return None
        stored = DeliveryPayload(id=self._new_id(), payload=payload, refs=len(servers), created_at=self._clock.now())
        deliveries = [(self._new_id(), server + path, server) for server in servers]
        _check_target(deliveries[0][1], servers[0])
        planned = Planned(stored=stored, name=name, deliveries=deliveries, payload_id=stored.id, trace=_trace())
        _check_jobs(planned)
        self.enter(session)
        session.add(stored)
        session.flush()
        placed = _placed(session, deliveries, ordering_key, wire)
        return self._insert_rows(session, planned, wire, placed, stored.created_at)

    def addressed(
        self,
        session: Session,
        name: str,
        addresses: Sequence[Address],
        payload: str,
        *,
        activity_id: str,
        actor: str,
    ) -> Planned:
        """Write the rows of one text to each of these addresses; the caller still has to add the jobs.

        The server of each is in its canonical spelling, and no ordering key is there twice for one server.
        `activity_id` and `actor` are what the protocol calls the text, and in whose name it is signed.
        """
        wire = self._check(name, payload)
        for target_url, server_url, ordering_key in addresses:
            _check_address(target_url, server_url)
            if ordering_key is not None:
                check_text("ordering key", ordering_key)
        stored = DeliveryPayload(
            id=self._new_id(),
            payload=payload,
            refs=len(addresses),
            created_at=self._clock.now(),
            activity_id=activity_id,
            actor=actor,
        )
        deliveries = [(self._new_id(), target_url, server_url) for target_url, server_url, _ in addresses]
        planned = Planned(stored=stored, name=name, deliveries=deliveries, payload_id=stored.id, trace=_trace())
        _check_jobs(planned)
        self.enter(session)
        session.add(stored)
        session.flush()
        lines = [(server_url, ordering_key) for _, server_url, ordering_key in addresses]
        keys = (ordering_key for _, _, ordering_key in addresses)
        placed = zip(deliveries, keys, stand_apart(session, lines, wire), strict=True)
        return self._insert_rows(session, planned, wire, placed, stored.created_at)

    def enter(self, session: Session) -> None:
        """Make sure that the transaction may write from now on. On SQLite this takes the only write lock.

        Raises:
            ForeignDatabase: the session is on another database.
        """
        connection = session.connection()
        self._database.check(connection)
        if connection.dialect.name == "sqlite":
            connection.execute(_WRITE_LOCK)
        elif isinstance(self._clock, DatabaseClock):
            self._clock.measure_on(connection)

    def add_jobs(self, session: Session, planned: Iterable[Planned]) -> None:
        """Insert the jobs in the transaction, for a queue that joins it."""
        for batch in batches(planned):
            self._queues.add_bulk_on(session, batch)

    def _row_values(self, placed: _Placed, now: datetime) -> dict[str, Any]:
        delivery, ordering_key, place = placed
        held = place.held is not None
        return {
            "id": delivery[0],
            "target_url": delivery[1],
            "server_url": delivery[2],
            "state": DeliveryState.HELD if held else DeliveryState.READY,
            "held_reason": place.held,
            "held_at": now if held else None,
            "job_id": delivery[0],
            "queued_at": now if self._joins and not held else None,
            "ordering_key": ordering_key,
            "ordering_position": place.position,
        }

    def _insert_rows(
        self, session: Session, planned: Planned, wire: str, placed: Iterable[_Placed], now: datetime
    ) -> Planned:
        """Insert the rows, and return the plan of those deliveries that are ready.

        Uses statements of many rows each: objects of the session would cost ten times as much.
        """
        connection = session.connection()
        shared = {
            "payload": "",
            "payload_id": planned.payload_id,
            "attempts": 0,
            "created_at": now,
            "job_name": planned.name,
            "wire": wire,
            "trace": planned.trace,
        }
        ready: list[Delivery] = []
        waiting = iter(placed)
        while batch := list(islice(waiting, BATCH)):
            connection.execute(insert(DeliveryJob), [{**shared, **self._row_values(each, now)} for each in batch])
            ready += [delivery for delivery, _, place in batch if place.held is None]
        return replace(planned, deliveries=ready, owed=tuple(delivery_id for delivery_id, _, _ in planned.deliveries))


def _placed(session: Session, deliveries: Sequence[Delivery], ordering_key: str | None, wire: str) -> Iterator[_Placed]:
    """Yield how each delivery of a fan-out stands, for each server separately."""
    for start in range(0, len(deliveries), BATCH):
        batch = deliveries[start : start + BATCH]
        standings = stand(session, [server_url for _, _, server_url in batch], ordering_key, wire)
        yield from ((delivery, ordering_key, standings[delivery[2]]) for delivery in batch)


def batches(planned: Iterable[Planned]) -> Iterator[list[PlannedJob]]:
    """Yield all their jobs, in batches of `BATCH`."""
    jobs = chain.from_iterable(each.jobs() for each in planned)
    while batch := list(islice(jobs, BATCH)):
        yield batch


def _check_address(target_url: str, server_url: str) -> None:
    """Check as `_check_target` does, for a server in its canonical spelling: parsing would take longer than all else.

    The job refuses a URL that is too long.
    """
    is_plain = target_url.isascii() and target_url.isprintable() and " " not in target_url
    if not is_plain or not target_url.startswith(server_url + "/"):
        _check_target(target_url, server_url)
        raise ValueError(f"the target URL has no path on {server_url}")


def _check_target(target_url: str, server_url: str) -> None:
    if canonical_origin(target_url) != server_url:
        raise ValueError(f"the target URL is not on {server_url}, the server the delivery is for")
    if not target_url.isascii():
        raise ValueError("the target URL must have everything but ASCII percent-encoded")


def _check_jobs(planned: Planned) -> None:
    """Build every job once, so that a value which it cannot carry is refused before anything is written."""
    for _ in planned.jobs():
        pass


def _trace() -> str | None:
    """Return the caller's trace context; None outside of spans, and in a process that has not loaded OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from workers.middlewares.opentelemetry import current_trace

    trace = current_trace()
    return encode_meta(trace) if trace else None


_KEY: Final = "federation.outbox"


@dataclass(slots=True)
class Pending:
    """The jobs that one session's transaction will lead to."""

    planned: list[Planned] = field(default_factory=list)

    def take(self, session: Session) -> list[Planned]:
        """Remove and return the jobs whose row is part of the transaction.

        A savepoint that is rolled back takes its rows out of the session, and with them their jobs.
        """
        planned, self.planned = self.planned, []
        return [each for each in planned if each.stored in session]


def pending_of(session: Session) -> Pending | None:
    """Return what the session's transaction will add, or None if nothing follows it yet."""
    pending: Pending | None = session.info.get(_KEY)
    return pending


def set_pending(session: Session, pending: Pending) -> None:
    """Attach `pending` to the session. Whoever commits the session has to take the jobs out of it."""
    session.info[_KEY] = pending


def follow_commit(session: Session, add: Callable[[list[Planned]], None]) -> Pending:
    """Call `add` after each commit of the session, with the jobs that were planned in it."""
    pending = Pending()
    set_pending(session, pending)

    @event.listens_for(session, "after_commit")
    def committed(_session: Session) -> None:
        if session.in_nested_transaction():  # a savepoint ended, the transaction goes on
            return
        planned = pending.take(session)
        if planned:
            add(planned)

    return pending
