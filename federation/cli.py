"""The `federation` command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from db.migrate import upgrade
from db.url import DatabaseUrlError
from federation.analytics.cli import add_commands
from federation.analytics.errors import AnalyticsError
from federation.errors import ConfigurationError
from federation.logs import configure_logging
from federation.protocol.errors import UrlError
from federation.protocol.keys import generate_own_keys
from federation.protocol.urls import canonical_origin
from federation.queues import QUEUE_NAMES, open_storage
from federation.run import run
from federation.settings import DEFAULT_DATABASE_URL, Settings, write_env_file
from workers import StorageError, WorkersError
from workers.storage.sql import SqlStorage

ENV_FILE: Final = Path(".env")
USAGE_ERROR: Final = 2

_EXTRAS: Final = {
    "bullmq": "bullmq",
    "fastapi": "node",
    "prometheus_client": "metrics",
    "psycopg": "postgres",
    "py4j": "analytics",
    "pyarrow": "analytics",
    "pyspark": "analytics",
    "redis": "bullmq",
    "uvicorn": "node",
}
"""The extra that brings a module."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ends the process with 0, or with 2 and what to do on stderr."""
    options = _parser().parse_args(arguments)
    complete(lambda: options.command(options))


def complete(action: Callable[[], None]) -> None:
    """It is done; where it cannot be, the process ends with 2 and what to do on stderr."""
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        lines = _explain(error)
        if not lines:
            raise
        _fail(*lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="federation", description="A federated server's delivery and inbound side.")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="write a .env with fresh keys and create the database")
    init.add_argument("--url", default="http://127.0.0.1:8000", help="this node's own URL (default: %(default)s)")
    init.set_defaults(command=_init)

    migrate = commands.add_parser("upgrade", help="bring the database's tables up to date")
    migrate.set_defaults(command=lambda _: _upgrade(Settings.load()))

    everything = commands.add_parser("run", help="deliver and serve, in one process")
    everything.set_defaults(command=lambda options: _run(options, workers=True, node=True))
    _add_metrics_port(everything)

    workers = commands.add_parser("workers", help="the delivering side").add_subparsers(
        required=True, metavar="COMMAND"
    )
    deliver = workers.add_parser("run", help="deliver until stopped")
    deliver.set_defaults(command=lambda options: _run(options, workers=True, node=False))
    _add_metrics_port(deliver)

    node = commands.add_parser("node", help="the inbound side").add_subparsers(required=True, metavar="COMMAND")
    serve = node.add_parser("serve", help="serve until stopped")
    serve.set_defaults(command=lambda options: _run(options, workers=False, node=True))

    add_commands(commands)
    return parser


def _add_metrics_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics on 127.0.0.1:PORT")


def _init(options: argparse.Namespace) -> None:
    own_url = canonical_origin(options.url)
    values = {"BETTER_AUTH_URL": own_url, **generate_own_keys().to_env(), "DATABASE_URL": DEFAULT_DATABASE_URL}
    if port := urlsplit(own_url).port:
        values["FEDERATION_PORT"] = str(port)
    try:
        write_env_file(ENV_FILE, values)
        print(f"wrote {ENV_FILE} with fresh keys for {own_url}; keep it secret")  # noqa: T201
    except FileExistsError:
        print(f"{ENV_FILE} exists and stays as it is")  # noqa: T201
    _upgrade(Settings.load())
    print("the database is ready; `federation run` starts the node")  # noqa: T201


def _upgrade(settings: Settings) -> None:
    upgrade(settings.database_url.get_secret_value())
    for queue in QUEUE_NAMES:
        storage = open_storage(settings, queue)
        if isinstance(storage, SqlStorage):
            asyncio.run(_prepare(storage))


async def _prepare(storage: SqlStorage) -> None:
    """The queue is known to its database: nobody has to write that later, perhaps while a transaction is open."""
    await storage.migrate()
    await storage.connect()
    await storage.disconnect()


def _run(options: argparse.Namespace, *, workers: bool, node: bool) -> None:
    settings = Settings.load_node()
    configure_logging(options.log_level)
    metrics_port = options.metrics_port if workers else None
    asyncio.run(run(settings, workers=workers, node=node, metrics_port=metrics_port))


def _explain(error: BaseException) -> list[str]:
    """What to tell who started this, nothing for what only a traceback explains."""
    match error:
        case BaseExceptionGroup():
            explained = [_explain(each) for each in error.exceptions]
            return [line for lines in explained for line in lines] if all(explained) else []
        case ConfigurationError():
            return ["this node's settings need attention:", *error.problems]
        case StorageError():
            return [str(error), "`federation upgrade` makes the tables a queue in a database needs"]
        case UrlError() | WorkersError() | OSError() | CommandError() | AnalyticsError() | DatabaseUrlError():
            return [str(error)]
        case SQLAlchemyError():
            return [f"the database cannot be used: {type(error).__name__}; is DATABASE_URL right, and the server up?"]
        case ModuleNotFoundError(name=name) if name in _EXTRAS:
            return [f"this needs more packages: pip install 'federation-delivery[{_EXTRAS[name]}]'"]
        case _:
            return []


def _fail(*lines: str) -> None:
    print("federation:", *lines, sep="\n  " if len(lines) > 1 else " ", file=sys.stderr)  # noqa: T201
    sys.exit(USAGE_ERROR)
