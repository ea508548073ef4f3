"""The definition of what recurs, and the text by which a storage keeps it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.checks import MAX_ATTEMPTS, MAX_DELAY, MAX_PRIORITY, MIN_PRIORITY, as_duration, check_text, check_whole
from workers.cron import MACROS, UnreadablePattern, find_zone, read_pattern
from workers.errors import StorageError
from workers.jobs import DROP, Missed, NewJob, Recurrence, Retention, check_retention

SHORTEST_PERIOD: Final = timedelta(seconds=1)
LONGEST_NAME: Final = 400
"""In bytes: the ids of its jobs have the name and a time."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron(Recurrence):
    """What recurs: jobs of the name `job`, at the times of a cron `pattern` in a time zone, or `every` so often.

    Of an hour that the clocks skip, the jobs come in the hour after it; of an hour that comes twice, the first time. A
    pattern without hours goes on through both. Of several versions of one name the highest counts.

    Raises:
        ValueError: neither a pattern nor a period, or both; a pattern that never comes or cannot be read; an unknown
            time zone; a period below a second; a version below 1; whatever `NewJob` refuses.
    """

    def __post_init__(self) -> None:
        check_text("name of a cron", self.name)
        if len(self.name.encode()) > LONGEST_NAME:
            raise ValueError(f"the name of a cron is at most {LONGEST_NAME} bytes long")
        object.__setattr__(self, "missed", Missed(self.missed))
        check_whole(f"cron {self.name!r}: version", self.version, 1, 2**31 - 1)
        check_whole(f"cron {self.name!r}: priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        check_whole(f"cron {self.name!r}: max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        check_retention(self.keep_completed)
        check_retention(self.keep_failed)
        if (self.pattern is None) is (self.every is None):
            raise ValueError(f"cron {self.name!r} has a pattern or a period, `every`: one of them")
        if self.every is not None:
            object.__setattr__(self, "every", as_duration(f"cron {self.name!r}: every", self.every))
            self._check_period(self.every)
        else:
            self._check_pattern()
        self.job_at(_EPOCH)

    def check_as_ours(self) -> None:
        """Refuse what is taken for Node's sake alone: its schedules may leave fields out, of which the last ones stay.

        Raises:
            ValueError: the pattern has fewer than five fields.
        """
        fields = [] if self.pattern is None or self.pattern in MACROS else self.pattern.split()
        if 1 <= len(fields) < 5:
            raise ValueError(
                f"cron {self.name!r}: the pattern {self.pattern!r} has {len(fields)} fields, not five or six"
            )

    def _check_period(self, every: timedelta) -> None:
        if not SHORTEST_PERIOD <= every <= MAX_DELAY or every % _MILLISECOND:
            raise ValueError(f"cron {self.name!r}: every is from 1 s to 100 years, in whole ms, not {every}")

    def _check_pattern(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"cron {self.name!r}: a pattern is a text such as '0 3 * * *', not {self.pattern!r}")
        try:
            found = self.next_after(datetime.now(UTC))
        except UnreadablePattern as error:
            raise ValueError(f"cron {self.name!r}: {error}") from error
        if found is None:
            raise ValueError(f"cron {self.name!r}: the pattern {self.pattern!r} never comes")

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the first time after that one, counted from it if there is a period; None if there is none."""
        if self.every is not None:
            return moment + self.every
        assert self.pattern is not None
        found = read_pattern(self.pattern).next_after(as_milliseconds(moment), find_zone(self.timezone))
        return None if found is None else as_moment(found)

    def offset_at(self, moment: datetime) -> timedelta | None:
        """Return by how much the clocks of the time zone are ahead of UTC."""
        return moment.astimezone(find_zone(self.timezone)).utcoffset()

    def job_at(self, moment: datetime) -> NewJob:
        """Return the job for that time. Its id is that of no other time."""
        return self.job_called(str(as_milliseconds(moment)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CronStatus:
    """What recurs, as it stands; `due` is None while it is paused, and once it never comes again.

    `last` is the last time that ticked; None if there was none, or nobody knows.
    """

    cron: Recurrence
    due: datetime | None
    paused: bool = False
    last: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCron:
    """A definition as a storage keeps it, with what became of it; `last` is the last time that ticked."""

    cron: Cron
    paused: bool = False
    removed: bool = False
    last: datetime | None = None

    def encoded(self) -> str:
        """Return the text for `CronRow.body`."""
        cron = self.cron
        return json.dumps(
            {
                "job": cron.job,
                "pattern": cron.pattern,
                "every": None if cron.every is None else cron.every // _MILLISECOND,
                "timezone": cron.timezone,
                "version": cron.version,
                "missed": cron.missed.value,
                "payload": base64.b64encode(cron.payload).decode(),
                "max_attempts": cron.max_attempts,
                "priority": cron.priority,
                "ordering_key": cron.ordering_key,
                "keep_completed": _kept(cron.keep_completed),
                "keep_failed": _kept(cron.keep_failed),
                "paused": self.paused,
                "removed": self.removed,
                "last": None if self.last is None else as_milliseconds(self.last),
            }
        )

    @classmethod
    def decoded(cls, name: str, body: str) -> KeptCron:
        """Read what `encoded` wrote.

        Raises:
            StorageError: this version did not write it.
        """
        try:
            return cls._decoded(name, json.loads(body))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise StorageError(f"cron {name!r} is not as this version writes it; use the version that did") from error

    @classmethod
    def _decoded(cls, name: str, found: Mapping[str, object]) -> KeptCron:
        every, last = found["every"], found["last"]
        cron = Cron(
            name=name,
            job=_text(found["job"]),
            pattern=None if found["pattern"] is None else _text(found["pattern"]),
            every=None if every is None else _number(every) * _MILLISECOND,
            timezone=_text(found["timezone"]),
            version=_number(found["version"]),
            missed=Missed(_text(found["missed"])),
            payload=base64.b64decode(_text(found["payload"]), validate=True),
            max_attempts=_number(found["max_attempts"]),
            priority=_number(found["priority"]),
            ordering_key=None if found["ordering_key"] is None else _text(found["ordering_key"]),
            keep_completed=_retention(found["keep_completed"]),
            keep_failed=_retention(found["keep_failed"]),
        )
        return cls(
            cron=cron,
            paused=found["paused"] is True,
            removed=found["removed"] is True,
            last=None if last is None else as_moment(_number(last)),
        )

    def replaced(self, cron: Cron) -> KeptCron:
        """Return the same with a newer definition, which brings back one that was removed."""
        return replace(self, cron=cron, removed=False)


def as_milliseconds(moment: datetime) -> int:
    """Return the whole milliseconds since 1970."""
    return (moment - _EPOCH) // _MILLISECOND


def as_moment(milliseconds: int) -> datetime:
    """Return the time that lies so many milliseconds after the beginning of 1970."""
    return _EPOCH + milliseconds * _MILLISECOND


def _kept(keep: Retention) -> int | None:
    return keep // _MILLISECOND if isinstance(keep, timedelta) else None


def _retention(value: object) -> Retention:
    return DROP if value is None else _number(value) * _MILLISECOND


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError("not a number")
    return value
