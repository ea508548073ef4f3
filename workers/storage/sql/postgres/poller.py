"""Hears by looking, where the server cannot be listened to.

Theory of operation. Whoever tells something writes it down as well, in `workers_told`, while a process is registered
for that (the queue 0 in `workers_listeners`). Every second the thread reads what has been committed since it looked
last: what the last snapshot did not see. A number in order of the writing would not do, as transactions commit in
another one. Nobody writes down wake-ups: all who wait look at the tables once a second.
"""

from __future__ import annotations

import selectors
import socket
from datetime import timedelta
from typing import Final

from workers.storage.sql.postgres.listener import PostgresListener, drain
from workers.storage.sql.postgres.silence import OwnConnection

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
