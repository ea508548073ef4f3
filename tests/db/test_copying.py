"""All rows of one database in another: as they were, all or none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    Boolean,
    Connection,
    Date,
    Double,
    Float,
    Integer,
    Table,
    Text,
    delete,
    insert,
    select,
    text,
    update,
)

from db import (
    BlacklistedServer,
    DeliveryAttempt,
    DeliveryJob,
    FederationTable,
    HostTable,
    QueueSighting,
    Server,
    ServerHealthEvent,
)
from db.columns import TextEnum, UtcDateTime
from db.copying import LEFT, SEEDED, CopyError, copy_database
from db.engines import migration_engine
from db.migrate import upgrade
from db.url import parse_url
from tests.patience import PATIENCE_SECONDS

ROWS = 450
"""More than two batches."""

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
TABLES = FederationTable.metadata.sorted_tables


@contextmanager
def transaction(url: str) -> Iterator[Connection]:
    engine = migration_engine(parse_url(url))
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def everything(url: str, tables: Sequence[Table] = TABLES) -> Mapping[str, list[dict[str, Any]]]:
    """All rows, as the application reads them."""
    with transaction(url) as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in tables
        }


def value_of(column: Any, number: int) -> object:  # a Column of any type
    """Something of the column's type; different for each row, and nothing in every third where that may be."""
    if column.foreign_keys or (column.nullable and number % 3 == 0):
        return None
    match column.type:
        case TextEnum():
            members = [*column.type.members.__members__.values()]
            return members[number % len(members)]
        case UtcDateTime():
            return NOW + timedelta(microseconds=number)
        case Boolean():
            return number % 2 == 0
        case Date():
            return date(2026, 1, 1) + timedelta(days=number)
        case Double() | Float():
            return number / 7
        case Integer():
            return number + 1
        case JSON():
            return [{"text": f"\u00e9 \U0001f600 {number}", "nothing": None, "deep": [1, 2.5, True]}, None]
        case Text():
            return f"{column.name} \u00e9 \U0001f600 '\"\\ {number}"
        case other:
            raise AssertionError(f"a type that this test does not know: {other!r}")


def fill(connection: Connection, tables: Sequence[Table], rows: int) -> None:
    for table in tables:
        if table.name not in SEEDED:
            values = [{c.name: value_of(c, number) for c in table.columns} for number in range(rows)]
            connection.execute(insert(table), values)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with rows in every table: copy it, never open it."""
    path = tmp_path_factory.mktemp("filled") / "old.sqlite3"
    upgrade(f"sqlite:///{path}", host_tables=True)
    with transaction(f"sqlite:///{path}") as connection:
        fill(connection, [*TABLES, *HostTable.metadata.sorted_tables[:1]], ROWS)
        connection.execute(insert(model(DeliveryJob)), {**big_job(), "attempts": 2**31 - 1})
    return path


@pytest.fixture
def source(filled: Path, tmp_path: Path) -> Path:
    """This test's own."""
    return Path(shutil.copy(filled, tmp_path / "old.sqlite3"))


def model(kind: Any) -> Table:  # a table model, whose __table__ SQLModel adds
    table = kind.__table__
    assert isinstance(table, Table)
    return table


def big_job() -> dict[str, object]:
    return {
        "id": "big",
        "target_url": "https://b.example/",
        "payload": "x" * 1_000_000,
        "created_at": NOW,
        "ordering_position": 2**62,
    }


@pytest.fixture
def new_url(database_url: str) -> str:
    """A new database of either kind, with the tables and no rows."""
    upgrade(database_url, host_tables=True)
    return database_url


def test_every_row_arrives_as_it_was(source: Path, new_url: str) -> None:
    """Times, booleans, JSON, numbers of 63 bits, texts of a megabyte; and what the migrations had put there is gone."""
    copied = copy_database(source, new_url)
    old = f"sqlite:///{source}"
    assert everything(new_url) == {**everything(old), **{name: [] for name in LEFT}}
    users = HostTable.metadata.sorted_tables[:1]
    assert everything(new_url, users) == everything(old, users)
    assert copied.left_to_host == ()
    assert copied.rows["delivery_jobs"] == ROWS + 1
    assert copied.rows["user"] == ROWS
    assert set(copied.rows) == {*FederationTable.metadata.tables, *HostTable.metadata.tables} - LEFT


def test_what_processes_saw_is_left(source: Path, new_url: str) -> None:
    """The old queue's place and its strangers are the old database's; where they are, somebody is at work."""
    table = model(QueueSighting)
    with transaction(new_url) as connection:
        fill(connection, [table], 1)
    with pytest.raises(CopyError, match=r"in use: queue_sightings have rows"):
        copy_database(source, new_url)
    with transaction(new_url) as connection:
        connection.execute(delete(table))
    copy_database(source, new_url)
    assert len(everything(f"sqlite:///{source}")[table.name]) == ROWS
    assert everything(new_url)[table.name] == []


def test_numbers_go_on_after_the_highest(source: Path, new_url: str) -> None:
    """A new attempt, or a change of health, takes no number that is taken."""
    copy_database(source, new_url)
    with transaction(new_url) as connection:
        for kind in (DeliveryAttempt, ServerHealthEvent):
            table = model(kind)
            values = {c.name: value_of(c, 10_000) for c in table.columns if c.name != "id"}
            (number,) = connection.execute(insert(table).returning(table.c.id), values).one()
            assert number == ROWS + 1


def test_the_blacklists_triggers_work_in_the_copy(source: Path, new_url: str) -> None:
    """The revision is the source's, and goes on from there."""
    copy_database(source, new_url)
    before = everything(new_url)["blacklist_revision"]
    assert before == everything(f"sqlite:///{source}")["blacklist_revision"]
    with transaction(new_url) as connection:
        connection.execute(update(model(BlacklistedServer)).values(reason="another"))
    assert everything(new_url)["blacklist_revision"][0]["revision"] > before[0]["revision"]


def test_what_migrations_fill_is_known(new_url: str) -> None:
    """A migration that puts rows into a table names it in `SEEDED`: a copy would find the new database in use."""
    filled = {name for name, rows in everything(new_url).items() if rows}
    assert filled == SEEDED & FederationTable.metadata.tables.keys()


def test_a_database_in_use_is_left_as_it_is(source: Path, new_url: str) -> None:
    """One row is enough, and a second copy finds what the first one wrote."""
    with transaction(new_url) as connection:
        fill(connection, [model(Server)], 1)
    before = everything(new_url)
    with pytest.raises(CopyError, match=r"in use: server_registry have rows"):
        copy_database(source, new_url)
    assert everything(new_url) == before


def test_what_does_not_fit_undoes_all_of_it(source: Path, postgres_url: str) -> None:
    """PostgreSQL takes no character 0 in a text; the error names the table, and quotes nothing."""
    upgrade(postgres_url, host_tables=True)
    with transaction(f"sqlite:///{source}") as connection:
        connection.execute(update(model(DeliveryJob)).values(payload="s3cret\0"))
    before = everything(postgres_url)
    with pytest.raises(CopyError, match="a row of delivery_jobs does not fit") as raised:
        copy_database(source, postgres_url)
    assert "s3cret" not in str(raised.value)
    assert everything(postgres_url) == before


def test_a_source_that_is_written_to_is_not_copied(source: Path, postgres_url: str) -> None:
    """Whoever writes would go on in the old database. A lock on the new one holds the copy up until somebody has."""
    upgrade(postgres_url, host_tables=True)
    before = everything(postgres_url)
    outcome: list[Exception] = []

    def copy() -> None:
        try:
            copy_database(source, postgres_url)
        except CopyError as error:
            outcome.append(error)

    copying = threading.Thread(target=copy)
    with transaction(postgres_url) as connection:
        connection.execute(text("LOCK TABLE delivery_jobs"))
        copying.start()
        while not connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one():
            assert copying.is_alive()
        with transaction(f"sqlite:///{source}") as writer:
            writer.execute(update(model(DeliveryJob)).values(attempts=1))
    copying.join(PATIENCE_SECONDS)
    assert "written to while it was copied" in str(outcome[0])
    assert everything(postgres_url) == before


def test_a_database_is_not_copied_into_itself(source: Path, tmp_path: Path) -> None:
    """By whatever path it is named."""
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CopyError, match="is the database itself"):
        copy_database(tmp_path / "link", f"sqlite:///{source}")


def older(source: Path, new_url: str) -> None:
    with transaction(f"sqlite:///{source}") as connection:
        connection.execute(text("UPDATE federation_alembic_version SET version_num = '0001'"))


def incomplete(source: Path, new_url: str) -> None:
    with transaction(new_url) as connection:
        connection.execute(text("DROP TABLE server_links"))


def missing(source: Path, new_url: str) -> None:
    source.unlink()


def without_host(source: Path, new_url: str) -> None:
    with transaction(new_url) as connection:
        for table in ("posts", "blocks", '"user"'):
            connection.execute(text(f"DROP TABLE {table}"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (older, "the old database does not have the tables of this version"),
        (incomplete, "the new database does not have the tables of this version"),
        (missing, "there is no database"),
        (without_host, "federation upgrade --host-tables"),
    ],
)
def test_databases_that_do_not_match_are_refused(
    source: Path, new_url: str, damage: Callable[[Path, str], None], message: str
) -> None:
    """And it is said what to do."""
    damage(source, new_url)
    with pytest.raises(CopyError, match=message):
        copy_database(source, new_url)
    assert damage is not missing or not source.exists()


@pytest.mark.parametrize("whose", ["old", "new"])
def test_a_hosts_own_tables_are_left_to_it(source: Path, new_url: str, whose: str) -> None:
    """A column that is not in ours says whose they are; ours are copied all the same."""
    with transaction(f"sqlite:///{source}" if whose == "old" else new_url) as connection:
        connection.execute(text('ALTER TABLE "user" ADD COLUMN email TEXT'))
    copied = copy_database(source, new_url)
    assert set(copied.left_to_host) == {"user", "posts", "blocks"}
    assert everything(new_url, HostTable.metadata.sorted_tables[:1])["user"] == []
    assert copied.rows["delivery_jobs"] == ROWS + 1


def test_a_source_without_a_host_needs_none(tmp_path: Path, new_url: str) -> None:
    """Its tables are ours alone."""
    path = tmp_path / "bare.sqlite3"
    upgrade(f"sqlite:///{path}")
    copied = copy_database(path, new_url)
    assert set(copied.rows) == set(FederationTable.metadata.tables) - LEFT


def test_a_backup_is_a_source(source: Path, tmp_path: Path, new_url: str) -> None:
    """It is only read."""
    backup = Path(shutil.copy(source, tmp_path / "backup.sqlite3"))
    content = backup.read_bytes()
    copy_database(backup, new_url)
    assert backup.read_bytes() == content
