"""The report: one HTML file that needs nothing else, no network, no scripts, and lists unhealthy servers first."""

from __future__ import annotations

from datetime import UTC, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from federation.analytics import REPORT_FILE
from federation.analytics.data.results import write_text
from federation.analytics.report import wording
from federation.analytics.report.advice import Suggestion, listing, meaning
from federation.analytics.report.attention import FIGURES, NAMES, STATES, attention, by_state, index, loss_codes, pages
from federation.analytics.report.changed import changed, heading
from federation.analytics.report.findings import BAD_DAY, DAYS
from federation.analytics.report.headline import alerts, lede, owed_parts, tiles
from federation.analytics.report.markup import Column, Markup, join, pasted, short, table, tag
from federation.analytics.report.network_charts import errors, network, owed_and_lost, spread
from federation.analytics.report.wording import day_and_year, moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import date, datetime

    from federation.analytics.data.snapshots import Place
    from federation.analytics.report.findings import Anomaly, Findings, RelayedServer, RelayFinding, Server, SetAside

# If a stranger's text ever got past the escaping, a browser would still run and fetch nothing.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(page: str, out: Place) -> None:
    """Write `page` to `out`/report.html, whole or not at all."""
    write_text(page, REPORT_FILE, out)


def render(findings: Findings, *, made_at: datetime) -> str:
    """Render the page."""
    style = _text("workers.dashboard", "static", "palette.css") + _text("federation.analytics.report", "report.css")
    title = f"Federation health as of {day_and_year(findings.as_of)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("header", tag("h1", "Federation health"), tag("p", _window(findings), class_="soft small")),
        tag("main", *_everything(findings)),
        tag("footer", _origin(findings, made_at)),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), "\n")


def _window(findings: Findings) -> str:
    if not findings.days:
        return f"as of {day_and_year(findings.as_of)}, no day computed"
    return f"{day_and_year(findings.days[0].day)} to {day_and_year(findings.as_of)}, days in UTC"


def _origin(findings: Findings, made_at: datetime) -> str:
    missing = DAYS - len(findings.days)
    gap = f" {missing} of these days have not been computed and are left out." if missing else ""
    return (
        f"Made on {moment(made_at.astimezone(UTC))} UTC from the {DAYS} days up to and including"
        f" {day_and_year(findings.as_of)}.{gap}"
    )


def _text(package: str, *path: str) -> str:
    return files(package).joinpath(*path).read_text(encoding="utf-8")


def _everything(findings: Findings) -> Iterator[Markup]:
    parts = tuple(_parts(findings))
    yield lede(findings)
    yield from alerts(findings)
    if (urgent := index(findings)) is not None:
        yield urgent
    yield tiles(findings)
    links = (tag("li", tag("a", title, href=f"#{id_}")) for id_, title, _ in parts)
    contents = tag("details", tag("summary", "Parts of this report"), tag("ul", *links))
    yield tag("nav", contents, aria_label="Parts of this report")
    for id_, title, content in parts:
        yield _section(id_, title, content)


def _parts(findings: Findings) -> Iterator[tuple[str, str, Markup]]:
    yield "attention", "Needs attention", join(*attention(findings))
    yield "owed", "Owed, held, lost", owed(findings)
    yield "servers", "All servers", join(*_servers(findings))
    yield "changes", heading(findings), changed(findings)
    yield "errors", "Why attempts fail", errors(findings)
    yield "network", "The network, day by day", network(findings)
    yield "outages", "Outages", _outages(findings)
    yield "busiest", "The busiest servers", _busiest(findings)
    yield "spread", "How servers compare", spread(findings)
    yield "relays", "What relays saved", _relays(findings)
    yield "keys", "Suspicious keys", _anomalies(findings)
    yield "completeness", "How complete the data are", completeness(findings)
    yield "definitions", "How each number is defined", _definitions()


def _definitions() -> Markup:
    """Return how the report's numbers are defined, for its readers."""
    told = _text("federation.analytics.report", "definitions.html").replace("{bad_day}", wording.percent(BAD_DAY))
    return tag("dl", Markup(told), class_="defined")


def _section(id_: str, title: str, *content: Markup | None) -> Markup:
    return tag("section", tag("h2", title, id=id_), *content, aria_labelledby=id_)


def _servers(findings: Findings) -> Iterator[Markup]:
    """Yield a line for each server, by name, in pages that are closed until somebody wants them."""
    number = sum(findings.actions.values())
    if not number:
        yield tag("p", "None is known.", class_="intro")
        return
    told = (
        f"{wording.plural(number, 'server')} = {by_state(findings.states)}, by name. What got through says nothing"
        " where nothing was sent: look at the last attempt."
    )
    yield tag("p", told, class_="intro")
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("Advice", lambda server: NAMES[server.action]),
        Column("State", lambda server: STATES.get(server.state or "", wording.NOTHING)),
        Column("Last attempt", lambda server: _day(server.last_attempt)),
        *FIGURES,
    ]

    def title(_: int, page: Sequence[Server]) -> str:
        first, last = (short(wording.server(each.url), 40) for each in (page[0], page[-1]))
        return f"{wording.plural(len(page), 'server')}, {first} to {last}"

    yield from pages(findings.servers, columns, title, findings, number=number)


def _day(value: date | None) -> str:
    return wording.NOTHING if value is None else wording.day(value)


def _outages(findings: Findings) -> Markup:
    found = findings.outages
    if not found.servers:
        return tag("p", "No server was down in 30 days.", class_="intro")
    told = [
        f"{wording.plural(found.failures, 'outage')} of {wording.plural(found.failed_servers, 'server')} began in 30"
        " days; one that began earlier is told by its length."
    ]
    if found.mttf_s is not None:
        told.append(f"The typical server of these is up for {wording.seconds(found.mttf_s)} before it fails (MTTF).")
    if found.mttr_s is not None:
        told.append(f"An outage that ended typically lasted {wording.seconds(found.mttr_s)} (MTTR).")
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("State", lambda server: STATES.get(server.state or "", wording.NOTHING)),
        Column("Longest", lambda server: wording.seconds(server.month.longest_outage_s), number=True),
        Column("Outages", lambda server: wording.count(server.month.failures), number=True),
        Column("MTTF", lambda server: wording.seconds(server.month.mttf_s), number=True),
        Column("MTTR", lambda server: wording.seconds(server.month.mttr_s), number=True),
    ]
    return join(tag("p", " ".join(told), class_="intro"), table("Most outages in 30 days", columns, found.servers))


def _busiest(findings: Findings) -> Markup:
    if not findings.week_attempts:
        return tag("p", "Nothing was attempted in 7 days.", class_="intro")
    top = sum(server.week.attempts for server in findings.busiest)
    told = (
        f"These {len(findings.busiest)} got {wording.percent(top / findings.week_attempts)} of the"
        f" {wording.count(findings.week_attempts)} attempts of 7 days."
    )
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("Attempts, 7 days", lambda server: wording.count(server.week.attempts), number=True),
        Column("Share", lambda server: wording.percent(server.week.attempts / findings.week_attempts), number=True),
        Column("p95, 7 days", lambda server: wording.milliseconds(server.week.p95_ms), number=True),
    ]
    return join(tag("p", told, class_="intro"), table(None, columns, findings.busiest, name="The busiest servers"))


def _relays(findings: Findings) -> Markup:
    return join(_saved(findings), _ranking_of_relays(findings))


def _saved(findings: Findings) -> Markup:
    relayed, delivered = sum(findings.relaying.daily), sum(day.delivered for day in findings.days)
    if not relayed:
        return tag("p", "Nothing arrived through another server in these days.", class_="intro")
    attempts = sum(day.attempts for day in findings.days)
    told = (
        f"{wording.plural(relayed, 'delivery')} to {wording.plural(findings.relaying.server_count, 'server')} arrived"
        f" through others in these days, {wording.percent(relayed / delivered)} of the {wording.count(delivered)} that"
        f" got through. Without them {wording.percent((delivered - relayed) / attempts)} of attempts would have,"
        f" not {wording.percent(delivered / attempts)}."
    )
    columns: list[Column[RelayedServer]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("Through relays", lambda server: wording.count(server.relayed), number=True),
        Column("of all that arrived", lambda server: wording.count(server.delivered), number=True),
        Column("Share", lambda server: wording.percent(server.relayed / server.delivered), number=True),
    ]
    most = table("Servers that relays reached most often", columns, findings.relaying.servers)
    return join(tag("p", told, class_="intro"), most)


def _ranking_of_relays(findings: Findings) -> Markup:
    if not findings.relays:
        return tag("p", "No server qualifies as a relay.", class_="intro")
    columns: list[Column[RelayFinding]] = [
        Column("Server", lambda relay: short(wording.server(relay.url))),
        Column("Rank", lambda relay: wording.count(relay.rank), number=True),
        Column("Took directly, 7 days", lambda relay: wording.percent(relay.availability), number=True),
        Column("p95, 7 days", lambda relay: wording.milliseconds(relay.p95_ms), number=True),
        Column("Last seen", lambda relay: _moment(relay.last_seen)),
    ]
    shown = f"Who could relay: the first {len(findings.relays)} of {wording.plural(findings.relay_count, 'candidate')}"
    return tag("div", table(shown, columns, findings.relays), class_="next")


def _anomalies(findings: Findings) -> Markup:
    if not findings.anomalies:
        return tag("p", "None: no key is shared, malformed, or changed outside a rotation.", class_="intro")
    counts = ", ".join(f"{wording.count(number)} {kind}" for kind, number in sorted(findings.anomaly_counts.items()))
    columns: list[Column[Anomaly]] = [
        Column("Kind", lambda anomaly: short(anomaly.kind, 40)),
        Column("Key", lambda anomaly: short(anomaly.key_kind or wording.NOTHING, 40)),
        Column("Servers", _urls),
        Column("SHA-256", lambda anomaly: tag("code", short(anomaly.fingerprint or wording.NOTHING, 17))),
        Column("Detail", lambda anomaly: wording.with_dates(short(anomaly.detail or wording.NOTHING, 200)), wide=True),
        Column("Found on", lambda anomaly: _day(anomaly.found_on)),
    ]
    intro = (
        f"{counts}. An answer that was not signed with its server's key does not say whose key it was, so it makes no"
        " line here."
    )
    return join(tag("p", intro, class_="intro"), table(None, columns, findings.anomalies, name="Suspicious keys"))


def _urls(anomaly: Anomaly) -> Markup:
    more = anomaly.servers - len(anomaly.urls)
    shown = [tag("div", short(wording.server(url), 60)) for url in anomaly.urls]
    return join(*shown, tag("div", f"and {wording.count(more)} more", class_="soft") if more > 0 else None)


def owed(findings: Findings) -> Markup:
    found = findings.obligations
    if not found.owed and not found.lost_month:
        return tag("p", "Nothing is owed, and nothing was lost in 30 days.", class_="intro")
    since = f", the oldest since {wording.moment(found.since)}" if found.since else ""
    told = (
        f"{wording.plural(found.owed, 'delivery')} owed to {wording.plural(found.owed_servers, 'server')} ="
        f" {owed_parts(found)}{since}. {wording.count(found.lost_week)} lost for good in 7 days,"
        f" {wording.count(found.lost_month)} in 30."
    )
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("State", lambda server: STATES.get(server.state or "", wording.NOTHING)),
        Column("Owed", lambda server: wording.count(server.owed), number=True),
        Column("of it held", lambda server: wording.count(server.held), number=True),
        Column("Oldest since", lambda server: _moment(server.owed_since)),
        Column(
            "Oldest held expires",
            lambda server: wording.day_and_year(server.expires) if server.expires else wording.NOTHING,
        ),
        Column("Lost, 7 days", lambda server: wording.count(server.week.lost), number=True),
        Column("Lost, 30 days", lambda server: wording.count(server.month.lost), number=True),
        Column("of", lambda server: loss_codes(server.month), wide=True),
    ]
    first = next((step for server in found.servers if server.owed and (step := listing(server.url))), None)
    steps = [
        Suggestion("federation deliveries stats", when="all of it by state and server"),
        *([first] if first else []),
    ]
    if found.lost_week:
        for state, what in (("failed", "refused for good"), ("expired", "too old")):
            steps.append(
                Suggestion(f"federation deliveries list --state {state}", when=f"what was lost in 7 days, {what}")
            )
    return join(
        tag("p", told, class_="intro"),
        owed_and_lost(findings),
        table(None, columns, found.servers, name="Servers to which the most is owed"),
        _more(findings),
        _causes(found.loss_codes),
        *(pasted(step.command, step.when) for step in steps),
    )


def _causes(codes: Mapping[str, int]) -> Markup | None:
    """Return why deliveries were lost: the last attempt of each failed with that code."""
    columns: list[Column[str]] = [
        Column("Code", lambda code: tag("code", short(code, 40))),
        Column("What it says", lambda code: meaning(code).text, wide=True),
        Column("Lost, 30 days", lambda code: wording.count(codes[code]), number=True),
    ]
    return tag("div", table("Why deliveries were lost", columns, codes), class_="next") if codes else None


def _moment(value: datetime | None) -> str:
    return wording.NOTHING if value is None else wording.moment(value)


def _more(findings: Findings) -> Markup | None:
    found = findings.obligations
    shown = sum(server.owed for server in found.servers)
    if found.owed == shown:
        return None
    left = f"{wording.count(found.owed - shown)} of the {wording.count(found.owed)} are owed to other servers."
    return tag("p", left, class_="soft small")


def completeness(findings: Findings) -> Markup:
    """Return what is missing of the days, and the rows that were set aside, with the reasons."""
    return join(tag("ul", *(tag("li", *line) for line in _lines(findings)), class_="facts"), _set_aside(findings))


def _lines(findings: Findings) -> Iterator[tuple[Markup | str, ...]]:
    found = findings.completeness
    computed = DAYS - len(found.missing)
    if found.missing:
        after = found.missing[-1] + timedelta(days=1)
        yield (
            f"{computed} of {DAYS} days are computed. Missing: {wording.days(found.missing)}. They are computed by ",
            tag("code", f"federation analytics run --since {found.missing[0]} --until {after} --out OUT"),
            ", as far as the database has their attempts.",
        )
    else:
        yield (f"All of the {DAYS} days are computed.",)
    if found.early:
        yield (f"Read before they were over, so late attempts lack: {wording.days(found.early)}.",)
    if found.purged:
        told = "The database has purged attempts of these days; those that were exported before are counted"
        yield (f"{told}: {wording.days(found.purged)}.",)
    if found.read:
        parts = {
            "counted": found.attempts,
            "given back, as the server was busy": found.parked,
            "set aside": found.set_aside,
        }
        share = f" ({wording.percent(found.set_aside / found.read)})" if found.set_aside else ""
        yield (f"{wording.count(found.read)} attempts were read = {wording.total(parts)}{share}.",)


def _set_aside(findings: Findings) -> Markup:
    if not findings.quarantine:
        return tag("p", "Every row that was read was good.", class_="intro")
    columns: list[Column[SetAside]] = [
        Column("Input", lambda each: short(each.source, 60)),
        Column("Reason", lambda each: short(each.reason, 120)),
        Column("Rows", lambda each: wording.count(each.rows), number=True),
    ]
    rows = wording.plural(findings.quarantined, "row")
    attempts = wording.count(findings.completeness.set_aside)
    total = (
        f"{rows} of all inputs set aside, {attempts} of them attempts: of these days, or of none. They count in no"
        " other number, and lie in quarantine/."
    )
    shown = table(None, columns, findings.quarantine, name="Rows set aside")
    return join(tag("p", total, class_="intro"), shown)
