"""The report's charts of the whole network, each with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from federation.analytics.report import wording
from federation.analytics.report.advice import meaning
from federation.analytics.report.charts import ChartSeries, bars, histogram, lines
from federation.analytics.report.comparison import compare
from federation.analytics.report.findings import LATENCY_BOUNDS_MS, SCORE_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import date

    from markupsafe import Markup

    from federation.analytics.report.findings import ErrorCode, Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart, and the table of its numbers: columns by their headings, as the templates have them, and rows."""

    title: str
    told: str
    chart: Markup
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]


def network(findings: Findings) -> Iterator[Figure]:
    def of(name: str, column: str, style: str = "main", *, label: str | None = None) -> ChartSeries:
        values = [getattr(day, column) for day in findings.days]
        return ChartSeries(name=name, values=values, style=style, label=label)

    draw = partial(_by_day, findings, [each.day for each in findings.days])
    yield draw(
        lines,
        "Attempts that got through",
        "Share of each day's attempts.",
        [of("got through", "success_rate", label="")],
        write=wording.percent,
        low=None,
        high=1,
    )
    told = "Those that are up, of all in the registry; one on the blacklist counts by its health here."
    yield draw(lines, "Servers", told, [of("known", "servers_known", "second"), of("up", "servers_healthy")])
    told = "The faint part got through, the solid one on top did not."
    yield draw(bars, "Attempts", told, [of("got through", "delivered"), of("failed", "failed", "bad")])
    told = "Half of the deliveries were quicker than p50, all but one in twenty quicker than p95."
    quickness = [of("p50", "p50_ms", "second"), of("p95", "p95_ms")]
    yield draw(lines, "Latency", told, quickness, write=wording.milliseconds)
    if any(findings.relaying.daily):
        relayed = ChartSeries(name="through relays", values=findings.relaying.daily)
        yield draw(bars, "Saved by relays", "Deliveries that arrived through another server.", [relayed])


def owed_and_lost(findings: Findings) -> Iterator[Figure]:
    """Yield charts of what was owed and held on each day of which there are results, and of what was lost."""
    if len(findings.obligations.history) > 1:
        days, owed, held = zip(*findings.obligations.history, strict=True)
        waiting = [ChartSeries(name="owed", values=owed), ChartSeries(name="held", values=held, style="second")]
        told = "On each day of which there are results."
        yield _by_day(findings, days, lines, "Owed and held", told, waiting)
    lost = [ChartSeries(name="lost", values=[each.lost for each in findings.days], style="bad")]
    told = "Deliveries that were refused for good, or too old."
    yield _by_day(findings, [each.day for each in findings.days], bars, "Lost for good", told, lost)


def errors(findings: Findings) -> Iterator[Figure]:
    """Yield one small chart per code, the most frequent first."""
    dates = [each.day for each in findings.days]
    length = compare(findings.days).now.days
    for each in findings.errors:
        attempts = [ChartSeries(name="attempts", values=each.daily, style="bad")]
        yield _by_day(findings, dates, bars, wording.short(each.code, 40), _told(each, length), attempts)


def spread(findings: Findings) -> Iterator[Figure]:
    """Yield charts of how many servers are quick, and how many reliable."""
    bounds = [wording.milliseconds(bound) for bound in LATENCY_BOUNDS_MS]
    latencies = [*(f"up to {bound}" for bound in bounds), f"over {bounds[-1]}"]
    highest = f"{SCORE_BOUNDS[-1]} to 100"
    scores = [f"below {SCORE_BOUNDS[0]}", *(f"{low} to {high}" for low, high in pairwise(SCORE_BOUNDS)), highest]
    yield _servers_by("Latency", "Servers by their p95 in the last 7 days.", latencies, findings.latencies)
    yield _servers_by("Score", "Servers by their score over 30 days; 100 is best.", scores, findings.scores)


def _servers_by(title: str, told: str, labels: Sequence[str], counts: Sequence[int]) -> Figure:
    rows = [(label, _whole(number)) for label, number in zip(labels, counts, strict=True)]
    chart = histogram(told, labels, counts, write=_whole)
    return Figure(title=title, told=told, chart=chart, columns=[(title, ""), ("servers", "number")], rows=rows)


def _told(error: ErrorCode, length: int) -> str:
    now, before = sum(error.daily[-length:]), sum(error.daily[-2 * length : -length])
    spell = f"{wording.count(now)} in the last {wording.plural(length, 'day')}"
    return f"{wording.sentence(meaning(error.code).text)}. {spell}, {wording.count(before)} in the {length} before."


def _by_day(
    findings: Findings,
    days: Sequence[date],
    chart: Callable[..., Markup],
    title: str,
    told: str,
    series: Sequence[ChartSeries],
    *,
    write: Callable[[float | None], str] | None = None,
    **shape: float | None,
) -> Figure:
    """Return a chart, and its numbers as `write` tells them: by default they are whole, and short along the axis."""
    early = findings.completeness.early
    drawn = chart(
        f"{title}, per day", days, series, write=write or _whole, scale=write or _compact, early=early, **shape
    )
    numbers = [[(write or _whole)(value) for value in each.values] for each in series]
    return Figure(
        title=title,
        told=told,
        chart=drawn,
        columns=[("Day", ""), *((each.name, "number") for each in series)],
        rows=list(zip(map(wording.day, days), *numbers, strict=True)),
    )


def _whole(value: float | None) -> str:
    return wording.NOTHING if value is None else wording.count(round(value))


def _compact(value: float | None) -> str:
    """Format a value for an axis."""
    if value is None:
        return wording.NOTHING
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
