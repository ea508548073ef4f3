"""Whether the database answers, as far as deliveries have noticed: while it does not, no delivery is claimed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import literal, select
from sqlalchemy.exc import SQLAlchemyError

from db import Database
from db.errors import is_outage
from workers.clock import monotonic

log = structlog.get_logger(__name__)

INTERVAL: Final = timedelta(seconds=1)
REFUSALS_LOGGED_EVERY: Final = timedelta(minutes=1)


class DatabaseWatch:
    """Learns of trouble from whoever runs into it; the worker asks it before each claim."""

    def __init__(self, database: Database, *, interval: timedelta = INTERVAL) -> None:
        self._database = database
        self._interval = interval
        self._in_trouble = False
        self._refusal_told_at = -math.inf

    def note_trouble(self, error: SQLAlchemyError) -> None:
        """Note that the database did not answer, or that it refused a statement, as where a table is missing.

        Only an outage stops claims. A database that refuses statements still answers, so asking whether it answers
        would not show when it has recovered.
        """
        if is_outage(error):
            if not self._in_trouble:
                log.error("database_away", then="no delivery is claimed until it answers")
            self._in_trouble = True
        elif monotonic() - self._refusal_told_at >= REFUSALS_LOGGED_EVERY.total_seconds():
            self._refusal_told_at = monotonic()
            log.error(
                "database_refuses", error=type(error).__name__, advice="`federation doctor` names what is missing"
            )

    def not_ready(self) -> Coroutine[object, object, None] | None:
        """Return None while the database answers, otherwise a coroutine that ends when it answers again."""
        return self._until_it_answers() if self._in_trouble else None

    async def _until_it_answers(self) -> None:
        while self._in_trouble:
            try:
                await self._database.rows(_ANYTHING)
            except SQLAlchemyError:
                await asyncio.sleep(self._interval.total_seconds())
            else:
                self._in_trouble = False
                log.info("database_back")


_ANYTHING: Final = select(literal(1))
