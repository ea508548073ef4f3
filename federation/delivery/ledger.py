"""What becomes of each delivery, written to the database in groups.

Theory of operation. Attempts run side by side, and each writes twice: before it sends, and when it knows the outcome.
One transaction per write would cost more than the delivery, so concurrent writes share one: each caller hands in its
entry and waits; a single loop takes all that has gathered and commits it, under load after a few milliseconds in which
more may come. A caller returns only after its entry is committed, so everything an attempt reported is on disk before
its job is settled. Every entry may be repeated: a crash between the commit and the settling of the job runs the attempt
again.

The row decides who may act for it. `begin` locks it, and lets a job send only if the row is ready and names this job;
a row of a Node producer, which names none, takes the first that comes. What ends an attempt writes to a row only if it
still names the attempt's job, but for a delivery that arrived: that is over in any case. An attempt's own row in
`delivery_attempts` is part of the transaction that writes its delivery's fate. `sending` marks an attempt under way:
who begins the next one finds the mark of one that lost its worker, and puts it on record as stalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias, cast

import structlog
from sqlalchemy import Connection, Row, Select, bindparam, delete, func, select, tuple_, update
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.sql.dml import ReturningUpdate

from db import AttemptOutcome, Database, DeliveryState, Follow, HoldReason
from federation.base.logs import crash
from federation.delivery.attempts import AttemptRecord, stalled_attempt, write_attempts
from federation.delivery.codes import STALLED
from federation.delivery.payloads import release
from federation.delivery.rows import TABLE, OwedRow, PlannedJob, forget_older, next_in_order, places_of
from federation.servers.link_rules import Hold
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

MAX_GROUP: Final = 500
MAX_ERROR_CHARACTERS: Final = 1_000
LINGER_SECONDS: Final = 0.015
"""How long a group is waited for under load: a commit costs as much as several entries, and what ends together is
settled together, whose slots are filled together."""
CROWD: Final = 4
"""More entries in a group than so many are load."""
FIRST_SUSPECTS: Final = 256
"""Of what was under way in too many crashes, so many run together first."""
FATAL_ALONE: Final = 3
"""So often a delivery may crash a worker that does nothing else."""

FollowKey: TypeAlias = tuple[str, str, str]

_REFUSED: Final = (DataError, IntegrityError, UnicodeError)
"""Blames an entry, not the database. The last is what a text without a UTF-8 form raises, bare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowAnswer:
    """What the other server says of our follow: accepted; or only that it knows of it."""

    follower_id: str
    following_id: str
    server_url: str
    accepted: bool

    @property
    def key(self) -> FollowKey:
        """What tells the follow from all others."""
        return self.follower_id, self.following_id, self.server_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The attempts of one job at one delivery: what an attempt's later entries name to be heard.

    `first_attempted_at` is when the first of them began, `attempts` how many were made at the delivery, in any series,
    this one included; `holds` how often in a row a fault of ours held it.
    `canary_at` is when it last went ahead of others to an absent server; `is_canary`: it does so now.
    """

    delivery_id: str
    job_id: str
    number: int
    first_attempted_at: datetime
    attempts: int
    holds: int
    canary_at: datetime | None
    is_canary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The attempt may send `text`; it is None where the row has no text of its own."""

    series: Series
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBegun:
    """The attempt may not send: there is no row, or it is held now, or another job acts for it, or none may."""

    exists: bool
    held: HoldReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An attempt is about to send. With `hold` the row is held instead, unless it is the canary sent to find out."""

    delivery_id: str
    job_id: str
    job_name: str
    server_url: str
    attempt: int
    at: datetime
    hold: Hold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The delivery is over: row and text are removed, in the transaction that applies the answer to a follow."""

    delivery_id: str
    follow: FollowAnswer | None = None
    attempt: AttemptRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt failed: the row stays `ready` for the next of its job, or is `held`, or `failed`.

    `attempt` is None where none was made; `until` is when a held one is released, where that is known.
    """

    series: Series
    state: DeliveryState
    at: datetime
    code: str
    error: str
    reason: HoldReason | None = None
    until: datetime | None = None
    outcome: str | None = None
    attempt: AttemptRecord | None = None
    suspect: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A job ended without its attempt having a say. The row is held until `until`.

    With the code STALLED its worker disappeared too often, and it is a suspect from then on: it may be what crashes
    workers, so suspects run apart from all other deliveries, in groups that are halved after each crash, until a crash
    has one author.
    """

    delivery_id: str
    job_id: str
    at: datetime
    until: datetime
    error: str
    code: str = STALLED


Entry: TypeAlias = Begin | Gone | Ended | Abandoned


class AddJobs(Protocol):
    """Adds jobs of deliveries to the queue, after the commit of what made them due."""

    async def __call__(self, jobs: Sequence[PlannedJob], /) -> object: ...


class Ledger:
    """Group commit for delivery rows. `write` may be called by any number of tasks of one event loop."""

    def __init__(self, database: Database, *, add_jobs: AddJobs | None = None, clock: Clock | None = None) -> None:
        self._database = database
        self._add_jobs = add_jobs
        self._clock = clock or SystemClock()
        self._waiting: list[tuple[Entry, asyncio.Future[object]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._crowded = False  # whether the last group was large

    async def begin(self, entry: Begin) -> Begun | NotBegun:
        """The row counts one more attempt, under way now, if the job may send at all."""
        return cast(Begun | NotBegun, await self._write(entry))

    async def gone(
        self, delivery_id: str, *, follow: FollowAnswer | None = None, attempt: AttemptRecord | None = None
    ) -> bool:
        """The row is removed and the follow updated, both or neither. False: no such follow is known here."""
        return cast(bool, await self._write(Gone(delivery_id=delivery_id, follow=follow, attempt=attempt)))

    async def ended(self, entry: Ended) -> bool:
        """The row says what became of the attempt; False if it does not name the attempt's job any more."""
        error = entry.error.replace("\x00", "")[:MAX_ERROR_CHARACTERS]
        return cast(bool, await self._write(replace(entry, error=error)))

    async def abandoned(self, entry: Abandoned) -> bool:
        """The row is held, if it is ready and names that job."""
        return cast(bool, await self._write(entry))

    async def close(self) -> None:
        """What was handed in is committed, or has failed."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write(self, entry: Entry) -> object:
        """What came of the entry, once that is committed.

        Raises:
            SQLAlchemyError: it was not; the whole attempt is worth repeating.
        """
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_groups(), name="delivery-ledger")
        return await future

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                # A lone attempt is joined only by those of this same turn of the loop.
                await asyncio.sleep(LINGER_SECONDS if self._crowded else 0)
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                self._crowded = len(group) > CROWD
                await self._write_group(group)
        finally:
            self._writer = None

    async def _write_group(self, group: Sequence[tuple[Entry, asyncio.Future[object]]]) -> None:
        now = self._clock.now()
        try:
            entries = [entry for entry, _ in group]
            written = await self._database.transact(lambda connection: _Group(connection, now).write(entries))
        except _REFUSED as error:
            if len(group) == 1:
                _fail(group, error)
                return
            for member in group:  # one entry the database refuses must not fail its neighbours
                await self._write_group([member])
        except Exception as error:
            _fail(group, error)
        else:
            for (_, future), result in zip(group, written.results, strict=True):
                if not future.done():
                    future.set_result(result)
            await self._add(written.ready)

    async def _add(self, rows: Sequence[OwedRow]) -> None:
        if not rows or self._add_jobs is None:
            return
        try:
            await self._add_jobs([row.job() for row in rows])
        except Exception as error:  # they are owed and ready: the sweeper finds them without a job
            log.error("ordered_jobs_not_added", delivery_ids=[row.id for row in rows][:20], **crash(error))


@dataclass(frozen=True, slots=True)
class _Written:
    results: list[object]
    ready: list[OwedRow]


class _Group:
    """One transaction's entries: each kind is one statement or two, however many there are."""

    def __init__(self, connection: Connection, now: datetime) -> None:
        self._connection = connection
        self._now = now
        self._attempts: list[AttemptRecord] = []
        self._freed: list[Row[*tuple[Any, ...]]] = []  # rows that are over and have an ordering key

    def write(self, entries: Sequence[Entry]) -> _Written:
        """What came of each entry, and the deliveries whose turn has come."""
        results: dict[int, object] = {}
        kinds: tuple[tuple[type[Entry], Callable[[Any], Mapping[int, object]]], ...] = (
            (Begin, self._begin),
            (Gone, self._remove),
            (Ended, self._end),
            (Abandoned, self._abandon),
        )
        for kind, write in kinds:
            chosen = {index: entry for index, entry in enumerate(entries) if isinstance(entry, kind)}
            if chosen:
                results |= write(chosen)
        write_attempts(self._connection, self._attempts)
        ready = next_in_order(self._connection, places_of(self._freed), self._now) if self._freed else []
        return _Written(results=[results[index] for index in range(len(entries))], ready=ready)

    def _begin(self, entries: Mapping[int, Begin]) -> dict[int, object]:
        rows = self._lock((entry.delivery_id for entry in entries.values()), _LOCKED_TO_SEND)
        results: dict[int, object] = {}
        begun: list[Begin] = []
        held: list[Begin] = []
        adopted: list[Begin] = []
        suspects: dict[int, Ended] = {}
        for index, entry in entries.items():
            row = rows.get(entry.delivery_id)
            if row is None or not _acts_for(row, entry.job_id):
                results[index] = NotBegun(exists=row is not None)
                continue
            del rows[entry.delivery_id]  # no other job of this group may act for it
            series = _series(row, entry.job_id, entry.at)
            if row.job_id is None or row.job_name is None:
                adopted.append(entry)
            if row.sending is not None and row.sending != entry.attempt:
                self._attempts.append(stalled_attempt(row))
                if row.suspect is not None:
                    suspects[index] = _suspected(row, entry)
                    results[index] = NotBegun(exists=True, held=HoldReason.OURS)
                    continue
            if entry.hold is not None and not series.is_canary:
                held.append(entry)
                results[index] = NotBegun(exists=True, held=entry.hold.reason)
                continue
            begun.append(entry)
            results[index] = Begun(series=series, text=row.payload if row.payload_id is None else None)
        self._adopt(adopted)
        self._hold(held)
        self._count(begun)
        if suspects:
            self._end(suspects)
        return results

    def _adopt(self, entries: Sequence[Begin]) -> None:
        """A Node producer's row is ours from its first job on: it may be held, released, and have other jobs."""
        if entries:
            names = [(e.delivery_id, e.job_id, e.job_name, e.server_url) for e in entries]
            keys = ("row", "job", "name", "server")
            self._connection.execute(_ADOPTED, [dict(zip(keys, each, strict=True)) for each in names])

    def _hold(self, entries: Sequence[Begin]) -> None:
        """Those with one hold by one statement: a backlog to a server that is down is held as fast as it is claimed."""
        for hold in {entry.hold for entry in entries if entry.hold is not None}:
            chosen = [entry for entry in entries if entry.hold == hold]
            rows, since = [entry.delivery_id for entry in chosen], max(entry.at for entry in chosen)
            self._connection.execute(_HELD, {"rows": rows, "why": hold.reason, "since": since, "until": hold.until})

    def _count(self, entries: Sequence[Begin]) -> None:
        for number in {entry.attempt for entry in entries}:
            chosen = [entry for entry in entries if entry.attempt == number]
            values = {"rows": [e.delivery_id for e in chosen], "at": max(e.at for e in chosen), "number": number}
            self._connection.execute(_BEGUN, values)

    def _remove(self, entries: Mapping[int, Gone]) -> dict[int, object]:
        ids = sorted({entry.delivery_id for entry in entries.values()})
        rows = self._connection.execute(_GONE, {"rows": ids}).all()
        release(self._connection, (row.payload_id for row in rows))
        arrived = [row for row in rows if row.ordering_key is not None]
        if arrived:
            release(self._connection, forget_older(self._connection, arrived))
        self._freed += arrived
        self._attempts += [entry.attempt for entry in entries.values() if entry.attempt is not None]
        answers = [entry.follow for entry in entries.values() if entry.follow is not None]
        known = _answer(self._connection, _ACCEPTED, [answer for answer in answers if answer.accepted])
        known |= _answer(self._connection, _ACKNOWLEDGED, [answer for answer in answers if not answer.accepted])
        return {index: entry.follow is None or entry.follow.key in known for index, entry in entries.items()}

    def _end(self, entries: Mapping[int, Ended]) -> dict[int, object]:
        rows = self._lock(entry.series.delivery_id for entry in entries.values())
        results: dict[int, object] = {}
        values: list[dict[str, object]] = []
        for index, entry in entries.items():
            row = rows.get(entry.series.delivery_id)
            if entry.attempt is not None:
                self._attempts.append(entry.attempt)
            results[index] = row is not None and _acts_for(row, entry.series.job_id)
            if row is None or not results[index]:
                continue
            values.append(_ending(row, entry))
            if entry.state is DeliveryState.FAILED and row.ordering_key is not None:
                self._freed.append(row)
        if values:
            self._connection.execute(_ENDED, values)
        return results

    def _abandon(self, entries: Mapping[int, Abandoned]) -> dict[int, object]:
        rows = self._lock(entry.delivery_id for entry in entries.values())
        endings: dict[int, Ended] = {}
        for index, entry in entries.items():
            row = rows.get(entry.delivery_id)
            if row is None or not _acts_for(row, entry.job_id):
                continue
            endings[index] = Ended(
                series=_series(row, entry.job_id, entry.at),
                state=DeliveryState.HELD,
                reason=HoldReason.OURS,
                until=entry.until,
                at=entry.at,
                code=entry.code,
                error=entry.error,
                attempt=stalled_attempt(row) if row.sending is not None else None,
                suspect=_suspicion(row) if entry.code == STALLED else row.suspect,
            )
        return dict.fromkeys(entries, False) | (self._end(endings) if endings else {})

    def _lock(
        self, ids: Iterable[str], query: Select[*tuple[Any, ...]] | None = None
    ) -> dict[str, Row[*tuple[Any, ...]]]:
        rows = self._connection.execute(_LOCKED if query is None else query, {"rows": sorted(set(ids))})
        return {row.id: row for row in rows}


def _suspected(row: Row[*tuple[Any, ...]], entry: Begin) -> Ended:
    """A suspect was under way in another crash."""
    suspect = _narrowed(row.suspect)
    is_found = suspect <= 1 - FATAL_ALONE
    return Ended(
        series=_series(row, entry.job_id, entry.at),
        state=DeliveryState.FAILED if is_found else DeliveryState.HELD,
        reason=None if is_found else HoldReason.OURS,
        until=None if is_found else entry.at,
        at=entry.at,
        code=STALLED,
        error=f"its worker disappeared with it {FATAL_ALONE} times while nothing else was under way"
        if is_found
        else "its worker disappeared with it, and others, again",
        outcome=AttemptOutcome.PERMANENT if is_found else None,
        suspect=suspect,
    )


def _suspicion(row: Row[*tuple[Any, ...]]) -> int:
    return FIRST_SUSPECTS if row.suspect is None else _narrowed(row.suspect)


def _narrowed(suspect: int) -> int:
    """Half as many next time; below one it ran alone."""
    return suspect // 2 if suspect > 1 else suspect - 1


def _acts_for(row: Row[*tuple[Any, ...]], job_id: str) -> bool:
    """Whether the job is the one that may act for the row: its own, or the first that a Node producer's row meets."""
    return row.state is DeliveryState.READY and row.settled_at is None and row.job_id in (None, job_id)


def _series(row: Row[*tuple[Any, ...]], job_id: str, at: datetime) -> Series:
    return Series(
        delivery_id=row.id,
        job_id=job_id,
        number=row.series,
        first_attempted_at=row.first_attempted_at or at,
        attempts=row.attempts + 1,
        holds=row.holds,
        canary_at=row.canary_at,
        is_canary=row.canary_at is not None and row.canary_at == row.released_at,
    )


def _ending(row: Row[*tuple[Any, ...]], entry: Ended) -> dict[str, object]:
    held = entry.state is DeliveryState.HELD
    is_over = entry.state is DeliveryState.FAILED
    return {
        "row": row.id,
        "next_state": entry.state,
        "why": entry.reason,
        "since": entry.at if held else None,
        "until": entry.until,
        "over": entry.at if is_over else None,
        "how": entry.outcome if is_over else None,
        "error": entry.error,
        "code": entry.code,
        "times": _holds(row, entry),
        "suspected": entry.suspect,
    }


def _holds(row: Row[*tuple[Any, ...]], entry: Ended) -> int:
    """How often in a row a fault of ours has held it; that its job tries again in between says nothing yet."""
    if entry.reason is HoldReason.OURS:
        return int(row.holds) + 1
    return int(row.holds) if entry.state is DeliveryState.READY else 0


def _answer(connection: Connection, statement: ReturningUpdate[Any], answers: Sequence[FollowAnswer]) -> set[FollowKey]:
    if not answers:
        return set()
    follows = connection.execute(statement, {"follows": [answer.key for answer in answers]})
    return {(row.follower_id, row.following_id, row.follower_server_url) for row in follows}


_ROWS = TABLE.c.id.in_(bindparam("rows", expanding=True))
_LOOKED_AT = (
    *("id", "state", "settled_at", "job_id", "job_name", "server_url", "payload_id", "ordering_key", "series"),
    *("attempts", "sending", "first_attempted_at", "last_attempted_at", "canary_at", "released_at", "holds", "suspect"),
)
_LOCKED = select(*(TABLE.c[name] for name in _LOOKED_AT)).where(_ROWS).order_by(TABLE.c.id).with_for_update()
_LOCKED_TO_SEND = _LOCKED.add_columns(TABLE.c.payload)
_BEGUN = (
    update(TABLE)
    .where(_ROWS)
    .values(
        attempts=TABLE.c.attempts + 1,
        last_attempted_at=bindparam("at"),
        first_attempted_at=func.coalesce(TABLE.c.first_attempted_at, bindparam("at")),
        sending=bindparam("number"),
        released_at=None,
    )
)
_ADOPTED = (
    update(TABLE)
    .where(TABLE.c.id == bindparam("row"))
    .values(job_id=bindparam("job"), job_name=bindparam("name"), server_url=bindparam("server"))
)
_GONE = (
    delete(TABLE)
    .where(_ROWS)
    .returning(TABLE.c.payload_id, TABLE.c.server_url, TABLE.c.ordering_key, TABLE.c.ordering_position)
)
_HELD = (
    update(TABLE)
    .where(_ROWS)
    .values(
        state=DeliveryState.HELD,
        held_reason=bindparam("why"),
        held_at=bindparam("since"),
        next_attempt_at=bindparam("until"),
        released_at=None,
        sending=None,
    )
)
_ENDED = (
    update(TABLE)
    .where(TABLE.c.id == bindparam("row"))
    .values(
        state=bindparam("next_state"),
        held_reason=bindparam("why"),
        held_at=bindparam("since"),
        next_attempt_at=bindparam("until"),
        settled_at=bindparam("over"),
        outcome=bindparam("how"),
        last_error=bindparam("error"),
        error_code=bindparam("code"),
        holds=bindparam("times"),
        suspect=bindparam("suspected"),
        released_at=None,
        sending=None,
    )
)

_FOLLOWS = Follow.__table__  # type: ignore[attr-defined] # as above
_KEY = (_FOLLOWS.c.follower_id, _FOLLOWS.c.following_id, _FOLLOWS.c.follower_server_url)
_FOLLOW = update(_FOLLOWS).where(tuple_(*_KEY).in_(bindparam("follows", expanding=True))).returning(*_KEY)
# A rejection and "received, not decided" look the same on this wire: only `acknowledged` is set.
_ACCEPTED = _FOLLOW.values(accepted=True)
_ACKNOWLEDGED = _FOLLOW.values(acknowledged=True)


def _fail(group: Sequence[tuple[Entry, asyncio.Future[object]]], error: Exception) -> None:
    for _, future in group:
        if not future.done():
            future.set_exception(error)
