"""The parts of the report, in the order in which an operator asks: who is unhealthy, how is the whole, what else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from federation.analytics.frames import Action
from federation.analytics.report import wording
from federation.analytics.report.advice import meaning
from federation.analytics.report.attention import NAMES, URGENT, attention
from federation.analytics.report.charts import strip, strip_title
from federation.analytics.report.comparison import compare
from federation.analytics.report.definitions import definitions
from federation.analytics.report.findings import FEWEST_ATTEMPTS
from federation.analytics.report.markup import Column, Markup, join, short, table, tag
from federation.analytics.report.network_charts import errors, network, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from federation.analytics.report.findings import Anomaly, Findings, RelayFinding, Server, SetAside

_SICK_NETWORK: Final = 0.5
_OWN_SHARE: Final = 0.01


def everything(findings: Findings) -> Iterator[Markup]:
    yield _lede(findings)
    yield _tiles(findings)
    yield from _alerts(findings)
    yield _section("attention", "Needs attention", *attention(findings))
    yield _section("network", "The network, day by day", network(findings))
    yield _section("errors", "Why attempts fail", errors(findings))
    yield _section("spread", "How servers compare", spread(findings))
    yield _section("servers", "Worst and best servers", _worst_and_best(findings))
    yield _section("relays", "RelayFinding ranking", _relays(findings))
    yield _section("keys", "Suspicious keys", _anomalies(findings))
    yield _section("quarantine", "Rows set aside", _quarantine(findings))
    yield _section("definitions", "How each number is defined", definitions())


def _section(id_: str, title: str, *content: Markup | None) -> Markup:
    return tag("section", tag("h2", title, id=id_), *content, aria_labelledby=id_)


def _lede(findings: Findings) -> Markup:
    """Return what matters, in a sentence or two."""
    known = sum(findings.actions.values())
    if not known:
        return tag("p", "No servers are known yet, so there is nothing to judge.", class_="lede")
    urgent = known - findings.actions.get(Action.KEEP, 0)
    need = "needs" if urgent == 1 else "need"
    who = f"Of {wording.plural(known, 'known server')} {wording.count(urgent)} {need} attention."
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


def _tiles(findings: Findings) -> Markup:
    comparison = compare(findings.days)
    now, before = comparison.now, comparison.before
    spell = f"last {wording.plural(now.days, 'day')}"
    urgent = {action: number for action in URGENT if (number := findings.actions.get(action))}
    tiles = [
        _tile(
            "Need attention",
            wording.count(sum(urgent.values())),
            ", ".join(f"{wording.count(number)} to {NAMES[action]}" for action, number in urgent.items()) or "none",
            bad=bool(urgent.get(Action.REVIEW) or urgent.get(Action.PARK)),
        ),
        _health(findings),
        _tile(f"Got through, {spell}", wording.percent(now.success_rate), wording.points(comparison.change)),
        _tile(
            f"Attempts, {spell}",
            wording.count(now.attempts),
            wording.growth(now.attempts, before.attempts) if before else wording.NOTHING,
        ),
        _tile(
            f"Daily p95, {spell}",
            wording.milliseconds(now.p95_ms),
            f"{wording.milliseconds(before.p95_ms)} before" if before else wording.NOTHING,
        ),
    ]
    return tag("dl", *tiles, class_="tiles")


def _tile(name: str, value: str, change: str, *, bad: bool = False) -> Markup:
    shown = tag("dd", value, class_="bad" if bad else None)
    return tag("div", tag("dt", name), shown, tag("dd", change), class_="tile")


def _health(findings: Findings) -> Markup:
    if not findings.days:
        return _tile("Healthy servers", wording.NOTHING, wording.NOTHING)
    last, length = findings.days[-1], compare(findings.days).now.days
    change = f"of {wording.count(last.servers_known)} known"
    if length < len(findings.days):
        earlier = findings.days[-1 - length].servers_healthy
        change += f", {wording.difference(last.servers_healthy, earlier)} in {wording.plural(length, 'day')}"
    return _tile("Healthy servers", wording.count(last.servers_healthy), change)


def _alerts(findings: Findings) -> Iterator[Markup]:
    """Yield what is wrong on this side, which no list of servers would show."""
    ours = {code: number for code, number in findings.error_totals.items() if meaning(code).ours}
    if sum(ours.values()) >= _OWN_SHARE * max(sum(findings.error_totals.values()), 1):
        told = "; ".join(f"{code} ({wording.count(number)}): {meaning(code).text}" for code, number in ours.items())
        yield tag("p", tag("b", "This node itself failed attempts. "), f"{told}. See its log.", class_="alert")
    if findings.days and findings.days[-1].servers_healthy < _SICK_NETWORK * findings.days[-1].servers_known:
        first = tag("b", "More than half of all servers are sick at once. ")
        then = "Look at this node first: its network, its name resolution, its clock."
        yield tag("p", first, then, class_="alert")


def _worst_and_best(findings: Findings) -> Markup:
    if not findings.worst:
        return tag("p", f"No server had {FEWEST_ATTEMPTS} attempts or more.", class_="intro")
    return join(
        tag("p", f"By score over 30 days, of servers with {FEWEST_ATTEMPTS} attempts or more.", class_="intro"),
        tag("div", _ranking("Worst", findings.worst), _ranking("Best", findings.best), class_="charts"),
    )


def _ranking(title: str, servers: Sequence[Server]) -> Markup:
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("30 days", lambda server: strip(strip_title(server.daily), server.daily)),
        Column("Score", lambda server: wording.score(server.month.score), number=True),
        Column("Got through", lambda server: wording.percent(server.month.availability), number=True),
    ]
    return table(title, columns, servers)


def _relays(findings: Findings) -> Markup:
    if not findings.relays:
        return tag("p", "No server qualifies as a relay.", class_="intro")
    columns: list[Column[RelayFinding]] = [
        Column("Rank", lambda relay: wording.count(relay.rank)),
        Column("Server", lambda relay: short(wording.server(relay.url))),
        Column("Score", lambda relay: wording.NOTHING if relay.score is None else f"{relay.score:.2f}", number=True),
        Column("Availability", lambda relay: wording.percent(relay.availability), number=True),
        Column("p95", lambda relay: wording.milliseconds(relay.p95_ms), number=True),
        Column("Last seen", lambda relay: wording.moment(relay.last_seen) if relay.last_seen else wording.NOTHING),
    ]
    shown = f"The first {len(findings.relays)} of {wording.plural(findings.relay_count, 'candidate')}."
    return join(tag("p", shown, class_="intro"), table(None, columns, findings.relays))


def _anomalies(findings: Findings) -> Markup:
    if not findings.anomalies:
        return tag("p", "None: no key is shared, malformed, or changed outside a rotation.", class_="intro")
    counts = ", ".join(f"{wording.count(number)} {kind}" for kind, number in sorted(findings.anomaly_counts.items()))
    columns: list[Column[Anomaly]] = [
        Column("Kind", lambda anomaly: short(anomaly.kind, 40)),
        Column("Key", lambda anomaly: short(anomaly.key_kind or wording.NOTHING, 40)),
        Column("Servers", _urls),
        Column("SHA-256", lambda anomaly: tag("code", short(anomaly.fingerprint or wording.NOTHING, 17))),
        Column("Detail", lambda anomaly: short(anomaly.detail or wording.NOTHING, 200)),
    ]
    intro = f"{counts}. Ask the servers' operators, by a way that does not lead over these keys, before trusting them."
    return join(tag("p", intro, class_="intro"), table(None, columns, findings.anomalies))


def _quarantine(findings: Findings) -> Markup:
    if not findings.quarantine:
        return tag("p", "None: every row that was read was good.", class_="intro")
    columns: list[Column[SetAside]] = [
        Column("Input", lambda each: short(each.source, 60)),
        Column("Reason", lambda each: short(each.reason, 120)),
        Column("Rows", lambda each: wording.count(each.rows), number=True),
    ]
    rows = wording.plural(findings.quarantined, "row")
    total = f"{rows} of these days, or of none, counted in no other number; they lie in quarantine/."
    return join(tag("p", total, class_="intro"), table(None, columns, findings.quarantine))


def _urls(anomaly: Anomaly) -> Markup:
    more = anomaly.servers - len(anomaly.urls)
    shown = [tag("div", short(wording.server(url), 60)) for url in anomaly.urls]
    return join(*shown, tag("div", f"and {wording.count(more)} more", class_="soft") if more > 0 else None)
