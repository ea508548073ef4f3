"""How attempts ended over the last hour, day or week, as the recurring job `rollups` has counted them by minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, Final

from sqlalchemy import Select, bindparam, func, select
from sqlmodel import col

from db import AttemptMinute, AttemptOutcome, Database
from workers.dashboard import charts
from workers.dashboard.api import ANSWERED
from workers.dashboard.charts import Columns, Layer
from workers.dashboard.text import grouped

FAILED: Final = (AttemptOutcome.RETRYABLE, AttemptOutcome.PERMANENT)


class Span(StrEnum):
    """How far back somebody looks."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The times that are shown as one: how many, how long each, and how a moment names its own.

    `digits` is how much of `2026-11-27 16:4` names the time that begins with `0` or `:00` behind it.
    """

    number: int
    length: timedelta
    digits: int
    rest: str
    what: str
    label: str


_STEPS: Final[Mapping[Span, _Steps]] = {
    Span.HOUR: _Steps(
        number=60, length=timedelta(minutes=1), digits=16, rest="", what="a minute", label="%H:%M UTC"
    ),
    Span.DAY: _Steps(
        number=144, length=timedelta(minutes=10), digits=15, rest="0", what="in ten minutes", label="%H:%M UTC"
    ),
    Span.WEEK: _Steps(
        number=168, length=timedelta(hours=1), digits=13, rest=":00", what="an hour", label="%a %d %b"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCount:
    """The attempts that began in the time from `at` to the next one, by how they ended."""

    __pydantic_config__: ClassVar = ANSWERED

    at: datetime
    attempts: Mapping[AttemptOutcome, int]

    @property
    def delivered(self) -> int:
        return self.attempts[AttemptOutcome.DELIVERED]

    @property
    def failed(self) -> int:
        return sum(self.attempts[outcome] for outcome in FAILED)


async def history(database: Database, span: Span, *, now: datetime | None = None) -> Sequence[TimeCount]:
    """Return the times of the span from the oldest on, without gaps; attempts that are under way are not counted."""
    steps = _STEPS[span]
    last = _begin(now or datetime.now(UTC), steps)
    times = [last - steps.length * back for back in reversed(range(steps.number))]
    counts: dict[datetime, dict[AttemptOutcome, int]] = {at: dict.fromkeys(AttemptOutcome, 0) for at in times}
    query = _counts(steps.digits, sqlite=database.is_sqlite)
    for row in await database.rows(query, {"first": times[0]}):
        at = datetime.fromisoformat(f"{row.time}{steps.rest}").replace(tzinfo=UTC)
        if at in counts:
            counts[at][row.outcome] = int(row.number)
    return [TimeCount(at=at, attempts=each) for at, each in counts.items()]


def history_charts(span: Span, times: Sequence[TimeCount]) -> list[tuple[str, str, Columns]]:
    """Draw what was delivered and what failed, each with its name and what a column is."""
    labels = [times[place].at.strftime(_STEPS[span].label) for place in (0, len(times) // 2, -1)]
    what = f"{_STEPS[span].what}, over the last {span.value}"
    return [
        _chart("Delivered", what, [float(each.delivered) for each in times], "main", labels),
        _chart("Failed attempts", what, [float(each.failed) for each in times], "bad", labels),
    ]


def _chart(name: str, what: str, values: list[float], style: str, labels: list[str]) -> tuple[str, str, Columns]:
    highest = grouped(round(max(values)))
    title = f"{name} {what}: {grouped(round(sum(values)))} in all, at most {highest} in one column"
    return name, what, charts.columns(title, [Layer(name=name, values=values, style=style)], labels)


def _begin(moment: datetime, steps: _Steps) -> datetime:
    text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M")[: steps.digits]
    return datetime.fromisoformat(f"{text}{steps.rest}").replace(tzinfo=UTC)


def _counts(digits: int, *, sqlite: bool) -> Select[*tuple[Any, ...]]:
    minute = col(AttemptMinute.minute)
    written = minute if sqlite else func.to_char(func.timezone("UTC", minute), "YYYY-MM-DD HH24:MI")
    # Grouped by its name: an expression with parameters would be another one to PostgreSQL.
    return (
        select(
            func.substr(written, 1, digits).label("time"),
            col(AttemptMinute.outcome),
            func.sum(col(AttemptMinute.attempts)).label("number"),
        )
        .where(minute >= bindparam("first"))
        .group_by("time", col(AttemptMinute.outcome))
    )
