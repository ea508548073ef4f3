"""The back-offs that jobs only name, as those of Node's producers do, and what this worker takes them for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from workers.retry import BackoffStrategy, NamedBackoff, RetryPolicy

logger = logging.getLogger(__name__)

MOST_TOLD: Final = 100
"""How many unknown names are told of: any producer may make them up."""


class NamedBackoffs:
    """The strategies of one worker, by name."""

    def __init__(self, strategies: Mapping[str, BackoffStrategy]) -> None:
        self._strategies = dict(strategies)
        self._told: set[str] = set()

    def policy(self, named: NamedBackoff, attempt: int) -> RetryPolicy | None:
        """Return how long to wait after this attempt, always; None, told once, for a name that says nothing here."""
        strategy = self._strategies.get(named.type)
        if strategy is None:
            self._tell(named.type, "is not known to this worker; see Worker(backoffs=...)")
            return None
        try:
            delay = max(strategy(attempt, named.delay), timedelta(0))
        except Exception as error:  # somebody's function, which must not keep the attempt from ending
            self._tell(named.type, f"failed with {type(error).__name__}: {error}")
            return None
        return RetryPolicy(initial=delay, multiplier=1, maximum=delay, jitter=0)

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(name)
            logger.warning("jobs wait by the worker's retry policy instead of their back-off %r, which %s", name, why)
