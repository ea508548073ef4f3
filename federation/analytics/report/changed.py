"""What changed since yesterday, and which servers are new or gone."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from federation.analytics.frames import Action
from federation.analytics.report import wording
from federation.analytics.report.attention import NAMES, badge
from federation.analytics.report.markup import Column, Markup, join, short, table, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from federation.analytics.report.findings import AdviceChange, Appearance, Changes, Day, Findings

    Row = tuple[str, str, str, str]

R = TypeVar("R")


def changed(findings: Findings) -> Markup:
    """Return the numbers of the day before beside the last one's, whose advice is another, and who came and went."""
    changes = findings.changes
    if changes.since is None:
        told = (
            "Advice is told for the days of runs alone, however many days of attempts they count, and there was no run"
            " in the week before this day."
        )
        return join(tag("p", told, class_="intro"), _turnover(findings))
    return join(
        tag("p", _intro(findings), class_="intro"),
        _numbers(findings),
        tag(
            "div",
            _advice("Graver advice", changes.worse, changes.worse_count),
            _advice("Better advice", changes.better, changes.better_count),
            class_="pair",
        ),
        _turnover(findings),
    )


def heading(findings: Findings) -> str:
    since = findings.changes.since
    if since is None or since == findings.as_of - timedelta(days=1):
        return "What changed since yesterday"
    return f"What changed since {wording.day_and_year(since)}"


def _intro(findings: Findings) -> str:
    keys = sum(anomaly.found_on == findings.as_of for anomaly in findings.anomalies)
    found = f" {wording.plural(keys, 'suspicious key')} came to light." if keys else ""
    last = findings.days[-1] if findings.days else None
    fell = f" {wording.plural(last.servers_lost, 'server')} went down and stayed so." if last else ""
    return (
        f"Of {wording.plural(findings.changes.worse_count, 'server')} the advice is graver than it was, of"
        f" {wording.count(findings.changes.better_count)} it is better; those that are new or gone are listed"
        f" below.{fell}{found}"
    )


def _numbers(findings: Findings) -> Markup:
    changes = findings.changes
    urgent = sum(number for action, number in findings.actions.items() if action is not Action.KEEP)
    rows = [
        _counts("Servers that need attention", changes.urgent_before, urgent),
        _counts("Deliveries owed", changes.owed_before, findings.obligations.owed),
        *_days(changes, findings.days),
    ]
    assert changes.since is not None
    columns: list[Column[Row]] = [
        Column("Figure", lambda row: row[0]),
        Column(wording.day(changes.since), lambda row: row[1], number=True),
        Column(wording.day(findings.as_of), lambda row: row[2], number=True),
        Column("change", lambda row: row[3], number=True),
    ]
    return table(None, columns, rows, name="Numbers of the two days")


def _days(changes: Changes, days: Sequence[Day]) -> Iterator[Row]:
    if len(days) < 2 or days[-2].day != changes.since:
        return
    before, now = days[-2:]
    yield _counts("Servers up at the end of the day", before.servers_healthy, now.servers_healthy)
    yield _counts("Attempts on the day", before.attempts, now.attempts)
    change = wording.NOTHING
    if before.success_rate is not None and now.success_rate is not None:
        change = wording.points(now.success_rate - before.success_rate)
    yield "Got through", wording.percent(before.success_rate), wording.percent(now.success_rate), change


def _counts(name: str, before: int, now: int) -> Row:
    return name, wording.count(before), wording.count(now), wording.difference(now, before)


def _advice(title: str, shown: Sequence[AdviceChange], number: int) -> Markup:
    columns: list[Column[AdviceChange]] = [
        Column("Server", lambda change: short(wording.server(change.url), 60)),
        Column("Now", lambda change: badge(change.now)),
        Column("Was", lambda change: NAMES[change.before]),
        Column("Because", lambda change: short(change.reason or wording.NOTHING, 200), wide=True),
    ]
    return _listed(title, columns, shown, number)


def _turnover(findings: Findings) -> Markup | None:
    """Return who came into the registry, and who left it."""
    found = findings.turnover
    if found.since is None:
        return None
    told = (
        f"Against the results of {wording.day_and_year(found.since)}, the earliest of these days:"
        f" {wording.count(found.arrived_count)} new, {wording.count(found.vanished_count)} gone from the registry."
    )
    return join(
        tag("p", told, class_="intro"),
        tag(
            "div",
            _appearances("New servers", "First seen", found.arrived, found.arrived_count),
            _appearances("Vanished servers", "Last seen", found.vanished, found.vanished_count),
            class_="pair",
        ),
    )


def _appearances(title: str, dated: str, shown: Sequence[Appearance], number: int) -> Markup:
    columns: list[Column[Appearance]] = [
        Column("Server", lambda each: short(wording.server(each.url), 60)),
        Column(dated, lambda each: wording.day(each.day)),
        Column("Advice then" if dated == "Last seen" else "Advice", lambda each: badge(each.action)),
    ]
    return _listed(title, columns, shown, number)


def _listed(title: str, columns: Sequence[Column[R]], shown: Sequence[R], number: int) -> Markup:
    if not shown:
        return tag("div", tag("h3", title), tag("p", "None.", class_="soft small"))
    left = number - len(shown)
    more = tag("p", f"And {wording.count(left)} more.", class_="soft small") if left else None
    return tag("div", table(f"{title}: {wording.count(number)}", columns, shown), more)
