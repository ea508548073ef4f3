"""`federation db`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from federation import interrupts
from federation.cli.options import AsJson, group
from federation.cli.output import lasting, print_json, print_lines
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.running import upgrade
from federation.cli.session import LogLevel, load_settings, start_logging

if TYPE_CHECKING:
    from sqlalchemy import URL

    from db.copying import Copied
    from federation.base.settings.reach import Schema

app = group("The database: upgrade, check, backup, copy.")


@app.command("upgrade")
def upgrade_tables(
    host_tables: Annotated[
        bool,
        typer.Option("--host-tables", help="For a node without a host application: make user, posts, blocks, too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database's tables up to date."""
    upgraded = upgrade(load_settings(), host_tables=host_tables)
    if as_json:
        print_json(upgraded)
    else:
        print_lines([*upgraded.told(), "the database is up to date"])
    if host_tables and upgraded.host_missing:
        raise typer.Exit(NOT_FOUND)


@app.command("check")
def check(as_json: AsJson = False) -> None:
    """Tell whether the tables are up to date. Exit status 1 if not."""
    from db import Database
    from federation.base.settings.reach import schema_of

    start_logging(LogLevel.WARNING)
    settings = load_settings()
    settings.require_files()

    async def look() -> Schema:
        database = Database(settings.database_url.get_secret_value())
        try:
            return await schema_of(database)
        finally:
            await database.close()

    schema = interrupts.run(look())
    version = schema.version
    if as_json:
        versions = {"current": version.current, "expected": version.expected}
        print_json({**versions, "up_to_date": schema.problem is None, "missing": schema.missing})
    else:
        print_lines([schema.problem or f"the database is at migration {version.current}, and nothing is missing"])
    if schema.problem is not None:
        raise typer.Exit(NOT_FOUND)


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that is not there yet.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Copy an SQLite database to a file, while processes work.

    The copy is of one moment, checked, and on the disk; only you can read it. For a PostgreSQL database, use pg_dump.
    """
    from db.backup import BackupError, back_up
    from db.url import parse_url, sqlite_file

    settings = load_settings()
    settings.require_files()
    url = settings.database_url.get_secret_value()
    source = sqlite_file(url)
    if source is None:
        fail(f"this database is backed up by PostgreSQL's own tool: {_pg_dump(parse_url(url), file)}")
    try:
        with lasting("copying the database"):
            size = back_up(source, file)
    except BackupError as error:
        fail(str(error), status=NOT_FOUND)
    if as_json:
        print_json({"file": str(file), "bytes": size})
    else:
        print_lines([f"wrote {file}: {size} bytes, checked; it has every delivery, keep it secret"])


def _pg_dump(url: URL, file: Path) -> str:
    """Return the command, without a password, which PGPASSWORD or ~/.pgpass has."""
    import shlex

    from sqlalchemy import URL

    # Leaves out what has a password; the rest of the query says where the server is, and how to reach it.
    query = {name: value for name, value in url.query.items() if "password" not in name}
    shown = URL.create("postgresql", url.username, None, url.host, url.port, url.database, query)
    return shlex.join(["pg_dump", "--format=custom", f"--file={file}", shown.render_as_string()])


@app.command("copy")
def copy(
    source: Annotated[Path, typer.Option("--from", metavar="FILE", help="The SQLite database.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Fill this node's new, empty database from an SQLite database.

    All or nothing. Stop every process first. DATABASE_URL names the new database, which `federation upgrade` has made;
    the old one is only read.
    """
    from db.copying import CopyError, copy_database

    start_logging(LogLevel.WARNING)
    settings = load_settings()
    settings.require_files()
    try:
        with lasting("copying the rows"):
            copied = copy_database(source, settings.database_url.get_secret_value())
    except CopyError as error:
        fail(str(error), status=NOT_FOUND)
    tasks = interrupts.run(tasks_in(source))
    if as_json:
        print_json({"rows": copied.rows, "left_to_host": copied.left_to_host, "tasks_left": tasks})
    else:
        print_lines(_told(copied, source, tasks))


async def tasks_in(file: Path) -> int:
    """Count the application's tasks that have not ended in the queues of an SQLite database; 0 if it has no queues."""
    from sqlalchemy import URL

    from federation.base.queues.queue import TASKS_QUEUE_NAME
    from workers import StorageError
    from workers.storage.sql import SqlStorage

    storage = SqlStorage(URL.create("sqlite", database=str(file)), TASKS_QUEUE_NAME)
    try:
        await storage.connect()
    except StorageError:  # it has no tables of queues
        return 0
    try:
        counts = await storage.counts()
    finally:
        await storage.disconnect()
    return sum(number for state, number in counts.items() if not state.is_final)


def _told(copied: Copied, source: Path, tasks: int) -> list[str]:
    lines = [f"copied {rows} of {table}" for table, rows in copied.rows.items() if rows]
    if copied.left_to_host:
        tables = ", ".join(copied.left_to_host)
        lines.append(f"not copied: {tables}, which are a host application's own; move them as it says")
    if tasks:
        lines.append(f"not copied: {tasks} of the application's tasks, which are in the queue of {source} alone")
    return [*lines, "every delivery is in the new database; `federation run` makes their jobs anew"]
