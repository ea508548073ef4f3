"""How a command says that it could not do what it was asked: on stderr, in one line where one is enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sqlalchemy.exc import SQLAlchemyError

NOT_FOUND: Final = 1
USAGE_ERROR: Final = 2

_EXTRAS: Final = {
    "fastapi": "node",
    "uvicorn": "node",
    "prometheus_client": "metrics",
    "msgpack": "redis",
    "redis": "bullmq",
    "bullmq": "bullmq",
    "psycopg": "postgres",
    "py4j": "analytics",
    "pyarrow": "analytics",
    "pyspark": "analytics",
}
"""Which extra has the package that is missing."""


def fail(*lines: str, status: int = USAGE_ERROR) -> NoReturn:
    """The process ends with `status` and these lines on stderr."""
    print("federation:", *lines, sep="\n  " if len(lines) > 1 else " ", file=sys.stderr)  # noqa: T201 - what this is for
    sys.exit(status)


def complete(action: Callable[[], object]) -> None:
    """It is done; where it cannot be, the process ends with 2 and what to do on stderr, or 130 after Ctrl-C."""
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        lines = explain(error)
        if not lines:
            raise
        fail(*lines)


def explain(error: BaseException) -> list[str]:
    """What to tell who started this, nothing for what only a traceback explains."""
    # Here, because a command that succeeds need not load what could have failed.
    from alembic.util import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    from db.host import HostTablesError
    from db.url import DatabaseUrlError
    from federation.analytics.errors import AnalyticsError
    from federation.base.errors import ConfigurationError, Unreachable
    from federation.protocol.errors import UrlError
    from workers import StorageError, WorkersError

    match error:
        case BaseExceptionGroup():
            explained = [explain(each) for each in error.exceptions]
            return [line for lines in explained for line in lines] if all(explained) else []
        case ConfigurationError(problems=(problem,)):
            return [problem]
        case ConfigurationError():
            return ["this node's settings need attention:", *error.problems]
        case StorageError():
            return [str(error), "where a queue in a database lacks tables, `federation upgrade` makes them"]
        case (
            HostTablesError()
            | UrlError()
            | WorkersError()
            | CommandError()
            | Unreachable()
            | AnalyticsError()
            | DatabaseUrlError()
        ):
            return [str(error)]
        case OSError():
            return [str(error) or "something did not answer in time"]
        case SQLAlchemyError():
            return [_database_problem(error)]
        case ModuleNotFoundError(name=str(name)) if name in _EXTRAS:
            return [f"this needs more packages: pip install 'federation-delivery[{_EXTRAS[name]}]'"]
        case _:
            return []


def _database_problem(error: SQLAlchemyError) -> str:
    """Told by the error's type, the driver's own if it has one; its text may quote a URL or a row."""
    from db.errors import is_outage

    kind = type(error.__cause__ or error).__name__
    if is_outage(error):
        return f"the database cannot be used: {kind}; is DATABASE_URL right, and the server up?"
    return f"the database answers, but refuses: {kind}; `federation doctor` looks at its tables"
