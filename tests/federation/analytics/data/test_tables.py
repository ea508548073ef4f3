"""Tables read in parts, as a task reads them: every row once, bounds kept, and no more than was asked for."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import sqlalchemy
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, IsNotNull, LessThan, Not, StringContains

from db import DeliveryLoss
from federation.analytics.data import tables
from federation.analytics.data.tables import TABLES, TableReader
from tests.federation.analytics.history import SERVERS, add, attempts, execute, fill, moment

ATTEMPTS = "delivery_attempts"
LOSS = {"state": "failed", "created_at": moment(), "lost_at": moment(1)}


def reader(url: str, **options: str) -> TableReader:
    """Of the attempts."""
    return TableReader({"url": url, "table": ATTEMPTS, **options}, TABLES[ATTEMPTS].schema)


def rows_of(reader: TableReader) -> list[dict[str, object]]:
    """What all parts of it hold."""
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("bounds", [{}, {"since": "2025-03-01", "until": "2025-03-04"}, {"since": "2025-03-01"}])
def test_parts_hold_every_row_once(database_url: str, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, str]) -> None:
    """By ids and by time, with one bound or two; the parts are as many as were asked for."""
    monkeypatch.setattr(tables, "BATCH_ROWS", 7)
    fill(database_url, attempts(50, 3))
    read = reader(database_url, partitions="5", **bounds)
    assert len(read.partitions()) == 5
    assert sorted(row["id"] for row in rows_of(read)) == list(range(1, 151))
    batches = [batch.num_rows for part in read.partitions() for batch in read.read(part)]
    assert max(batches) == 7


def test_a_large_table_has_more_parts(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is read by ids or by time, unless the number of parts is asked for; and every row once."""
    monkeypatch.setattr(tables, "BATCH_ROWS", 7)
    monkeypatch.setattr(tables, "ROWS_PER_PARTITION", 10)
    fill(database_url, attempts(50, 3))
    for bounds in ({}, {"since": "2025-03-01", "until": "2025-03-04"}):
        read = reader(database_url, **bounds)
        assert len(read.partitions()) == 15
        assert sorted(row["id"] for row in rows_of(read)) == list(range(1, 151))
        assert len(reader(database_url, partitions="3", **bounds).partitions()) == 3
    monkeypatch.setattr(tables, "MOST_PARTITIONS", 12)
    assert len(reader(database_url).partitions()) == 12


def test_deliveries_are_read_in_parts(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows each, whatever texts their ids are; and every row once."""
    names = [text for number in range(12) for text in (f"{number:x}", f"Z-{number}", f"é{number}")]
    add(database_url, DeliveryLoss, [{**LOSS, "id": name} for name in names])
    read = TableReader({"url": database_url, "table": "delivery_losses"}, TABLES["delivery_losses"].schema)
    assert len(read.partitions()) == 1
    monkeypatch.setattr(tables, "ROWS_PER_PARTITION", 10)
    assert [sum(batch.num_rows for batch in read.read(part)) for part in read.partitions()] == [9, 10, 10, 7]
    assert sorted(str(row["id"]) for row in rows_of(read)) == sorted(names)


def test_bounds_are_kept_to_the_microsecond(database_url: str) -> None:
    """The first moment of a day is in, the first of the next is not."""
    fill(database_url, attempts(10, 3))
    read = reader(database_url, since="2025-03-02", until="2025-03-03T00:00:00+00:00")
    assert sorted(row["id"] for row in rows_of(read)) == list(range(11, 21))


def test_the_database_drops_what_it_can(database_url: str) -> None:
    """PostgreSQL leaves Spark what it cannot say; what SQLite lets through Spark looks at once more."""
    fill(database_url, attempts(10, 3))
    pushable = [
        GreaterThanOrEqual(("started_at",), moment(1, 0)),
        LessThan(("started_at",), moment(2, 0)),
        In(("server_url",), (SERVERS[0], SERVERS[1])),
        Not(EqualTo(("server_url",), SERVERS[1])),
        IsNotNull(("duration_ms",)),
        LessThan(("id",), 19),
    ]
    beyond = StringContains(("server_url",), "s0")
    read = reader(database_url)
    left = list(read.pushFilters([*pushable, beyond]))
    assert left == ([beyond] if database_url.startswith("postgresql") else [*pushable, beyond])
    assert sorted(row["id"] for row in rows_of(read)) == [12, 15, 18]


def test_other_spellings_of_a_time_are_read(sqlite_only: str) -> None:
    """Without a fraction, with a T, with a zone; each falls into its own day."""
    fill(sqlite_only, attempts(4, 1))
    spellings = ["2025-03-02 00:00:00", "2025-03-02T23:59:59.5", "2025-03-02 10:00:00+00:00", "2025-03-02T10:00:00Z"]
    for number, text in enumerate(spellings, start=1):
        change = sqlalchemy.text("UPDATE delivery_attempts SET started_at = :text WHERE id = :id")
        execute(sqlite_only, change, [{"text": text, "id": number}])
    rows = rows_of(reader(sqlite_only, since="2025-03-02", until="2025-03-03"))
    times = {row["id"]: row["started_at"] for row in rows}
    assert times == {
        1: moment(1, 0),
        2: datetime(2025, 3, 2, 23, 59, 59, 500_000, UTC),
        3: moment(1, 10),
        4: moment(1, 10),
    }


def test_a_time_without_end_is_null(postgres_only: str) -> None:
    """PostgreSQL's `infinity` fits no datetime."""
    fill(postgres_only, attempts(2, 1))
    execute(postgres_only, sqlalchemy.text("UPDATE delivery_attempts SET started_at = 'infinity' WHERE id = 2"))
    for options in ({}, {"since": "2025-03-01"}):
        assert {row["id"]: row["started_at"] for row in rows_of(reader(postgres_only, **options))} == {
            1: moment(0, 0),
            2: None,
        }
