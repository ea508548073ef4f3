"""How claims on PostgreSQL are given back whose answer did not arrive, see `storage/unread.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.postgres.asking import Asking
from workers.storage.sql.rows import Transaction
from workers.storage.unread import Unread

_RELEASE: Final = text(
    "SELECT s.place, s.outcome FROM (SELECT array_agg(seq) AS seqs, array_agg(token) AS tokens, array_agg(id) AS ids,"
    " array_agg('released'::text) AS kinds, array_agg(NULL::bigint) AS numbers, array_agg(NULL::text) AS texts,"
    " array_agg(NULL::bytea) AS results FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND token = CAST(:secret AS bytea)) j,"
    " LATERAL workers_settle(:queue, seqs, tokens, ids, kinds, numbers, numbers, texts, texts, results, texts, 0,"
    " false) s WHERE j.seqs IS NOT NULL"
)


class LostClaims:
    """The claims of this process that were not read, by queue; touched by all threads."""

    def __init__(self) -> None:
        self._by_queue: dict[int, Unread[bytes]] = {}

    def claiming(self, transaction: Transaction, secret: bytes) -> AbstractContextManager[None]:
        """Note a claim whose answer is not read in this context; its tokens have the secret in common."""
        return self._of(transaction).claiming(secret)

    def given_back(self, transaction: Transaction) -> Asking[None]:
        """Release what was claimed from the queue and not read."""
        unread = self._of(transaction)
        while (secret := unread.take()) is not None:
            with unread.claiming(secret):
                yield _RELEASE, {"queue": transaction.queue, "secret": secret}

    def _of(self, transaction: Transaction) -> Unread[bytes]:
        return self._by_queue.setdefault(transaction.queue, Unread(DBAPIError))
