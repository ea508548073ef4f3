"""The errors of the analytics, for whoever started them: each message is one line that says what to do."""

from __future__ import annotations

import re
from typing import Final

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Unavailable|Unusable)\b: ")
"""Matches the line that ends a traceback."""


class AnalyticsError(Exception):
    """The run cannot go on, and nothing half-done was left in place."""


class JavaNotFound(AnalyticsError):
    """There is no Java that Spark can run on."""


class DatabaseUnavailable(AnalyticsError):
    """The application's database does not answer, or lacks our tables."""


class DriverNotFound(AnalyticsError):
    """Spark has no JDBC driver for the database."""


class DamagedExport(AnalyticsError):
    """A file among the exports is not what we write; the message names it."""


class DirectoryUnusable(AnalyticsError):
    """A directory given to read from or write to cannot be used like that."""


def first_cause(error: BaseException) -> str:
    """Return the cause of Spark's exception in one line: the last of a Python worker's traceback, or else its first."""
    lines = str(error).splitlines() or [type(error).__name__]
    ended = [line for line in lines[1:] if _RAISED.match(line)]
    return ended[0].strip() if ended else lines[0].strip()
