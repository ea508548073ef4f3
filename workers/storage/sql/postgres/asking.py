"""A step that asks for one statement after the other, whoever carries them out: a thread, or the event loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import TextClause

from workers.storage.sql.direct import Values
from workers.storage.sql.rows import Transaction

T = TypeVar("T")

Ask: TypeAlias = "tuple[TextClause, Values] | Callable[[Transaction], object]"
"""A statement, to be answered with its rows, or any work that may block, to be answered with what it returns."""

Asking: TypeAlias = "Generator[Ask, Any, T]"  # answers of any type, as rows have columns of any
"""What a step asks for; it returns the step's result."""


def run_blocking(transaction: Transaction, asking: Asking[T], first: Ask | None = None) -> T:
    """Carry the step out here, blocking; if it has begun elsewhere, from what it asks for `first`."""
    try:
        ask = next(asking) if first is None else first
        while True:
            try:
                answer = ask(transaction) if callable(ask) else transaction.connection.execute(*ask)
            except BaseException as error:
                ask = asking.throw(error)
            else:
                ask = asking.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
