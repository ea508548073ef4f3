"""The values of which the entries of a journal consist; what reads one raises unless it is of that kind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from workers.jobs import ErrorInfo

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
"""What times and durations are counted in."""


def number_of(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // MICROSECOND


def time_of(value: object) -> datetime | None:
    return None if value is None else moment_of(value)


def moment_of(value: object) -> datetime:
    return _EPOCH + duration_of(value)


def duration_of(value: object) -> timedelta:
    return timedelta(microseconds=integer_of(value))


def integer_of(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError("not a number")
    return value


def optional_integer_of(value: object) -> int | None:
    return None if value is None else integer_of(value)


def text_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def optional_text_of(value: object) -> str | None:
    return None if value is None else text_of(value)


def value_of_error(error: ErrorInfo | None) -> tuple[object, ...] | None:
    return None if error is None else (error.type, error.message, error.stack, error.exhausted)


def error_of(value: object) -> ErrorInfo | None:
    if not isinstance(value, list):
        return None
    kind, message, stack, exhausted = value
    return ErrorInfo(type=text_of(kind), message=text_of(message), stack=text_of(stack), exhausted=bool(exhausted))
