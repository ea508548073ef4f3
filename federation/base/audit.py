"""The audit log: what operators have done, written together with what they do.

Theory of operation. An action of one transaction gets its row in that transaction (`noted`): both are there, or
neither. A longer action has a row from its beginning (`recorded`), and each of its transactions adds what it changed
to that row. So the log never says more than what happened, and what a killed process has done by then is on record,
without an end. An action that is not asked for by an operator has no order, and no row.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, bindparam, insert, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql.dml import Insert

from db import ActionSource, AdminAction, Database

MAX_CHARACTERS: Final = 500
MAX_ITEMS: Final = 20
"""How many members of a list are written down; further ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an operator wants done: who asks, by what way, the command that does it, and its arguments.

    Arguments must not be secrets. Those that are None, False or empty were not given, and are left out.
    """

    actor: str
    source: ActionSource
    action: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    server_url: str | None = None


class Record:
    """The row of an action under way; without an order there is none, and nothing is written.

    An action that goes on in another process, after a crash, goes on with its row.
    """

    def __init__(self, action_id: int | None) -> None:
        self.action_id = action_id

    def add(self, connection: Connection, number: int) -> None:
        """Count what the connection's transaction changes."""
        if self.action_id is not None and number:
            connection.execute(_ADDED, {"row": self.action_id, "more": number})


UNRECORDED: Final = Record(None)


def noted(order: Order, *, affected: int) -> Insert:
    """Return the statement that notes a whole action, for the transaction that does it."""
    now = datetime.now(UTC)
    return insert(_TABLE).values(**_begun(order, now), affected=affected, finished_at=now)


@asynccontextmanager
async def recorded(database: Database, order: Order | None) -> AsyncIterator[Record]:
    """Note an action before it begins, and at its end when, and by what, it was ended.

    Raises:
        SQLAlchemyError: the database did not take the note; nothing was begun.
    """
    if order is None:
        yield UNRECORDED
        return
    row = await database.transact(lambda connection: begin(connection, order))
    try:
        yield Record(row)
    except BaseException as error:
        ended = {"row": row, "now": datetime.now(UTC), "problem": type(error).__name__}
        with suppress(SQLAlchemyError):  # the action's own error matters more
            await database.transact(lambda connection: connection.execute(_ENDED, ended))
        raise
    ended = {"row": row, "now": datetime.now(UTC), "problem": None}
    await database.transact(lambda connection: connection.execute(_ENDED, ended))


def begin(connection: Connection, order: Order) -> int:
    """Note an action that takes further transactions. Return the number of its row."""
    values = {**_begun(order, datetime.now(UTC)), "affected": 0}
    return int(connection.execute(insert(_TABLE).values(values).returning(_TABLE.c.id)).scalar_one())


def finish(connection: Connection, action_id: int, *, error: str | None = None) -> None:
    """Note that the action is over, in the transaction that ends it."""
    connection.execute(_ENDED, {"row": action_id, "now": datetime.now(UTC), "problem": error})


def _begun(order: Order, now: datetime) -> dict[str, object]:
    given = {name: _told(value) for name, value in order.arguments.items() if value not in (None, False, (), [], "")}
    return {
        "at": now,
        "actor": _storable(order.actor),
        "source": order.source,
        "action": _storable(order.action),
        "arguments": json.dumps(given),
        "server_url": None if order.server_url is None else _storable(order.server_url),
    }


def _told(value: object) -> object:
    """Return an argument as JSON has it, cut to what an audit needs."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = [f"and {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return [*(_told(each) for each in value[:MAX_ITEMS]), *more]
    return str(value)[:MAX_CHARACTERS]


def _storable(text: str) -> str:
    """Return a text that both databases take: neither has lone surrogates, and PostgreSQL has no NUL."""
    return text[:MAX_CHARACTERS].replace("\x00", " ").encode("utf-8", "replace").decode()


_TABLE: Final = AdminAction.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core skips the ORM
_THIS: Final = _TABLE.c.id == bindparam("row")
_ADDED: Final = update(_TABLE).where(_THIS).values(affected=_TABLE.c.affected + bindparam("more"))
_ENDED: Final = update(_TABLE).where(_THIS).values(finished_at=bindparam("now"), error=bindparam("problem"))
