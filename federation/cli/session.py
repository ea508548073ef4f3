"""What commands have in common: a log level, and a node that is opened for them and closed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import typer

from federation import interrupts
from federation.cli.problems import tell

if TYPE_CHECKING:
    from db import Database
    from federation.base.settings.settings import Settings
    from federation.runtime.composition import Federation

T = TypeVar("T")


class LogLevel(StrEnum):
    """The level from which on a process logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _LogLevel:
    """The state of this process; `set_log_level` writes it."""

    log_level: LogLevel | None = None


def set_log_level(level: LogLevel | None) -> None:
    """Make commands of this process log from `level` up; None stands for their own default."""
    _LogLevel.log_level = level


def start_logging(default: LogLevel) -> None:
    """Log to stderr in this process: stdout is for results."""
    from federation.base.logs import configure_logging

    configure_logging(_LogLevel.log_level or default)


def number_lines(process: int) -> None:
    """Name this process of several, by its number, in each line of its log."""
    from structlog.contextvars import bind_contextvars

    bind_contextvars(process=process)


def load_settings(*, node: bool = False) -> Settings:
    """Load this directory's settings, with `node` those of one that delivers or serves.

    What is set without any effect is named on stderr.

    Raises:
        ConfigurationError: as `Settings.load` and `Settings.load_node`.
    """
    from federation.base.settings.misspelt import without_effect
    from federation.base.settings.settings import Settings

    try:
        return Settings.load_node() if node else Settings.load()
    finally:  # a missing setting may be there under a misspelt name
        for told in without_effect():
            typer.echo(f"federation: {told}", err=True)


def with_node(work: Callable[[Federation], Awaitable[T]]) -> T:
    """Return the result of `work` with this directory's node, whose database is up to date. It is closed afterwards.

    Raises:
        ConfigurationError: a setting is malformed, or the database has not been upgraded.
        Unreachable: the database does not answer.
    """

    async def session(settings: Settings) -> T:
        from federation.base.database_clock import DatabaseClock
        from federation.runtime.composition import Federation

        async with _closing(Federation(settings)) as federation:
            await _require(federation.database)
            if isinstance(federation.clock, DatabaseClock):
                await federation.clock.measure()
            return await work(federation)

    return _run(session)


def with_database(work: Callable[[Database], Awaitable[T]]) -> T:
    """Do the same as `with_node` for work on the database alone. The rest of the node is not even imported."""

    async def session(settings: Settings) -> T:
        from db import Database

        async with _closing(Database(settings.database_url.get_secret_value())) as database:
            await _require(database)
            return await work(database)

    return _run(session)


def _run(session: Callable[[Settings], Coroutine[object, object, T]]) -> T:
    start_logging(LogLevel.WARNING)
    settings = load_settings()
    settings.require_files()
    return interrupts.run(session(settings))


class _Closed(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closed)


@asynccontextmanager
async def _closing(opened: C) -> AsyncIterator[C]:
    from federation.base.errors import Unreachable

    try:
        yield opened
    except Unreachable as error:
        tell(error)  # now, because what does not answer may take long to close
    finally:
        await opened.close()


async def _require(database: Database) -> None:
    from federation.base.settings.reach import require_schema

    await require_schema(database)
