"""`column IN (a list)`, on PostgreSQL as one text, however long the list is.

SQLAlchemy's `in_` writes a parameter for each element. Then a statement has another text for each length, which
PostgreSQL parses and plans anew each time. A delivery asks several such questions. SQLite has no arrays, but prepares a
text in microseconds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Text, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapped
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement


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
    """Make the condition that the column, a text, is in the list that is the statement's parameter `name`."""
    return _Among(column, bindparam(name, type_=ARRAY(Text())))
