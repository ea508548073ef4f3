"""The report's charts of the whole network, each with its numbers in a table beneath."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from federation.analytics.report import wording
from federation.analytics.report.advice import meaning
from federation.analytics.report.charts import ChartSeries, bars, histogram, lines
from federation.analytics.report.comparison import compare
from federation.analytics.report.findings import LATENCY_BOUNDS_MS, SCORE_BOUNDS
from federation.analytics.report.markup import Column, Markup, join, plain_table, scrolling, short, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from datetime import date

    from federation.analytics.report.findings import Day, ErrorCode, Findings


def network(findings: Findings) -> Markup:
    if not findings.days:
        return tag("p", "No day has been computed.", class_="intro")
    early = findings.completeness.early
    dates = [each.day for each in findings.days]
    figures = (
        *_outcomes(findings.days, dates, early),
        *_traffic(findings.days, dates, early, findings.relaying.daily),
    )
    half = f"Not over when read, and so pale or dashed: {wording.days(early)}."
    return join(tag("p", half, class_="intro") if early else None, tag("div", *figures, class_="charts"))


def owed_and_lost(findings: Findings) -> Markup:
    """Return charts of what was owed and held on each day of which there are results, and of what was lost."""
    history = findings.obligations.history
    days, owed, held = [day for day, _, _ in history], [owed for _, owed, _ in history], [held for *_, held in history]
    dates, lost = [each.day for each in findings.days], [each.lost for each in findings.days]
    return tag(
        "div",
        _figure(
            "Owed and held",
            "At the end of each day of which there are results.",
            lines(
                "Deliveries owed and held, per day",
                days,
                [ChartSeries(name="owed", values=owed), ChartSeries(name="held", values=held, style="second")],
                write=_whole,
                scale=_compact,
            ),
            _numbers(days, {"owed": owed, "held": held}, _whole),
        ),
        _figure(
            "Lost for good",
            "Deliveries that were refused for good, or too old.",
            bars(
                "Deliveries lost, per day",
                dates,
                [ChartSeries(name="lost", values=lost, style="bad")],
                write=_compact,
                early=findings.completeness.early,
            ),
            _numbers(dates, {"lost": lost}, _whole),
        ),
        class_="charts",
    )


def _outcomes(days: Sequence[Day], dates: Sequence[date], early: Collection[date]) -> tuple[Markup, ...]:
    success = [each.success_rate for each in days]
    known, healthy = [each.servers_known for each in days], [each.servers_healthy for each in days]
    delivered = [each.delivered for each in days]
    failed = [each.attempts - each.delivered for each in days]
    return (
        _figure(
            "Attempts that got through",
            "Share of each day's attempts.",
            lines(
                "Share of attempts that got through, per day",
                dates,
                [ChartSeries(name="", values=success)],
                early=early,
                write=wording.percent,
                low=None,
                high=1,
            ),
            _numbers(dates, {"got through": success}, wording.percent),
        ),
        _figure(
            "Servers",
            "Healthy ones, of all in the registry. One on the blacklist counts by its health here.",
            lines(
                "Servers known and healthy, per day",
                dates,
                [ChartSeries(name="known", values=known, style="second"), ChartSeries(name="healthy", values=healthy)],
                early=early,
                write=_whole,
            ),
            _numbers(dates, {"known": known, "healthy": healthy}, _whole),
        ),
        _figure(
            "Attempts",
            "Blue got through, red did not.",
            bars(
                "Attempts per day, those that got through and those that failed",
                dates,
                [
                    ChartSeries(name="got through", values=delivered),
                    ChartSeries(name="failed", values=failed, style="bad"),
                ],
                early=early,
                write=_compact,
            ),
            _numbers(dates, {"got through": delivered, "failed": failed}, _whole),
        ),
    )


def _traffic(
    days: Sequence[Day], dates: Sequence[date], early: Collection[date], relayed: Sequence[int]
) -> tuple[Markup, ...]:
    p50, p95 = [each.p50_ms for each in days], [each.p95_ms for each in days]
    top10 = [each.top10_share for each in days]
    return (
        _figure(
            "Latency",
            "Half of the deliveries were quicker than p50, all but one in twenty quicker than p95.",
            lines(
                "Latency per day: p50 and p95",
                dates,
                [ChartSeries(name="p95", values=p95), ChartSeries(name="p50", values=p50, style="second")],
                early=early,
                write=wording.milliseconds,
            ),
            _numbers(dates, {"p50": p50, "p95": p95}, wording.milliseconds),
        ),
        _figure(
            "Top 10",
            "Share of each day's attempts that went to the ten busiest servers of the day.",
            lines(
                "Share of attempts that went to the ten busiest servers, per day",
                dates,
                [ChartSeries(name="", values=top10)],
                early=early,
                write=wording.percent,
                high=1,
            ),
            _numbers(dates, {"top 10": top10}, wording.percent),
        ),
        _figure(
            "Saved by relays",
            "Deliveries that arrived through another server.",
            bars(
                "Deliveries through relays, per day",
                dates,
                [ChartSeries(name="through relays", values=relayed)],
                early=early,
                write=_compact,
            ),
            _numbers(dates, {"through relays": relayed}, _whole),
        ),
    )


def errors(findings: Findings) -> Markup:
    """Return one small chart per code, each on its own scale, the most frequent first."""
    if not findings.errors:
        return tag("p", "No attempt failed.", class_="intro")
    dates = [each.day for each in findings.days]
    length = compare(findings.days).now.days
    figures = [
        _figure(
            short(each.code, 40),
            _told(each, length),
            bars(
                f"Attempts that failed with {short(each.code, 40)}, per day",
                dates,
                [ChartSeries(name=each.code, values=each.daily)],
                write=_compact,
                early=findings.completeness.early,
                width=340,
                height=120,
            ),
            _numbers(dates, {"attempts": each.daily}, _whole),
        )
        for each in findings.errors
    ]
    shown = sum(each.total for each in findings.errors)
    rest = sum(findings.error_totals.values()) - shown
    others = f" {wording.count(rest)} failures have other codes." if rest else ""
    told = (
        f"{wording.count(shown + rest)} attempts failed in these days, {wording.count(shown)} of them with these codes"
    )
    intro = f"{told}; each chart has its own scale.{others}"
    return join(tag("p", intro, class_="intro"), tag("div", *figures, class_="charts three"))


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
    spell = f"{wording.count(now)} in the last {wording.plural(length, 'day')}, {wording.growth(now, before)}"
    return f"{wording.sentence(meaning(error.code).text)}. {spell}."


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


def _numbers(
    days: Sequence[date], columns: dict[str, Sequence[float | None]], write: Callable[[float | None], str]
) -> Markup:
    rows = [(day.isoformat(), *values) for day, *values in zip(days, *columns.values(), strict=True)]
    heads = [tag("th", name, scope="col", class_="number") for name in columns]
    body = [
        tag("tr", tag("td", name), *(tag("td", write(value), class_="number") for value in values))
        for name, *values in rows
    ]
    return tag("table", tag("thead", tag("tr", tag("th", "day", scope="col"), *heads)), tag("tbody", *body))


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
