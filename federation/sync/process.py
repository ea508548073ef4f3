"""This process's side of the node for synchronous code: made on first use, in any thread, and anew after a fork."""

from __future__ import annotations

import os
from typing import TypeAlias

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from db.session import PlainDatabase
from federation.delivery.outbox.sync import PlainOutbox
from federation.runtime.composition import Federation
from federation.runtime.nodes import background_node, close_background_node
from workers.borrowed import DbApiConnection, DjangoConnection
from workers.homes import ForkLock, keep_inherited

Caller: TypeAlias = "Session | Connection | DjangoConnection | DbApiConnection"
"""The owner of the transaction: an SQLAlchemy or SQLModel session, an SQLAlchemy connection, Django's
`connection` in a `transaction.atomic` block, or one of `sqlite3` or psycopg 3."""


class PlainNode:
    """A node, with what synchronous code has in addition."""

    def __init__(self, node: Federation) -> None:
        self.node = node
        self.pid = os.getpid()
        self.database = PlainDatabase(node.settings.database_url.get_secret_value())
        self.outbox = PlainOutbox(node.outbox)


class _SyncProcess:
    """The state of this process, written under the lock."""

    lock = ForkLock()
    plain: PlainNode | None = None


def plain_node() -> PlainNode:
    """Return the one of this process."""
    found = _SyncProcess.plain
    if found is not None and found.pid == os.getpid():
        return found
    node = background_node()  # not under the lock, which work of other threads in that loop may need
    with _SyncProcess.lock:
        found = _SyncProcess.plain
        if found is not None and found.pid != os.getpid():
            keep_inherited(found)
            found = None
        if found is None:
            found = _SyncProcess.plain = PlainNode(node)
    return found


def close() -> None:
    """Close what this process has open for synchronous code. The next call opens it anew."""
    with _SyncProcess.lock:
        plain, _SyncProcess.plain = _SyncProcess.plain, None
    if plain is not None:
        plain.database.close()
    close_background_node()
