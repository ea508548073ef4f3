"""Connections to PostgreSQL that a silent server does not keep for ever; psycopg, an extra, has to be there.

Theory of operation. The kernel gives up a server that is gone (`engines.py` says when). The kernel of a frozen server
acknowledges what it is sent, as does a balancer that has lost the server, and libpq waits for an answer as long. So a
connection closes itself when its server owes something, and for some time nothing has come. What was asked may have
been done, as whenever a connection breaks. SQLAlchemy then empties the pool: the others are most likely as silent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen

T = TypeVar("T")

SILENCE: Final = timedelta(seconds=60)
"""Ours take seconds, also over ten million rows. A statement that waits for a lock is as silent."""
_SILENCE_OF_PING: Final = timedelta(seconds=10)
"""What an idle connection is tried by waits for nothing."""


class ServerSilent(psycopg.OperationalError):
    """The server owed an answer and said nothing for too long, so the connection was closed."""


class PlainConnection(psycopg.Connection[Any]):
    """One for threads, of the kind above."""

    silence = SILENCE

    def wait(self, gen: PQGen[T], *more: Any, **named: Any) -> T:  # as psycopg has it
        return super().wait(_bounded(gen, self), *more, **named)


class TaskConnection(psycopg.AsyncConnection[Any]):
    """One for coroutines, of the kind above."""

    silence = SILENCE

    async def wait(self, gen: PQGen[T], *more: Any, **named: Any) -> T:  # as psycopg has it
        return await super().wait(_bounded(gen, self), *more, **named)


@contextmanager
def impatient(connection: object) -> Iterator[None]:
    """Wait less for what one of the connections above is tried by."""
    assert isinstance(connection, PlainConnection | TaskConnection)
    connection.silence, usual = _SILENCE_OF_PING, connection.silence
    try:
        yield
    finally:
        connection.silence = usual


def _bounded(gen: PQGen[T], connection: PlainConnection | TaskConnection) -> PQGen[T]:
    """Go on with what psycopg waits for, which it looks at ten times a second, until that has been silent for long."""
    heard = time.monotonic()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            now = time.monotonic()
            if ready:
                heard = now
            elif now - heard > connection.silence.total_seconds():
                gen.close()
                connection.pgconn.finish()
                raise ServerSilent(f"the server has been silent for {now - heard:.0f} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result
