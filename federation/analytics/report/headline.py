"""The first screen: what matters in a sentence, the headline numbers, and what is wrong on this side.

Each number says what it is the sum of, or a part of, so that two that differ explain each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.days import WEEK
from federation.analytics.frames import Action
from federation.analytics.report import wording
from federation.analytics.report.advice import meaning, own_commands
from federation.analytics.report.attention import NAMES, URGENT, by_state
from federation.analytics.report.comparison import compare
from federation.analytics.report.markup import Markup, join, pasted, short, tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from federation.analytics.report.comparison import Comparison
    from federation.analytics.report.findings import Findings

_SICK_NETWORK: Final = 0.5
_OWN_SHARE: Final = 0.01
_MOST_SPELLS: Final = 10


def lede(findings: Findings) -> Markup:
    """Return what matters, in a sentence or two."""
    all_ = sum(findings.actions.values())
    if not all_:
        return tag("p", "No servers are known yet, so there is nothing to judge.", class_="lede")
    urgent = all_ - findings.actions.get(Action.KEEP, 0)
    need = "needs" if urgent == 1 else "need"
    who = f"Of {wording.plural(all_, 'server')} {wording.count(urgent)} {need} attention."
    return tag("p", who if urgent else "No server needs attention.", " ", tag("em", _success(findings)), class_="lede")


def _success(findings: Findings) -> str:
    comparison = compare(findings.days)
    now = comparison.now
    if now.success_rate is None:
        return "Nothing was attempted in these days."
    text = f"In the last {wording.plural(now.days, 'day')} {wording.percent(now.success_rate)} of attempts got through"
    if comparison.change is not None:
        text += f", {wording.points(comparison.change)} on the days before"
    recent = {error.code: sum(error.daily[-now.days :]) for error in findings.errors}
    failed = now.attempts - now.delivered
    if failed and recent:
        code = max(recent, key=lambda each: recent[each])
        text += f"; {short(code, 40)} is behind {wording.percent(recent[code] / failed)} of the failures"
    return f"{text}."


def tiles(findings: Findings) -> Markup:
    comparison = compare(findings.days)
    return tag(
        "dl",
        *_server_tiles(findings),
        *_attempt_tiles(findings, comparison),
        *_delivery_tiles(findings, comparison),
        class_="tiles",
    )


def _server_tiles(findings: Findings) -> Iterator[Markup]:
    urgent = {action: number for action in URGENT if (number := findings.actions.get(action))}
    grave = bool(urgent.get(Action.REVIEW) or urgent.get(Action.PARK))
    parts = wording.total({f"to {NAMES[action]}": number for action, number in urgent.items()})
    yield _tile("Need attention", wording.count(sum(urgent.values())), parts, bad=grave)
    others = {state: number for state, number in findings.states.items() if state != ServerHealth.HEALTHY}
    healthy = findings.states.get(ServerHealth.HEALTHY, 0)
    rest = f", the others are {by_state(others)}" if any(others.values()) else ""
    yield _tile(
        "Healthy servers",
        wording.count(healthy) if findings.states else wording.NOTHING,
        f"of {wording.count(sum(findings.actions.values()))}{rest}",
    )
    outages = findings.outages
    between = f"MTTF {wording.seconds(outages.mttf_s)}; " if outages.mttf_s is not None else ""
    whose = f"{wording.plural(outages.failures, 'outage')} of {wording.plural(outages.failed_servers, 'server')}"
    yield _tile("Typical MTTR, 30 days", wording.seconds(outages.mttr_s), f"{between}{whose}")


def _attempt_tiles(findings: Findings, comparison: Comparison) -> Iterator[Markup]:
    now, before = comparison.now, comparison.before
    spell = f"last {wording.plural(now.days, 'day')}"
    grown = f"; {wording.growth(now.attempts, before.attempts)}" if before else ""
    parts = {"got through": now.delivered, "failed": now.attempts - now.delivered}
    yield _tile(f"Attempts, {spell}", wording.count(now.attempts), f"{wording.total(parts)}{grown}")
    change = f"; {wording.points(comparison.change)}" if comparison.change is not None else ""
    share = f"{wording.count(now.delivered)} of {wording.count(now.attempts)}{change}"
    yield _tile(f"Got through, {spell}", wording.percent(now.success_rate), share)
    yield _tile(
        f"Daily p95, {spell}",
        wording.milliseconds(now.p95_ms),
        f"{wording.milliseconds(before.p95_ms)} before" if before else wording.NOTHING,
    )
    top = sum(server.week.attempts for server in findings.busiest)
    yield _tile(
        f"Top 10, last {WEEK} days",
        wording.percent(top / findings.week_attempts if findings.week_attempts else None),
        f"of attempts: {wording.count(top)} of {wording.count(findings.week_attempts)}",
    )


def _delivery_tiles(findings: Findings, comparison: Comparison) -> Iterator[Markup]:
    owed = findings.obligations
    parts = wording.total({"held": owed.held, "to be sent": owed.owed - owed.held})
    since = f"; the oldest since {wording.day(owed.since.date())}" if owed.since else ""
    yield _tile("Owed now", wording.count(owed.owed), f"{parts}{since}")
    month = f"{wording.count(owed.lost_month)} in 30 days, of {wording.plural(owed.lost_servers, 'server')}"
    yield _tile("Lost for good, last 7 days", wording.count(owed.lost_week), month, bad=owed.lost_week > 0)
    days = comparison.now.days
    relayed = sum(findings.relaying.daily[-days:]) if days else 0
    yield _tile(
        f"Relays saved, last {wording.plural(days, 'day')}",
        wording.count(relayed),
        f"of the {wording.count(comparison.now.delivered)} that got through",
    )


def _tile(name: str, value: str, told: str, *, bad: bool = False) -> Markup:
    shown = tag("dd", value, class_="bad" if bad else None)
    return tag("div", tag("dt", name), shown, tag("dd", told), class_="tile")


def alerts(findings: Findings) -> Iterator[Markup]:
    """Yield what is wrong on this side, which no list of servers would show."""
    if spells := [f"{wording.day(each.day)} {hours}" for each in findings.days for hours in each.own_trouble]:
        more = f" and {wording.plural(len(spells) - _MOST_SPELLS, 'more time')}" if len(spells) > _MOST_SPELLS else ""
        told = (
            f"{', '.join(spells[-_MOST_SPELLS:])}{more} (UTC). They, and what failed in them, count against no server. "
        )
        yield _alert("Most servers failed together, or this node did nothing: ", told, own_commands(()))
    ours = {code: number for code, number in findings.error_totals.items() if meaning(code).ours}
    if sum(ours.values()) >= _OWN_SHARE * max(sum(findings.error_totals.values()), 1):
        told = "; ".join(f"{code} ({wording.count(number)}): {meaning(code).text}" for code, number in ours.items())
        yield _alert("This node itself failed attempts. ", f"{told}. See its log, and: ", own_commands(ours))
    if findings.days and findings.days[-1].servers_healthy < _SICK_NETWORK * findings.days[-1].servers_known:
        then = "Look at this node first: its network, its name resolution, its clock. "
        yield _alert("More than half of all servers are sick at once. ", then, own_commands(()))


def _alert(first: str, then: str, commands: tuple[str, ...]) -> Markup:
    return tag("p", tag("b", first), then, join(*(pasted(command) for command in commands)), class_="alert")
