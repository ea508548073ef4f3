"""Migrations: from nothing, over an existing node's database, again, and at the same time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, inspect, select, text
from sqlalchemy.exc import OperationalError

import db
from db import Database, DeliveryJob, DeliveryState, FederationTable, Follow, Server, create_host_tables
from db.engines import migration_engine
from db.migrate import schema_version, upgrade
from db.url import parse_url
from federation.base.settings.reach import Schema
from tests import warm
from tests.db.original import TABLES, create_original
from tests.patience import PATIENCE_SECONDS
from workers.storage.sql import SqlStorage

_OURS = {
    "sweeps",
    "accepted_keys",
    "activitypub_actors",
    "activitypub_follows",
    "activitypub_undone_follows",
    "activitypub_inboxes",
    "activitypub_keys",
    "activitypub_received",
    "activitypub_remote_keys",
    "admin_actions",
    "attempt_minutes",
    "bulk_jobs",
    "delivery_losses",
    "delivery_totals",
    "rollup_positions",
    "server_summaries",
    "blacklist_revision",
    "database_identity",
    "delivery_attempts",
    "delivery_payloads",
    "follow_news",
    "process_clocks",
    "queue_sightings",
    "relay_candidates",
    "scheduler_jobs",
    "server_health_events",
    "server_links",
    "server_scorecards",
    "federation_alembic_version",
}

_CATALOG = (
    """SELECT table_name, ordinal_position, column_name, data_type, is_nullable, column_default
       FROM information_schema.columns WHERE table_schema = 'public' AND table_name = ANY(:tables)""",
    """SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)
       FROM pg_constraint WHERE conrelid::regclass::text = ANY(:tables)""",
    "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE tablename = ANY(:tables)",
)


@contextmanager
def engine_on(url: str) -> Iterator[Engine]:
    engine = migration_engine(parse_url(url))
    try:
        yield engine
    finally:
        engine.dispose()


def catalog(connection: Connection) -> list[list[tuple[object, ...]]]:
    """Columns, constraints and indexes of the tables federation owns, as PostgreSQL itself describes them."""
    tables = list(FederationTable.metadata.tables)
    return [sorted(map(tuple, connection.execute(text(query), {"tables": tables}))) for query in _CATALOG]


def rows(connection: Connection, columns: dict[str, list[str]]) -> dict[str, Sequence[object]]:
    quoted = {table: ", ".join(f'"{name}"' for name in names) for table, names in columns.items()}
    return {t: connection.execute(text(f'SELECT {names} FROM "{t}"')).all() for t, names in quoted.items()}


def test_an_empty_database_gets_exactly_the_tables_of_the_models(database_url: str) -> None:
    """Autogenerate finds no difference, and there is no host table."""
    upgrade(database_url)
    with engine_on(database_url) as engine, engine.begin() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": "federation_alembic_version",
                "compare_type": True,
                "compare_server_default": True,
            },
        )
        assert compare_metadata(context, FederationTable.metadata) == []
        assert set(inspect(connection).get_table_names()) == {
            *FederationTable.metadata.tables,
            "federation_alembic_version",
        }


def test_the_queues_tables_may_lie_beside_ours(database_url: str) -> None:
    """Whoever makes theirs first: ours come out the same, and theirs are of one prefix, to be left out of a compare."""
    asyncio.run(SqlStorage(database_url).migrate())
    upgrade(database_url)
    with engine_on(database_url) as engine, engine.begin() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": "federation_alembic_version",
                "include_name": lambda name, kind, _: kind != "table" or not name.startswith("workers_"),
            },
        )
        assert compare_metadata(context, FederationTable.metadata) == []
        assert "workers_jobs" in inspect(connection).get_table_names()


def test_adopted_migrated_and_modelled_schemas_are_the_same_to_postgres(postgres_url: str) -> None:
    """Columns with types and order, constraints and indexes agree, whichever way the tables came to be."""
    with engine_on(postgres_url) as engine:
        create_original(engine)
        upgrade(postgres_url)
        with engine.begin() as connection:
            adopted = catalog(connection)
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        upgrade(postgres_url)
        with engine.begin() as connection:
            migrated = catalog(connection)
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            FederationTable.metadata.create_all(connection)
            modelled = catalog(connection)
    assert adopted == migrated == modelled
    assert len(adopted[0]) > 60


def test_adoption_changes_no_row_and_no_existing_column(postgres_url: str) -> None:
    """An existing node's rows and columns read the same before and after; only our columns and tables are new."""
    with engine_on(postgres_url) as engine:
        create_original(engine)
        with engine.connect() as connection:
            described = {table: inspect(connection).get_columns(table) for table in TABLES}
            columns = {table: [str(column["name"]) for column in described[table]] for table in TABLES}
            before = rows(connection, columns)
        upgrade(postgres_url)
        with engine.connect() as connection:
            assert rows(connection, columns) == before
            assert all(len(found) == 1 for found in before.values())
            after = {table: inspect(connection).get_columns(table) for table in TABLES}
            assert set(inspect(connection).get_table_names()) == {*TABLES, *_OURS}
    for table in TABLES:
        kept = after[table][: len(described[table])]
        assert [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in kept] == [
            (c["name"], str(c["type"]), c["nullable"], c["default"]) for c in described[table]
        ]
    added = after["delivery_jobs"][len(described["delivery_jobs"]) :]
    assert [column["name"] for column in added] == [
        *(
            "job_name",
            "server_url",
            "wire",
            "queued_at",
            "settled_at",
            "outcome",
            "last_error",
            "payload_id",
            "error_code",
        ),
        *("state", "held_reason", "held_at", "job_id", "series", "sending", "first_attempted_at", "released_at"),
        *("canary_at", "ordering_key", "ordering_position", "holds", "suspect", "alone", "trace"),
    ]
    assert all(column["nullable"] or column["default"] for column in added)


async def test_rows_of_the_original_are_readable_and_it_may_go_on_writing(postgres_url: str) -> None:
    """Its wall-clock times come back as UTC, and an insert that names only its columns still works."""
    with engine_on(postgres_url) as engine:
        create_original(engine)
        upgrade(postgres_url)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO delivery_jobs (id, target_url, payload, created_at) VALUES ('d-2', 't', 'p', now())"
            )
    database = Database(postgres_url)
    async with database.read() as session:
        server = (await session.execute(select(Server))).scalar_one()
        job = await session.get(DeliveryJob, "d-2")
        follow = (await session.execute(select(Follow))).scalar_one()
    await database.close()
    assert server.last_seen == datetime(2025, 3, 30, 2, 30, 0, 123000, tzinfo=UTC)
    assert job is not None
    assert (job.attempts, job.job_name, job.settled_at) == (0, None, None)
    assert (job.state, job.job_id, job.series, job.holds, job.sending) == (DeliveryState.READY, None, 0, 0, None)
    assert (server.knows_key, server.rotation_tried_at, server.rotation_problem) == (None, None, None)
    assert follow.follower_server_url == server.url


def test_upgrading_again_changes_nothing(database_url: str) -> None:
    """A second run keeps the rows and the version."""
    upgrade(database_url)
    insert = """INSERT INTO blacklisted_servers (id, server_url, created_at, reason)
        VALUES ('x', 'https://evil.example', '2025-01-01 00:00:00', 'spam')"""
    with engine_on(database_url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql(insert)
        upgrade(database_url)
        with engine.begin() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM blacklisted_servers").scalar() == 1
            version = schema_version(connection)
            assert (version.current, version.is_behind) == (version.expected, False)
            assert connection.exec_driver_sql("SELECT count(*) FROM federation_alembic_version").scalar_one() == 1


def test_tables_of_the_host_application_and_its_alembic_history_are_left_alone(database_url: str) -> None:
    """`alembic_version`, `posts` and a stranger's table survive with their content."""
    with engine_on(database_url) as engine:
        with engine.begin() as connection:
            create_host_tables(connection)
            connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
            connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('theirs')")
        upgrade(database_url)
        with engine.begin() as connection:
            assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").all() == [("theirs",)]
            assert {"user", "posts", "blocks", "follows"} <= set(inspect(connection).get_table_names())


def test_a_failing_migration_leaves_no_trace(database_url: str) -> None:
    """DDL is one transaction: a name in the way of the last table rolls back the first."""
    with engine_on(database_url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE server_health_events (id integer)")
        with pytest.raises(Exception, match=r"server_health_events.*already exists"):
            upgrade(database_url)
        with engine.begin() as connection:
            assert inspect(connection).get_table_names() == ["server_health_events"]


def test_processes_that_upgrade_at_once_all_succeed(database_url: str) -> None:
    """Three processes released together on an empty database: one migrates, the others find it done."""
    program = "import sys; from db.migrate import upgrade; print('ready', flush=True); input(); upgrade(sys.argv[1])"
    command = [warm.PYTHON, "-c", program, database_url]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "error"}
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    with engine_on(database_url) as engine, engine.begin() as connection:
        version = schema_version(connection)
        assert (version.current, version.is_behind) == (version.expected, False)
        assert connection.exec_driver_sql("SELECT count(*) FROM federation_alembic_version").scalar_one() == 1


def test_the_expected_version_is_alembics_head(database_url: str) -> None:
    script = ScriptDirectory(str(Path(db.__file__).parent / "migrations"))
    with engine_on(database_url) as engine, engine.begin() as connection:
        version = schema_version(connection)
        assert (version.current, version.is_behind) == (None, True)
        assert [version.expected] == script.get_heads()


def test_the_expected_version_is_told_without_alembic() -> None:
    """Every process would have to import it."""
    asked = "import sys, federation.runtime.workers, federation.cli; print('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "False\n"


async def test_an_upgrade_waits_for_a_writer_of_a_file_not_yet_in_wal_mode(sqlite_url: str) -> None:
    """SQLite refuses to switch the mode at once, whatever the busy timeout; the upgrade tries again until it may."""
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("CREATE TABLE theirs (id)")
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO theirs VALUES (1)")
    upgrading = asyncio.create_task(asyncio.to_thread(upgrade, sqlite_url))
    assert not (await asyncio.wait({upgrading}, timeout=0.2))[0]
    other.execute("COMMIT")
    await upgrading
    assert other.execute("SELECT count(*) FROM theirs, server_registry").fetchone() == (0,)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


async def test_threads_may_upgrade_several_databases_at_once(tmp_path: Path) -> None:
    """Alembic's module state is not shared between two running upgrades."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(4)]
    await asyncio.gather(*(asyncio.to_thread(upgrade, url) for url in urls))
    for url in urls:
        with engine_on(url) as engine, engine.begin() as connection:
            assert len(inspect(connection).get_table_names()) == len(FederationTable.metadata.tables) + 1


def test_a_database_of_a_newer_version_is_refused(sqlite_url: str) -> None:
    """An old program does not run migrations against a schema it does not know."""
    upgrade(sqlite_url)
    with engine_on(sqlite_url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE federation_alembic_version SET version_num = '9999'")
        with pytest.raises(CommandError, match="9999"):
            upgrade(sqlite_url)


@pytest.mark.parametrize("revision", ["0001", "0018"])
def test_a_database_of_a_version_before_the_first_release_is_refused(database_url: str, revision: str) -> None:
    """It is told what was found and what to do, and nothing is changed."""
    with engine_on(database_url) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE federation_alembic_version (version_num VARCHAR(32) NOT NULL)")
            connection.exec_driver_sql(f"INSERT INTO federation_alembic_version VALUES ('{revision}')")
        with pytest.raises(CommandError, match=rf"migration {revision}.*before 1\.0.*a new database"):
            upgrade(database_url)
        with engine.begin() as connection:
            assert inspect(connection).get_table_names() == ["federation_alembic_version"]
            version = schema_version(connection)
    assert (version.current, version.is_behind) == (revision, True)
    problem = Schema(version=version, missing=()).problem
    assert problem is not None
    assert "a new database" in problem
    assert "federation upgrade" not in problem  # which refuses


def test_an_unreachable_server_is_an_operational_error_without_the_password() -> None:
    """The error names the problem, and never the secret."""
    with pytest.raises(OperationalError) as caught:
        upgrade("postgresql://node:hunter2@127.0.0.1:1/node")
    assert "hunter2" not in str(caught.value)
