"""What recurs, and what limits keep back, on the pages of queues."""

from __future__ import annotations

import shlex
import uuid
from datetime import timedelta
from urllib.parse import quote

import pytest

from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import WITH_TOKENS, Program
from tests.workers.dashboard.conftest import MakeSite
from workers import QueueOptions
from workers.command.main import make_parser
from workers.crons import Cron
from workers.dashboard.access import Access
from workers.dashboard.cron_pages import CRON_ACTIONS, cron_command
from workers.dashboard.site import Site
from workers.dashboard.visit import ActionTaken
from workers.jobs import JobState
from workers.limits import Limit
from workers.queue import Queue
from workers.storage import open_storage
from workers.testing import steps

NIGHT = Cron(name="night", job="clean", pattern="0 3 * * *", timezone="Europe/Berlin")
HOSTILE = "<b>\u202e'\"\x1b[31m\r\n" + "x" * 300


async def recurs(queue: Queue, *crons: Cron) -> None:
    for cron in crons:
        queue.crons.add(cron)
    await queue.crons.declare()


async def asks(person: Person, queue: str, name: str, action: str) -> str:
    """The question before the action."""
    fields = (("queue", quote(queue, safe="")), ("name", quote(name, safe="")), ("action", action))
    asked = await person.sends("/recurring", *fields, page="/recurring")
    assert asked.status_code == 200, asked.text
    return asked.text


async def does(person: Person, queue: str, name: str, action: str) -> str:
    """What the page says after it was done."""
    fields = (("queue", queue), ("name", name), ("action", action))
    answer = await person.confirms(await person.sends("/recurring", *fields, page="/recurring"))
    return await person.sees(answer.headers["location"])


async def test_what_recurs_is_paused_resumed_run_and_removed(
    acting: Site, queue: Queue, done: list[ActionTaken]
) -> None:
    """Each after a question; the page shows it, and each has its line in the log."""
    await recurs(queue, NIGHT, Cron(name="digest", job="mail", every=timedelta(minutes=5)))
    person = Person(acting.app)
    page = await person.sees("/recurring")
    assert "2 crons recur." in page
    assert "<code>0 3 * * *</code> Europe/Berlin" in page
    assert "every 5 min" in page
    assert "What it misses is not made up for." in await asks(person, "mail", "night", "pause")
    assert not any(each.paused for each in await queue.crons.list())
    assert "night: it is paused." in (page := await does(person, "mail", "night", "pause"))
    assert "1 paused." in page
    assert "night: it goes on." in await does(person, "mail", "night", "resume")
    assert "night: its job is queued." in await does(person, "mail", "night", "run")
    assert (await queue.counts())[JobState.QUEUED] == 1
    assert "night: it does not recur any more." in await does(person, "mail", "night", "remove")
    assert [each.cron.name for each in await queue.crons.list()] == ["digest"]
    assert "night: nothing of that name recurs there any more." in await does(person, "mail", "night", "run")
    assert [(each.action, each.subject, each.affected) for each in done] == [
        ("crons pause", "mail: night", 1),
        ("crons resume", "mail: night", 1),
        ("crons run", "mail: night", 1),
        ("crons remove", "mail: night", 1),
        ("crons run", "mail: night", 0),
    ]


async def test_what_it_is_called_does_nothing(acting: Site, queue: Queue) -> None:
    """Wherever it is shown; the forms carry it as it is."""
    await recurs(queue, Cron(name=HOSTILE, job=HOSTILE, pattern="@daily"))
    person = Person(acting.app)
    page = await person.sees("/recurring")
    for text in (page, await asks(person, "mail", HOSTILE, "pause")):
        assert "<b>\\u202e" not in text
        assert "&lt;b&gt;\\u202e" in text
        assert not [each for each in text if not each.isprintable() and each != "\n"]
    carried = quote(HOSTILE, safe="")
    assert f'name="name" value="{carried}"' in page
    await does(person, "mail", carried, "pause")
    assert [each.paused for each in await queue.crons.list()] == [True]


async def test_a_storage_that_keeps_none_says_so(make_site: MakeSite, redis_url: str) -> None:
    """On the page and to programs; a queue that is away says that, and hides no other."""
    name = f"t-{uuid.uuid4().hex}"
    bull = Queue(open_storage(f"bull+{redis_url}", queue=name))
    away = Queue(open_storage("redis://127.0.0.1:1/0", queue="away"))
    site = make_site(Access(accounts=WITH_TOKENS, allow_actions=True), bull, away)
    program = Program(site.app)
    assert (await program.gets("/recurring"))["items"] == []
    told = await program.posts("/recurring", queue=name, name="night", action="pause", status=409)
    assert "keeps nothing that recurs" in told["detail"]
    assert (await program.gets("/queue/limits", name=name))["items"] == []
    await program.posts("/recurring", queue="away", name="night", action="run", status=503)
    page = await Person(make_site(Access(), away).app).sees("/recurring")
    assert 'class="alert">away: ' in page
    assert "Nothing recurs." in page
    await bull.stop()
    await away.stop()


async def test_what_cannot_be_paused_has_no_button(make_site: MakeSite, redis_url: str) -> None:
    """On BullMQ it is a job scheduler, which Node's workers repeat as well."""
    name = f"t-{uuid.uuid4().hex}"
    async with Queue(open_storage(f"bullmq+{redis_url}", queue=name)) as queue:
        await recurs(queue, NIGHT)
        program = Program(make_site(Access(accounts=WITH_TOKENS), queue).app)
        page = await Person(make_site(Access(allow_actions=True), queue).app).sees("/recurring")
        assert "Run now: night" in page
        assert "Pause: night" not in page
        [line] = (await program.gets("/recurring"))["items"]
        assert line["pausable"] is False
        await program.posts("/recurring", queue=name, name="night", action="pause", status=409)
        for action, done in (("run", True), ("remove", True), ("remove", False)):
            assert (await program.posts("/recurring", queue=name, name="night", action=action))["done"] is done
        await queue.manage.drain()


async def test_programs_see_and_do_the_same(make_site: MakeSite, queue: Queue, done: list[ActionTaken]) -> None:
    """With the job that was enqueued, and the line in the log of a program."""
    await recurs(queue, NIGHT)
    program = Program(make_site(Access(accounts=WITH_TOKENS)).app)
    [line] = (await program.gets("/recurring"))["items"]
    assert (line["queue"], line["pattern"], line["every"], line["paused"]) == ("mail", "0 3 * * *", None, False)
    told = await program.posts("/recurring", queue="mail", name="night", action="run")
    assert told["done"] is True
    status = await queue.get_status(told["job"])
    assert status is not None
    assert status.name == "clean"
    told = await program.posts("/recurring", queue="mail", name="none", action="remove")
    assert (told["done"], told["job"]) == (False, None)
    assert [(each.action, each.affected, each.by_api) for each in done] == [
        ("crons run", 1, True),
        ("crons remove", 0, True),
    ]


@pytest.mark.parametrize("verb", CRON_ACTIONS)
async def test_the_command_beside_it_is_one(verb: str) -> None:
    """As `python -m workers` reads it; where only one process sees the queue it is Python."""
    shared = Queue(open_storage("redis://127.0.0.1:1/0", queue="mail"))
    words = shlex.split(cron_command(verb, shared, "it's; night"), comments=True)
    assert words[:3] == ["python", "-m", "workers"]
    assert make_parser().parse_args(words[3:]).name == "it's; night"
    own = Queue(open_storage(f"memory://{uuid.uuid4().hex}", queue="mail"))
    assert cron_command(verb, own, "night").startswith(f"await queue.crons.{'run_now' if verb == 'run' else verb}(")


async def test_limits_are_listed_with_their_queue(make_site: MakeSite) -> None:
    """To people and to programs, with the one of the whole queue; and a job that one keeps back says so."""
    limits = {"*": Limit(concurrency=50), "send": Limit("10/s", burst=5, concurrency=2)}
    async with Queue(
        open_storage(f"memory://{uuid.uuid4().hex}", queue="limited"), options=QueueOptions(limits=limits)
    ) as queue:
        await queue.counts()
        site = make_site(Access(accounts=WITH_TOKENS), queue)
        page = await Person(make_site(Access(), queue).app).sees("/queue?name=limited")
        assert "all together</td><td>\u2013</td>" in page
        assert "send</td><td>10/s</td>" in page
        assert "<h2>Limits</h2>" not in await Person(make_site(Access()).app).sees("/queue?name=mail")
        program = Program(site.app)
        found = (await program.gets("/queue/limits", name="limited"))["items"]
        for number in range(3):  # of which two may run
            await queue.enqueue(number, name="send", id=f"job-{number}")
        assert len(await steps.claim(queue.storage, 3)) == 2
        waits = {number: (await program.gets("/job", queue="limited", id=f"job-{number}"))["waits"] for number in "02"}
        assert (waits["0"], (waits["2"] or "")[:17]) == (None, "for limit 'send',")
        page = await Person(make_site(Access(), queue).app).sees("/job?queue=limited&id=job-2")
        assert "<dt>Waits</dt><dd>for limit &#39;send&#39;" in page
    assert [(each["name"], each["rate"], each["burst"], each["concurrency"]) for each in found] == [
        ("*", None, None, 50),
        ("send", "10/s", 5, 2),
    ]
