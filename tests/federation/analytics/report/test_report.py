"""The report and the summary: what they say is what was found, and a stranger's text is only ever text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from federation.analytics import pipeline
from federation.analytics.data.computed import Computed
from federation.analytics.data.results import SERVER_SCORECARD
from federation.analytics.data.sinks import write_outputs
from federation.analytics.frames import Action, Window
from federation.analytics.report.find import find
from federation.analytics.report.findings import DAYS, HELD_FOR, Findings, SetAside, Since
from federation.analytics.report.page import render
from federation.analytics.report.summary import summary_of, write_summary
from federation.base.settings.settings import Settings
from tests.federation.analytics.page import Element, read_page
from tests.federation.analytics.report.hostile import hostile_findings
from tests.federation.analytics.story import AS_OF, Character, at, make_outputs, steady
from tests.test_manual import complaint

MADE_AT = datetime(2026, 3, 31, 4, 12, tzinfo=UTC)
SECTIONS = [
    *("attention", "owed", "servers", "changes", "errors", "network", "outages", "busiest", "spread", "relays"),
    *("keys", "completeness", "definitions"),
]
NOTHING_NOTED = Computed(read_at={}, purged=frozenset())
HOSTILE = "</title></style><script>alert(1)</script><img src=//evil.example onerror='x'>\u202e\"&<!--"


def part(page: Element, name: str) -> Element:
    """A section of the page."""
    [found] = [each for each in page.all("section") if each.attributes["aria-labelledby"] == name]
    return found


def plain(text: str) -> str:
    """With ordinary spaces, and none between the digits of a number."""
    return re.sub(r"(?<=\d)\u202f(?=\d)", "", text).replace("\u202f", " ")


def tiles(page: Element) -> dict[str, tuple[str, str]]:
    """Each headline number's value, and what it says of it."""
    found = {}
    for tile in page.all("div", style="tile"):
        [name] = tile.all("dt")
        value, told = tile.all("dd")
        found[name.text] = plain(value.text), plain(told.text)
    return found


@pytest.fixture(scope="session")
def page(findings: Findings) -> Element:
    return read_page(render(findings, made_at=MADE_AT))


def test_the_servers_that_need_attention_are_found(findings: Findings) -> None:
    """Each with its advice, since when it is sick, why, and its days; the others are only counted."""
    found = {server.url.removeprefix("https://"): server for server in findings.attention}
    assert findings.actions == {
        Action.REVIEW: 1,
        Action.PRUNE: 1,
        Action.PARK: 2,
        Action.WATCH: 1,
        Action.KEEP: 20,
    }
    assert list(found) == ["spam.example", "old.example", "gone.example", "expired.example:8443", "slow.example"]
    assert found["gone.example"].since == Since(at=at(3, 27, 3))
    assert found["spam.example"].since == Since(at=at(3, 25))
    assert found["slow.example"].since == Since(at=at(3, 26))
    assert found["gone.example"].reasons[0] == "unhealthy for 4 days"
    assert found["gone.example"].week.attempts - found["gone.example"].week.delivered == 3600 + 3 * 9
    assert found["gone.example"].daily[-5:] == (0.99, 0.0, 0.0, 0.0, 0.0)
    assert [server.url for server in findings.worst][:2] == ["https://spam.example", "https://old.example"]
    assert found["old.example"].expires == at(1, 9)
    assert {server.last_attempt for server in findings.attention} == {AS_OF}
    assert findings.obligations.history == ((AS_OF, 9, 6),)
    assert [server.url for server in findings.servers] == sorted(server.url for server in findings.servers)
    assert len(findings.servers) == 25
    assert findings.latencies == (0, 4, 7, 8, 5, 0, 1, 0)
    assert sum(findings.scores) == 25
    assert findings.quarantine[0] == SetAside(source="attempts", reason="unknown error code", rows=3)


def test_the_page_stands_alone(page: Element, findings: Findings) -> None:
    """No script, no reference to anything outside it, and a policy that would refuse both."""
    text = render(findings, made_at=MADE_AT)
    names = {element.name for element in page.all()}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "use", "image"}
    assert all(not attribute.startswith("on") for element in page.all() for attribute in element.attributes)
    assert not {a for element in page.all() for a in element.attributes} & {"src", "style", "srcset", "action"}
    links = [link.attributes["href"] for link in page.all("a")]
    groups = ("review-for-blacklist", 1), ("prune", 1), ("park", 2), ("watch", 1)
    patients = [f"#{action}-{place}" for action, number in groups for place in range(1, number + 1)]
    assert links == [*patients, *(f"#{name}" for name in SECTIONS)]
    assert set(links) <= {f"#{element.attributes.get('id')}" for element in page.all()}
    assert {element.name for element in page.all() if "href" in element.attributes} == {"a"}
    assert "`" not in page.text
    [style] = page.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    policies = [meta.attributes["content"] for meta in page.all("meta") if "http-equiv" in meta.attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert text.startswith("<!doctype html>")
    assert len(text) < 300_000


def test_the_page_can_be_read_without_seeing_it(page: Element) -> None:
    """A language, one first heading, sections named by their headings, tables with headed columns, charts in words."""
    [html] = page.all("html")
    assert html.attributes["lang"] == "en"
    assert [heading.text for heading in page.all("h1")] == ["Federation health"]
    sections = list(page.all("section"))
    assert [section.attributes["aria-labelledby"] for section in sections] == SECTIONS
    for section in sections:
        heading = section.one("h2", id_=section.attributes["aria-labelledby"])
        assert heading.text
    for table in page.all("table"):
        heads = list(table.all("th"))
        assert all(head.attributes["scope"] == "col" for head in heads)
        assert {len(list(row.all("td"))) for row in table.all("tr")} <= {0, len(heads)}
    charts = list(page.all("svg"))
    assert len(charts) > 15
    for chart in charts:
        assert chart.attributes["role"] == "img"
        assert next(chart.all("title")).text == chart.attributes["aria-label"] != ""
    for figure in page.all("figure"):
        assert next(figure.all("details")) is not None
        assert next(figure.all("table")) is not None


def test_within_a_minute_a_reader_knows_who_is_sick_since_when_why_and_what_to_do(page: Element) -> None:
    """It begins with a sentence, headline numbers against the week before, and the sick in groups."""
    [lede] = page.all("p", style="lede")
    assert lede.text.startswith(
        "Of 25 servers 5 need attention. 9 deliveries owed: 6 held + 3 to be sent. 3 lost for good in 7 days. In the"
    )
    assert "on the days before" in lede.text
    groups = [badge.text for badge in part(page, "attention").all("span", style="badge")]
    assert groups == ["review for blacklist", "prune", "park", "watch"]
    cards = {next(card.all("h4")).text.split(" ")[0]: card for card in page.all("li", style="patient")}
    gone = cards["gone.example"].text.replace("\u202f", " ")
    assert gone.startswith("gone.example downUnhealthy for 4 days.None of 3600 attempts got through in that time.")
    assert "CONN_REFUSED: nothing listens at its address." in gone
    assert "The oldest of what is held expires on 3 Apr 2026 at the earliest." in gone
    assert "3 owed, 2 held" in gone
    assert "last attempt on 30 Mar" in gone
    commands = {name: [code.text for code in card.all("code")] for name, card in cards.items()}
    probe, why = "federation servers probe https://", "federation why https://"
    again = "federation deliveries retry --server https://"
    for name in ("gone.example", "expired.example:8443"):
        assert commands[name] == [f"{probe}{name}", f"{why}{name}", f"{again}{name}"]
    assert commands["old.example"] == [
        f"{probe}old.example",
        "federation deliveries drop --server https://old.example --state open",
        "federation servers forget https://old.example",
    ]
    assert commands["spam.example"][:2] == [f"{why}spam.example", "federation servers accept-key https://spam.example"]
    assert commands["spam.example"][2].startswith("federation blacklist add https://spam.example --reason ")


def test_headline_numbers_explain_each_other(page: Element) -> None:
    """What one is the sum of, or a part of, stands beneath it."""
    found = tiles(page)
    sums = {
        name: [int(n) for n in re.findall(r"(\d+) [a-z]", told.partition(";")[0])] for name, (_, told) in found.items()
    }
    assert found["Need attention"] == ("5", "1 to review for blacklist + 1 to prune + 2 to park + 1 to watch")
    assert found["Servers that are up"] == ("22", "of 25, the others are 3 down; 2 of those up need attention")
    assert found["Owed now"] == ("9", "6 held + 3 to be sent; the oldest since 2 Jan")
    assert found["Lost for good, last 7 days"] == ("3", "3 in 30 days, of 3 servers")
    for name in ("Need attention", "Owed now", "Attempts, last 7 days"):
        assert sum(sums[name]) == int(found[name][0]), name
    attempts, delivered = int(found["Attempts, last 7 days"][0]), sums["Attempts, last 7 days"][0]
    assert found["Got through, last 7 days"][1].startswith(f"{delivered} of {attempts};")
    assert plain(part(page, "attention").text).startswith("Needs attention5 servers = 2 up + 3 down. ")


def test_commands_are_ours(findings: Findings) -> None:
    """The program takes each that the page names, whatever it tells; nothing else is to be pasted."""
    strange = replace(findings.attention[0], action=Action.WATCH, state="unregistered")
    refusing = replace(findings.attention[2], action=Action.PARK, state="healthy")
    days = (*findings.days[:-1], replace(findings.days[-1], servers_healthy=0))
    ill = replace(
        findings,
        days=days,
        attention=(*findings.attention, strange, refusing),
        error_totals={"DATABASE": 9, "NO_OWN_KEYS": 9},
        completeness=replace(findings.completeness, missing=(date(2026, 3, 2), date(2026, 3, 3))),
    )
    page = read_page(render(ill, made_at=MADE_AT))
    found = {code.text for code in page.all("code") if code.attributes.get("class") == "command"}
    mentioned = {code.text for code in page.all("code") if code.text.startswith("federation ")}
    assert found <= mentioned
    kinds = {" ".join(re.findall(r"(?<!\S)[a-z-]+(?!\S)", text)[:3]) for text in mentioned}
    assert kinds >= {
        *("federation why", "federation servers probe", "federation servers forget", "federation servers discover"),
        *("federation servers accept-key", "federation blacklist add", "federation deliveries stats"),
        *("federation deliveries list", "federation doctor", "federation keys show", "federation analytics run"),
        *("federation deliveries drop", "federation deliveries retry", "federation deliveries release"),
    }
    assert {text: told for text in mentioned if (told := complaint(text))} == {}
    assert complaint("federation servers prob https://x.example")


def test_when_what_is_held_expires_is_told(findings: Findings) -> None:
    """By the default of the setting; what is to be sent does not, and there this node is looked at."""
    assert Settings.model_fields["federation_delivery_max_age"].default == HELD_FOR
    old = replace(findings.attention[-1], owed=4, held=4, owed_since=at(3, 20))
    young, unsent = replace(old, owed_since=at(3, 28)), replace(old, held=0, owed_since=at(3, 29))
    late = replace(unsent, owed_since=at(3, 25))
    page = read_page(render(replace(findings, attention=(old, young, unsent, late)), made_at=MADE_AT))
    cards = [plain(card.text) for card in page.all("li", style="patient")]
    assert "The oldest of what is held has been due to expire since 27 Mar 2026." in cards[0]
    assert "The oldest of what is held expires on 4 Apr 2026." in cards[1]
    assert ["expire" in card for card in cards] == [True, True, False, False]
    assert ["4 owed, all held" in card for card in cards] == [True, True, False, False]
    assert ["federation doctor" in card for card in cards] == [False, False, False, True]


def test_why_deliveries_were_lost_is_told(findings: Findings, page: Element) -> None:
    """Beside what each server lost, and of all together: the codes of the last attempts, and what these mean."""
    assert findings.obligations.loss_codes == {"CONN_REFUSED": 1, "DNS_BLOCKED": 1, "TLS_ERROR": 1}
    assert summary_of(findings)["deliveries"]["loss_codes_30_days"] == findings.obligations.loss_codes
    told = plain(page.text)
    assert "TLS_ERRORits certificate or TLS set-up is broken1" in told
    assert "1 more lost for good: 1 CONN_REFUSED" in told
    several = replace(findings.attention[-1].month, lost=3, loss_codes={"HTTP_410": 2, "A_CODE_OF_THE_FUTURE": 1})
    untold = replace(several, loss_codes={})
    cards = [replace(findings.attention[-1], owed=0, month=each) for each in (several, untold)]
    first, second = read_page(render(replace(findings, attention=cards), made_at=MADE_AT)).all("li", style="patient")
    assert "3 lost for good: 2 HTTP_410 + 1 A_CODE_OF_THE_FUTURE" in plain(first.text)
    assert "lost for good:" not in second.text


def test_a_server_that_is_sick_on_and_off_shows_how_often(findings: Findings) -> None:
    """Its last day was a good one, so there is no day since when; days without attempts count neither way."""
    days = (None, 0.2, 0.95, 0.89, 1.0)
    server = replace(findings.attention[-1], since=None, daily=(*days, *(None,) * (DAYS - len(days))))
    page = read_page(render(replace(findings, attention=(server,)), made_at=MADE_AT))
    [card] = page.all("li", style="patient")
    assert next(card.all("h4")).text == "slow.example up, bad on 2 of 4 days"


def test_each_server_has_its_reasons_and_its_commands(findings: Findings) -> None:
    """Those in a line, and those in a page, as well as the first of a group; a stranger is not probed."""
    strange = replace(findings.attention[-1], action=Action.PARK, state="unregistered")
    many = [replace(strange, url=f"https://{number}.example") for number in range(21)]
    page = read_page(render(replace(findings, attention=tuple(many)), made_at=MADE_AT))
    told = part(page, "attention")
    rows = [row for row in told.all("tr") if "availability fell from 98% to 90%" in row.text.lower()]
    assert len(rows) == 21 - 4
    for row in rows:
        assert [code.text.rsplit(" ", 1)[0] for code in row.all("code")] == [
            "federation why",
            "federation servers discover",
        ]
    assert next(told.all("summary")).text == "21 of 2 to park"


def test_a_day_that_is_not_over_is_drawn_as_one(findings: Findings) -> None:
    """Its bars are pale, and what leads to it is dashed."""
    half = replace(findings, completeness=replace(findings.completeness, early=(findings.as_of,)))
    network = part(read_page(render(half, made_at=MADE_AT)), "network")
    assert "Not over when read, and so pale or dashed: 30\u202fMar." in network.text
    figures = {next(figure.all("h3")).text: figure for figure in network.all("figure")}
    pale = [bar for bar in figures["Attempts"].all("rect") if bar.attributes["class"].endswith(" early")]
    assert len(pale) == 2
    whole, dashed = [
        path.attributes["d"] for path in figures["Servers"].all("path") if "second" in path.attributes["class"]
    ]
    assert (whole.count("L"), dashed.count("L")) == (28, 1)


def test_a_failure_of_this_node_itself_is_told_first(findings: Findings) -> None:
    """So is half of the network being sick at once, which is hardly the network's fault."""
    days = (*findings.days[:-1], replace(findings.days[-1], servers_healthy=12))
    ill = replace(findings, days=days, error_totals={**findings.error_totals, "DATABASE": 10_000})
    trouble, *alerts = [alert.text for alert in read_page(render(ill, made_at=MADE_AT)).all("p", style="alert")]
    assert trouble.startswith(
        "Most servers failed together, or this node did nothing: 12\u202fMar 07:30 to 07:52 (UTC)."
    )
    assert alerts[0].startswith("This node itself failed attempts. DATABASE (10\u202f000): this node's database failed")
    assert alerts[1].startswith("More than half of all servers are down at once.")
    days = tuple(replace(day, own_trouble=()) for day in findings.days)
    few = replace(findings, days=days, error_totals={**findings.error_totals, "DATABASE": 7})
    assert not list(read_page(render(few, made_at=MADE_AT)).all("p", style="alert"))


def test_a_strangers_text_stays_text(findings: Findings) -> None:
    """Tags and quotes in every field that comes from the network are shown, not obeyed; marks of direction replaced."""
    hostile = hostile_findings(findings, HOSTILE)
    text = render(hostile, made_at=MADE_AT)
    page = read_page(text)
    assert not [element.name for element in page.all() if element.name in {"script", "img"}]
    assert not [element for element in page.all() if "onerror" in element.attributes]
    assert "\u202e" not in text
    assert "<!--" not in text
    visible = page.text
    assert visible.count("<script>alert(1)") > 20
    assert "\ufffd" in visible
    json.dumps(summary_of(hostile), allow_nan=False)


@pytest.mark.parametrize(
    "url",
    [
        "https://x.example/$(reboot)",
        "https://x.example';DROP TABLE users;--",
        "https://-oProxyCommand=reboot",
        "https://x.example`reboot`",
        "https://x.example\nreboot",
        "ftp://x.example",
        "",
    ],
    ids=["path", "quote", "option", "backtick", "newline", "scheme", "empty"],
)
def test_a_url_that_is_no_plain_origin_gets_into_no_command(findings: Findings, url: str) -> None:
    """An operator pastes commands; for such a server none is offered, whatever the advice."""
    servers = tuple(replace(findings.attention[0], url=url, action=action) for action in Action)
    page = read_page(render(replace(findings, attention=servers), made_at=MADE_AT))
    cards = list(page.all("li", style="patient"))
    assert len(cards) == 4
    for card in cards:
        assert list(card.all("code")) == []
        assert "no command is offered" in card.text


def test_the_charts_say_what_the_results_say(page: Element, findings: Findings) -> None:
    """Bars are as long as their numbers, lines pass through theirs, and the tables beneath have the same ones."""
    figures = {next(figure.all("h3")).text: figure for figure in page.all("figure")}
    attempts = figures["Attempts"]
    delivered = [float(bar.attributes["height"]) for bar in attempts.all("rect", style="main")]
    failed = [float(bar.attributes["height"]) for bar in attempts.all("rect", style="bad")]
    unit = delivered[0] / findings.days[0].delivered
    assert delivered == [pytest.approx(day.delivered * unit, abs=0.02) for day in findings.days]
    assert failed == [pytest.approx((day.attempts - day.delivered) * unit, abs=0.02) for day in findings.days]
    cells = [cell.text.replace("\u202f", "") for cell in next(attempts.all("table")).all("td")]
    rows = [[f"{day.day:%-d%b}", str(day.delivered), str(day.attempts - day.delivered)] for day in findings.days]
    assert cells == [cell for row in rows for cell in row]

    [path] = figures["Servers"].all("path", style="main")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path.attributes["d"])]
    healthy = [day.servers_healthy for day in findings.days]
    per_server = (heights[0] - heights[-1]) / (healthy[0] - healthy[-1])
    expected = [heights[0] + (number - healthy[0]) * per_server for number in healthy]
    assert heights == [pytest.approx(height, abs=0.11) for height in expected]
    assert per_server < 0  # more is higher

    scores = [float(bar.attributes["width"]) for bar in figures["Score"].all("rect")]
    assert scores == [
        pytest.approx(number * max(scores) / max(findings.scores), abs=0.02) for number in findings.scores
    ]


def test_the_colours_can_be_told_from_the_paper(findings: Findings) -> None:
    """Text has a contrast of at least 4.5 to 1 in light and in dark, marks of 3 to 1."""
    style = render(findings, made_at=datetime.now(UTC))
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)]
    assert len(themes) == 3
    for theme in themes:
        for ground in ("paper", "raised"):
            for name in ("ink", "soft", "main", "bad", "warn"):
                assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground, theme)
        assert contrast(theme["second"], theme["paper"]) >= 3


def contrast(one: str, other: str) -> float:
    """WCAG 2.1, contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_found_is_said_and_a_long_list_has_pages(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No servers and no attempts make a whole page; so do hundreds of sick ones, all of them there up to a bound."""
    last = Window(since=AS_OF, until=AS_OF + timedelta(days=1))
    write_outputs(make_outputs(spark, [], key_anomalies=[], quarantine=[]), tmp_path / "empty", last)
    nothing = find(spark, tmp_path / "empty", AS_OF, NOTHING_NOTED)
    empty = read_page(render(nothing, made_at=MADE_AT))
    assert [section.attributes["aria-labelledby"] for section in empty.all("section")] == SECTIONS
    assert "No servers are known yet" in empty.text
    assert "29 of these days have not been computed" in empty.text
    assert "1 of 30 days are computed. Missing: 1\u202fMar to 29\u202fMar." in empty.text
    assert summary_of(nothing)["totals"] == {
        "servers": 0,
        "servers_healthy": 0,
        "attempts": 0,
        "delivered": 0,
        "success_rate": None,
    }

    sick = [
        Character(
            url=f"https://{number}.example", traffic=number, availability=steady(0.0), action=action, reasons=["r"] * 50
        )
        for number, action in enumerate([Action.PARK, Action.WATCH] * 150, start=1)
    ]
    write_outputs(make_outputs(spark, sick, key_anomalies=[]), tmp_path / "sick", last)
    monkeypatch.setattr("federation.analytics.report.findings.MOST_PER_ACTION", 140)
    found = find(spark, tmp_path / "sick", AS_OF, NOTHING_NOTED)
    assert len(found.attention) == 2 * 140
    assert found.attention[0].url == "https://299.example"
    assert len(found.attention[0].reasons) == 5
    page = read_page(render(found, made_at=MADE_AT))
    pages = [next(details.all("summary")).text for details in part(page, "attention").all("details", style="page")]
    assert pages == [f"{span} of 150 to {name}" for name in ("park", "watch") for span in ("21 to 120", "121 to 140")]
    assert page.text.count("And 10 more servers: in server_scorecard/as_of=2026-03-30.") == 2
    told = {cell.text for details in part(page, "attention").all("details", style="page") for cell in details.all("td")}
    assert told >= {f"{number}.example" for number in range(21, 261)}
    named = {cell.text for cell in part(page, "servers").all("td")}
    assert named >= {f"{number}.example" for number in range(1, 301)}


def test_what_changed_since_yesterday_is_told(spark: SparkSession, written: Path, tmp_path: Path) -> None:
    """Whose advice is another, who is new and who is gone, by the results of the days before."""
    for directory in written.iterdir():
        shutil.copytree(directory, tmp_path / directory.name)
    table = pyarrow.parquet.ParquetFile(SERVER_SCORECARD.file(written, AS_OF)).read()

    def store(day: date, *, without: str, **advice: str) -> None:
        rows = [row for row in table.to_pylist() if without not in row["server_url"]]
        old = {"action": "watch", "owed": 4, "state": "healthy"}
        rows += [{**row, **old, "server_url": f"https://moved-{day.day}.example"} for row in rows[:2]]
        changed = [
            {**row, "action": advice.get(row["server_url"][8:].partition(".")[0], row["action"])} for row in rows
        ]
        file = SERVER_SCORECARD.file(tmp_path, day)
        file.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(changed, table.schema), file)

    store(date(2026, 3, 20), without="server-00")
    store(date(2026, 3, 29), without="server-019", gone="watch", slow="park", old="keep")
    noted = Computed(read_at={"2026-03-30": "2026-03-30T12:00:00+00:00"}, purged=frozenset({"2026-03-02"}))
    found = find(spark, tmp_path, AS_OF, noted)
    worse = [(change.url, change.before, change.now) for change in found.changes.worse]
    assert worse == [
        ("https://old.example", Action.KEEP, Action.PRUNE),
        ("https://gone.example", Action.WATCH, Action.PARK),
    ]
    [better] = found.changes.better
    assert (better.url, better.before, better.now) == ("https://slow.example", Action.PARK, Action.WATCH)
    assert (found.changes.since, found.changes.urgent_before) == (date(2026, 3, 29), 5)
    assert (found.turnover.since, found.turnover.arrived_count, found.turnover.vanished_count) == (
        date(2026, 3, 20),
        10,
        2,
    )
    assert {each.url: each.day.day for each in found.turnover.arrived} == {
        **{f"https://server-{number:03}.example": 29 for number in range(10)},
    }
    assert [(each.url, each.day.day) for each in found.turnover.vanished] == [
        ("https://moved-29.example", 29),
        ("https://moved-20.example", 20),
    ]
    page = read_page(render(found, made_at=MADE_AT))
    changes = plain(part(page, "changes").text)
    assert changes.startswith(
        "What changed since yesterdayOf 2 servers the advice is graver than it was, of 1 it is better;"
    )
    assert "Servers that need attention55±0" in changes
    assert "Deliveries owed139\u22124" in changes
    assert "10 new, 2 gone from the registry" in changes
    complete = plain(part(page, "completeness").text)
    assert "All of the 30 days are computed." in complete
    assert "Read before they were over, so late attempts lack: 30 Mar." in complete
    assert "those that were exported before are counted: 2 Mar." in complete
    assert "attempts were read = " in complete
    assert "+ 4 set aside" in complete


def test_the_summary_agrees_with_a_calculation_by_hand(findings: Findings, tmp_path: Path) -> None:
    """Totals, actions, worst servers, quarantine and window, in JSON."""
    summary = summary_of(findings)
    write_summary(summary, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert summary["window"] == {
        "first_day": "2026-03-01",
        "last_day": "2026-03-30",
        "days": DAYS,
        "days_with_attempts": DAYS,
    }
    assert summary["actions"] == {"review-for-blacklist": 1, "prune": 1, "park": 2, "watch": 1, "keep": 20}
    assert summary["quarantine"] == {
        "rows": 5,
        "reasons": [
            {"source": "attempts", "reason": "unknown error code", "rows": 3},
            {"source": "attempts", "reason": "negative duration", "rows": 1},
            {"source": "servers", "reason": "malformed URL", "rows": 1},
        ],
    }
    assert summary["key_anomalies"] == {"changed": 1, "malformed": 1, "shared": 1}
    assert isinstance(summary["totals"], dict)
    traffic = [400, 900, 250, 3, 1200, *(round(4000 / (number + 1)) + 20 for number in range(20))]
    assert summary["totals"]["attempts"] == 30 * sum(traffic)
    assert summary["totals"]["servers"] == 25
    assert isinstance(summary["worst_servers"], list)
    assert summary["worst_servers"][0]["server_url"] == "https://spam.example"


def test_the_report_is_one_file_and_results_that_are_missing_are_named(
    spark: SparkSession, findings: Findings, written: Path, tmp_path: Path
) -> None:
    """It replaces an earlier one whole; without results of that day there is an error, and the old one stays.

    What is found twice in the same results is the same, and its summary is the command's.
    """
    for directory in written.iterdir():
        (tmp_path / directory.name).symlink_to(directory)
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(FileNotFoundError, match="as_of=2026-03-29"):
        pipeline.report(spark, tmp_path, date(2026, 3, 29))
    assert (tmp_path / "report.html").read_text() == "old"
    assert pipeline.report(spark, tmp_path, AS_OF) == summary_of(findings)
    page = read_page((tmp_path / "report.html").read_text())
    assert "from the 30 days up to and including 30\u202fMar 2026." in page.text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
