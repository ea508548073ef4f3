"""Claims whose answer did not arrive: they are given back before the next ones of their queue are made.

Otherwise the jobs wait for the end of their leases, and an attempt is counted that nobody made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from workers.storage.sql.postgres.asking import Asking
from workers.storage.sql.rows import Transaction

_MOST: Final = 10
"""Of a queue; those before the last ones come back when their leases end."""
_RELEASE: Final = text(
    "SELECT s.place, s.outcome FROM (SELECT array_agg(seq) AS seqs, array_agg(token) AS tokens, array_agg(id) AS ids,"
    " array_agg('released'::text) AS kinds, array_agg(NULL::bigint) AS numbers, array_agg(NULL::text) AS texts,"
    " array_agg(NULL::bytea) AS results FROM workers_jobs"
    " WHERE queue = :queue AND state = 'processing' AND token = CAST(:secret AS bytea)) j,"
    " LATERAL workers_settle(:queue, seqs, tokens, ids, kinds, numbers, numbers, texts, texts, results, texts, 0,"
    " false) s WHERE j.seqs IS NOT NULL"
)


class LostClaims:
    """What the tokens of claims have in common that were not read; touched by all threads."""

    def __init__(self) -> None:
        self._secrets: dict[int, deque[bytes]] = {}

    @contextmanager
    def claiming(self, transaction: Transaction, secret: bytes) -> Iterator[None]:
        """Note a claim whose answer is not read in this context."""
        try:
            yield
        except DBAPIError:
            self._secrets.setdefault(transaction.queue, deque(maxlen=_MOST)).append(secret)
            raise

    def given_back(self, transaction: Transaction) -> Asking[None]:
        """Release what was claimed from the queue and not read."""
        secrets = self._secrets.get(transaction.queue)
        while secrets:
            secret = secrets.popleft()
            with self.claiming(transaction, secret):
                yield _RELEASE, {"queue": transaction.queue, "secret": secret}
