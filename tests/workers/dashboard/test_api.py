"""The API of the queues: what it answers is what its document says, to those who have a token."""

from __future__ import annotations

import json
import uuid
from ipaddress import ip_network

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import ROOT, VIEWER, WITH_TOKENS, Program
from tests.workers.dashboard.conftest import ACCOUNTS, PASSWORD, MakeSite
from workers.dashboard.access import Access, TrustedProxy
from workers.dashboard.site import Site
from workers.dashboard.visit import ActionTaken
from workers.jobs import ProgressReport
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage import open_storage
from workers.testing import steps

HOSTILE = "<b>\u202e\x1b[31m'\"/..%2f&=?#" + "é" * 300


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site(Access(accounts=[*ACCOUNTS, *WITH_TOKENS]))


async def test_the_document_is_openapi_and_its_calls_are_those_that_there_are(site: Site, queue: Queue) -> None:
    """Each is called once here, and its answer is checked against its schema."""
    program = Program(site.app)
    document = await program.document()
    OpenAPIV31SpecValidator(document).validate()
    [job] = await queue.enqueue_many([JobSpec(name="send", payload={"to": 1})])
    await program.gets("/queues")
    await program.gets("/queue", name="mail")
    await program.gets("/jobs", queue="mail", state="queued")
    await program.gets("/job", queue="mail", id=job.id)
    await program.gets("/queue/limits", name="mail")
    await program.gets("/tasks")
    await program.gets("/recurring")
    await program.posts("/recurring", queue="mail", name="none", action="pause")
    await program.gets("/workers")
    await program.posts("/queue/pause", name="mail")
    await program.posts("/queue/resume", name="mail")
    await program.posts("/jobs", queue="mail", action="remove", ids=[job.id])
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert program.called == described


async def test_jobs_are_paged_and_acted_on_and_that_is_recorded(
    site: Site, queue: Queue, done: list[ActionTaken]
) -> None:
    """With the same line in the log as by a click, which says that a program asked."""
    jobs = await queue.enqueue_many([JobSpec(name=HOSTILE[:200], payload=number) for number in range(5)])
    program = Program(site.app)
    address, seen = f"{ROOT}/jobs?queue=mail&state=queued&limit=2", list[str]()
    while address:
        page = await program.gets(address)
        seen += [each["id"] for each in page["items"]]
        assert {each["name"] for each in page["items"]} == {HOSTILE[:200]}
        address = page["next"]
    assert sorted(seen) == sorted(job.id for job in jobs)
    told = await program.posts("/jobs", queue="mail", action="remove", ids=[jobs[0].id, "none", jobs[0].id])
    assert told == {"asked": 2, "done": 1, "problem": None}
    told = await program.posts("/jobs", queue="mail", action="remove", all=True, state="queued")
    assert told["done"] == 4
    await program.posts("/queue/pause", name="mail")
    assert await queue.manage.is_paused()
    assert [(each.by, each.action, each.affected, each.by_api) for each in done] == [
        ("robot", "jobs remove", 1, True),
        ("robot", "jobs remove", 4, True),
        ("robot", "queues pause", 1, True),
    ]


async def test_what_another_program_reported_is_told(site: Site, queue: Queue) -> None:
    """Half of a pair has no bytes in UTF-8; everything else comes as it is."""
    [job] = await queue.enqueue_many([JobSpec(name="send", payload=1)])
    value = json.dumps({"a\ud800": ["\u202e", 10**30, None]}).encode()
    await queue.storage.progress([ProgressReport(claim=await steps.claim_one(queue.storage), value=value)])
    told = await Program(site.app).gets("/job", queue="mail", id=job.id)
    assert told["progress"] == {"a?": ["\u202e", 10**30, None]}


async def test_only_a_token_comes_in(make_site: MakeSite) -> None:
    """Neither a browser's cookie, nor a password, nor what a proxy says; and nobody where there is no account."""
    access = Access(accounts=[*ACCOUNTS, *WITH_TOKENS])
    site = make_site(access)
    person = Person(site.app)
    assert (await person.logs_in("olga", PASSWORD)).status_code == 303
    refused = await person.client.get(f"{ROOT}/queues")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    for token in (None, "", PASSWORD, WITH_TOKENS[0].hash, ACCOUNTS[0].hash, VIEWER[:-1], "é", "x" * 10_000):
        headers = {} if token is None else {b"authorization": f"Bearer {token}".encode()}
        assert (await Program(site.app, None).client.get(f"{ROOT}/queues", headers=headers)).status_code == 401
    opened = make_site(Access(allow_actions=True))
    await Program(opened.app, None).gets("/queues", status=401)
    secret = "0123456789abcdef-shared"
    proxied = make_site(Access(proxy=TrustedProxy(networks=[ip_network("127.0.0.0/8")], secret=secret)))
    named = {"x-dashboard-user": "olga", "x-dashboard-role": "operator", "x-dashboard-secret": secret}
    assert (await Program(proxied.app, None).client.get(f"{ROOT}/queues", headers=named)).status_code == 401


async def test_a_viewers_token_looks_and_does_not_act(site: Site, queue: Queue, done: list[ActionTaken]) -> None:
    """The role is the account's, as on the pages."""
    program = Program(site.app, VIEWER)
    await program.gets("/queues")
    told = await program.posts("/queue/pause", name="mail", status=403)
    assert "does not act" in told["detail"]
    assert not await queue.manage.is_paused()
    assert not done


async def test_a_token_does_not_open_the_pages_and_calls_name_the_dashboard(site: Site) -> None:
    """Where a browser goes, one logs in; and a name that is not the dashboard's own is refused here, too."""
    client = Program(site.app).client
    assert (await client.get("/queues")).headers["location"].startswith("/login")
    assert (await client.post("/queue/pause", data={"queue": "mail", "confirmed": "yes"})).status_code == 403
    assert (await client.get(f"{ROOT}/queues", headers={"host": "evil.test"})).status_code == 421


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/nowhere", 404, "no such call"),
        ("", 404, "no such call"),
        ("/queue/pause", 405, "POST"),
        ("/queue", 400, "'name' is missing"),
        ("/queue?name=none", 404, "no such queue"),
        ("/queue?name=mail&name=mail", 400, "twice"),
        ("/queues?color=red", 400, "'color' is not known"),
        ("/jobs?queue=mail&state=odd", 400, "'state': Input should be 'queued'"),
        ("/jobs?queue=mail&state=queued&limit=0", 400, "greater than or equal to 1"),
        ("/jobs?queue=mail&state=queued&limit=1e9", 400, "integer"),
        ("/jobs?queue=mail&state=queued&limit=" + "9" * 5_000, 400, "integer"),
        ("/jobs?queue=mail&state=queued&after=%20", 400, "not one that list() gave"),
        ("/job?queue=mail&id=none", 404, "knows no job"),
        ("/job?queue=mail&id=" + "x" * 5_000, 400, "at most 3000"),
    ],
)
async def test_what_cannot_be_answered_is_told_as_a_problem(site: Site, path: str, status: int, told: str) -> None:
    """As RFC 9457 has it, in a sentence."""
    problem = await Program(site.app).gets(ROOT + path, status=status)
    assert told in problem["detail"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"queue": 1, "action": "retry"}', "application/json", 400),
        (b'{"queue": "mail", "action": "burn"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": [1]}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": "a"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "all": true}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "all": true, "state": "queued"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "all": true, "ids": ["a"]}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "all": 1}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": ["a"], "all": "false"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": ["a"], "color": "red"}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": ["a\\u0000"]}', "application/json", 400),
        (b'{"queue": "mail", "action": "retry", "ids": ["a"]}', "text/plain", 415),
        (b'{"queue": "mail", "action": "retry", "ids": ["a"]}', "application/x-www-form-urlencoded", 415),
        (b" " * 300_000, "application/json", 413),
        (b'{"queue": "mail", "action": "retry", "ids": [' + b'"a",' * 1_001 + b'"a"]}', "application/json", 400),
    ],
)
async def test_a_body_of_another_shape_does_nothing(
    site: Site, done: list[ActionTaken], body: bytes, kind: str, status: int
) -> None:
    """Whatever is sent, by whomever has a token."""
    client = Program(site.app).client
    answer = await client.post(f"{ROOT}/jobs", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert not done


async def test_a_queue_that_is_away_says_so_and_the_others_answer(make_site: MakeSite, queue: Queue) -> None:
    """Nothing listens on that port."""
    away = Queue(open_storage("redis://127.0.0.1:1/0", queue="away"))
    program = Program(make_site(Access(accounts=WITH_TOKENS), away).app)
    lines = {line["name"]: line for line in (await program.gets("/queues"))["items"]}
    assert lines["mail"]["problem"] is None
    assert lines["away"]["problem"]
    told = await program.gets("/job", queue="away", id=uuid.uuid4().hex, status=503)
    assert "not known" not in told["detail"]
    told = await program.posts("/queue/pause", name="away", status=503)
    assert "Whether it had an effect is not known" in told["detail"]
    await away.stop()
