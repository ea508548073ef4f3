"""A node's API: the same as the pages show and do, by token, with the same lines in the audit log."""

from __future__ import annotations

from datetime import timedelta

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from sqlalchemy import delete, func, insert, select, update

from db import (
    ActionSource,
    AttemptOutcome,
    BlacklistedServer,
    BulkVerb,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryState,
    ServerLink,
)
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.admin.deliveries.deliveries import Selection
from federation.base.audit import Order
from federation.base.settings.settings import Settings
from federation.dashboard import delivery_calls
from federation.dashboard.node_site import NodeSite
from federation.rollups.job import Rollups
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import (
    HOSTILE,
    NOT_SHOWN,
    PEER,
    actions,
    know,
    now,
    owe,
    owe_activity,
    receive,
)
from tests.workers.dashboard.calling import ROOT, VIEWER, WITH_TOKENS, Program
from workers.dashboard.access import Access

ORDER = Order(actor="anna", source=ActionSource.CLI, action="deliveries hold")
EVIL = "https://evil.example"
LIST = b"server_url,reason\n*.one.example,spam\nhttps://two.example,lies\n*.evil.example,worse\n"


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    """Of a node with everything that has a call."""
    return make_settings(federation_activitypub="1")


@pytest.fixture
def site(federation: Federation, make_node_site: MakeNodeSite) -> NodeSite:
    return make_node_site(federation, Access(accounts=WITH_TOKENS))


@pytest.fixture
def program(site: NodeSite) -> Program:
    return Program(site.site.app)


async def test_every_call_answers_what_the_document_says(federation: Federation, program: Program) -> None:
    """Also with what strangers wrote; each call is made once at least."""
    document = await program.document()
    OpenAPIV31SpecValidator(document).validate()
    await know(federation, PEER, text=HOSTILE)
    await owe(federation, f"held{HOSTILE[:200]}", text=HOSTILE)
    await owe(federation, "failed", text="BROKEN", state=DeliveryState.FAILED)
    async with federation.database.transaction() as session:
        session.add(ServerLink(server_url=PEER, since=now(), reason=HOSTILE[:60]))
        session.add(BlacklistedServer(server_url=f"*.{HOSTILE}", reason=HOSTILE, created_at=now()))
    await owe_activity(federation, "posted", activity=HOSTILE[:500])
    await receive(federation, "one", error=HOSTILE)
    await Rollups(federation.database)()
    gets: dict[str, dict[str, str]] = {
        "/overview": {},
        "/history": {"over": "week"},
        "/servers": {"sort": "owed", "down": "true"},
        "/server": {"url": PEER},
        "/deliveries": {"state": "open"},
        "/delivery": {"id": "failed"},
        "/activity": {"id": HOSTILE[:500]},
        "/received": {"state": "failed"},
        "/attempts": {"server": PEER},
        "/queues": {},
        "/queue": {"name": "federation-delivery"},
        "/jobs": {"queue": "federation-delivery", "state": "queued"},
        "/queue/limits": {"name": "federation-delivery"},
        "/tasks": {},
        "/recurring": {},
        "/workers": {},
        "/scheduler": {},
        "/blacklist": {},
        "/blacklist/check": {"url": PEER},
    }
    for path, parameters in gets.items():
        told = await program.gets(path, **parameters)
        assert NOT_SHOWN not in str(told)
    job = await federation.tasks_queue.enqueue(1)
    await program.gets("/job", queue="federation-tasks", id=job.id)
    await program.posts("/jobs", queue="federation-tasks", action="remove", ids=[job.id])
    for action in ("hold", "release", "forget"):
        await program.posts("/server", url=PEER, action=action)
    await program.posts("/deliveries", action="retry", ids=["failed"])
    await program.posts("/received/retry", all=True)
    await program.posts("/recurring", queue="federation-tasks", name="none", action="remove")
    await program.posts("/queue/pause", name="federation-tasks")
    await program.posts("/queue/resume", name="federation-tasks")
    await program.posts("/scheduler/run", name="rollups")
    await program.posts("/blacklist/add", rule="*.evil.example", reason="spam", lasts="30d")
    await program.uploads("/blacklist/import", LIST, kind="text/csv")
    await program.posts("/blacklist/remove", rule="*.evil.example")
    bulk = await BulkJobs(federation).start_deliveries(BulkVerb.DROP, Selection(server_url=PEER), order=ORDER)
    await program.gets("/bulk", id=str(bulk))
    await program.posts("/bulk/cancel", id=bulk)
    log = await program.gets("/actions")
    assert {each["source"] for each in log["items"]} == {"api", "cli"}
    assert {each["actor"] for each in log["items"] if each["source"] == "api"} == {"robot"}
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert program.called == described


async def test_actions_do_what_the_pages_do_and_are_recorded(federation: Federation, program: Program) -> None:
    """Each changes the rows, answers how many, and has its line in the audit log, as one of a program."""
    await owe(federation, "one", "two", state=DeliveryState.FAILED)
    await owe(federation, "waits")
    told = await program.posts("/deliveries", action="retry", all=True, state="failed")
    assert told == {"done": 2, "left": 0, "job": None}
    told = await program.posts("/deliveries", action="drop", ids=["one", "none"])
    assert told["done"] == 1
    assert (await program.posts("/server", url="peer.example", action="hold"))["affected"] == 2
    assert (await program.gets("/server", url=PEER))["why"]["link"]["operator_hold"] is True
    assert (await program.posts("/server", url=PEER, action="release"))["affected"] == 1
    added = await program.posts("/blacklist/add", rule="*.Evil.example", reason="spam", lasts="7d")
    assert (added["change"], added["entry"]["rule"]) == ("added", "*.evil.example")
    assert (await program.gets("/blacklist/check", url=f"{EVIL}/a"))["blacklisted"] is True
    assert len((await program.posts("/blacklist/remove", rule="*.evil.example"))["rows"]) == 1
    assert (await program.gets("/blacklist/check", url=EVIL)) == {"blacklisted": False, "rules": []}
    assert [each for each in await actions(federation) if each[0] == "robot"] == [
        ("robot", ActionSource.API, "deliveries retry", 2),
        ("robot", ActionSource.API, "deliveries drop", 1),
        ("robot", ActionSource.API, "deliveries hold", 2),
        ("robot", ActionSource.API, "deliveries release", 1),
        ("robot", ActionSource.API, "blacklist add", 1),
        ("robot", ActionSource.API, "blacklist remove", 1),
    ]


async def test_many_deliveries_are_a_job(
    federation: Federation, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer names it, and any process does it."""
    monkeypatch.setattr(delivery_calls, "MOST_AT_ONCE", 2)
    await owe(federation, "a", "b", "c", state=DeliveryState.FAILED)
    told = await program.posts("/deliveries", action="retry", all=True)
    assert await BulkJobs(federation).tick()
    progress = await program.gets("/bulk", id=str(told["job"]))
    assert (progress["done"], progress["total"], progress["error"]) == (3, 3, None)
    assert (await program.posts("/bulk/cancel", id=told["job"]))["cancelled"] is False


async def test_lists_go_on_by_key(federation: Federation, program: Program) -> None:
    """Whatever is deleted meanwhile, and each item comes once."""
    await owe(federation, *(f"d{number}" for number in range(7)))
    for path in (f"{ROOT}/deliveries?limit=3&server=peer.example", f"{ROOT}/attempts?limit=3"):
        address, seen, pages = path, list[str](), 0
        while address:
            page = await program.gets(address)
            seen += [each.get("delivery_id", each.get("id")) for each in page["items"]]
            address, pages = page["next"], pages + 1
        assert sorted(seen) == [f"d{number}" for number in range(7)]
        assert pages == 3


async def test_a_delivered_delivery_is_told_from_the_log(federation: Federation, program: Program) -> None:
    """Its row is gone; one that was dropped has attempts that failed."""
    await owe(federation, "gone", "dropped")
    async with federation.database.transaction() as session:
        await session.execute(delete(DeliveryJob))
        values = {"delivery_id": "gone", "job_name": "x", "server_url": PEER, "attempt": 2, "duration_ms": 5}
        done = {"outcome": AttemptOutcome.DELIVERED, "started_at": now() + timedelta(seconds=1)}
        await session.execute(insert(DeliveryAttempt).values(**values, **done, series=0))
        await session.execute(update(DeliveryAttempt).where(DeliveryAttempt.attempt == 1).values(series=0))
    told = await program.gets("/delivery", id="gone")
    assert told["delivery"] is None
    assert told["next"].startswith(f"It was delivered to {PEER}")
    assert [each["outcome"] for each in told["attempts"]] == ["delivered", "permanent"]
    assert "dropped" in (await program.gets("/delivery", id="dropped"))["next"]
    await program.gets("/delivery", id="never", status=404)


async def test_what_cannot_be_answered_is_told(program: Program) -> None:
    """In a sentence, and with nothing in the log of the process."""
    for path, status in (
        ("/server?url=%00", 400),
        ("/servers?after=%20&sort=score", 400),
        ("/deliveries?after=nonsense", 400),
        ("/deliveries?state=odd", 400),
        ("/deliveries?older=soon", 400),
        ("/attempts?after=nonsense", 400),
        ("/attempts?outcome=odd", 400),
        ("/bulk?id=99999999999999999999", 400),
        ("/bulk?id=7", 404),
        ("/actions?after=-1", 400),
        ("/delivery?id=%00", 400),
        ("/delivery?id=none", 404),
    ):
        assert (await program.gets(ROOT + path, status=status))["detail"], path


async def test_an_order_that_cannot_be_done_does_nothing(federation: Federation, program: Program) -> None:
    """And leaves no line in the audit log."""
    orders: list[tuple[str, dict[str, object], int]] = [
        ("/deliveries", {"action": "retry"}, 400),
        ("/deliveries", {"action": "retry", "ids": ["a"], "all": True}, 400),
        ("/deliveries", {"action": "retry", "ids": ["a"], "state": "failed"}, 400),
        ("/server", {"url": "https://none.example", "action": "probe"}, 404),
        ("/server", {"url": "..", "action": "hold"}, 400),
        ("/deliveries", {"action": "drop", "ids": ["\ud800"]}, 400),
        ("/scheduler/run", {"name": "none"}, 404),
        ("/blacklist/add", {"rule": "evil", "reason": ""}, 400),
        ("/blacklist/add", {"rule": "*.evil.example", "reason": "x", "lasts": "99999999999d"}, 400),
    ]
    for path, body, status in orders:
        await program.posts(path, status=status, **body)
        assert not [each for each in await actions(federation) if each[0] == "robot"], (path, body)


async def test_a_list_is_imported_after_a_dry_run(federation: Federation, program: Program) -> None:
    """Nothing is written by default, nor where a row is wrong; a viewer may not even ask."""
    await program.posts("/blacklist/add", rule="*.evil.example", reason="spam")
    planned = await program.uploads("/blacklist/import", LIST, kind="text/csv")
    assert (planned["imported"], planned["added"], planned["changed"]) == (False, 2, 1)
    assert planned["first_changed"][0]["before"][0]["reason"] == "spam"
    assert await rules(federation) == 1
    bad = LIST + b"no rule,because\n"
    refused = await program.uploads("/blacklist/import", bad, kind="text/csv", dry_run="false")
    assert (refused["imported"], refused["bad"]) == (False, 1)
    assert await rules(federation) == 1
    done = await program.uploads("/blacklist/import", bad, kind="text/csv", dry_run="false", skip_bad="true")
    assert done["imported"] is True
    assert await rules(federation) == 3
    assert (await actions(federation))[-1] == ("robot", ActionSource.API, "blacklist import", 3)
    await program.uploads("/blacklist/import", b"\xff\xfe", kind="text/csv", status=400)
    await program.uploads("/blacklist/import", LIST, kind="application/json", status=415)
    await program.uploads("/blacklist/import", b"x" * (9 << 20), kind="text/csv", status=413)


async def rules(federation: Federation) -> int:
    return int((await federation.database.rows(select(func.count()).select_from(BlacklistedServer)))[0][0])


async def test_a_viewers_token_does_not_act(federation: Federation, site: NodeSite) -> None:
    """On a node either."""
    program = Program(site.site.app, VIEWER)
    await program.gets("/overview")
    await program.posts("/server", url=PEER, action="hold", status=403)
    assert not await actions(federation)
