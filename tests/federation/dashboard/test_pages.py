"""A node's pages, as somebody without scripts reads them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import timedelta
from html import unescape
from urllib.parse import quote, urlencode, urlsplit

import pytest
from sqlalchemy import delete, insert, text, update
from sqlmodel import col
from typer.main import get_command

from db import (
    ActionSource,
    AdminAction,
    AttemptNote,
    AttemptOutcome,
    BlacklistedServer,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryState,
    DeliveryTotal,
    HoldReason,
    ServerLink,
)
from federation.admin.deliveries import holds
from federation.cli.app import app as cli
from federation.dashboard import findings
from federation.dashboard.node_site import NodeSite
from federation.delivery.rows import series_job_id
from federation.rollups.job import Rollups
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings, alter
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import HOSTILE, NOT_SHOWN, PAGES, PEER, know, now, owe
from tests.workers.dashboard.browsing import Person
from workers.clock import monotonic
from workers.dashboard.access import Access
from workers.dashboard.feed import TROUBLE
from workers.testing import steps


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_of_a_node_that_has_nothing_says_so(acting: NodeSite, path: str) -> None:
    """Before anything was delivered or counted."""
    page = await Person(acting.site.app).sees(path)
    assert f'<a href="{path}" aria-current="page">' in page


async def test_what_strangers_wrote_is_shown_and_does_nothing(federation: Federation, acting: NodeSite) -> None:
    """On every page where it appears: names, codes, errors; and no page shows what a delivery says."""
    url = "https://peer.example"
    await know(federation, url, text=HOSTILE)
    await owe(federation, f"held{HOSTILE}", text=HOSTILE)
    await owe(federation, "failed", text=HOSTILE, state=DeliveryState.FAILED)
    async with federation.database.transaction() as session:
        session.add(ServerLink(server_url=url, since=now(), reason=HOSTILE[:60]))
        session.add(BlacklistedServer(server_url=f"*.{HOSTILE}", reason=HOSTILE, created_at=now()))
        session.add(
            AdminAction(
                at=now(), actor=HOSTILE, source=ActionSource.CLI, action=HOSTILE, arguments='{"a": "<img src=x>"}'
            )
        )
    await Rollups(federation.database)()
    person = Person(acting.site.app)
    pages = [await person.sees(path) for path in (*PAGES, f"/server?{urlencode({'url': url})}")]
    ids = re.findall(r'href="(/delivery\?[^"]+)"', "".join(pages))
    assert len(set(ids)) == 2
    pages += [await person.sees(unescape(each), status=None) for each in set(ids)]
    pages += [await person.sees(f"/blacklist?{urlencode({'check': HOSTILE, 'block': HOSTILE})}")]
    pages += [await person.sees(f"/server?{urlencode({'url': HOSTILE})}", status=400)]
    for page in pages:
        assert "<script>alert" not in page
        assert "<img" not in page
        assert not [each for each in page if not each.isprintable() and each != "\n"]
        assert len(page) < 100_000
        assert NOT_SHOWN not in page
    assert sum("&lt;script&gt;alert(1)" in page for page in pages) >= 6


async def test_a_delivery_says_what_happens_next(federation: Federation, acting: NodeSite) -> None:
    """By its state, and its job."""
    await owe(federation, "held")
    await owe(federation, "failed", state=DeliveryState.FAILED)
    person = Person(acting.site.app)
    assert "It is held, and waits for its server" in await person.sees("/delivery?id=held")
    assert "It was given up" in await person.sees("/delivery?id=failed")
    for reason in HoldReason:
        async with federation.database.transaction() as session:
            await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == "held").values(held_reason=reason))
        assert "It is held, and waits for " in await person.sees("/delivery?id=held")
    assert "the log knows no attempt at it" in await person.sees("/delivery?id=none", status=404)


async def test_a_delivery_whose_worker_died_is_not_being_sent(federation: Federation, acting: NodeSite) -> None:
    """Once the worker is not heard of for longer than its lease, the page says so, and what comes next."""
    await owe(federation, "a")
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(state=DeliveryState.READY))
    storage = federation.delivery_queue.storage
    await federation.delivery_queue.start()
    await steps.enqueue(storage, steps.job(series_job_id("a", 0)))
    await steps.claim(storage, worker_id="dies", lease=timedelta(seconds=30))
    person = Person(acting.site.app)
    assert "It is being sent: attempt 1 of" in await person.sees("/delivery?id=a")
    async with federation.database.transaction() as session:
        await session.execute(text("UPDATE workers_seen SET seen_at = seen_at - 40000"))
    page = await person.sees("/delivery?id=a")
    assert re.search(r"Its worker has not been heard of since \d\d \w+ [\d:]+ UTC, and its lease is over", page)
    assert "the next worker tries it again." in page
    async with federation.database.transaction() as session:
        await session.execute(text("DELETE FROM workers_seen"))
    assert "Its worker has not been heard of for long, and its lease is over" in await person.sees("/delivery?id=a")


@pytest.mark.parametrize(
    "path", ["/delivery?id=failed", f"/server?url={PEER}", "/live-attempts"], ids=["delivery", "server", "live"]
)
async def test_the_last_attempt_at_a_delivery_that_was_given_up_says_so(
    federation: Federation, acting: NodeSite, path: str
) -> None:
    """It does not read like those that others followed."""
    await know(federation, PEER)
    await owe(federation, "failed", state=DeliveryState.FAILED)
    ended = update(DeliveryAttempt).values(outcome=AttemptOutcome.RETRYABLE, note=AttemptNote.GIVEN_UP)
    async with federation.database.transaction() as session:
        await session.execute(ended)
    page = await Person(acting.site.app).sees(path)
    assert '<span class="state permanent">given up</span>' in page
    assert '<span class="state retryable">' not in page


async def test_a_delivery_without_a_row_is_told_from_the_log(federation: Federation, acting: NodeSite) -> None:
    """Whether it was delivered, and by which attempts."""
    await owe(federation, "gone", text=HOSTILE)
    async with federation.database.transaction() as session:
        await session.execute(delete(DeliveryJob))
        values = {"delivery_id": "gone", "job_name": "x", "server_url": PEER, "attempt": 2, "duration_ms": 5}
        done = {"outcome": AttemptOutcome.DELIVERED, "started_at": now(), "relayed_by": "https://relay.example"}
        done["note"] = AttemptNote.FORGED_ACK
        await session.execute(update(DeliveryAttempt).values(series=0))
        await session.execute(insert(DeliveryAttempt).values(**values, **done, series=0))
    page = await Person(acting.site.app).sees("/delivery?id=gone")
    assert f"It was delivered to {PEER}" in page
    assert "through https://relay.example" in page
    assert page.count("delivered, forged ack</span>") == 1
    assert page.count("<tr><td>") == 2
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    "path", ["/delivery?id=a%00", "/deliveries?code=%00", "/blacklist?check=%00", "/job?queue=%00"]
)
async def test_a_name_that_no_database_stores_is_refused(acting: NodeSite, path: str) -> None:
    """It is not said that the database is away."""
    assert "nothing stores" in await Person(acting.site.app).sees(path, status=400)


async def test_commands_that_pages_show_are_commands(federation: Federation, acting: NodeSite) -> None:
    """As the program itself reads them."""
    await know(federation, PEER)
    await owe(federation, "a", state=DeliveryState.FAILED)
    person, server = Person(acting.site.app), f"/server?{urlencode({'url': PEER})}"
    shown = [await person.sees(path) for path in (server, "/deliveries?state=failed&older=2h", "/delivery?id=a")]

    async def asks(path: str, *fields: tuple[str, str]) -> None:
        """The question before an action shows the command that does the same."""
        shown.append((await person.sends(path, *fields, page="/deliveries")).text)

    for action in ("probe", "hold", "release", "forget"):
        await asks("/server", ("url", quote(PEER, safe="")), ("action", action))
    for action in ("pause", "resume"):
        await asks(f"/queue/{action}", ("queue", "federation-delivery"))
    for action in ("retry", "drop"):
        await asks("/deliveries/act", ("id", "a"), ("action", action))
    await asks("/blacklist/add", ("rule", "*.x.example"), ("reason", "it's spam"), ("lasts", "7d"))
    await asks("/blacklist/remove", ("rule", "x"))
    await asks("/scheduler/run", ("name", "purge"))
    lines = [unescape(line) for page in shown for line in re.findall(r"<code>(federation .*)</code>", page)]
    assert len(lines) == len(shown)
    for line in lines:
        parse(shlex.split(line)[1:])


def parse(words: Sequence[str]) -> None:
    """The command takes these words; it is not run."""
    command = get_command(cli)
    rest = [*words]
    context = command.make_context("federation", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        name = rest.pop(0)
        found = command.get_command(context, name)
        assert found is not None, words
        command = found
    command.make_context(command.name, rest)


async def test_a_database_that_is_away_is_told(
    make_settings: MakeSettings, make_node_site: MakeNodeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing, where, and what to do, in one page without a traceback, which tries again by itself.

    So do those that are open; nothing secret is in what they say.
    """
    url = "postgresql://user:s3cret@127.0.0.1:1/nothing"
    federation = Federation(make_settings(database_url=url))
    node = make_node_site(federation, Access(allow_actions=True))
    site, person = node.site, Person(node.site.app)
    for path in ("/", "/servers", "/deliveries", "/live-attempts", "/blacklist"):
        page = await person.sees(path, status=503)
        assert '<meta http-equiv="refresh" content="5">' in page
        assert "The database does not answer (OperationalError). It is nothing at 127.0.0.1:1, by DATABASE_URL" in page
        assert "<code>federation doctor</code>" in page
        assert "s3cret" not in page
    async with site.feed.listen("overview") as listener:
        told = await listener.take()
        assert told is not None
        assert "The database does not answer" in told[TROUBLE]
    await node.close()
    await federation.close()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_database_that_lacks_tables_is_told(federation: Federation, acting: NodeSite) -> None:
    """It answers, and another command is what helps."""
    async with federation.database.transaction() as session:
        await session.execute(text("DROP TABLE delivery_totals"))
    page = await Person(acting.site.app).sees("/deliveries", status=503)
    assert "The database answers, and refuses what this page asks (OperationalError)." in page
    assert "node.sqlite3, by DATABASE_URL" in page
    assert "<code>federation upgrade</code> makes tables that it lacks" in page


async def test_a_database_that_comes_back_is_used_again(
    make_settings: MakeSettings, make_node_site: MakeNodeSite, migrated_postgres_url: str, postgres_server: str
) -> None:
    """By the pages and by those that are open, which said meanwhile that it was away; nobody does anything for that."""
    federation = Federation(make_settings(database_url=migrated_postgres_url))
    node = make_node_site(federation, Access())
    person, name = Person(node.site.app), urlsplit(migrated_postgres_url).path[1:]
    async with node.site.feed.listen("overview") as listener:

        async def hears(told: str) -> None:
            """The open page says this of what is wrong; nothing, if that is empty."""
            while True:
                news = await listener.take()
                assert news is not None
                if TROUBLE in news and bool(news[TROUBLE]) is bool(told) and told in news[TROUBLE]:
                    return

        await hears("")
        alter(postgres_server, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        alter(postgres_server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        await hears("The database does not answer")
        for path in ("/", "/deliveries"):
            assert 'data-again="5"' in await person.sees(path, status=503)
        assert "4 queues do not answer." in await person.sees("/queues")
        alter(postgres_server, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await hears("")
    assert "Nothing is owed." in await person.sees("/")
    await person.sees("/deliveries")
    await node.close()
    await federation.close()


async def test_the_report_is_shown_as_it_was_written(
    make_settings: MakeSettings, make_node_site: MakeNodeSite, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a policy of its own, by which it runs nothing and is no page of the dashboard."""
    out = tmp_path_factory.mktemp("analytics")
    federation = Federation(make_settings(federation_analytics_out=str(out)))
    person = Person(make_node_site(federation, Access()).site.app)
    assert "There is no report yet" in await person.sees("/analytics", status=404)
    (out / "report.html").write_text("<!doctype html><style>p{}</style><p>as of")
    answer = await person.client.get("/analytics")
    assert answer.text == "<!doctype html><style>p{}</style><p>as of"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    await federation.close()


async def test_a_node_without_analytics_says_how_to_turn_them_on(acting: NodeSite) -> None:
    """Where somebody looks for them, and where their columns are empty."""
    person = Person(acting.site.app)
    page = await person.sees("/analytics")
    for told in ("pip install", "[analytics]", "FEDERATION_ANALYTICS_OUT=", "federation analytics run --out"):
        assert told in page
    assert '<a href="/analytics">' in await person.sees("/servers")


async def test_what_was_given_up_needs_somebody(federation: Federation, acting: NodeSite) -> None:
    """The overview says so, with why, to whom, and what to run."""
    await owe(federation, "failed", state=DeliveryState.FAILED)
    page = await Person(acting.site.app).sees("/")
    assert '<span class="state warning">given up</span>: 1 delivery given up' in page
    assert f"because of TIMEOUT (1); to {PEER} (1)" in page
    assert "<code>deliveries retry --state failed</code>" in page
    assert "Nothing: every check" not in page


async def test_what_needs_somebody_is_examined_anew_after_a_pause(
    federation: Federation, acting: NodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks again after a while does not read what is long over; the heading says how old it is."""
    await owe(federation, "failed", state=DeliveryState.FAILED)
    person = Person(acting.site.app)
    assert ": 1 delivery given up" in await person.sees("/")
    await owe(federation, "another", state=DeliveryState.FAILED)
    page = await person.sees("/")
    assert re.search(r'<h2>What needs somebody <span class="small soft">as of \d+ s ago</span></h2>', page)
    assert ": 2 deliveries given up" not in page
    monkeypatch.setattr(findings, "monotonic", lambda: monotonic() + 3_600)
    assert ": 2 deliveries given up" in await person.sees("/")


async def test_what_needs_somebody_agrees_with_what_is_above(
    federation: Federation, acting: NodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where something new is there, it is examined at once if the last time is not a moment ago; else it says so."""
    monkeypatch.setattr(findings, "SHARE", 0)
    person = Person(acting.site.app)
    assert ": 1 delivery given up" not in await person.sees("/")
    await owe(federation, "failed", state=DeliveryState.FAILED)
    page = await person.sees("/")
    assert ": 1 delivery given up" not in page
    assert re.search(r"as of \d+ s ago, before what is above</span></h2>", page)
    monkeypatch.setattr(findings, "monotonic", lambda: monotonic() + findings.NEWS.total_seconds())
    page = await person.sees("/")
    assert ": 1 delivery given up" in page
    assert "before what is above" not in page


@pytest.mark.parametrize(
    ("number", "counted", "told"),
    [
        (7, 0, "7 deliveries are held. "),
        (300, 0, "At least 200 deliveries are held. "),
        (300, 300, "300 deliveries were held 7 min "),
        (0, 300, "Nothing is owed. "),
    ],
)
async def test_a_count_that_is_old_is_not_told_as_news(
    federation: Federation, acting: NodeSite, number: int, counted: int, told: str
) -> None:
    """Nothing counts while the node is down: the overview looks itself, and says how old the rest is."""
    await owe(federation, *(f"a{each}" for each in range(number)))
    count = {"state": DeliveryState.HELD, "held_reason": "", "deliveries": counted}
    async with federation.database.transaction() as session:
        await session.execute(insert(DeliveryTotal).values(**count, counted_at=now() - timedelta(minutes=7)))
    assert f'<p class="lede">{told}' in await Person(acting.site.app).sees("/")


async def test_workers_that_are_not_heard_of_do_not_count(federation: Federation, acting: NodeSite) -> None:
    """The overview has those that live, and says that there are others."""
    storage = federation.delivery_queue.storage
    await federation.delivery_queue.start()
    await storage.claim("died", leases={"*": timedelta(minutes=1)}, limit=1)
    async with federation.database.transaction() as session:
        await session.execute(text("UPDATE workers_seen SET seen_at = seen_at - 94000"))
    await storage.claim("lives", leases={"*": timedelta(minutes=1)}, limit=1)
    page = await Person(acting.site.app).sees("/")
    assert re.search(r'<dt>Workers</dt><dd><a href="/workers">1</a>', page)
    assert "1 worker not heard of any more" in page


async def test_live_shows_attempts_as_they_end_narrowed_down(federation: Federation, acting: NodeSite) -> None:
    """Each listener by its own choice, from one reading."""
    await owe(federation, "a")
    site = acting.site
    async with site.feed.listen("attempts") as all_, site.feed.listen("attempts", (("server", "other"),)) as other:
        for listener, sees in ((all_, True), (other, False)):
            told = await listener.take()
            assert told is not None
            assert ("id=a" in told["attempts-live"]) is sees
        await owe(federation, "b", url="https://other.example")
        for listener in (all_, other):
            told = await listener.take()
            assert told is not None
            assert "id=b" in told["attempts-live"]


async def test_servers_are_sorted_filtered_and_paged(federation: Federation, acting: NodeSite) -> None:
    """By the counts of the last time; a heading turns the order."""
    await know(federation, *(f"https://s{number:03}.example" for number in range(130)))
    await owe(federation, *(f"d{number}" for number in range(3)), url="https://s007.example")
    await holds.hold(federation, "https://s009.example")
    await Rollups(federation.database)()
    person = Person(acting.site.app)

    def urls(page: str) -> list[str]:
        return re.findall(r">(https://s\d+\.example)</a>", page)

    page = await person.sees("/servers")
    assert urls(page)[0] == "https://s007.example"
    assert len(urls(page)) == 100
    further = re.search(r'<a href="([^"]+)">Further</a>', page)
    assert further is not None
    assert len({*urls(page), *urls(await person.sees(unescape(further[1])))}) == 130
    turned = re.search(r'<a class="sort" href="([^"]+)">Server', page)
    assert turned is not None
    assert urls(await person.sees(unescape(turned[1])))[0] == "https://s000.example"
    assert urls(await person.sees("/servers?link=on_hold")) == ["https://s009.example"]
    assert re.search(r"were counted \d+ s ago\.</p>", page)
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryTotal).values(counted_at=now() - timedelta(minutes=7)))
    assert re.search(r"were counted 7 min[\d s]* ago, and not since: see ", await person.sees("/servers"))
    await person.sees("/servers?sort=owed&after=nonsense", status=400)
    found = await person.client.get("/servers?url=s007.example")
    assert found.headers["location"] == "/server?url=s007.example"
