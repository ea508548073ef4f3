"""What most entries of the ledger are, beginnings and arrivals, in a single statement of PostgreSQL.

Theory of operation. A transaction of several statements takes a round trip for each, and two more to begin and to
commit; of what a group costs a worker, the entries themselves are the smaller part. So the beginnings and the arrivals
of a group go into one statement, which commits by itself. It does what `Group` does to rows that are as they mostly
are, and leaves all others alone: rows that are held, or another job's, or nobody's yet, or whose attempt was lost, or
that are in an order, or not there. `Group` then writes those entries. What an acknowledgment changes is part of the
statement where its kind has a `Fragment`. If an arrival releases a text that others share, a second statement removes
the text, so the two are a transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from functools import cache
from typing import Any, Final, TypeAlias, TypeGuard

import msgspec
from sqlalchemy import Connection

from db import Database
from federation.delivery.error_codes import STALLED
from federation.delivery.ledger.attempt_log import LEARNED_LATE, AttemptRecord
from federation.delivery.ledger.entries import Begin, Begun, Entry, Gone, NotBegun, Series
from federation.delivery.rows import free
from federation.delivery.wire import Effect

UsualEntry: TypeAlias = Begin | Gone
Rows: TypeAlias = Sequence[Any]


def may_be_usual(entry: Entry) -> TypeGuard[UsualEntry]:
    """Tell whether the statement can do all that the entry asks for."""
    if isinstance(entry, Gone):
        return entry.effect is None or entry.effect.fragment is not None
    return isinstance(entry, Begin) and entry.hold is None


async def write_usual(database: Database, entries: Sequence[UsualEntry]) -> list[object]:
    """Write those of the entries whose rows are as they mostly are, and return the result of each as `Group` does.

    The result of an entry that is not written is None. Of several entries for one delivery, only the first is written;
    but if that began an attempt, no other job may.

    Raises:
        SQLAlchemyError: nothing was written, or the answer was lost.
        UnicodeError: a text has no UTF-8 form; nothing was written.
    """
    first: dict[str, UsualEntry] = {}
    for entry in entries:
        first.setdefault(entry.delivery_id, entry)
    chosen = [entry for entry in first.values() if may_be_usual(entry)]
    begins = [entry for entry in chosen if isinstance(entry, Begin)]
    gone = [entry for entry in chosen if isinstance(entry, Gone)]
    shares = any(entry.shared for entry in gone)
    kinds = tuple(dict.fromkeys(type(entry.effect) for entry in gone if entry.effect is not None))
    statement = _statement(kinds)
    arrivals, attempts = _arrivals(gone, kinds), _attempts(gone)
    values = {"begins": _begins(begins), "arrivals": arrivals, "attempts": attempts, "shared": shares}

    def write(connection: Connection) -> Rows:
        rows = connection.exec_driver_sql(statement, values).all()
        free(connection, [row.id for row in rows if row.kind == "unused"])
        return rows

    rows = await (database.transact(write) if shares else database.alone(statement, values))
    results = _results(rows, begins, gone)
    return [
        results.get(entry.delivery_id) if first[entry.delivery_id] is entry else _second(entry, results)
        for entry in entries
    ]


def _second(entry: UsualEntry, results: Mapping[str, object]) -> NotBegun | None:
    """Return the result of an entry whose delivery had another one in the group."""
    is_taken = isinstance(entry, Begin) and isinstance(results.get(entry.delivery_id), Begun)
    return NotBegun(exists=True) if is_taken else None


def _begins(entries: Sequence[Begin]) -> str:
    return _json(
        [{"id": e.delivery_id, "job": e.job_id, "number": e.attempt, "at": e.at, "wire": e.wire} for e in entries]
    )


def _arrivals(entries: Sequence[Gone], kinds: Sequence[type[Effect]]) -> str:
    return _json(
        [
            {"id": e.delivery_id, "number": e.attempt and e.attempt.attempt}
            if e.effect is None
            else {
                "id": e.delivery_id,
                "number": e.attempt and e.attempt.attempt,
                "kind": kinds.index(type(e.effect)),
                "effect": e.effect,
            }
            for e in entries
        ]
    )


def _attempts(entries: Sequence[Gone]) -> str:
    return _json([entry.attempt for entry in entries if entry.attempt is not None])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _results(rows: Rows, begins: Sequence[Begin], gone: Sequence[Gone]) -> dict[str, object]:
    """Return the results of the entries that were written, by their deliveries."""
    removed = {row.id for row in rows if row.kind == "gone"}
    begun = {row.id: row for row in rows if row.kind == "begun"}
    changed = {row.id for row in rows if row.kind == "changed"}
    results: dict[str, object] = {
        entry.delivery_id: entry.effect is None or entry.delivery_id in changed
        for entry in gone
        if entry.delivery_id in removed
    }
    for entry in begins:
        row = begun.get(entry.delivery_id)
        if row is not None:
            results[entry.delivery_id] = Begun(series=_series(row, entry), text=row.text)
    return results


def _series(row: Any, entry: Begin) -> Series:
    return Series(
        delivery_id=row.id,
        job_id=entry.job_id,
        number=row.series,
        first_attempted_at=row.first.replace(tzinfo=UTC),
        attempts=row.attempts,
        holds=row.holds,
        canary_at=row.canary and row.canary.replace(tzinfo=UTC),
        is_canary=row.is_canary,
        alone=row.alone,
        shared=row.other is not None,
    )


_TYPES: Final = {
    **dict.fromkeys(("attempt", "duration_ms", "http_status", "request_bytes", "response_bytes", "series"), "integer"),
    "started_at": "timestamptz",
}
"""Those of an attempt's columns that are no texts."""
_COLUMNS: Final = AttemptRecord.__struct_fields__
_USUAL: Final = f"""
WITH b AS MATERIALIZED (
    SELECT id, job, number, wire, at AT TIME ZONE 'UTC' AS at
    FROM json_to_recordset(CAST(%(begins)s AS json)) AS j(id text, job text, number integer, at timestamptz, wire text)
), locked AS MATERIALIZED (
    SELECT id, state, settled_at, job_id, job_name, wire, sending, released_at, canary_at
    FROM delivery_jobs WHERE id = ANY (ARRAY(SELECT id FROM b)) ORDER BY id FOR UPDATE
), begun AS (
    UPDATE delivery_jobs AS d
    SET attempts = d.attempts + 1, last_attempted_at = b.at, sending = b.number, released_at = NULL,
        first_attempted_at = coalesce(d.first_attempted_at, b.at)
    FROM locked JOIN b ON b.id = locked.id
    WHERE d.id = locked.id AND locked.state = 'ready' AND locked.settled_at IS NULL AND locked.job_id = b.job
        AND locked.wire = b.wire AND locked.job_name IS NOT NULL
        AND (locked.sending IS NULL OR locked.sending = b.number)
    RETURNING d.id, d.series, d.attempts, d.holds, d.alone, d.first_attempted_at, d.canary_at,
        d.payload_id,
        CASE WHEN d.payload_id IS NULL THEN d.payload END AS payload,
        coalesce(locked.canary_at = locked.released_at, false) AS is_canary
), g AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(%(arrivals)s AS json))
        AS j(id text, number integer, kind integer, effect json)
), gone AS (
    DELETE FROM delivery_jobs AS d USING g
    WHERE d.id = ANY (ARRAY(SELECT id FROM g)) AND d.id = g.id
        AND (d.ordering_key IS NULL OR NOT EXISTS (
            SELECT FROM delivery_jobs AS other
            WHERE other.ordering_key = d.ordering_key AND other.server_url = d.server_url AND other.id <> d.id
        ))
        AND (d.payload_id IS NULL OR %(shared)s) AND (d.sending IS NULL OR d.sending = g.number)
    RETURNING d.id, d.payload_id
), noted AS (
    INSERT INTO delivery_attempts ({", ".join(_COLUMNS)})
    SELECT {", ".join("a.started_at AT TIME ZONE 'UTC'" if c == "started_at" else f"a.{c}" for c in _COLUMNS)}
    FROM json_to_recordset(CAST(%(attempts)s AS json))
        AS a({", ".join(f"{c} {_TYPES.get(c, 'text')}" for c in _COLUMNS)})
    JOIN gone ON gone.id = a.delivery_id
    ON CONFLICT (delivery_id, series, attempt) DO UPDATE
    SET {", ".join(f"{c} = excluded.{c}" for c in LEARNED_LATE)} WHERE delivery_attempts.error_code = '{STALLED}'
), shared AS (
    SELECT id FROM delivery_payloads WHERE id = ANY (ARRAY(SELECT payload_id FROM gone)) ORDER BY id FOR UPDATE
), released AS (
    UPDATE delivery_payloads AS p SET refs = p.refs - n.rows
    FROM shared JOIN (SELECT payload_id AS id, count(*) AS rows FROM gone GROUP BY payload_id) AS n USING (id)
    WHERE p.id = n.id
    RETURNING p.id, p.refs
)@CTES
SELECT 'begun' AS kind, id, payload_id AS other, payload AS text, series, attempts, holds, alone,
    first_attempted_at AS first, canary_at AS canary, is_canary FROM begun
UNION ALL SELECT 'gone', id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM gone
UNION ALL SELECT 'unused', id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM released WHERE refs <= 0
@CHANGED"""  # noqa: S608 - it is made of names of columns


@cache
def _statement(kinds: tuple[type[Effect], ...]) -> str:
    """Return the statement that also writes effects of these kinds."""
    ctes, changed = "", ""
    for number, kind in enumerate(kinds):
        fragment = kind.fragment
        assert fragment is not None  # else the entry is not usual
        columns = ", ".join(f"{name} {type_}" for name, type_ in fragment.columns.items())
        ctes += f""", arrived_{number} AS MATERIALIZED (
    SELECT g.id, e.* FROM g JOIN gone USING (id), json_to_record(g.effect) AS e({columns}) WHERE g.kind = {number}
), {fragment.ctes.format(arrived=f"arrived_{number}")}"""  # noqa: S608 - it is made of what wires have in their code
        changed += f"""UNION ALL SELECT 'changed', id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM {fragment.changed}
"""  # noqa: S608 - as above
    return _USUAL.replace("@CTES", ctes).replace("@CHANGED", changed)
