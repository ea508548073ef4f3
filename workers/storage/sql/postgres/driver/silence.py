"""Our own connections to PostgreSQL: a server that is silent for too long counts as absent.

Theory of operation. `lock_timeout` bounds what the server waits for, and nothing bounds our wait for the server: behind
a frozen server, or a balancer that lost it, a connection stays open for ever, and libpq waits as long. So each wait
ends when for some seconds nothing has come, and nothing has gone; then the connection is closed. What was asked may
have been done. Other connections of the same age go the same way, most likely: `Patience` tells so, and those who stand
in line since before fail with it. The event loop keeps the time by itself, see `loop_step.py`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import ConnectionTimeout

T = TypeVar("T")

_LOOKS_SECONDS: Final = 0.25
"""How often a thread that waits for the server looks whether that is still worth it."""


class Patience:
    """How long the connections of one process to a database are waited for; touched by all its threads.

    `on_silence` is called, in any thread, when one of them was given up.
    """

    def __init__(self, limit: timedelta | None, on_silence: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._on_silence = on_silence
        self._lock = threading.Lock()
        self._silent_since = -math.inf
        self._ends = math.inf

    @classmethod
    def endless(cls) -> Patience:
        """Make one that waits for as long as it takes."""
        return cls(None)

    def connect(self, *arguments: Any, **options: Any) -> OwnConnection:  # as psycopg takes them
        """Open a connection that is waited for like this.

        Raises:
            psycopg.OperationalError: the server is not there, or silent.
        """
        began = time.monotonic()
        try:
            connection = OwnConnection.connect(*arguments, **options)
        except ConnectionTimeout:
            self.lose(began)
            raise
        connection.patience, connection.silence = self, self.limit
        return connection

    def end(self, after: timedelta) -> None:
        """Wait for nothing any more once that time is over."""
        self._ends = time.monotonic() + after.total_seconds()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends

    def was_lost(self, since: float) -> bool:
        """Tell whether the server was found to be silent since then, by `time.monotonic`, or later."""
        with self._lock:
            return self._silent_since >= since

    def lose(self, since: float) -> None:
        """Note that a connection was given up whose server has been silent since then."""
        with self._lock:
            self._silent_since = max(self._silent_since, since)
        self._on_silence()


class OwnConnection(psycopg.Connection[tuple[object, ...]]):
    """A connection that closes itself, with `OperationalError`, when its server owes something and is silent.

    `silence` is how long that may last; None: as long as it takes.
    """

    silence: timedelta | None = None
    patience: Patience = Patience.endless()

    def wait(self, gen: PQGen[T], interval: float = _LOOKS_SECONDS, *more: Any, **named: Any) -> T:  # as psycopg has it
        return super().wait(self._bounded(gen), _LOOKS_SECONDS, *more, **named)

    def hang_up(self, since: float) -> psycopg.OperationalError:
        """Close the connection, as nothing was heard since then, and return the error that says so."""
        self.pgconn.finish()
        self.patience.lose(since)
        return psycopg.OperationalError(f"the server has been silent for {time.monotonic() - since:.1f} s")

    def _bounded(self, gen: PQGen[T]) -> PQGen[T]:
        heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    heard = now
                elif self.patience.is_over or (self.silence is not None and now - heard > self.silence.total_seconds()):
                    gen.close()
                    raise self.hang_up(heard)
                wanted = gen.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result
