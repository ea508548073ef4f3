"""What somebody does on a node's pages, without scripts, and what the audit log has of it."""

from __future__ import annotations

import re
from urllib.parse import quote, urlencode

import pytest
from sqlalchemy import select

from db import (
    ActionSource,
    DeliveryJob,
    DeliveryState,
)
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import PAGES, PEER, actions, know, owe
from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.conftest import ACCOUNTS, PASSWORD
from workers.crons import Cron
from workers.dashboard.access import Access


async def test_a_server_is_held_released_and_forgotten(federation: Federation, acting: NodeSite) -> None:
    """Each after a question that says how many; the audit log has it, with whoever asked."""
    await know(federation, PEER)
    await owe(federation, "one", "two")
    person, page = Person(acting.site.app), f"/server?{urlencode({'url': PEER})}"

    async def does(action: str, asked: str, told: str) -> None:
        question = await person.sends("/server", ("url", quote(PEER, safe="")), ("action", action), page=page)
        assert asked in question.text
        answer = await person.confirms(question)
        assert told in await person.sees(answer.headers["location"])

    await does("hold", "2 deliveries are owed to it.", "Deliveries to it are held.")
    assert (await federation.links.find(PEER)).operator_hold
    await does("release", "2 deliveries are held for it.", "2 deliveries go out.")
    assert not (await federation.links.find(PEER)).operator_hold
    await does("forget", "1 server and 0 follows with it.", "It is forgotten.")
    by = ("local", ActionSource.DASHBOARD)
    assert await actions(federation) == [
        (*by, "deliveries hold", 2),
        (*by, "deliveries release", 2),
        (*by, "servers forget", 1),
    ]


async def test_deliveries_are_chosen_retried_and_dropped(federation: Federation, acting: NodeSite) -> None:
    """Those that were ticked, or all of a list; others stay as they are."""
    await owe(federation, "a", "b", "c", state=DeliveryState.FAILED)
    await owe(federation, "d", url="https://other.example", state=DeliveryState.FAILED)
    person = Person(acting.site.app)
    page = await person.sees("/deliveries?state=failed&server=peer.example")
    assert re.findall(r'name="id" value="(\w+)"', page) == ["c", "b", "a"]

    async def does(*fields: tuple[str, str]) -> str:
        question = await person.sends("/deliveries/act", *fields, page="/deliveries")
        answer = await person.confirms(question)
        return question.text + await person.sees(answer.headers["location"])

    told = await does(("id", "a"), ("action", "retry"))
    assert "Retry 1 delivery?" in told
    assert "federation deliveries retry a</code>" in told
    assert "1 delivery owed again." in told
    told = await does(("server", "peer.example"), ("state", "failed"), ("all", "yes"), ("action", "drop"))
    assert "Drop 2 deliveries?" in told
    assert "federation deliveries drop --server peer.example --state failed" in told
    assert "2 deliveries dropped." in told
    left = await federation.database.rows(select(DeliveryJob.id, DeliveryJob.state).order_by(DeliveryJob.id))
    assert [tuple(row) for row in left] == [("a", DeliveryState.READY), ("d", DeliveryState.FAILED)]
    assert [each[2:] for each in await actions(federation)] == [("deliveries retry", 1), ("deliveries drop", 2)]


async def test_two_operators_act_on_the_same_deliveries(federation: Federation, acting: NodeSite) -> None:
    """The second changes nothing, and is told so."""
    await owe(federation, "a", "b", "c", state=DeliveryState.FAILED)
    for action, ids, done in (("retry", "ab", "2 deliveries owed again."), ("drop", "bc", "2 deliveries dropped.")):
        people = Person(acting.site.app), Person(acting.site.app)
        fields = [("id", each) for each in ids] + [("action", action)]
        asked = [await each.sends("/deliveries/act", *fields, page="/deliveries") for each in people]
        answers = [await person.confirms(question) for person, question in zip(people, asked, strict=True)]
        first, second = [
            await person.sees(answer.headers["location"]) for person, answer in zip(people, answers, strict=True)
        ]
        assert done in first
        assert "had changed" not in first
        assert f"{done.replace('2', '0', 1)} 2 deliveries had changed meanwhile." in second
    assert [each[2:] for each in await actions(federation)] == [
        ("deliveries retry", 2),
        ("deliveries retry", 0),
        ("deliveries drop", 2),
        ("deliveries drop", 0),
    ]


async def test_more_than_a_page_waits_for_is_a_job_of_the_node(
    federation: Federation, acting: NodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection of a million rows blocks no page; whoever asked may go away, look how far it is, or end it."""
    monkeypatch.setattr("federation.dashboard.delivery_pages.MOST_AT_ONCE", 2)
    await owe(federation, "a", "b", "c", state=DeliveryState.FAILED)
    fields = (("state", "failed"), ("all", "yes"), ("action", "drop"))
    person = Person(acting.site.app)
    pages = []
    for _ in range(2):
        asked = await person.sends("/deliveries/act", *fields, page="/deliveries")
        assert "Drop more than 2 deliveries?" in asked.text
        assert "federation deliveries drop --state failed" in asked.text
        pages.append((await person.confirms(asked)).headers["location"])
    assert "Waiting for a process that delivers." in await person.sees(pages[0])
    await person.confirms(await person.sends("/bulk/cancel", ("id", pages[1].partition("=")[2]), page=pages[1]))
    assert "It ended early: cancelled." in await person.sees(pages[1])
    async with acting.site.feed.listen("bulk", (("id", pages[0].partition("=")[2]),)) as listener:
        await listener.take()
        assert await BulkJobs(federation).tick()
        told = await listener.take()
        assert told is not None
    assert "Done: 3 changed." in await person.sees(pages[0])
    await person.sees("/bulk?id=999", status=404)
    assert [each[2:] for each in await actions(federation)] == [
        ("deliveries drop", 3),
        ("deliveries drop", 0),
        ("bulk cancel", 1),
    ]


async def test_rules_are_added_checked_and_lifted(federation: Federation, acting: NodeSite) -> None:
    """What is no rule is refused with the reason."""
    person = Person(acting.site.app)

    async def adds(rule: str) -> str:
        fields = (("rule", rule), ("reason", "spam"), ("lasts", "7d"))
        answer = await person.confirms(await person.sends("/blacklist/add", *fields, page="/blacklist"))
        return answer.text if answer.status_code == 400 else await person.sees(answer.headers["location"])

    assert "is no rule" in await adds("nothing at all")
    assert "covers this server itself" in await adds("https://a.example")
    assert "*.evil.example: added." in await adds("*.evil.example")
    assert "is blacklisted by *.evil.example (spam)" in await person.sees("/blacklist?check=x.evil.example")
    assert "No rule covers" in await person.sees("/blacklist?check=good.example")
    asked = await person.sends("/blacklist/remove", ("rule", quote("*.evil.example")), page="/blacklist")
    await person.confirms(asked)
    assert "There is no rule." in await person.sees("/blacklist")
    assert [each[2:] for each in await actions(federation)] == [("blacklist add", 1), ("blacklist remove", 1)]


async def test_recurring_work_is_run_now(federation: Federation, acting: NodeSite) -> None:
    """And the page says how it ended."""
    person = Person(acting.site.app)
    asked = await person.sends("/scheduler/run", ("name", "purge"), page="/scheduler")
    assert "Run purge now?" in asked.text
    answer = await person.confirms(asked)
    page = await person.sees(answer.headers["location"])
    assert re.search(r"purge: done after [\d.]+ s: nothing to do\.", page)
    assert '<td class="wide">nothing to do</td>' in page
    assert "{&#34;" not in page
    assert (await person.sends("/scheduler/run", ("name", "none"), page="/scheduler")).status_code == 404
    assert [each[2:] for each in await actions(federation)] == [("scheduler run", 1)]


async def test_what_is_done_to_a_queue_is_in_the_audit_log(federation: Federation, acting: NodeSite) -> None:
    """The queues' pages are the core's, which knows no database."""
    person = Person(acting.site.app)
    asked = await person.sends("/queue/pause", ("queue", "federation-delivery"), page="/queue?name=federation-delivery")
    assert "federation queues pause delivery" in asked.text
    await person.confirms(asked)
    assert await federation.delivery_queue.manage.is_paused()
    federation.tasks_queue.crons.add(Cron(name="night", job="clean", pattern="@daily"))
    await federation.tasks_queue.crons.declare()
    fields = (("queue", "federation-tasks"), ("name", "night"), ("action", "pause"))
    asked = await person.sends("/recurring", *fields, page="/recurring")
    assert "await queue.crons.pause(&#39;night&#39;)" in asked.text
    await person.confirms(asked)
    by = ("local", ActionSource.DASHBOARD)
    assert await actions(federation) == [(*by, "queues pause", 1), (*by, "crons pause", 1)]
    assert "federation-delivery</span> is paused" in await person.sees("/")


async def test_a_viewer_acts_nowhere(federation: Federation, make_node_site: MakeNodeSite) -> None:
    """Whatever the action is."""
    site = make_node_site(federation, Access(accounts=ACCOUNTS))
    vera = Person(site.site.app)
    await vera.logs_in("vera", PASSWORD)
    paths = [path for part in site._parts() for path in part.actions]
    assert len(paths) >= 8
    for path in paths:
        answer = await vera.sends(
            path, ("confirmed", "yes"), ("action", "drop"), ("all", "yes"), page="/queue?name=federation-delivery"
        )
        assert answer.status_code == 403, path
    for path in PAGES:
        assert 'class="actions"' not in await vera.sees(path)
    assert await actions(federation) == []
