"""Transactions of plain code: threads and scripts without an event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from db.engines import writing_engine
from db.url import parse_url


class PlainDatabase:
    """Pooled synchronous sessions on an SQLite file or a PostgreSQL database; any thread may use them.

    A fork's child opens connections of its own and leaves the parent's alone.

    Raises:
        DatabaseUrlError: as `Database`.
    """

    def __init__(self, url: str) -> None:
        self._url = parse_url(url)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._thread = threading.local()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Commit what the block did when it ends, and undo it if it raises; see `Database.transaction`.

        Raises:
            RuntimeError: this thread is inside `transaction()` already; hand its session on instead.
        """
        if getattr(self._thread, "writing", False):
            raise RuntimeError("transaction() inside transaction() of the same thread; pass the outer session on")
        self._thread.writing = True
        try:
            with Session(self._opened(), expire_on_commit=False) as session, session.begin():
                yield session
        finally:
            self._thread.writing = False

    def close(self) -> None:
        """Close every idle connection; end the sessions first. A later transaction opens new ones."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=self._pid == os.getpid())

    def forget(self) -> None:
        """Leave the connections to the parent: this is the child of a fork."""
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._thread = threading.local()
        self._pid = os.getpid()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=False)

    def _opened(self) -> Engine:
        if self._pid != os.getpid():
            self.forget()
        with self._lock:
            if self._engine is None:
                self._engine = writing_engine(self._url)
            return self._engine
