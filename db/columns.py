"""Column types, and the two table bases: what is ours to migrate, and what belongs to the host application."""

from __future__ import annotations

import secrets
import time
import uuid
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from sqlalchemy import DateTime, Dialect, Text, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapped, registry
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator
from sqlmodel import SQLModel

E = TypeVar("E", bound=StrEnum)

DEFAULT_WIRE = "sealed"
"""The wire of rows that name none, as other producers' are written."""


class FederationTable(SQLModel, registry=registry()):
    """Base of every table the migrations create; its metadata is what they are compared with.

    A registry of its own keeps these tables out of `SQLModel.metadata`, where a host application that runs in the
    same process may have its own model of `follows` or `posts`. pydantic's validators, which rows are made without, are
    not built: that took a fifth of the time in which the tables are imported.
    """

    model_config = {"defer_build": True}


class HostTable(SQLModel, registry=registry()):
    """Base of the tables the host application owns: read and written here, never created by a migration."""

    model_config = {"defer_build": True}


class UtcDateTime(TypeDecorator[datetime]):
    """An aware `datetime` in Python, `timestamp` without time zone holding UTC in the database.

    Naive values are refused: whether they meant UTC or local time is unknown.
    """

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive datetime {value.isoformat()}: pass an aware one, such as datetime.now(UTC)")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class TextEnum(TypeDecorator[E], Generic[E]):
    """A `StrEnum` in Python, `text` in the database, so that a new member needs no migration."""

    impl = Text
    cache_ok = True

    def __init__(self, members: type[E]) -> None:
        super().__init__()
        self.members = members

    def process_bind_param(self, value: E | None, dialect: Dialect) -> str | None:
        return None if value is None else self.members(value).value

    def process_result_value(self, value: str | None, dialect: Dialect) -> E | None:
        return None if value is None else self.members(value)


def new_id() -> str:
    """Return a fresh UUIDv4 as text, the form every node uses for identifiers."""
    return str(uuid.uuid4())


def new_timed_id() -> str:
    """Return a fresh UUIDv7 as text (RFC 9562): one that was made in a later millisecond sorts behind.

    Indexes of such ids grow at one end. Ids at random touch another page for each row, which is read and written from
    the disk once an index is larger than memory.
    """
    milliseconds, random = time.time_ns() // 1_000_000, secrets.randbits(74)
    high, low = random >> 62, random & (1 << 62) - 1
    return str(uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low))


class _Among(FunctionElement[bool]):
    """Whether its first clause is among the elements of its second one.

    It has no type: what is Boolean would be compared with 1 on SQLite, which then uses no index.
    """

    inherit_cache = True


@compiles(_Among)
def _one_by_one(element: _Among, compiler: SQLCompiler, **options: Any) -> str:
    column, texts = element.clauses
    return compiler.process(column.in_(bindparam(texts.key, expanding=True)), **options)


@compiles(_Among, "postgresql")
def _as_array(element: _Among, compiler: SQLCompiler, **options: Any) -> str:
    column, texts = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY ({texts})"


def among(column: ColumnElement[Any] | Mapped[Any], name: str) -> ColumnElement[bool]:
    """Make the condition that the column, a text, is in the list that is the statement's parameter `name`.

    SQLAlchemy's `in_` writes a parameter for each element. Then a statement has another text for each length, which
    PostgreSQL parses and plans anew each time, so there the list is one array. A delivery asks several such questions.
    SQLite has no arrays, but prepares a text in microseconds.
    """
    return _Among(column, bindparam(name, type_=ARRAY(Text())))
