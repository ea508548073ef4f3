"""What happened in a world, in the order in which it did: its own events, and what the node logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any

import structlog

from workers.worker import leases


class Story:
    """Events with their times; a line of it is made only when it is told."""

    def __init__(self, now: Callable[[], float], *, is_heard: Callable[[], bool]) -> None:
        self._now = now
        self._is_heard = is_heard
        self._events: list[tuple[float, str, MutableMapping[str, Any]]] = []

    def tell(self, event: str, **details: object) -> None:
        """It happened now."""
        self._events.append((self._now(), event, details))

    def lines(self, *, about: set[str] | None = None) -> Iterator[str]:
        """What happened; with `about` only the events of the world, and those with one of these values."""
        for at, event, details in self._events:
            if about is None or event.startswith("* ") or about & {str(value) for value in details.values()}:
                told = " ".join(f"{name}={value}" for name, value in details.items() if name != "stack")
                yield f"{moment(at)} {event} {told}"

    def digest(self) -> str:
        """The same for two runs in which the same happened at the same times."""
        told = sha256()
        for at, event, details in self._events:
            named = sorted((name, str(value)) for name, value in details.items() if name not in _MADE_UP)
            told.update(f"{at:.6f} {event} {named}\n".encode())
        return told.hexdigest()

    @contextmanager
    def logs(self) -> Iterator[None]:
        """What the node logs meanwhile is part of the story, and goes nowhere else."""
        before, core = structlog.get_config(), logging.getLogger("workers")
        core.addHandler(handler := _Hearing(self))
        core.propagate = False
        structlog.configure(
            processors=[self._log],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**before)
            core.propagate = True
            core.removeHandler(handler)

    def _log(self, _logger: object, _level: str, event: MutableMapping[str, Any]) -> str:
        if self._is_heard():  # not what a killed process logs while its tasks are cancelled
            self._events.append((self._now(), str(event.pop("event")), event))
        raise structlog.DropEvent


class _Hearing(logging.Handler):
    """What the core logs, but for loops that were blocked: where time jumps, each of them seems to be."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(lambda record: record.name != leases.__name__)
        self._story = story

    def emit(self, record: logging.LogRecord) -> None:
        self._story.tell(record.name, error=record.getMessage())


_MADE_UP = frozenset({"worker_id", "stack", "error", "follow_id"})
"""Names that hold random ids."""


def moment(seconds: float) -> str:
    """Day and time of the world."""
    days, rest = divmod(seconds, 86_400)
    return f"{days:.0f}d {timedelta(seconds=round(rest, 3))!s:.11}"
