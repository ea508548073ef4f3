"""Pages of long lists: each reads a bounded number of rows, whatever is asked for.

Theory of operation. A list is in the order of an index, and a page goes on behind the key that the page before ended
with, so the database steps to that key, however long the list is. What no index is sorted by is looked at row by row,
but at no more than `MOST_SCANNED` rows for one page: a page may therefore be shorter than was asked for, or empty, and
still have a next one. A list over several ranges of an index, as of two states, is merged from them, as far as each was
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, bindparam, func, literal, select, true, tuple_, union_all

from db import Database

MOST_SHOWN: Final = 200
"""The greatest limit of a page; with the rows that are scanned, it reads less than a thousand."""
MOST_SCANNED: Final = 750

T = TypeVar("T")
Key = tuple[Any, ...]  # Any: values of the columns that the list is sorted by


class CursorError(ValueError):
    """A page cannot go on from this: it is no cursor of its list."""

    def __init__(self) -> None:
        super().__init__("this is no cursor of this list")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage(Generic[T]):
    """Part of a list. `after` continues it, None at its end; it may have fewer rows than asked for, even none."""

    rows: tuple[T, ...]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Rows in the order of `keys`, which an index has behind what each of `ranges` fixes.

    `wanted` is looked at row by row. The last of the keys tells rows apart.
    """

    keys: Sequence[ColumnElement[Any]]  # Any: columns of any type
    ranges: Sequence[ColumnElement[bool]]
    wanted: ColumnElement[bool] | None = None
    descending: bool = False

    async def keys_of_page(self, database: Database, *, limit: int, after: Key | None) -> tuple[list[Key], Key | None]:
        """Return up to *limit* keys behind *after*, and the key behind which the list goes on, None at its end."""
        limit = min(max(limit, 1), MOST_SHOWN)
        most = MOST_SCANNED // len(self.ranges)
        if self.wanted is None:
            most = min(most, limit + 1)
        keys: list[Key] = []
        read = Counter[int]()
        for number, is_wanted, *values in await database.rows(self._query(most, after)):
            read[number] += 1
            key = tuple(values)
            if is_wanted and len(keys) == limit:
                return keys, keys[-1]
            if is_wanted:
                keys.append(key)
            if read[number] == most:  # what this range has behind it was not read, and may come before all others
                return keys, key
        return keys, None

    def _query(self, most: int, after: Key | None) -> Select[*tuple[Any, ...]]:
        is_wanted = true() if self.wanted is None else self.wanted
        behind = [] if after is None else [self._behind(after)]
        order = [key.desc() if self.descending else key for key in self.keys]
        parts = [
            select(
                literal(number).label("range"),
                func.coalesce(is_wanted, False).label("is_wanted"),
                *(key.label(f"key{index}") for index, key in enumerate(self.keys)),
            )
            .where(within, *behind)
            .order_by(*order)
            .limit(most)
            .subquery(f"range{number}")
            for number, within in enumerate(self.ranges)
        ]
        union = union_all(*(select(part) for part in parts)).subquery("ranges")
        merged = [union.c[f"key{index}"] for index in range(len(self.keys))]  # by the database, whose order texts have
        return select(union).order_by(*(key.desc() if self.descending else key for key in merged))

    def _behind(self, after: Key) -> ColumnElement[bool]:
        values = [bindparam(None, value, type_=key.type) for key, value in zip(self.keys, after, strict=True)]
        keys = tuple_(*self.keys)
        return keys < tuple_(*values) if self.descending else keys > tuple_(*values)


def timed_cursor(key: Key | None) -> str | None:
    """Write the key of a list by time as a cursor; None at its end."""
    return None if key is None else f"{key[0].isoformat()} {key[1]}"


def timed_key(cursor: str | None, build: Callable[[str], object]) -> Key | None:
    """Read a cursor of `timed_cursor`; *build* makes what follows the time.

    Raises:
        CursorError: it is none.
    """
    if cursor is None:
        return None
    moment, space, rest = cursor.partition(" ")
    try:
        at = datetime.fromisoformat(moment)
        key = (at.astimezone(UTC), build(rest))
    except (ValueError, OverflowError):
        raise CursorError from None
    if at.tzinfo is None or not space or "\x00" in rest:
        raise CursorError
    return key


def small(text: str) -> int:
    """Return the number, if a database has room for it.

    Raises:
        ValueError: it is none, or has not.
    """
    number = int(text)
    if abs(number) >= 1 << 31:
        raise ValueError("too large")
    return number
