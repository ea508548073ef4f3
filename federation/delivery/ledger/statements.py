"""The entries of one group in the ledger, as one transaction writes them: a statement or two for each kind.

The row decides which job may act for it. Beginning an attempt locks the row, and the attempt may send only if the row
is ready and names its job. The row of a Node producer names no job and accepts the first one that comes. Ending an
attempt changes a row only if it still names the attempt's job; the exception is a delivery that arrived, which is over
in any case. The attempt's own row in `delivery_attempts` is part of the transaction that writes its delivery's fate.
`sending` holds the number of the attempt under way: if an attempt lost its worker, the next one to begin finds that
number still there, and records the lost attempt as stalled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, delete, func, literal_column, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from db import AttemptNote, AttemptOutcome, DeliveryState, HoldReason, among
from db.errors import is_outage
from federation.delivery.error_codes import STALLED
from federation.delivery.errors import EffectFailed
from federation.delivery.ledger.attempt_log import ATTEMPT_UNDER_WAY, AttemptRecord, stalled_attempt, write_attempts
from federation.delivery.ledger.entries import (
    Abandoned,
    Begin,
    Begun,
    Ended,
    Entry,
    Gone,
    NotBegun,
    Series,
)
from federation.delivery.rows import OPEN_STATES, TABLE, OwedRow, forget_older, next_in_order, places_of, release
from federation.delivery.wire import Effect
from federation.servers.link_rules import Hold

FIRST_SUSPECTS: Final = 256
"""How many suspects, deliveries that were under way in too many crashes, run together at first."""
UNKNOWN_WIRE_PAUSE: Final = timedelta(hours=1)
"""How long a delivery is held that a process took for another wire's, as it does not know its own."""
FATAL_ALONE: Final = 3
"""How often a delivery may crash a worker that does nothing else."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of each entry of a group, and the deliveries whose turn has come."""

    results: list[object]
    ready: list[OwedRow]


class Group:
    """The entries of one transaction: each kind takes one statement or two, however many entries there are."""

    def __init__(self, connection: Connection, now: datetime) -> None:
        self._connection = connection
        self._now = now
        self._attempts: list[AttemptRecord] = []
        self._freed: list[Row[*tuple[Any, ...]]] = []  # rows that are over and have an ordering key

    def write(self, entries: Sequence[Entry]) -> Written:
        """Write all entries. Return the result of each, and the deliveries whose turn has come."""
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
        return Written(results=[results[index] for index in range(len(entries))], ready=ready)

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
            if row.job_id is not None and row.wire != entry.wire:  # this process does not know how to send it
                later = Hold(reason=HoldReason.OURS, until=entry.at + UNKNOWN_WIRE_PAUSE)
                held.append(replace(entry, hold=later))
                results[index] = NotBegun(exists=True, held=HoldReason.OURS)
                continue
            series = _series(row, entry.job_id, entry.at)
            if row.job_id is None or row.job_name is None:
                adopted.append(entry)
            if row.sending is not None and row.sending != entry.attempt:
                ended = _suspected(row, entry) if row.suspect is not None or _was_canary(row, entry) else None
                is_last = ended is not None and ended.state is DeliveryState.FAILED
                self._attempts.append(stalled_attempt(row, note=AttemptNote.GIVEN_UP if is_last else None))
                if ended is not None:
                    suspects[index] = ended
                    results[index] = NotBegun(exists=True, held=ended.reason)
                    continue
            if entry.hold is not None and not (series.is_canary and entry.hold.may_be_tried):
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
        """Make a Node producer's row ours from its first job on: it may be held and released, and have other jobs."""
        if entries:
            names = [(e.delivery_id, e.job_id, e.job_name, e.server_url, e.wire) for e in entries]
            keys = ("row", "job", "name", "server", "by")
            self._connection.execute(_ADOPTED, [dict(zip(keys, each, strict=True)) for each in names])

    def _hold(self, entries: Sequence[Begin]) -> None:
        """Hold the rows, with one statement per kind of hold.

        A backlog to a server that is down is thus held as fast as it is claimed.
        """
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
        arrived = [row for row in rows if row.has_others]  # mostly none is: each activity has a line of its own
        if arrived:
            release(self._connection, forget_older(self._connection, arrived))
        self._freed += arrived
        ended = [entry.attempt for entry in entries.values() if entry.attempt is not None]
        numbers = {attempt.delivery_id: attempt.attempt for attempt in ended}
        # Another attempt was under way when it lost its worker; or it still is, and will say so at its end.
        lost = [row for row in rows if row.sending is not None and row.sending != numbers.get(row.id)]
        self._attempts += [*(stalled_attempt(row) for row in lost), *ended]
        return dict.fromkeys(entries, True) | apply_effects(self._connection, entries)

    def _end(self, entries: Mapping[int, Ended]) -> dict[int, object]:
        rows = self._lock(entry.series.delivery_id for entry in entries.values())
        results: dict[int, object] = {}
        values: list[dict[str, object]] = []
        for index, entry in entries.items():
            row = rows.get(entry.series.delivery_id)
            results[index] = row is not None and _acts_for(row, entry.series.job_id) and not _is_late(row, entry)
            if entry.attempt is not None:  # another one may act for the row: then this attempt was not the last
                self._attempts.append(entry.attempt if results[index] else replace(entry.attempt, note=None))
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


def fail_owed(
    connection: Connection, target_url: str, *, server_url: str, code: str, error: str, now: datetime, but: str | None
) -> int:
    """Give up all deliveries that are owed to a target, but for that of the id `but`. Return how many there were.

    Those that wait for them in their order are found by the next sweep. An attempt that is under way, or has lost its
    worker, is recorded as stalled, and as it ended if it ends: if it arrives after all, the row goes.
    """
    values = {"server": server_url, "target": target_url, "but": but or "", "at": now, "why": code, "told": error}
    failed = connection.execute(_GIVEN_UP, values).all()
    write_attempts(connection, [stalled_attempt(row) for row in failed if row.sending is not None])
    return len(failed)


def apply_effects(connection: Connection, entries: Mapping[int, Gone]) -> dict[int, object]:
    """Write what the acknowledgments change, all of one kind together.

    Raises:
        EffectFailed: the wire broke off.
    """
    kinds: dict[type[Effect], dict[int, Effect]] = {}
    for index, entry in entries.items():
        if entry.effect is not None:
            kinds.setdefault(type(entry.effect), {})[index] = entry.effect
    found: dict[int, object] = {}
    for kind, effects in kinds.items():
        try:
            found |= dict(zip(effects, kind.apply(connection, list(effects.values())), strict=True))
        except Exception as error:
            if isinstance(error, SQLAlchemyError) and (is_outage(error) or isinstance(error, IntegrityError)):
                raise
            raise EffectFailed(kind.__name__, error) from error
    return found


def _suspected(row: Row[*tuple[Any, ...]], entry: Begin) -> Ended:
    """Build the end of an attempt whose delivery was under way in a crash: a suspect, from then on if not before."""
    suspect = _suspicion(row)
    is_found = suspect <= 1 - FATAL_ALONE
    waits = entry.hold is not None and entry.hold.reason is HoldReason.SERVER
    return Ended(
        series=_series(row, entry.job_id, entry.at),
        state=DeliveryState.FAILED if is_found else DeliveryState.HELD,
        reason=None if is_found else HoldReason.SERVER if waits else HoldReason.OURS,
        until=None if is_found or waits else entry.at,
        at=entry.at,
        code=STALLED,
        error=f"its worker disappeared with it {FATAL_ALONE} times while nothing else was under way"
        if is_found
        else "its worker disappeared with it, and perhaps with others",
        outcome=AttemptOutcome.PERMANENT if is_found else None,
        suspect=suspect,
    )


def _was_canary(row: Row[*tuple[Any, ...]], entry: Begin) -> bool:
    """Tell whether it lost its worker as a canary of a server that is away still.

    Its job ends now, and with it the count of how often that happened: so the row counts.
    """
    is_away = entry.hold is not None and entry.hold.reason is HoldReason.SERVER
    return is_away and row.canary_at is not None and row.canary_at <= row.last_attempted_at


def _suspicion(row: Row[*tuple[Any, ...]]) -> int:
    return FIRST_SUSPECTS if row.suspect is None else _narrowed(row.suspect)


def _narrowed(suspect: int) -> int:
    """Halve the size of the group that the suspect runs in.

    From 1 on, when it ran alone, count its crashes downwards.
    """
    return suspect // 2 if suspect > 1 else suspect - 1


def _acts_for(row: Row[*tuple[Any, ...]], job_id: str) -> bool:
    """Tell whether the job may act for the row: it is the row's own, or the first that a Node producer's row meets."""
    return row.state is DeliveryState.READY and row.settled_at is None and row.job_id in (None, job_id)


def _is_late(row: Row[*tuple[Any, ...]], entry: Ended) -> bool:
    """Tell whether the attempt lost its job, as its process stood still, and the next is under way, which decides."""
    return entry.attempt is not None and row.sending not in (None, entry.attempt.attempt)


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
        alone=row.alone,
        shared=row.payload_id is not None,
    )


def _ending(row: Row[*tuple[Any, ...]], entry: Ended) -> dict[str, object]:
    held = entry.state is DeliveryState.HELD
    is_over = entry.state is DeliveryState.FAILED
    is_alone = entry.reason is HoldReason.ALONE
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
        "alone_times": row.alone + 1 if entry.uses_pause else row.alone,
        # That another one got through since it was a canary was told against it, and is not told twice.
        "ahead": None if is_alone else row.canary_at,
    }


def _holds(row: Row[*tuple[Any, ...]], entry: Ended) -> int:
    """Count how often in a row a fault of ours has held the delivery.

    An attempt of its job in between does not reset this.
    """
    if entry.reason is HoldReason.OURS:
        return int(row.holds) + 1
    return int(row.holds) if entry.state is DeliveryState.READY else 0


_ROWS = among(TABLE.c.id, "rows")
_LOOKED_AT = (
    *("id", "state", "settled_at", "job_id", "job_name", "server_url", "wire", "payload_id", "ordering_key", "series"),
    *("attempts", "sending", "first_attempted_at", "last_attempted_at", "canary_at", "released_at", "holds", "alone"),
    "suspect",
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
    .values(job_id=bindparam("job"), job_name=bindparam("name"), server_url=bindparam("server"), wire=bindparam("by"))
)
# As text: in what SQLite returns, SQLAlchemy leaves out the tables of columns, also in a query inside.
_HAS_OTHERS: Final[ColumnElement[bool]] = literal_column(
    "EXISTS (SELECT 1 FROM delivery_jobs AS other WHERE other.ordering_key = delivery_jobs.ordering_key"
    " AND other.server_url = delivery_jobs.server_url AND other.id <> delivery_jobs.id)"
)
"""Whether more of its line is there. If two go together, at least one of them sees the other."""
_GONE = (
    delete(TABLE)
    .where(_ROWS)
    .returning(
        *(TABLE.c[name] for name in ("payload_id", "ordering_key", "ordering_position", *ATTEMPT_UNDER_WAY)),
        _HAS_OTHERS.label("has_others"),
    )
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
        alone=bindparam("alone_times"),
        canary_at=bindparam("ahead"),
        released_at=None,
        sending=None,
    )
)
_OWED_TO_TARGET = (
    select(TABLE.c.id)
    .where(
        TABLE.c.server_url == bindparam("server"),
        TABLE.c.target_url == bindparam("target"),
        TABLE.c.state.in_(OPEN_STATES),
        TABLE.c.id != bindparam("but"),
    )
    .order_by(TABLE.c.id)
    .with_for_update()
)
_GIVEN_UP = (
    update(TABLE)
    .where(TABLE.c.id.in_(_OWED_TO_TARGET), TABLE.c.state.in_(OPEN_STATES))
    .values(
        state=DeliveryState.FAILED,
        held_reason=None,
        held_at=None,
        next_attempt_at=None,
        released_at=None,
        settled_at=bindparam("at"),
        outcome=AttemptOutcome.PERMANENT,
        last_error=bindparam("told"),
        error_code=bindparam("why"),
    )
    .returning(*(TABLE.c[name] for name in ATTEMPT_UNDER_WAY))
)
