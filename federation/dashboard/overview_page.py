"""The first page: how the node does, in a sentence, in numbers, and what needs somebody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from fastapi import Query
from sqlalchemy import Select, bindparam, func, select
from sqlmodel import col
from starlette.responses import Response

from db import AttemptMinute, AttemptOutcome, Database, DeliveryState
from federation.admin import overview
from federation.admin.doctor.doctor import Finding
from federation.admin.overview import LastHour, Owed
from federation.dashboard.findings import Examination, Examinations
from federation.dashboard.orders import Node
from federation.runtime.composition import Federation
from workers.dashboard import charts
from workers.dashboard.api import ANSWERED, ApiAnswer, Listing, calls, given
from workers.dashboard.catalog import QueueCatalog, QueueLine, Queues
from workers.dashboard.charts import Columns, Layer
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.rendering import MenuItem, Templates
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, grouped, since
from workers.dashboard.visit import Visit

OVERVIEW: Final = MenuItem(title="Overview", path="/")

api: Final = calls()


class OverviewAnswer(ApiAnswer):
    """How the node does. `findings` are those of the doctor that matter, as of `examined_at`, which may be null."""

    hour: LastHour
    owed: Owed
    queues: list[QueueLine]
    examined_at: datetime | None
    findings: list[Finding]


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


def overview_part(federation: Federation, queues: QueueCatalog, examinations: Examinations) -> SitePart:
    """Return the page, and the call."""

    async def shown(span: Span) -> Mapping[str, object]:
        hour, owed, lines, examined = await _looked(federation, queues, examinations)
        return {
            "lede": _lede(hour, owed),
            "hour": hour,
            "failures": sum(hour.attempts[outcome] for outcome in FAILED),
            "owed": owed,
            "given_up": owed.states[DeliveryState.FAILED] + owed.states[DeliveryState.EXPIRED],
            "spans": list(Span),
            "span": span,
            "charts": history_charts(span, await history(federation.database, span)),
            "examined": examined,
            "is_before": examined is not None and examined.picture != _picture(owed, lines),
            **_of_queues(lines),
        }

    async def page(visit: Visit) -> Response:
        span = _span(visit.query.get("over"))
        return visit.page("overview.html", await shown(span), live="overview", parameters=(("over", span.value),))

    def live(templates: Templates) -> LiveSource:
        async def read(parameters: Parameters) -> Fragments:
            told = await shown(_span(dict(parameters).get("over")))
            return {"overview-live": templates.render("parts/overview.html", **told)}

        return read

    return SitePart(
        menu=(OVERVIEW,), pages={"/": page}, live={"overview": live}, calls=api.routes, gives=(examinations,)
    )


@api.get("/overview")
async def show_overview(
    node: Node, queues: Queues, examinations: Annotated[Examinations, given(Examinations)]
) -> OverviewAnswer:
    """Show how the node does."""
    hour, owed, lines, examined = await _looked(node, queues, examinations)
    return OverviewAnswer(
        hour=hour,
        owed=owed,
        queues=lines,
        examined_at=None if examined is None else examined.at,
        findings=[] if examined is None else [*examined.matters],
    )


@api.get("/history")
async def show_history(
    node: Node, over: Annotated[Span, Query(description="How far back: `hour`, `day` or `week`.")] = Span.HOUR
) -> Listing[TimeCount]:
    """Show how attempts ended: by the minute over an hour, by ten minutes over a day, by the hour over a week."""
    return Listing(items=tuple(await history(node.database, over)))


async def _looked(
    federation: Federation, queues: QueueCatalog, examinations: Examinations
) -> tuple[LastHour, Owed, list[QueueLine], Examination | None]:
    hour, owed, lines = await asyncio.gather(
        overview.last_hour(federation.database), overview.owed(federation.database), queues.lines()
    )
    return hour, owed, lines, await examinations.last(_picture(owed, lines))


def _picture(owed: Owed, lines: list[QueueLine]) -> tuple[frozenset[str], ...]:
    """Return what a page says in words of the node, and the doctor, too: no number, which would always be another."""
    return (
        frozenset(state.value for state, number in owed.states.items() if number),
        frozenset(line.name for line in lines if line.problem),
        frozenset(line.name for line in lines if line.paused),
        frozenset(line.name for line in lines if line.alive),
    )


def _span(asked: str | None) -> Span:
    return Span(asked) if asked in list(Span) else Span.HOUR


def _of_queues(lines: list[QueueLine]) -> dict[str, object]:
    workers = {worker.id for line in lines for worker in line.alive}
    return {
        "workers": len(workers),
        "lost": len({worker.id for line in lines for worker in line.workers} - workers),
        "waiting": sum(line.waiting for line in lines),
        "running": sum(line.running for line in lines),
        "silent": [line for line in lines if line.problem],
        "paused": [line for line in lines if line.paused],
    }


def _lede(hour: LastHour, owed: Owed) -> tuple[str, str]:
    """Say first what stands, then what was done."""
    held, ready = owed.states[DeliveryState.HELD], owed.states[DeliveryState.READY]
    state, number, how = (DeliveryState.HELD, held, "held") if held else (DeliveryState.READY, ready, "on the way")
    if number and owed.counted_at is not None and owed.is_old:
        first = f"{counted(number, 'delivery')} {'was' if number == 1 else 'were'} {how} {since(owed.counted_at)} ago."
    elif number:
        least = "At least " if state in owed.more else ""
        first = f"{least}{counted(number, 'delivery')} {'is' if number == 1 else 'are'} {how}."
    else:
        first = "Nothing is owed."
    delivered = hour.attempts[AttemptOutcome.DELIVERED]
    failed = sum(hour.attempts[outcome] for outcome in FAILED)
    rest = f"{grouped(delivered)} delivered in the last hour, " if delivered else "Nothing delivered in the last hour, "
    return first, rest + (f"{counted(failed, 'attempt')} failed." if failed else "no attempt failed.")
