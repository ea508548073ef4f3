"""How our processes log: one line per event on stderr, as JSON unless a person is watching.

Text written by peers appears in our events as values, in those of libraries anywhere. JSON output is pure ASCII. For
people, everything that a terminal would obey is escaped: in keys, values, events, names of loggers, and the lines of
stacks. The latter are also indented, so that none looks like an event.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from federation.base.terminal import escaped, escaped_block

_SHARED: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def configure_logging(level: str = "info") -> None:
    """Log events of this application to stderr from `level` up, and those of libraries from `warning` up."""
    number = logging.getLevelNamesMapping()[level.upper()]
    renderers = _for_people() if sys.stderr.isatty() else _for_machines()
    structlog.configure(
        processors=[*_SHARED, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Writer(sys.stderr),
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
    logging.getLogger("dotenv").setLevel(logging.ERROR)  # it names no file; `settings.misspelt` does


class _Writer(structlog.WriteLogger):
    """Writes lines as long as anybody takes them: a pipe may have lost its reader, a disk may be full, and whoever logs
    goes on with his work, and stops when he is told to.
    """

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the latter: it is closed
            super().msg(message)

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def crash(error: BaseException) -> dict[str, str]:
    """Return what may be logged of an unexpected error: its class and its frames, and those of its causes.

    Messages and variables are left out: they may quote what a stranger sent, a payload or a secret.
    """
    return {"error_type": type(error).__name__, "stack": "".join(_stack(error, set()))}


def _for_people() -> list[Processor]:
    return [_escape, structlog.dev.ConsoleRenderer(exception_formatter=_write_stack)]


class _Written:
    """An object that the renderer writes as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _escape(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape everything in the event that a terminal would obey. The renderer prints `_BLOCKS` as they are."""
    return {escaped(key): _escaped_value(key, value) for key, value in event.items()}


_BLOCKS: Final = frozenset({"stack", "exception"})


def _escaped_value(key: str, value: object) -> object:
    if key == "exc_info" or value is None:
        return value  # see `_write_stack`
    if key in _BLOCKS:
        return escaped_block(str(value))
    if not isinstance(value, str):
        return _Written(escaped(repr(value)))
    if key == "event":
        return escaped(value)
    return value if value.isprintable() else _Written(repr(value))


def _for_machines() -> list[Processor]:
    return [structlog.processors.ExceptionRenderer(_formatted), structlog.processors.JSONRenderer(default=str)]


def _write_stack(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + escaped_block(_formatted(exc_info)))


def _formatted(exc_info: ExcInfo) -> str:
    """Format the exception of a log record, by whatever library, as `crash` does."""
    return "".join(_stack(exc_info[1], set()))


def _stack(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    """Yield the lines of the stack: the cause first, as Python prints it, the members of a group last."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield from _stack(error.__cause__ or (None if error.__suppress_context__ else error.__context__), seen)
    yield from traceback.format_tb(error.__traceback__)
    yield f"{type(error).__name__}\n"
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _stack(member, seen)
