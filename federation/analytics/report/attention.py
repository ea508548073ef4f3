"""The report's first part: which servers are sick, since when, why, and what to do about them."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.frames import BLACKLISTED, UNREGISTERED, Action
from federation.analytics.report import wording
from federation.analytics.report.advice import Command, instruction, meaning, steps
from federation.analytics.report.charts import strip
from federation.analytics.report.findings import BAD_DAY, HELD_FOR, MOST_WITH_DAYS
from federation.analytics.report.markup import Column, Markup, join, pasted, short, table, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from federation.analytics.report.findings import Findings, Period, Server, Since

URGENT: Final = (Action.REVIEW, Action.PRUNE, Action.PARK, Action.WATCH)
"""The actions, the gravest first."""

NAMES: Final = {
    Action.REVIEW: "review for blacklist",
    Action.PARK: "park",
    Action.WATCH: "watch",
    Action.PRUNE: "prune",
    Action.KEEP: "keep",
}
STATES: Final = {
    ServerHealth.HEALTHY.value: "up",
    ServerHealth.UNHEALTHY.value: "down",
    BLACKLISTED: "on the blacklist",
    UNREGISTERED: "not in the registry",
}

_CARDS: Final = 4
_PAGE: Final = 100


def by_state(counts: Mapping[str, int]) -> str:
    """Write what a number of servers is the sum of."""
    return wording.total({told: counts.get(state, 0) for state, told in STATES.items()})


def index(findings: Findings) -> Markup | None:
    """Return links to the servers that are told at length."""
    groups = [tag("li", badge(action), join(*links)) for action in URGENT if (links := list(_links(action, findings)))]
    return tag("nav", tag("ul", *groups), aria_label="Servers that need attention", class_="index") if groups else None


def _links(action: Action, findings: Findings) -> Iterator[Markup]:
    servers = _servers(action, findings)
    for place, server in enumerate(servers[:_CARDS]):
        yield tag("a", short(wording.server(server.url), 60), href=f"#{_id(action, place)}")
    if servers and (more := findings.actions[action] - len(servers[:_CARDS])) > 0:
        yield tag("a", f"{wording.count(more)} more", href=f"#{action.value}")


def attention(findings: Findings) -> Iterator[Markup]:
    """Yield the servers that need attention, with their days, in groups; the rest of a long list is only listed."""
    number = sum(findings.actions.get(action, 0) for action in URGENT)
    if not number:
        yield tag("p", "No server needs attention.", class_="intro")
        return
    whose = f"{wording.plural(number, 'server')} = {by_state(findings.urgent_states)}. "
    first = "In each group the servers to which the most is owed, or was lost in 30 days, come first."
    yield tag("p", f"{whose}{first}", class_="intro")
    yield tag(
        "p",
        f"What is held expires {wording.plural(HELD_FOR.days, 'day')} after it was made, if"
        " FEDERATION_DELIVERY_MAX_AGE is not set to another time; what is to be sent does not. What expired, or was"
        " refused for good, is lost, and can be sent again for 7 days. A strip has a column for each day: what failed"
        " hangs from above, and a line at the bottom is a day on which nothing was sent. ",
        tag("code", "federation why URL"),
        " tells what the link to a server does, what is held and until when, and the last attempts.",
        class_="intro",
    )
    for action in URGENT:
        if findings.actions.get(action):
            yield from _group(action, findings)


def _servers(action: Action, findings: Findings) -> list[Server]:
    return [server for server in findings.attention if server.action is action]


def _id(action: Action, place: int) -> str:
    return f"{action.value}-{place + 1}"


def _group(action: Action, findings: Findings) -> Iterator[Markup]:
    servers = _servers(action, findings)
    number = findings.actions[action]
    yield tag("h3", badge(action), wording.plural(number, "server"), class_="group", id=action.value)
    for paragraph in instruction(action):
        words = (tag("code", each) if isinstance(each, Command) else each for each in paragraph)
        yield tag("p", *words, class_="instruction")
    cards = (_patient(server, findings, _id(action, place)) for place, server in enumerate(servers[:_CARDS]))
    yield tag("ol", *cards, class_="patients")
    if rest := servers[_CARDS:MOST_WITH_DAYS]:
        yield table(None, _columns(findings), rest, name=f"To {NAMES[action]}, {_CARDS + 1} to {_CARDS + len(rest)}")

    def title(start: int, page: Sequence[Server]) -> str:
        places = f"{start + 1} to {start + len(page)}" if len(page) > 1 else f"{start + 1}"
        return f"{places} of {wording.count(number)} to {NAMES[action]}"

    shown = [each for each in _columns(findings) if each.heading not in _OF_DAYS]
    yield from pages(servers, shown, title, findings, begin=MOST_WITH_DAYS, number=number)


def pages(
    servers: Sequence[Server],
    columns: Sequence[Column[Server]],
    title: Callable[[int, Sequence[Server]], str],
    findings: Findings,
    *,
    begin: int = 0,
    number: int,
) -> Iterator[Markup]:
    """Yield the servers of a long list in pages, closed until somebody wants them, and where the rest of `number` is.

    A page's title is made of the place of its first server, and of its servers.
    """
    for start in range(begin, len(servers), _PAGE):
        page = servers[start : start + _PAGE]
        name = title(start, page)
        yield tag("details", tag("summary", name), table(None, columns, page, name=name), class_="page")
    if left := number - len(servers):
        where = f"server_scorecard/as_of={findings.as_of.isoformat()}"
        yield tag("p", f"And {wording.plural(left, 'more server')}: in {where}.", class_="soft small")


def _patient(server: Server, findings: Findings, id_: str) -> Markup:
    pasted_ones = [pasted(step.command, step.when) for step in steps(server, _end(findings))]
    plain = tag("p", "Its address is not a plain one: no command is offered.", class_="soft small")
    return tag(
        "li",
        tag(
            "div",
            tag(
                "h4",
                short(wording.server(server.url)),
                " ",
                tag("span", ", ".join(filter(None, _state(server, findings))), class_="soft"),
            ),
            tag("ul", *(tag("li", line) for line in _told(server, findings)), class_="reasons"),
            *(pasted_ones or [plain]),
            class_="told",
        ),
        tag("div", *_days(server, findings), *(tag("p", line) for line in _numbers(server)), class_="shown"),
        class_="patient",
        id=id_,
    )


def _state(server: Server, findings: Findings) -> tuple[str, ...]:
    """Return how a server is; since when it is down its first reason says."""
    state = STATES.get(server.state or "", "")
    if server.state == ServerHealth.UNHEALTHY:
        return (state,)
    return state, _since(server.since, findings) if server.since else _on_and_off(server).strip(wording.NOTHING)


def _told(server: Server, findings: Findings) -> Iterator[str]:
    """Yield what there is to say of a server, each in a sentence of its own, as each has days of its own."""
    for reason in server.reasons:
        yield f"{_reason(reason, 200)}."
    if server.top_error is not None and server.action is not Action.REVIEW:
        yield f"{short(server.top_error, 40)}: {meaning(server.top_error).text}."
    if server.expires is not None:
        yield f"{_expiry(server, findings)}."


def _expiry(server: Server, findings: Findings) -> str:
    assert server.expires is not None
    day = wording.day_and_year(server.expires)
    if server.held < server.owed:
        return f"The oldest of what is held expires on {day} at the earliest"
    if server.expires <= _end(findings):
        return f"The oldest of what is held has been due to expire since {day}"
    return f"The oldest of what is held expires on {day}"


def _days(server: Server, findings: Findings) -> Iterator[Markup]:
    if server.daily:
        dates = [day.day for day in findings.days]
        yield strip(dates, server.daily)
        yield tag("p", *(tag("span", wording.day(day)) for day in dict.fromkeys((dates[0], dates[-1]))), class_="ends")


def _numbers(server: Server) -> Iterator[Markup | str]:
    """Yield the numbers of 30 days, and what is owed now."""
    month = server.month
    if month.attempts:
        yield tag("b", wording.percent(month.got_through), " got through")
        yield f"{wording.count(month.delivered)} of {wording.plural(month.attempts, 'attempt')} in 30 days"
    if server.last_attempt is None:
        yield "Nothing was sent in 30 days."
    elif month.attempts:
        yield f"last attempt on {wording.day(server.last_attempt)}"
    yield f"score {wording.score(month.score)} of 100"
    if server.owed:
        yield f"{wording.count(server.owed)} owed, {_held(server)}"
    if month.lost:
        lost = f"{wording.count(month.lost)}{' more' if server.owed else ''} lost for good"
        yield f"{lost}: {loss_codes(month)}" if month.loss_codes else lost
    if month.failures:
        yield wording.plural(month.failures, "outage")


def loss_codes(period: Period) -> str:
    """Write of what a server lost deliveries; results of an earlier version do not tell."""
    codes = {short(code, 40): number for code, number in period.loss_codes.items()}
    return wording.total(codes) if codes else wording.NOTHING


def _held(server: Server) -> str:
    if not server.held:
        return "none held"
    return "all held" if server.held == server.owed else f"{wording.count(server.held)} held"


def badge(action: Action) -> Markup:
    return tag("span", NAMES[action], class_=f"badge {action.value}")


def _end(findings: Findings) -> datetime:
    return datetime.combine(findings.as_of + timedelta(days=1), time(), UTC)


def _since(since: Since, findings: Findings) -> str:
    lasted = wording.duration(_end(findings) - since.at)
    whole_day = since.at.time() == time()
    when = wording.day_and_year(since.at) if whole_day else wording.moment(since.at)
    if not since.at_least:
        return f"since {when} ({lasted})"
    first = findings.days[0].day if findings.days else None
    return f"since {when} or earlier" if since.at.date() == first else f"bad from the first attempt on, {when}"


def _on_and_off(server: Server) -> str:
    """Say how often a server was unhealthy, if it is not, or not known to be, unhealthy without a break until now."""
    known = [ratio for ratio in server.daily if ratio is not None]
    bad = sum(ratio < BAD_DAY for ratio in known)
    return f"bad on {bad} of {wording.plural(len(known), 'day')}" if bad else wording.NOTHING


def _columns(findings: Findings) -> list[Column[Server]]:
    """Return the columns of a list of servers that need attention."""
    dates = [day.day for day in findings.days]
    since, days = _OF_DAYS
    return [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column(since, lambda server: _since(server.since, findings) if server.since else _on_and_off(server)),
        Column("Because, and what to paste", lambda server: _because(server, findings), wide=True),
        Column(days, lambda server: strip(dates, server.daily)),
        *FIGURES,
    ]


def _because(server: Server, findings: Findings) -> Markup:
    reasons = "; ".join(_reason(reason, 120) for reason in server.reasons)
    told = f"{reasons}. {_expiry(server, findings)}" if server.expires else reasons
    return join(tag("p", told), *(pasted(step.command, step.when) for step in steps(server, _end(findings))))


def _reason(text: str, limit: int) -> str:
    return wording.sentence(wording.with_dates(short(text, limit)))


def _share(server: Server) -> Markup:
    month = server.month
    return join(wording.percent(month.got_through), tag("span", f" of {wording.count(month.attempts)}", class_="soft"))


_OF_DAYS: Final = ("Since", "30 days")
"""Columns of those that are shown with their days."""
FIGURES: Final[tuple[Column[Server], ...]] = (
    Column("Got through, 30 days", _share, number=True),
    Column("Score, 30 days", lambda server: wording.score(server.month.score), number=True),
    Column("Owed", lambda server: wording.count(server.owed), number=True),
    Column("Lost, 30 days", lambda server: wording.count(server.month.lost), number=True),
)
"""Columns of every list of servers."""
