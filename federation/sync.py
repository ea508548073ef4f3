"""Owing deliveries from plain code: threads, scripts, Flask, Django, `def` endpoints of FastAPI, Celery tasks.

The calls of `federation`, without `await`. They write through the caller's own connection, in the caller's thread and
transaction; one background loop per process does what follows the commit. Any thread may call them, after a fork too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from db.plain import PlainDatabase
from federation.app import Federation
from federation.delivery.plain_outbox import PlainOutbox
from federation.process import background_node, close_background_node

Caller: TypeAlias = Session | Connection
"""Whose transaction a delivery is owed in; a SQLModel session is a `Session` too."""


class _Plain:
    """This process's side of the node that serves plain code."""

    def __init__(self, node: Federation) -> None:
        self.node = node
        self.pid = os.getpid()
        self.database = PlainDatabase(node.settings.database_url.get_secret_value())
        outbox = node.outbox
        self.outbox = PlainOutbox(outbox.owing, joins=outbox.joins, add=outbox.add)


class _Process:
    plain: _Plain | None = None


def _plain() -> _Plain:
    found = _Process.plain
    if found is None or found.pid != os.getpid():
        found = _Process.plain = _Plain(background_node())
    return found


@contextmanager
def transaction() -> Iterator[Session]:
    """`with transaction() as session:` commits, then the jobs of every delivery enqueued in it follow.

    The session is on the node's own database.

    Raises:
        RuntimeError: this thread is inside such a block already; hand its session on instead.
    """
    plain = _plain()
    with plain.database.transaction() as session, plain.outbox.owed_in(session):
        yield session


def enqueue_delivery(
    session: Caller,
    name: str,
    target_url: str,
    server_url: str,
    payload: str,
    *,
    ordering_key: str | None = None,
) -> str:
    """A delivery is owed from the moment `session` commits; returns its id. See `Outbox.enqueue_delivery`."""
    plain = _plain()

    def owe(inside: Session) -> str:
        planned = plain.node.outbox.owing.delivery(inside, name, target_url, server_url, payload, ordering_key)
        plain.outbox.plan(inside, planned)
        return planned.owed[0]

    return plain.outbox.within(session, owe, "enqueue_delivery")


def close() -> None:
    """What this process has open for plain code is closed; the next call opens it anew."""
    plain, _Process.plain = _Process.plain, None
    if plain is not None:
        plain.database.close()
    close_background_node()
