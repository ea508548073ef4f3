"""Job events across processes: written only while another process listens, read when the database has changed.

Theory of operation. A process with subscribers keeps a row in `workers_listeners`, valid for a minute and renewed in
time. A transaction that changes jobs of a queue with such a row of *another* process adds its events to
`workers_events`, so they appear with the commit and vanish with a rollback. Within a process, events are delivered
directly, except those of a caller's own transaction: they name no process, so every process reads them from the table.

Requests to cancel a running job are always written, because they are few. A process that listens to them alone keeps no
row, which would cause every event to be written.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Final

from sqlalchemy import text

from workers.errors import StorageUnavailable
from workers.jobs import JobEventKind
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import BATCH, Transaction
from workers.storage.subscribers import DatabaseSubscribers

NOBODY: Final = ""
"""Stands for the process in events of a caller's transaction."""

_LISTENING = timedelta(minutes=1)
_RENEW_AFTER = timedelta(seconds=20)

_LISTENED = text(
    "SELECT 1 FROM workers_listeners WHERE queue = :queue AND process <> :process AND expires_at > :now LIMIT 1"
)
_LOG = text(
    "INSERT INTO workers_events (queue, process, kind, job_id, at, result)"
    " VALUES (:queue, :process, :kind, :job_id, :at, :result)"
)
_LISTEN = text(
    "INSERT INTO workers_listeners (queue, process, expires_at) VALUES (:queue, :process, :expires_at)"
    " ON CONFLICT (queue, process) DO UPDATE SET expires_at = excluded.expires_at"
)
_NEWEST = text("SELECT coalesce(max(seq), 0) FROM workers_events")
_LATER = text(
    "SELECT seq, queue, kind, job_id, result FROM workers_events"
    " WHERE seq > :seq AND process <> :process ORDER BY seq LIMIT :limit"
)


class EventLog:
    """This process's side of the event table of one database."""

    def __init__(
        self,
        process: str,
        subscribers: DatabaseSubscribers,
        write: Callable[[Callable[[Executor], None]], Future[None]],
    ) -> None:
        self._process = process
        self._subscribers = subscribers
        self._write = write
        # The last event that was read, None while nobody subscribes; written by the reader's thread, to None only under
        # the lock: who has registered before he sees that it is set will not see it taken back.
        self._position: int | None = None
        self._lock = threading.Lock()
        # When each queue's row was last renewed, by a commit, on the monotonic clock; guarded by the lock.
        self._renewed: dict[int, float] = {}
        # When the watcher last began to; touched by the reader's thread alone.
        self._renewing: dict[int, float] = {}

    def record(self, transaction: Transaction, *, own: bool) -> None:
        """Write the transaction's events for listening processes; `own` if this one is told directly."""
        if not transaction.events:
            return
        process = self._process if own else NOBODY
        bound = {"queue": transaction.queue, "process": process, "now": transaction.now}
        events = transaction.events
        if transaction.connection.execute(_LISTENED, bound).first() is None:
            events = [event for event in events if event[0] is JobEventKind.CANCEL_REQUESTED]
        if not events:
            return
        common = {"queue": transaction.queue, "process": process, "at": transaction.now}
        rows = [{**common, "kind": kind.value, "job_id": job_id, "result": told} for kind, job_id, told in events]
        transaction.connection.execute(_LOG, rows)

    def is_listening(self, queue: int) -> bool:
        """Tell whether other processes know that this one listens, for at least another half minute."""
        with self._lock:
            renewed = self._renewed.get(queue)
        return renewed is not None and time.monotonic() - renewed < _RENEW_AFTER.total_seconds()

    @property
    def is_reading(self) -> bool:
        """Whether whoever has registered is told of all events from now on, perhaps after some from before."""
        with self._lock:
            return self._position is not None

    def listen(self, transaction: Transaction) -> None:
        """Let other processes write down their events of the queue, from this transaction's commit on.

        That is to be told to `listens`: whoever subscribes must not rely on what may be undone.
        """
        until = transaction.now + _LISTENING // timedelta(milliseconds=1)
        transaction.connection.execute(
            _LISTEN, {"queue": transaction.queue, "process": self._process, "expires_at": until}
        )

    def listens(self, queue: int) -> None:
        """Note that `listen` was committed just now."""
        with self._lock:
            self._renewed[queue] = time.monotonic()

    def keep_listening(self) -> None:
        """Renew the rows of queues with subscribers in time."""
        now = time.monotonic()
        for queue in self._subscribers.subscribed():
            began = self._renewing.get(queue, -math.inf)
            if not self.is_listening(queue) and now - began >= _RENEW_AFTER.total_seconds():
                self._renewing[queue] = now
                self._renew(queue)

    def _renew(self, queue: int) -> None:
        def listen(connection: Executor) -> None:
            self.listen(Transaction(connection=connection, queue=queue, clock=lambda _: time.time_ns() // 1_000_000))

        def note(written: Future[None]) -> None:
            if written.exception() is None:
                self.listens(queue)

        with contextlib.suppress(StorageUnavailable):  # disconnecting
            self._write(listen).add_done_callback(note)

    def read(self, connection: Executor) -> bool:
        """Deliver what others wrote since the last call, and tell whether anybody here had asked for any of it.

        The first call only notes where the table ends.
        """
        with self._lock:
            if not (self._subscribers.subscribed() or self._subscribers.awaits_cancels):
                self._position = None
                return False
        if self._position is None:
            self._position = int(connection.execute(_NEWEST).scalar_one())
            return False
        asked = False
        while True:
            bound = {"seq": self._position, "process": self._process, "limit": BATCH}
            rows = connection.execute(_LATER, bound).all()
            for seq, queue, kind, job_id, result in rows:
                self._position = seq
                asked |= self._subscribers.tell(queue, [(JobEventKind(kind), job_id, result)], wake=False)
            if len(rows) < BATCH:
                return asked
