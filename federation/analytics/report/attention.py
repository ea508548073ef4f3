"""The report's first part: which servers are sick, since when, why, and what to do about them."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from federation.analytics.frames import Action
from federation.analytics.report import wording
from federation.analytics.report.advice import command, instruction, meaning
from federation.analytics.report.charts import strip, strip_title
from federation.analytics.report.findings import BAD_DAY
from federation.analytics.report.markup import Column, Markup, join, short, table, tag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from federation.analytics.report.findings import Findings, Server, Since

URGENT: Final = (Action.REVIEW, Action.PARK, Action.WATCH, Action.PRUNE)
"""The actions, in the order in which to look at them."""

NAMES: Final = {
    Action.REVIEW: "review for blacklist",
    Action.PARK: "park",
    Action.WATCH: "watch",
    Action.PRUNE: "prune",
    Action.KEEP: "keep",
}
_CARDS: Final = 4


def attention(findings: Findings) -> Iterator[Markup]:
    """Yield a group per advice: its first servers in full, the next ones in a line each."""
    if not findings.attention:
        yield tag("p", "No server does.", class_="intro")
        return
    first = "In each group the servers that lost the most attempts in 7 days come first."
    told = f"{first} Each column of a strip is a day: blue got through, red did not."
    yield tag("p", told, class_="intro")
    for action in URGENT:
        if findings.actions.get(action):
            yield from _group(action, findings)


def _group(action: Action, findings: Findings) -> Iterator[Markup]:
    servers = [server for server in findings.attention if server.action is action]
    number = findings.actions[action]
    yield tag("h3", _badge(action), wording.plural(number, "server"), class_="group")
    yield tag("p", instruction(action), class_="instruction")
    yield tag("ol", *(_patient(server, findings) for server in servers[:_CARDS]), class_="patients")
    if rest := servers[_CARDS:]:
        yield _lines(rest, findings)
    if left := number - len(servers):
        where = f"server_scorecard/as_of={findings.as_of.isoformat()}"
        yield tag("p", f"And {wording.plural(left, 'more server')}: in {where}.", class_="soft small")


def _patient(server: Server, findings: Findings) -> Markup:
    told = [wording.sentence("; ".join(short(reason, 200) for reason in server.reasons))]
    if server.top_error is not None and server.action is not Action.REVIEW:
        told.append(f"{short(server.top_error, 40)}: {meaning(server.top_error).text}")
    helpful = command(server.action, server.url, server.top_error)
    plain = tag("p", "Its address is not a plain one: no command is offered.", class_="soft small")
    since = f"since {_since(server.since, findings)}" if server.since else _on_and_off(server)
    return tag(
        "li",
        tag(
            "div",
            tag("h4", short(wording.server(server.url)), " ", tag("span", since, class_="soft")),
            tag("p", *(f"{sentence}. " for sentence in told if sentence)),
            tag("code", helpful) if helpful else plain,
            class_="told",
        ),
        tag("div", strip(strip_title(server.daily), server.daily), _numbers(server), class_="shown"),
        class_="patient",
    )


def _numbers(server: Server) -> Markup:
    week = server.week
    if not week.attempts:
        return tag("p", "Nothing attempted in 7 days.")
    through = tag("b", wording.percent(week.availability), " got through")
    return join(
        tag("p", through),
        tag("p", f"{wording.plural(week.attempts, 'attempt')} in 7 days"),
        tag("p", f"score {wording.score(week.score)} of 100"),
    )


def _badge(action: Action) -> Markup:
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
    return f"on {bad} of {wording.plural(len(known), 'day')}" if bad else wording.NOTHING


def _lines(servers: Sequence[Server], findings: Findings) -> Markup:
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("Since", lambda server: _since(server.since, findings) if server.since else _on_and_off(server)),
        Column("Most often", lambda server: short(server.top_error or wording.NOTHING, 40)),
        Column("30 days", lambda server: strip(strip_title(server.daily), server.daily)),
        Column("Got through, 7 days", lambda server: _share(server), number=True),
    ]
    return table(None, columns, servers)


def _share(server: Server) -> Markup:
    week = server.week
    return join(wording.percent(week.availability), tag("span", f" of {wording.count(week.attempts)}", class_="soft"))
