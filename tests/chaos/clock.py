"""A wrong clock: the process's wall clock is off, as on a machine nobody set; the monotonic one goes on as it was."""

from __future__ import annotations

import datetime
import time


def skew(seconds: float) -> None:
    """Everything imported from now on reads a wall clock that is `seconds` fast (or slow, if negative)."""
    if not seconds:
        return
    real_time, real_time_ns, real = time.time, time.time_ns, datetime.datetime
    offset = datetime.timedelta(seconds=seconds)
    time.time = lambda: real_time() + seconds
    time.time_ns = lambda: real_time_ns() + int(seconds * 1e9)

    class AnyDatetime(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class SkewedDatetime(real, metaclass=AnyDatetime):
        __slots__ = ()  # extensions in C want it of the size they know

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real.now(tz) + offset

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return real.now(datetime.UTC).replace(tzinfo=None) + offset

    datetime.datetime = SkewedDatetime  # type: ignore[misc]  # the very thing to replace
