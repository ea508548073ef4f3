"""The first screen: what matters in a sentence, the headline numbers, and what is wrong on this side.

Each number says what it is the sum of, or a part of, so that two that differ explain each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.frames import Action
from federation.analytics.report import wording
from federation.analytics.report.advice import meaning, own_steps
from federation.analytics.report.attention import NAMES, URGENT, by_state
from federation.analytics.report.comparison import compare
from federation.analytics.report.markup import Markup, join, pasted, tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from federation.analytics.report.advice import Suggestion
    from federation.analytics.report.comparison import Comparison
    from federation.analytics.report.findings import Findings, Obligations

_SICK_NETWORK: Final = 0.5
_OWN_SHARE: Final = 0.01
_MOST_SPELLS: Final = 10


def lede(findings: Findings) -> Markup:
    """Return what matters, in a few sentences."""
    all_ = sum(findings.actions.values())
    if not all_:
        return tag("p", "No servers are known yet, so there is nothing to judge.", class_="lede")
    urgent = all_ - findings.actions.get(Action.KEEP, 0)
    need = "needs" if urgent == 1 else "need"
    who = f"Of {wording.plural(all_, 'server')} {wording.count(urgent)} {need} attention."
    rest = " ".join((*_deliveries(findings.obligations), _success(findings)))
    return tag("p", who if urgent else "No server needs attention.", " ", tag("em", rest), class_="lede")


def _deliveries(found: Obligations) -> Iterator[str]:
    if found.owed:
        yield f"{wording.plural(found.owed, 'delivery')} owed: {owed_parts(found)}."
    if found.lost_week:
        yield f"{wording.count(found.lost_week)} lost for good in 7 days."


def owed_parts(found: Obligations) -> str:
    """Write what is owed as a sum."""
    return wording.total({"held": found.held, "to be sent": found.owed - found.held})


def _success(findings: Findings) -> str:
    comparison = compare(findings.days)
    now = comparison.now
    if now.success_rate is None:
        return "Nothing was attempted in these days."
    text = f"In the last {wording.plural(now.days, 'day')} {wording.percent(now.success_rate)} of attempts got through"
    if comparison.change is not None:
        text += f", {wording.points(comparison.change)} on the days before"
    return f"{text}."


def tiles(findings: Findings) -> Markup:
    found = (*_server_tiles(findings), *_delivery_tiles(findings.obligations), *_attempt_tiles(compare(findings.days)))
    return tag("dl", *found, class_="tiles")


def _server_tiles(findings: Findings) -> Iterator[Markup]:
    urgent = {action: number for action in URGENT if (number := findings.actions.get(action))}
    parts = wording.total({f"to {NAMES[action]}": number for action, number in urgent.items()})
    yield _tile("Need attention", wording.count(sum(urgent.values())), parts, bad=set(urgent) - {Action.WATCH} != set())
    others = {state: number for state, number in findings.states.items() if state != ServerHealth.HEALTHY}
    up = findings.states.get(ServerHealth.HEALTHY, 0)
    rest = f", the others are {by_state(others)}" if any(others.values()) else ""
    sick = findings.urgent_states.get(ServerHealth.HEALTHY, 0)
    but = f"; {wording.count(sick)} of those up need attention" if sick else ""
    yield _tile(
        "Servers that are up",
        wording.count(up) if findings.states else wording.NOTHING,
        f"of {wording.count(sum(findings.actions.values()))}{rest}{but}",
    )


def _attempt_tiles(comparison: Comparison) -> Iterator[Markup]:
    now, before = comparison.now, comparison.before
    spell = f"last {wording.plural(now.days, 'day')}"
    grown = f"; {wording.growth(now.attempts, before.attempts)}" if before else ""
    parts = {"got through": now.delivered, "failed": now.attempts - now.delivered}
    yield _tile(f"Attempts, {spell}", wording.count(now.attempts), f"{wording.total(parts)}{grown}")
    change = f"; {wording.points(comparison.change)}" if comparison.change is not None else ""
    share = f"{wording.count(now.delivered)} of {wording.count(now.attempts)}{change}"
    yield _tile(f"Got through, {spell}", wording.percent(now.success_rate), share)


def _delivery_tiles(found: Obligations) -> Iterator[Markup]:
    since = f"; the oldest since {wording.day(found.since.date())}" if found.since else ""
    yield _tile("Owed now", wording.count(found.owed), f"{owed_parts(found)}{since}")
    month = f"{wording.count(found.lost_month)} in 30 days, of {wording.plural(found.lost_servers, 'server')}"
    yield _tile("Lost for good, last 7 days", wording.count(found.lost_week), month, bad=found.lost_week > 0)


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
        yield _alert("Most servers failed together, or this node did nothing: ", told, own_steps(()))
    ours = {code: number for code, number in findings.error_totals.items() if meaning(code).ours}
    if sum(ours.values()) >= _OWN_SHARE * max(sum(findings.error_totals.values()), 1):
        told = "; ".join(f"{code} ({wording.count(number)}): {meaning(code).text}" for code, number in ours.items())
        yield _alert("This node itself failed attempts. ", f"{told}. See its log, and: ", own_steps(ours))
    if findings.days and findings.days[-1].servers_healthy < _SICK_NETWORK * findings.days[-1].servers_known:
        then = "Look at this node first: its network, its name resolution, its clock. "
        yield _alert("More than half of all servers are down at once. ", then, own_steps(()))


def _alert(first: str, then: str, steps: tuple[Suggestion, ...]) -> Markup:
    return tag("p", tag("b", first), then, join(*(pasted(step.command) for step in steps)), class_="alert")
