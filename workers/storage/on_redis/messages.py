"""Values as they travel between our scripts and us: packed, states and events by number, times in microseconds.

`lua/states.lua` has the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgpack

from workers.jobs import JobEventKind, JobState
from workers.storage.on_redis.wire import Reply
from workers.storage.rules import bounded

STATES: Final[Mapping[int, JobState]] = {
    1: JobState.QUEUED,
    2: JobState.FAILING,
    3: JobState.PROCESSING,
    4: JobState.COMPLETED,
    5: JobState.FAILED,
    6: JobState.CANCELLED,
    7: JobState.SCHEDULED,
    8: JobState.WAITING,
}
KINDS: Final[Mapping[int, JobEventKind]] = {
    1: JobEventKind.QUEUED,
    2: JobEventKind.ACTIVE,
    3: JobEventKind.COMPLETED,
    4: JobEventKind.FAILING,
    5: JobEventKind.FAILED,
    6: JobEventKind.CANCELLED,
    7: JobEventKind.CANCEL_REQUESTED,
    8: JobEventKind.PROGRESS,
}
"""The meaning of the numbers that scripts publish."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_MICROSECOND: Final = timedelta(microseconds=1)

pack = msgpack.Packer(use_bin_type=False, unicode_errors="surrogatepass").pack


def unpack(packed: bytes) -> Reply:
    """Unpack what a script packed."""
    return msgpack.unpackb(packed, raw=True, strict_map_key=False)


def moment(microseconds: float) -> datetime:
    """Return the time `microseconds` after 1970; a number out of range becomes the nearest time possible."""
    return _EPOCH + timedelta(microseconds=int(min(max(microseconds, 0), _LATEST)))


def duration(value: timedelta) -> int:
    """Return the bounded duration in microseconds."""
    return bounded(value) // _MICROSECOND


def end_kind(code: Reply) -> JobEventKind:
    """Return the event that announces the end which a script names by its code."""
    return JobEventKind(STATES[code].value)
