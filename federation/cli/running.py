"""Commands that set a node up and run it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from federation.cli.options import MetricsPort, group
from federation.cli.queues import list_workers
from federation.cli.session import LogLevel, start_logging

if TYPE_CHECKING:
    from federation.base.settings import Settings
    from workers.storage.sql import SqlStorage

ENV_FILE: Final = Path(".env")

workers = group("The delivering side.")
node = group("The inbound side.")


def add_to(app: typer.Typer) -> None:
    """The commands are `app`'s."""
    app.command("init")(init)
    app.command("upgrade")(upgrade_tables)
    app.command("run")(run_all)
    workers.command("list")(list_workers)
    app.add_typer(workers, name="workers")
    app.add_typer(node, name="node")


def init(
    url: Annotated[
        str, typer.Option("--url", help="This node's own URL, under which others know it.")
    ] = "http://127.0.0.1:8000",
) -> None:
    """Write a .env with fresh keys and create the database."""
    from federation.base.settings import DEFAULT_DATABASE_URL, Settings, write_env_file
    from federation.protocol.keys import generate_own_keys
    from federation.protocol.urls import canonical_origin

    own_url = canonical_origin(url)
    values = {"BETTER_AUTH_URL": own_url, **generate_own_keys().to_env(), "DATABASE_URL": DEFAULT_DATABASE_URL}
    if port := urlsplit(own_url).port:
        values["FEDERATION_PORT"] = str(port)
    try:
        write_env_file(ENV_FILE, values)
        typer.echo(f"wrote {ENV_FILE} with fresh keys for {own_url}; keep it secret")
    except FileExistsError:
        typer.echo(f"{ENV_FILE} exists and stays as it is")
    upgrade(Settings.load())
    typer.echo("the database is ready; `federation run` starts the node")


def upgrade_tables() -> None:
    """Bring the database's tables up to date."""
    from federation.base.settings import Settings

    upgrade(Settings.load())


def upgrade(settings: Settings) -> None:
    """The tables of the application and of its queues are those of this version.

    Raises:
        ConfigurationError: something that an earlier upgrade had made is missing.
    """
    from db import migrate
    from federation.base.queues import QUEUE_NAMES
    from federation.base.storages import open_storage
    from workers.storage.sql import SqlStorage

    url = settings.database_url.get_secret_value()
    migrate.upgrade(url)
    for queue in QUEUE_NAMES:
        storage = open_storage(settings, queue)
        if isinstance(storage, SqlStorage):
            asyncio.run(_prepare(storage))
    asyncio.run(_confirm(url))


async def _confirm(url: str) -> None:
    """No migration brings back what was taken away after it: an upgrade that leaves gaps is none."""
    from db import Database
    from federation.base.reach import require_schema

    database = Database(url)
    try:
        await require_schema(database)
    finally:
        await database.close()


async def _prepare(storage: SqlStorage) -> None:
    """The queue is known to its database: nobody has to write that later, perhaps while a transaction is open."""
    await storage.migrate()
    await storage.connect()
    await storage.disconnect()


def run_all(metrics_port: MetricsPort = None) -> None:
    """Deliver and serve, in one process.

    Until SIGTERM or Ctrl-C; a second signal skips the grace.
    """
    _run(deliver=True, serve=True, metrics_port=metrics_port)


@workers.command("run")
def run_workers(metrics_port: MetricsPort = None) -> None:
    """Deliver until stopped.

    By SIGTERM or Ctrl-C; a second signal skips the grace.
    """
    _run(deliver=True, serve=False, metrics_port=metrics_port)


@node.command("serve")
def serve() -> None:
    """Serve until stopped.

    By SIGTERM or Ctrl-C; a second signal skips the grace.
    """
    _run(deliver=False, serve=True)


def _run(*, deliver: bool, serve: bool, metrics_port: int | None = None) -> None:
    from federation.base.settings import Settings
    from federation.run import run

    settings = Settings.load_node()
    start_logging(LogLevel.INFO)
    asyncio.run(run(settings, workers=deliver, node=serve, metrics_port=metrics_port))
