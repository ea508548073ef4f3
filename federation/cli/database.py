"""`federation db`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.options import AsJson, group
from federation.cli.output import print_json, print_lines
from federation.cli.problems import NOT_FOUND
from federation.cli.running import upgrade
from federation.cli.session import LogLevel, load_settings, start_logging

if TYPE_CHECKING:
    from federation.base.reach import Schema

app = group("The database's tables: check, upgrade.")


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
    from federation.base.reach import schema_of

    start_logging(LogLevel.WARNING)
    settings = load_settings()
    settings.require_files()

    async def look() -> Schema:
        database = Database(settings.database_url.get_secret_value())
        try:
            return await schema_of(database)
        finally:
            await database.close()

    schema = asyncio.run(look())
    version = schema.version
    if as_json:
        versions = {"current": version.current, "expected": version.expected}
        print_json({**versions, "up_to_date": schema.problem is None, "missing": schema.missing})
    else:
        print_lines([schema.problem or f"the database is at migration {version.current}, and nothing is missing"])
    if schema.problem is not None:
        raise typer.Exit(NOT_FOUND)
