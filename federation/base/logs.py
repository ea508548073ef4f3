"""How a process of ours logs: one line per event on stderr, JSON unless a person is watching."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Final, TextIO

import structlog
from structlog.typing import ExcInfo, Processor

_SHARED: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logging(level: str = "info") -> None:
    """Events of this application and of its libraries go to stderr, from `level` up; libraries from `warning` up."""
    number = logging.getLevelNamesMapping()[level.upper()]
    renderers = _for_people() if sys.stderr.isatty() else _for_machines()
    structlog.configure(
        processors=[*_SHARED, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))


def crash(error: BaseException) -> dict[str, str]:
    """What may be logged of an error nobody expected: its class and its frames, and those of its causes.

    Neither a message nor a variable: they may quote what a stranger sent, a payload or a secret.
    """
    return {"error_type": type(error).__name__, "stack": "".join(_stack(error, set()))}


def _for_people() -> list[Processor]:
    return [structlog.dev.ConsoleRenderer(exception_formatter=_write_stack)]


def _for_machines() -> list[Processor]:
    return [structlog.processors.ExceptionRenderer(_formatted), structlog.processors.JSONRenderer(default=str)]


def _write_stack(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + _formatted(exc_info))


def _formatted(exc_info: ExcInfo) -> str:
    """As `crash`, for what is logged with its exception, by whatever library."""
    return "".join(_stack(exc_info[1], set()))


def _stack(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    """The cause first, as Python prints it; the members of a group last."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield from _stack(error.__cause__ or (None if error.__suppress_context__ else error.__context__), seen)
    yield from traceback.format_tb(error.__traceback__)
    yield f"{type(error).__name__}\n"
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _stack(member, seen)
