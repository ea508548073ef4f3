"""The report's first part: which servers are sick, since when, why, and what to do about them."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.frames import BLACKLISTED, UNREGISTERED, Action
from federation.analytics.report import wording
from federation.analytics.report.advice import Command, commands, instruction, meaning
from federation.analytics.report.charts import hours, strip, strip_title
from federation.analytics.report.findings import BAD_DAY, MOST_WITH_DAYS
from federation.analytics.report.markup import Column, Markup, join, pasted, short, table, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from federation.analytics.report.findings import Findings, Period, Server, Since

URGENT: Final = (Action.REVIEW, Action.PARK, Action.WATCH, Action.PRUNE)
"""The actions, in the order in which to look at them."""

NAMES: Final = {
    Action.REVIEW: "review for blacklist",
    Action.PARK: "park",
    Action.WATCH: "watch",
    Action.PRUNE: "prune",
    Action.KEEP: "keep",
}
STATES: Final = {
    ServerHealth.HEALTHY.value: "healthy",
    ServerHealth.UNHEALTHY.value: "unhealthy",
    BLACKLISTED: "on the blacklist",
    UNREGISTERED: "not in the registry",
}

_CARDS: Final = 4
_PAGE: Final = 100


def by_state(counts: Mapping[str, int]) -> str:
    """Write what a number of servers is the sum of."""
    return wording.total({told: counts.get(state, 0) for state, told in STATES.items()})


def attention(findings: Findings) -> Iterator[Markup]:
    """Yield a group per advice: its first servers in full, the next ones in a line each, all others in pages."""
    if not findings.attention:
        yield tag("p", "No server does.", class_="intro")
        return
    number = sum(findings.urgent_states.values())
    whose = f"{wording.plural(number, 'server')} = {by_state(findings.urgent_states)}. " if number else ""
    first = "In each group the servers to which the most is owed, or was lost in 30 days, come first."
    told = f"{whose}{first} Each column of a strip is a day: blue got through, red did not."
    yield tag("p", told, class_="intro")
    for action in URGENT:
        if findings.actions.get(action):
            yield from _group(action, findings)


def _group(action: Action, findings: Findings) -> Iterator[Markup]:
    servers = [server for server in findings.attention if server.action is action]
    number = findings.actions[action]
    yield tag("h3", badge(action), wording.plural(number, "server"), class_="group")
    words = (tag("code", each) if isinstance(each, Command) else each for each in instruction(action))
    yield tag("p", *words, class_="instruction")
    yield tag("ol", *(_patient(server, findings) for server in servers[:_CARDS]), class_="patients")
    if rest := servers[_CARDS:MOST_WITH_DAYS]:
        yield _lines(rest, findings, name=f"To {NAMES[action]}, {_CARDS + 1} to {_CARDS + len(rest)}")
    for start in range(MOST_WITH_DAYS, len(servers), _PAGE):
        yield _page(action, servers, start, number)
    if left := number - len(servers):
        where = f"server_scorecard/as_of={findings.as_of.isoformat()}"
        yield tag("p", f"And {wording.plural(left, 'more server')}: in {where}.", class_="soft small")


def _page(action: Action, servers: Sequence[Server], start: int, number: int) -> Markup:
    """Return the next servers of a long list, closed until somebody wants them."""
    page = servers[start : start + _PAGE]
    places = f"{start + 1} to {start + len(page)}" if len(page) > 1 else f"{start + 1}"
    title = f"{places} of {wording.count(number)} to {NAMES[action]}"
    columns = [_NAME, _BECAUSE, _GOT_THROUGH, *_MISSING]
    return tag("details", tag("summary", title), table(None, columns, page, name=title), class_="page")


def _patient(server: Server, findings: Findings) -> Markup:
    told = [wording.sentence("; ".join(short(reason, 200) for reason in server.reasons))]
    if server.top_error is not None and server.action is not Action.REVIEW:
        told.append(f"{short(server.top_error, 40)}: {meaning(server.top_error).text}")
    told += _deliveries(server)
    helpful = [pasted(command) for command in commands(server)]
    plain = tag("p", "Its address is not a plain one: no command is offered.", class_="soft small")
    since = f"since {_since(server.since, findings)}" if server.since else _on_and_off(server).strip(wording.NOTHING)
    return tag(
        "li",
        tag(
            "div",
            tag("h4", short(wording.server(server.url)), " ", tag("span", since, class_="soft")),
            tag("p", *(f"{sentence}. " for sentence in told if sentence)),
            *(helpful or [plain]),
            class_="told",
        ),
        tag(
            "div",
            strip(strip_title(server.daily), server.daily),
            _numbers(server),
            *(
                (tag("p", "Failures by weekday and hour (UTC)"), hours(server.failed_hours))
                if server.failed_hours
                else ()
            ),
            class_="shown",
        ),
        class_="patient",
    )


def _deliveries(server: Server) -> Iterator[str]:
    if server.owed:
        since = f", the oldest since {wording.moment(server.owed_since)}" if server.owed_since else ""
        held = "all held" if server.held == server.owed else f"{wording.count(server.held)} of them held"
        yield f"{wording.plural(server.owed, 'delivery')} owed, {held}{since}"
    if server.month.lost:
        yield f"{wording.plural(server.month.lost, 'delivery')} lost in 30 days"


def _numbers(server: Server) -> Markup:
    return join(*(tag("p", line) for line in (*_attempts(server.week), *_outages(server.month))))


def _attempts(week: Period) -> Iterator[Markup | str]:
    if not week.attempts:
        yield "Nothing attempted in 7 days."
        return
    plain = week.delivered / week.attempts
    yield tag("b", wording.percent(plain), " got through")
    yield f"{wording.count(week.delivered)} of {wording.plural(week.attempts, 'attempt')} in 7 days"
    if week.availability is not None and week.availability < plain - 0.0005:
        yield f"{wording.percent(week.availability)} counting its time down"
    yield f"score {wording.score(week.score)} of 100"


def _outages(month: Period) -> Iterator[str]:
    if month.failures:
        yield f"{wording.plural(month.failures, 'outage')} in 30 days"
    times = {"MTTF": month.mttf_s, "MTTR": month.mttr_s}
    if known := [f"{name} {wording.seconds(value)}" for name, value in times.items() if value is not None]:
        yield ", ".join(known)


def badge(action: Action) -> Markup:
    return tag("span", NAMES[action], class_=f"badge {action.value}")


def _since(since: Since, findings: Findings) -> str:
    end = datetime.combine(findings.as_of + timedelta(days=1), time(), UTC)
    lasted = wording.duration(end - since.at)
    whole_day = since.at.time() == time()
    when = wording.day_and_year(since.at) if whole_day else wording.moment(since.at)
    return f"{when} or earlier ({lasted} at least)" if since.at_least else f"{when} ({lasted})"


def _on_and_off(server: Server) -> str:
    """Say how often a server was unhealthy, if it is not, or not known to be, unhealthy without a break until now."""
    known = [ratio for ratio in server.daily if ratio is not None]
    bad = sum(ratio < BAD_DAY for ratio in known)
    return f"bad on {bad} of {wording.plural(len(known), 'day')}" if bad else wording.NOTHING


def _lines(servers: Sequence[Server], findings: Findings, *, name: str) -> Markup:
    columns: list[Column[Server]] = [
        _NAME,
        Column("Since", lambda server: _since(server.since, findings) if server.since else _on_and_off(server)),
        _BECAUSE,
        Column("30 days", lambda server: strip(strip_title(server.daily), server.daily)),
        _GOT_THROUGH,
        *_MISSING,
    ]
    return table(None, columns, servers, name=name)


def _because(server: Server) -> Markup:
    reasons = wording.sentence("; ".join(short(reason, 120) for reason in server.reasons))
    return join(tag("p", reasons), *(pasted(command) for command in commands(server)))


def _share(server: Server) -> Markup:
    week = server.week
    return join(wording.percent(week.availability), tag("span", f" of {wording.count(week.attempts)}", class_="soft"))


_NAME: Final[Column[Server]] = Column("Server", lambda server: short(wording.server(server.url), 60))
_BECAUSE: Final[Column[Server]] = Column("Because, and what to paste", _because, wide=True)
_GOT_THROUGH: Final[Column[Server]] = Column("Got through, 7 days", _share, number=True)
_MISSING: Final[tuple[Column[Server], ...]] = (
    Column("Owed", lambda server: wording.count(server.owed), number=True),
    Column("Lost, 30 days", lambda server: wording.count(server.month.lost), number=True),
)
"""Columns of every list of servers that need attention."""
