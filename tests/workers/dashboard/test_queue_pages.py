"""The pages of queues, as somebody without scripts reads and uses them, on every storage."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest

from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.conftest import MakeSite
from workers.clock import ManualClock
from workers.dashboard import catalog, queue_pages
from workers.dashboard.access import Access
from workers.dashboard.application import queue_site
from workers.dashboard.catalog import QueueCatalog
from workers.dashboard.charts import Layer, columns, shares
from workers.dashboard.site import Site
from workers.dashboard.task_pages import look_at_tasks
from workers.dashboard.visit import ActionTaken
from workers.jobs import SILENT_AFTER, JobState
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage import open_storage
from workers.storage.memory import MemoryStorage
from workers.testing import Harness, steps

HOUR = timedelta(hours=1)
HOSTILE = (
    "two\r\nlines\n",
    "<script>alert(1)</script>",
    "\u202egnp.exe",
    "\x1b[31mred",
    "a&b?c#d",
    "x" * 500,
    "'\"><img src=x>",
    "../..",
    "%2e%2e",
)


async def fail_all(queue: Queue, number: int) -> None:
    for claim in await steps.claim(queue.storage, number):
        await steps.apply(queue.storage, steps.failed(claim))


@pytest.mark.spread("harness")
async def test_an_operator_retries_promotes_and_removes_jobs(harness: Harness) -> None:
    """Each after a question that says how many; what the page says then is what the queue did."""
    async with Queue(await harness.open()) as queue:
        name = queue.storage.queue
        site, _ = queue_site([queue], access=Access(allow_actions=True))
        await queue.enqueue_many([JobSpec(payload=1, id=f"job-{number}") for number in range(4)])
        await fail_all(queue, 4)
        await queue.enqueue(1, id="later", delay=HOUR, meta={"<b>tenant": "a&b"})
        person = Person(site.app)

        page = await person.sees(f"/queue?name={name}")
        assert ">job-0</a>" in page
        assert re.search(r"failed <b>4</b>", page)
        chosen = (("queue", name), ("state", "failed"), ("id", "job-0"), ("id", "job-1"))
        asked = await person.sends("/jobs", *chosen, ("action", "retry"), page=f"/queue?name={name}")
        assert "Queue 2 jobs again" in asked.text
        assert "queue.manage.retry([" in asked.text
        assert (await queue.counts())[JobState.FAILED] == 4
        told = await person.confirms(asked)
        assert "2 jobs are queued again." in await person.sees(told.headers["location"])
        assert (await queue.counts())[JobState.QUEUED] == 2

        asked = await person.sends(
            "/jobs",
            ("queue", name),
            ("state", "failed"),
            ("all", "yes"),
            ("action", "remove"),
            page="/queue?name=" + name,
        )
        assert "Remove 2 failed jobs without a trace?" in asked.text
        await person.confirms(asked)
        assert (await queue.counts())[JobState.FAILED] == 0

        page = await person.sees(f"/job?queue={name}&id=later")
        assert "Next run" in page
        assert "<dt>Meta &lt;b&gt;tenant</dt><dd>a&amp;b</dd>" in page
        asked = await person.sends(
            "/jobs",
            ("queue", name),
            ("state", "scheduled"),
            ("id", "later"),
            ("action", "promote"),
            page="/queue?name=" + name,
        )
        await person.confirms(asked)
        assert (await queue.counts())[JobState.QUEUED] == 3
        await site.close()


async def test_a_pause_says_what_it_means_and_is_seen(acting: Site, queue: Queue, done: list[ActionTaken]) -> None:
    """And goes on again."""
    await queue.enqueue_many([JobSpec(payload=1) for _ in range(3)])
    person = Person(acting.app)
    asked = await person.sends("/queue/pause", ("queue", "mail"), page="/queue?name=mail")
    assert "3 jobs are waiting in it." in asked.text
    assert not await queue.manage.is_paused()
    told = await person.confirms(asked)
    assert await queue.manage.is_paused()
    assert "The queue is paused." in (page := await person.sees(told.headers["location"]))
    assert "This queue is paused" in page
    assert "The queue is paused." not in await person.sees(told.headers["location"])
    assert "mail is paused." in await person.sees("/queues")
    await person.confirms(await person.sends("/queue/resume", ("queue", "mail"), page="/queue?name=mail"))
    assert not await queue.manage.is_paused()
    assert [each.action for each in done] == ["queues pause", "queues resume"]


async def test_two_operators_act_on_the_same_jobs(acting: Site, queue: Queue) -> None:
    """The second is told that there was nothing left to do."""
    await queue.enqueue(1, id="one")
    await fail_all(queue, 1)
    first, second = Person(acting.app), Person(acting.app)
    fields = (("queue", "mail"), ("state", "failed"), ("id", "one"), ("action", "retry"))
    asked = [await each.sends("/jobs", *fields, page="/queue?name=mail") for each in (first, second)]
    for person, question, told in (
        (first, asked[0], "1 job is queued again."),
        (second, asked[1], "1 job had changed meanwhile"),
    ):
        answer = await person.confirms(question)
        assert told in await person.sees(answer.headers["location"])


async def test_a_whole_state_is_taken_in_parts(
    acting: Site, queue: Queue, done: list[ActionTaken], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, no request holds them all; the question says how many are left for another time."""
    monkeypatch.setattr(queue_pages, "AT_ONCE", 5)
    await queue.enqueue_many([JobSpec(payload=1) for _ in range(12)])
    await fail_all(queue, 12)
    person = Person(acting.app)
    fields = (("queue", "mail"), ("state", "failed"), ("all", "yes"), ("action", "retry"))
    asked = await person.sends("/jobs", *fields, page="/queue?name=mail")
    assert "Queue 5 failed jobs again" in asked.text
    assert "7 more are left for another time." in asked.text
    await person.confirms(asked)
    assert (await queue.counts())[JobState.FAILED] == 7
    assert done[0].affected == 5


async def test_long_lists_have_pages(acting: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with so many rows, and a link to the next."""
    monkeypatch.setattr(catalog, "PER_PAGE", 10)
    await queue.enqueue_many([JobSpec(payload=1, id=f"job-{number:02}") for number in range(25)])
    person, address, seen = Person(acting.app), "/queue?name=mail&state=queued", []
    while True:
        page = await person.sees(address)
        found = re.findall(r'class="id" href="[^"]+">(job-\d\d)</a>', page)
        assert len(found) <= 10
        seen += found
        further = re.search(r'<a href="([^"]+)">Further</a>', page)
        if further is None:
            break
        address = further[1].replace("&amp;", "&")
    assert sorted(seen) == [f"job-{number:02}" for number in range(25)]


@pytest.mark.parametrize("text", HOSTILE)
async def test_what_a_job_is_called_is_shown_and_does_nothing(make_site: MakeSite, text: str) -> None:
    """In every place: HTML is escaped, what cannot be seen is spelt, what is too long is cut; links lead to it."""
    async with Queue(open_storage("memory://hostile", queue=text)) as queue:
        await queue.manage.remove([text])
        await queue.enqueue(1, id=text, name=text)
        [claim] = await steps.claim(queue.storage, 1)
        failed = steps.failed(claim)
        await steps.apply(queue.storage, failed)
        site, _ = queue_site([queue], access=Access(allow_actions=True))
        person = Person(site.app)
        pages = [await person.sees(path) for path in ("/queues", "/workers")]
        linked = re.search(r'<h2><a href="([^"]+)">', pages[0])
        assert linked is not None
        pages.append(await person.sees(linked[1].replace("&amp;", "&")))
        linked = re.search(r'class="id" href="([^"]+)"', pages[-1])
        assert linked is not None
        pages.append(await person.sees(linked[1].replace("&amp;", "&")))
        assert "Remove" in pages[-1]
        carried = quote(text, safe="")
        assert f'name="id" value="{carried}"' in pages[-1]
        fields = (("queue", carried), ("state", "failed"), ("id", carried), ("action", "remove"))
        asked = await person.sends("/jobs", *fields, page=linked[1].replace("&amp;", "&"))
        told = await person.confirms(asked)
        pages += [asked.text, await person.sees(told.headers["location"])]
        assert await queue.get_status(text) is None
        for page in pages:
            assert "<script>alert" not in page
            assert "<img" not in page
            assert not [each for each in page if not each.isprintable() and each not in "\n"]
            assert len(page) < 100_000
        await site.close()


async def test_a_queue_that_does_not_answer_is_only_that(make_site: MakeSite, queue: Queue) -> None:
    """The others are shown; what is asked of it says so, and that page tries again by itself."""
    dead = Queue(open_storage("redis://127.0.0.1:1/0", queue="dead"))
    await queue.enqueue(1)
    site = make_site(Access(allow_actions=True), dead)
    person = Person(site.app)
    page = await person.sees("/queues")
    assert "dead does not answer." in page
    assert "queued</dt><dd>1</dd>" in page
    assert "answer" in await person.sees("/workers")
    page = await person.sees("/queue?name=dead")
    assert 'class="alert"' in page
    away = await person.sees("/job?queue=dead&id=x", status=503)
    assert '<meta http-equiv="refresh" content="5">' in away
    refused = await person.sends("/queue/pause", ("queue", "dead"), ("confirmed", "yes"), page="/queue?name=mail")
    assert refused.status_code == 503
    assert "http-equiv" not in refused.text
    await dead.stop()


async def test_a_queue_whose_server_is_silent_is_only_that(
    make_site: MakeSite, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, and never answers: nobody waits for it for long."""
    monkeypatch.setattr(catalog, "PATIENCE", timedelta(milliseconds=50))

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(listens, "127.0.0.1", 0) as server:
        silent = Queue(open_storage(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", queue="silent"))
        await queue.enqueue(1)
        site = make_site(Access(allow_actions=True), silent)
        page = await Person(site.app).sees("/queues")
        assert "silent does not answer." in page
        assert "queued</dt><dd>1</dd>" in page
        assert "does not answer within" in await Person(site.app).sees("/recurring")
        await silent.stop()


async def test_what_is_not_there_is_said(acting: Site) -> None:
    """With the right status."""
    person = Person(acting.app)
    for path in ("/nowhere", "/queue?name=none", "/job?queue=mail&id=none", "/job?queue=none&id=1"):
        assert "<h1" in await person.sees(path, status=404)
    await person.sees("/job?queue=mail", status=400)
    for fields in ([("queue", "mail"), ("action", "none")], [("queue", "mail"), ("action", "retry")]):
        assert (await person.sends("/jobs", *fields, page="/queue?name=mail")).status_code == 400


async def test_a_worker_that_is_not_heard_of_does_not_count(make_site: MakeSite) -> None:
    """It is shown as such, beside those that run."""
    clock = ManualClock(datetime.now(UTC) - 2 * SILENT_AFTER)
    storage = MemoryStorage(queue="shop", clock=clock)
    await steps.claim(storage, worker_id="died")
    person = Person(make_site(Access(), Queue(storage)).app)
    page = await person.sees("/workers")
    assert "No worker runs." in page
    assert "1 worker is not heard of any more." in page
    assert re.search(r'<span class="state stalled">not heard of for [56] min', page)

    clock.advance(2 * SILENT_AFTER)
    await steps.claim(storage, worker_id="lives")
    assert "1 worker runs." in await person.sees("/workers")
    assert "1 worker, 1 not heard of any more" in await person.sees("/queues")
    await steps.enqueue(storage, steps.job())
    look = await look_at_tasks(QueueCatalog([Queue(storage)]))
    assert [line.workers for line in look.lines] == [1]


async def test_queues_of_one_name_in_two_storages_are_told_apart() -> None:
    """By a number."""
    queues = [Queue(open_storage(f"memory://{place}", queue="mail")) for place in "ab"]
    assert [*QueueCatalog(queues)] == ["mail", "mail (2)"]


def test_a_bar_shows_every_part_however_small() -> None:
    """And its parts make a whole."""
    parts = shares([("failed", 1, "bad"), ("queued", 1_000_000, "second"), ("none", 0, "none")])
    assert [part.name for part in parts] == ["failed", "queued"]
    assert parts[0].width > 1
    assert sum(part.width for part in parts) == pytest.approx(100, abs=0.1)
    assert shares([("failed", 0, "bad")]) == []


def test_columns_stand_on_zero_and_stay_below_the_highest_mark() -> None:
    """Whatever the numbers are."""
    for values in ([0.0, 0], [1, 2, 3], [999_999, 1], [7], []):
        chart = columns(
            "rates",
            [Layer(name="sent", values=values), Layer(name="failed", values=values, style="bad")],
            ["12:00", "13:00"],
        )
        assert all(bar.y >= 9.9 and bar.y + bar.height <= chart.height - 21.9 for bar in chart.bars)
        assert 2 <= len(chart.ticks) <= 5
