"""The one connection of a process that hears what is committed in a PostgreSQL database.

Theory of operation. A thread listens to four channels. By `workers_wake` waiters are told to look. `workers_events`
carries job events while anybody subscribes, and `workers_results` the result that belongs to an end, in front of it. By
`workers_cancels` workers hear of requests to cancel jobs that they run.
The connection is opened when somebody first wants to hear, and again whenever it breaks. What was committed meanwhile
went unheard. So after each start every waiter looks at the tables, and the subscribers of a job that has ended by then
are told so. Requests to cancel are not kept: those who listen to them are told that some may be missing, and look at
the jobs they run.
Where nothing is committed, nothing is heard, as on a connection that has gone silent. So the thread asks the server
something when it has heard nothing for a while.
Where the server cannot be listened to, a poller looks. Whoever tells something writes it down as well, in
`workers_told`, while a process is registered for that (the queue 0 in `workers_listeners`). Every second the thread
reads what has been committed since it looked last: what the last snapshot did not see. A number in order of the writing
would not do, as transactions commit in another one. Nobody writes down wake-ups: all who wait look at the tables once a
second.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Final

from workers.jobs import JobEventKind
from workers.retry import Backoff
from workers.storage.sql.postgres.driver.silence import OwnConnection
from workers.storage.sql.rows import decode_text, encode_text
from workers.storage.subscribers import DatabaseSubscribers, Told

REGISTERED: Final = 60_000
"""How many milliseconds a process counts as subscribed; renewed after a third of them."""

ASKS_SECONDS: Final = 5.0
ANSWERED_IN: Final = timedelta(seconds=5)
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
_LOG = logging.getLogger(__name__)

_COMPLETED: Final = JobEventKind.COMPLETED.value
_REGISTER = "SELECT workers_listen(%s, %s, %s)"
_ENDED = (
    "SELECT id, state FROM workers_jobs WHERE queue = %s AND id = ANY(%s)"
    " AND state IN ('completed', 'failed', 'cancelled') AND expires_at > workers_now()"
)


class PostgresListener:
    """Listens for `subscribers`, in a thread of its own from the first `start` until `stop`."""

    def __init__(
        self, database: str, process: str, connect: Callable[[], OwnConnection], subscribers: DatabaseSubscribers
    ) -> None:
        self._database = database
        self._process = process
        self._connect = connect
        self._subscribers = subscribers
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._armed: Future[None] = Future()
        self._alarm: socket.socket | None = None  # with the thread: it wakes it up
        self._renewed: dict[int, float] = {}
        self._results: dict[tuple[int, str], bytes] = {}  # touched in the thread alone; their ends come right behind

    def start(self) -> Future[None]:
        """Start listening.

        Returns a future that is done when everything committed from then on is heard; there is another one after every
        loss of the connection.
        """
        with self._lock:
            if self._thread is None:
                self._alarm, alarmed = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._run, args=(alarmed,), name="workers-postgres-listener", daemon=True
                )
                self._thread.start()
            return self._armed

    def stop(self, until: float) -> None:
        """End the thread and close its connection; wait for it until then, by `time.monotonic`."""
        self._stopping = True
        if self._thread is not None and self._alarm is not None:
            self.ask()
            self._thread.join(max(until - time.monotonic(), 0))
            self._alarm.close()

    def ask(self) -> None:
        """Find out now whether the server still answers; from any thread."""
        if self._alarm is not None:
            with contextlib.suppress(OSError):  # the thread has ended
                self._alarm.send(b"x", socket.MSG_DONTWAIT)

    def is_registered(self, queue: int) -> bool:
        """Tell whether every step on the queue sends its events here, for a while yet."""
        with self._lock:
            renewed = self._renewed.get(queue)
        return renewed is not None and time.monotonic() - renewed < REGISTERED / 3_000

    def registered(self, queue: int) -> None:
        """Note that `workers_listen` was called for the queue just now."""
        with self._lock:
            self._renewed[queue] = time.monotonic()

    def _run(self, alarmed: socket.socket) -> None:
        with alarmed:
            self._listen(alarmed)

    def _listen(self, alarmed: socket.socket) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        first, logged = True, False
        while not self._stopping:
            try:
                with self._connect() as connection:
                    self._arm(connection, first)
                    first, logged = False, False
                    backoff.reset()
                    self._hear(connection, alarmed)
            except Exception as error:  # whatever it is, the thread must live: others rely on it
                if not logged:
                    _LOG.warning("cannot listen to %s, trying again: %s", self._database, type(error).__name__)
            with self._lock:
                was_heard = self._armed.done()
                if was_heard:
                    self._armed = Future()
            if was_heard:  # told only now: those who listen anew wait until the next connection hears
                self._subscribers.miss_cancels(f"the connection that listens to {self._database} was lost")
            if not self._stopping:
                self._pause(backoff.pause(), alarmed)
            logged = True

    def _pause(self, seconds: float, alarmed: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(alarmed, selectors.EVENT_READ)
            selector.select(seconds)

    def _arm(self, connection: OwnConnection, first: bool) -> None:
        self._results.clear()
        # The driver reads a notification that arrives with the answer to a statement, and gives it to handlers alone.
        connection.add_notify_handler(lambda notice: self._deliver(notice.channel, notice.payload))
        self._begin(connection)
        for queue in self._subscribers.subscribed():
            self._register(connection, queue)
        with self._lock:
            self._armed.set_result(None)
        if not first:
            self._tell_ended(connection)
        self._subscribers.wake_all()

    def _begin(self, connection: OwnConnection) -> None:
        for channel in ("wake", "events", "cancels", "results"):
            connection.execute(f"LISTEN workers_{channel}".encode())

    def _register_subscribed(self, connection: OwnConnection) -> None:
        for queue in self._subscribers.subscribed():
            if not self.is_registered(queue):
                self._register(connection, queue)

    def _register(self, connection: OwnConnection, queue: int) -> None:
        connection.execute(_REGISTER, (queue, self._process, REGISTERED))
        self.registered(queue)

    def _tell_ended(self, connection: OwnConnection) -> None:
        for queue, jobs in self._subscribers.awaited().items():
            for job_id, state in connection.execute(_ENDED, (queue, [encode_text(job_id) for job_id in jobs])):
                event = (JobEventKind(str(state)), decode_text(str(job_id)), None)
                self._subscribers.tell(queue, [event], wake=False)

    def _hear(self, connection: OwnConnection, alarmed: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(alarmed, selectors.EVENT_READ)
            while not self._stopping:
                self._register_subscribed(connection)
                # After the statements and before the wait: what came with an answer does not make the socket readable.
                # The driver's own generator is no alternative: it cannot be woken to stop.
                while notice := connection.pgconn.notifies():
                    self._deliver(notice.relname.decode(), notice.extra.decode())
                if connection.closed:
                    return
                ready = {key.fd for key, _ in selector.select(ASKS_SECONDS)}
                if connection.fileno() in ready:
                    connection.pgconn.consume_input()
                elif not self._stopping:
                    drain(alarmed)
                    self._ask(connection)

    def _ask(self, connection: OwnConnection) -> None:
        usual, connection.silence = connection.silence, ANSWERED_IN
        connection.execute("SELECT 1")
        connection.silence = usual

    def _deliver(self, channel: str, payload: str) -> None:
        if channel == "workers_cancels":
            number, _, job_id = payload.partition(" ")
            self._subscribers.request_cancel(int(number), decode_text(job_id))
            return
        if channel == "workers_results":
            number, data, job_id = payload.split(" ", 2)
            self._results[int(number), job_id] = base64.b64decode(data)
            return
        queue, *events = payload.split(" ")
        if channel == "workers_wake":
            self._subscribers.tell(int(queue), (), wake=True)
            return
        told: list[Told] = []
        for event in events:
            kind, _, job_id = event.replace("%20", " ").replace("%25", "%").partition(":")
            result = self._results.pop((int(queue), job_id), None) if kind == _COMPLETED else None
            told.append((JobEventKind(kind), decode_text(job_id), result))
        self._subscribers.tell(int(queue), told, wake=False)


def drain(alarmed: socket.socket) -> None:
    """Forget that somebody rang."""
    with contextlib.suppress(BlockingIOError):
        alarmed.recv(1_000, socket.MSG_DONTWAIT)


def new_process() -> str:
    """Make a name that no other process has."""
    return os.urandom(8).hex()


LOOKS_EACH: Final = timedelta(seconds=1)
_KEPT: Final = 300_000
"""Milliseconds after which something told is forgotten; a transaction that lasts longer may be told to nobody."""
_EVERYTHING: Final = 0
_SNAPSHOT: Final = "SELECT txid_current_snapshot()::text"
_TOLD: Final = (
    "SELECT s.now::text, t.channel, t.payload FROM (SELECT txid_current_snapshot() AS now) s LEFT JOIN workers_told t"
    " ON t.txid >= txid_snapshot_xmin(%(seen)s::txid_snapshot)"
    " AND NOT txid_visible_in_snapshot(t.txid, %(seen)s::txid_snapshot) ORDER BY t.seq"
)
_FORGET: Final = "DELETE FROM workers_told WHERE told_at < workers_now() - %s"


class PostgresPoller(PostgresListener):
    """See `PostgresListener`; it takes transactions alone from the server."""

    def _begin(self, connection: OwnConnection) -> None:
        self._register(connection, _EVERYTHING)
        row = connection.execute(_SNAPSHOT).fetchone()
        assert row is not None
        self._seen = str(row[0])

    def _hear(self, connection: OwnConnection, alarmed: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(alarmed, selectors.EVENT_READ)
            while not self._stopping:
                if not self.is_registered(_EVERYTHING):
                    self._register(connection, _EVERYTHING)
                    connection.execute(_FORGET, (_KEPT,))
                self._register_subscribed(connection)
                self._look(connection)
                self._subscribers.wake_all()
                selector.select(LOOKS_EACH.total_seconds())
                drain(alarmed)

    def _look(self, connection: OwnConnection) -> None:
        for seen, channel, payload in connection.execute(_TOLD, {"seen": self._seen}):
            self._seen = str(seen)
            if channel is not None:
                self._deliver(str(channel), str(payload))
