"""What the analytics raise for the one who started them: each message is one line that says what to do."""

from __future__ import annotations

import re
from typing import Final

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Unavailable|Unusable)\b: ")
"""The line that ends a traceback."""


class AnalyticsError(Exception):
    """The run cannot go on, and nothing half-done was left in place."""


class JavaNotFound(AnalyticsError):
    """No Java that Spark can run on."""


class DatabaseUnavailable(AnalyticsError):
    """The application's database does not answer, or lacks our tables."""


class DriverNotFound(AnalyticsError):
    """Spark has no JDBC driver for the database."""


class DamagedExport(AnalyticsError):
    """A file among the exports is not what we write; the message names it."""


class DirectoryUnusable(AnalyticsError):
    """A directory given to read from or write to is none that can be used so."""


def first_cause(error: BaseException) -> str:
    """What Spark's exception comes from, in one line: a Python worker's traceback's last, else its first."""
    lines = str(error).splitlines() or [type(error).__name__]
    ended = [line for line in lines[1:] if _RAISED.match(line)]
    return ended[0].strip() if ended else lines[0].strip()
