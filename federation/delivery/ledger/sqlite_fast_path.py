"""What most entries of the ledger are, beginnings and arrivals, by the driver's own statements on SQLite.

Theory of operation. Of what a group costs a worker, half is SQLAlchemy's way to its statements. A statement whose text
is always the same is prepared once, and then costs a few microseconds: so each entry has its own, and `Group` is for
the rows that are not as they mostly are, as in `postgres_fast_path`. Both are in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection

from db.session import sqlite_cursor
from federation.delivery.error_codes import STALLED
from federation.delivery.ledger.attempt_log import LEARNED_LATE, AttemptRecord
from federation.delivery.ledger.entries import Begin, Begun, Ended, Entry, Gone, Series
from federation.delivery.ledger.statements import apply_effects
from federation.delivery.rows import release

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import DBAPICursor


def write_usual(connection: Connection, entries: Sequence[Entry]) -> Mapping[int, object]:
    """Write those of the entries whose rows are as they mostly are, and return the result of each by its place.

    Of several entries for one delivery none is written.

    Raises:
        SQLAlchemyError, UnicodeError, EffectFailed: as `Group.write`.
    """
    times = Counter(_delivery_of(entry) for entry in entries)
    results: dict[int, object] = {}
    removed: list[Gone] = []
    acknowledged: dict[int, Gone] = {}
    texts: list[str] = []
    with sqlite_cursor(connection) as cursor:
        for place, entry in enumerate(entries):
            if times[_delivery_of(entry)] > 1:
                continue
            if isinstance(entry, Begin) and entry.hold is None:
                begun = _begun(cursor, entry)
                if begun is not None:
                    results[place] = begun
            elif isinstance(entry, Gone) and _remove(cursor, entry, texts):
                results[place] = True
                removed.append(entry)
                if entry.effect is not None:
                    acknowledged[place] = entry
        attempts = [_values(entry.attempt) for entry in removed if entry.attempt is not None]
        if attempts:
            cursor.executemany(_NOTE, attempts)
    release(connection, texts)
    return results | apply_effects(connection, acknowledged) if acknowledged else results


def _delivery_of(entry: Entry) -> str:
    return entry.series.delivery_id if isinstance(entry, Ended) else entry.delivery_id


def _begun(cursor: DBAPICursor, entry: Begin) -> Begun | None:
    cursor.execute(_BEGIN, (_stored(entry.at), entry.attempt, entry.delivery_id, entry.job_id, entry.wire))
    for row in cursor.fetchall():
        series = _series(entry, row)
        return Begun(series=series, text=None if series.shared else row[0])
    return None


def _series(entry: Begin, row: tuple[Any, ...]) -> Series:
    _, payload_id, number, attempts, holds, alone, first_attempted_at, canary_at = row
    return Series(
        delivery_id=entry.delivery_id,
        job_id=entry.job_id,
        number=number,
        first_attempted_at=_told(first_attempted_at),
        attempts=attempts,
        holds=holds,
        canary_at=canary_at and _told(canary_at),
        is_canary=False,
        alone=alone,
        shared=payload_id is not None,
    )


def _remove(cursor: DBAPICursor, entry: Gone, texts: list[str]) -> bool:
    """Remove the row, if it is as usual, and add the text that it shared with others."""
    cursor.execute(_REMOVE, (entry.delivery_id, None if entry.attempt is None else entry.attempt.attempt))
    rows = cursor.fetchall()
    texts += [payload_id for (payload_id,) in rows if payload_id is not None]
    return bool(rows)


def _values(attempt: AttemptRecord) -> tuple[object, ...]:
    return tuple(_stored(attempt.started_at) if name == "started_at" else getattr(attempt, name) for name in _COLUMNS)


def _stored(moment: datetime) -> str:
    """Return the moment as `UtcDateTime` stores it."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _told(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


_COLUMNS: Final = AttemptRecord.__struct_fields__
# A canary is not as usual: what `released_at` was is lost once the statement returns something.
_BEGIN: Final = """
UPDATE delivery_jobs
SET attempts = attempts + 1, last_attempted_at = ?1, sending = ?2, released_at = NULL,
    first_attempted_at = coalesce(first_attempted_at, ?1)
WHERE id = ?3 AND state = 'ready' AND settled_at IS NULL AND job_id = ?4 AND wire = ?5 AND job_name IS NOT NULL
    AND (sending IS NULL OR sending = ?2) AND (canary_at IS NULL OR canary_at IS NOT released_at)
RETURNING payload, payload_id, series, attempts, holds, alone,
    first_attempted_at, canary_at
"""
_REMOVE: Final = """
DELETE FROM delivery_jobs
WHERE id = ?1 AND (sending IS NULL OR sending = ?2) AND (ordering_key IS NULL OR NOT EXISTS (
    SELECT 1 FROM delivery_jobs AS other
    WHERE other.ordering_key = delivery_jobs.ordering_key AND other.server_url = delivery_jobs.server_url
        AND other.id <> delivery_jobs.id
))
RETURNING payload_id
"""
_NOTE: Final = f"""
INSERT INTO delivery_attempts ({", ".join(_COLUMNS)}) VALUES ({", ".join("?" * len(_COLUMNS))})
ON CONFLICT (delivery_id, series, attempt) DO UPDATE
SET {", ".join(f"{name} = excluded.{name}" for name in LEARNED_LATE)} WHERE delivery_attempts.error_code = '{STALLED}'
"""  # noqa: S608 - it is made of names of columns
