"""The errors of the analytics, for whoever started them: each message is one line that says what to do."""

from __future__ import annotations

import re
from typing import Final

_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Unavailable|Unusable)\b: ")
"""Matches the line that ends a traceback."""

_FILE: Final = re.compile(r"file:(?://)?(/[^\n]*?\.parquet)\b")
_COLUMN: Final = re.compile(r"[Cc]olumn:? \[([^\]\n]+)\]")


class AnalyticsError(Exception):
    """The run cannot go on, and nothing half-done was left in place."""


class JavaNotFound(AnalyticsError):
    """There is no Java that Spark can run on."""


class DatabaseUnavailable(AnalyticsError):
    """The application's database does not answer, or lacks our tables."""


class DamagedExport(AnalyticsError):
    """A file among the exports is not what we write; the message names it."""


class DirectoryUnusable(AnalyticsError):
    """A directory given to read from or write to cannot be used like that."""


class StoreUnusable(AnalyticsError):
    """A store does not do what it is asked; the message names it."""


class StoreChanged(AnalyticsError):
    """Another run committed to the store meanwhile, and nothing of this one is visible."""


def first_cause(error: BaseException) -> str:
    """Return the cause of Spark's exception in one line.

    This is the last line of a Python worker's traceback; else, if a file is to blame, its name; else the first line
    that tells something.
    """
    text = str(error)
    lines = text.splitlines() or [type(error).__name__]
    ended = [line for line in lines[1:] if _RAISED.match(line)]
    if ended:
        return ended[0].strip()
    if file := _FILE.search(text):
        column = _COLUMN.search(text)
        where = f"{file[1]}, column {column[1]!r}," if column else file[1]
        return f"{where} is damaged, or no Parquet that Spark can read; remove it and export its day again"
    # Java's exceptions begin with the name of the call, for whoever debugs py4j.
    return (lines[1].removeprefix(": ") if lines[1:] and lines[1].startswith(": ") else lines[0]).strip()
