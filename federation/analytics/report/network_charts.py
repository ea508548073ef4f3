"""The report's charts of the whole network, each with its numbers in a table beneath."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from federation.analytics.report import wording
from federation.analytics.report.advice import meaning
from federation.analytics.report.charts import ChartSeries, bars, histogram, lines
from federation.analytics.report.comparison import compare
from federation.analytics.report.findings import LATENCY_BOUNDS_MS, SCORE_BOUNDS
from federation.analytics.report.markup import Column, Markup, join, plain_table, scrolling, short, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import date

    from federation.analytics.report.findings import ErrorCode, Findings


def network(findings: Findings) -> Markup:
    if not findings.days:
        return tag("p", "No day has been computed.", class_="intro")
    early = findings.completeness.early
    half = f"Not over when read, and so pale or dashed: {wording.days(early)}."
    return join(
        tag("p", half, class_="intro") if early else None, tag("div", *_of_the_network(findings), class_="charts")
    )


def _of_the_network(findings: Findings) -> Iterator[Markup]:
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


def owed_and_lost(findings: Findings) -> Markup:
    """Return charts of what was owed and held on each day of which there are results, and of what was lost."""
    days, owed, held = zip(*findings.obligations.history, strict=True) if findings.obligations.history else ((),) * 3
    waiting = [ChartSeries(name="owed", values=owed), ChartSeries(name="held", values=held, style="second")]
    lost = [ChartSeries(name="lost", values=[each.lost for each in findings.days], style="bad")]
    told = "Deliveries that were refused for good, or too old."
    told_days = "On each day of which there are results."
    return tag(
        "div",
        _by_day(findings, days, lines, "Owed and held", told_days, waiting) if len(days) > 1 else None,
        _by_day(findings, [each.day for each in findings.days], bars, "Lost for good", told, lost),
        class_="charts",
    )


def errors(findings: Findings) -> Markup:
    """Return one small chart per code, each on its own scale, the most frequent first."""
    if not findings.errors:
        return tag("p", "No attempt failed.", class_="intro")
    dates = [each.day for each in findings.days]
    length = compare(findings.days).now.days
    figures = [
        _by_day(
            findings,
            dates,
            bars,
            short(each.code, 40),
            _told(each, length),
            [ChartSeries(name="attempts", values=each.daily, style="bad")],
        )
        for each in findings.errors
    ]
    shown = sum(each.total for each in findings.errors)
    rest = sum(findings.error_totals.values()) - shown
    others = f" {wording.count(rest)} failures have other codes." if rest else ""
    intro = (
        f"{wording.plural(shown + rest, 'attempt')} failed in these days. Each chart has its own scale, and a code is"
        f" rarer, too, where less was tried.{others}"
    )
    return join(tag("p", intro, class_="intro"), tag("div", *figures, class_="charts"))


def spread(findings: Findings) -> Markup:
    """Return charts of how many servers are quick, and how many reliable."""
    bounds = [wording.milliseconds(bound) for bound in LATENCY_BOUNDS_MS]
    latencies = [*(f"up to {bound}" for bound in bounds), f"over {bounds[-1]}"]
    highest = f"{SCORE_BOUNDS[-1]} to 100"
    scores = [f"below {SCORE_BOUNDS[0]}", *(f"{low} to {high}" for low, high in pairwise(SCORE_BOUNDS)), highest]
    return tag(
        "div",
        _servers_by("Latency", "Servers by their p95 in the last 7 days.", latencies, findings.latencies),
        _servers_by("Score", "Servers by their score over 30 days; 100 is best.", scores, findings.scores),
        class_="charts",
    )


def _servers_by(title: str, told: str, labels: Sequence[str], counts: Sequence[int]) -> Markup:
    columns: list[Column[tuple[str, int]]] = [
        Column(title, lambda row: row[0]),
        Column("servers", lambda row: _whole(row[1]), number=True),
    ]
    rows = list(zip(labels, counts, strict=True))
    return _figure(title, told, histogram(told, labels, counts, write=_whole), plain_table(None, columns, rows))


def _told(error: ErrorCode, length: int) -> str:
    now, before = sum(error.daily[-length:]), sum(error.daily[-2 * length : -length])
    spell = f"{wording.count(now)} in the last {wording.plural(length, 'day')}"
    return f"{wording.sentence(meaning(error.code).text)}. {spell}, {wording.count(before)} in the {length} before."


def _figure(title: str, told: str, chart: Markup, numbers: Markup) -> Markup:
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", told)),
        chart,
        tag(
            "details",
            tag("summary", "Numbers", tag("span", f" of {title}", class_="unseen")),
            scrolling(numbers, f"Numbers of {title}", style="data"),
        ),
    )


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
) -> Markup:
    """Return a chart, and its numbers as `write` tells them: by default they are whole, and short along the axis."""
    early = findings.completeness.early
    drawn = chart(
        f"{title}, per day", days, series, write=write or _whole, scale=write or _compact, early=early, **shape
    )
    columns: list[Column[int]] = [Column("Day", lambda place: wording.day(days[place]))]
    columns += [_column(each, write or _whole) for each in series]
    return _figure(title, told, drawn, plain_table(None, columns, range(len(days))))


def _column(series: ChartSeries, write: Callable[[float | None], str]) -> Column[int]:
    return Column(series.name, lambda place: write(series.values[place]), number=True)


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
