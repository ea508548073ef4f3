"""A list of rules is sent, shown with what it would change, and imported."""

from __future__ import annotations

import io
import re
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from sqlalchemy import select

from db import ActionSource, BulkJob
from federation.admin import blacklist
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.dashboard import import_pages
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import HOSTILE, actions
from tests.federation.dashboard.test_api import LIST, rules
from tests.patience import eventually
from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import VIEWER, WITH_TOKENS, Program
from workers.dashboard.access import Access

HEAD = b"server_url,reason\n"


async def uploads(person: Person, content: bytes, *, token: str | None = None) -> httpx.Response:
    """As a browser sends the form."""
    fields = {"form_token": token or await person.token("/blacklist")}
    return await person.client.post("/blacklist/plan", data=fields, files={"list": ("list.csv", content, "text/csv")})


async def agrees(person: Person, planned: httpx.Response) -> httpx.Response:
    return await person.posts("/blacklist/import", *hidden(planned.text))


def hidden(page: str) -> list[tuple[str, str]]:
    """The fields of its form that nobody sees."""
    return re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page)


async def test_a_list_is_shown_before_it_is_imported(federation: Federation, acting: NodeSite) -> None:
    """What it adds, and what it changes into what; nothing is written until somebody agrees."""
    await blacklist.add(federation.database, "*.evil.example", reason="spam")
    person = Person(acting.site.app)
    planned = await uploads(person, LIST)
    assert "Import 3 rules?" in planned.text
    assert "2 rules added, 1 changed" in planned.text
    assert re.search(r"\*\.evil\.example</td><td>spam, for good</td><td>worse, for good", planned.text)
    assert await rules(federation) == 1
    done = await agrees(person, planned)
    assert "2 rules added, 1 changed, 0 as they were." in await person.sees(done.headers["location"])
    assert await rules(federation) == 3
    assert await actions(federation) == [("local", ActionSource.DASHBOARD, "blacklist import", 3)]
    assert "This list changes nothing." in (await uploads(person, LIST)).text
    assert (await agrees(person, planned)).status_code == 410


async def test_wrong_lines_are_shown_and_left_out(federation: Federation, acting: NodeSite) -> None:
    """What is in a list may be anybody's text."""
    person = Person(acting.site.app)
    planned = await uploads(person, LIST + f'"{HOSTILE[:60]}",x\n*.x.example,"<img src=x>\u202e"\n'.encode())
    assert "without the wrong lines" in planned.text
    assert "<img" not in planned.text
    assert "<script>alert" not in planned.text
    assert "\u202e" not in planned.text
    await agrees(person, planned)
    assert await rules(federation) == 4


async def test_a_long_list_is_imported_by_a_job(
    federation: Federation, acting: NodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says so, goes to the job, and the row does not keep the list."""
    monkeypatch.setattr(import_pages, "MOST_AT_ONCE", 2)
    person = Person(acting.site.app)
    planned = await uploads(person, LIST)
    assert "A process that delivers imports them" in planned.text
    began = await agrees(person, planned)
    assert await rules(federation) == 0
    assert await BulkJobs(federation).tick()
    assert await rules(federation) == 3
    page = await person.sees(began.headers["location"])
    assert "Importing rules" in page
    assert "Done: 3 changed." in page
    [row] = await federation.database.rows(select(BulkJob.__table__.c.chosen))
    assert row.chosen == {}
    assert await actions(federation) == [("local", ActionSource.DASHBOARD, "blacklist import", 3)]


async def test_a_list_that_takes_its_time_is_compared_beside_the_pages(
    federation: Federation, acting: NodeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page looks again until the result is there; nothing is imported before, and nobody else sees it."""
    monkeypatch.setattr(import_pages, "WAITS", 0)
    person = Person(acting.site.app)
    async with acting._imports._one_at_a_time:
        address = (await uploads(person, LIST)).headers["location"]
        await blacklist.plan_import(federation.database, io.BytesIO(LIST))  # it would be done by then
        page = await person.sees(address)
        assert "is being compared with the rules" in page
        assert 'data-again="2"' in page
        key = parse_qs(urlsplit(address).query)["key"][0]
        early = await person.sends("/blacklist/import", ("key", key), page="/blacklist")
        assert early.status_code == 409
        await person.sees("/blacklist/plan?key=another", status=410)
    page = await eventually(lambda: person.sees(address), lambda text: "Import 3 rules?" in text)
    await person.posts("/blacklist/import", *hidden(page))
    assert await rules(federation) == 3
    await person.sees(address, status=410)


async def test_files_that_nobody_comes_back_to_are_forgotten(acting: NodeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are kept, also of those that wait for their turn; one that is no list is not kept at all."""
    monkeypatch.setattr(import_pages, "WAITS", 0)
    person, imports = Person(acting.site.app), acting._imports
    async with imports._one_at_a_time:
        addresses = [(await uploads(person, LIST)).headers["location"] for _ in range(import_pages.KEPT + 2)]
        assert len(imports._lists) == import_pages.KEPT
        await person.sees(addresses[0], status=410)
    broken = (await uploads(person, b"\xff\xfe")).headers["location"]
    await eventually(lambda: person.sees(broken, status=None), lambda text: "not UTF-8" in text)
    await person.sees(broken, status=410)


async def test_a_page_of_a_long_list_is_short(federation: Federation, acting: NodeSite) -> None:
    """It counts all, and shows the first hundred of each kind."""
    many = HEAD + b"".join(b"*.n%d.example,spam\n" % number for number in range(5_000))
    planned = await uploads(Person(acting.site.app), many + b"nothing,x\n" * 500)
    assert "Import 5000 rules?" in planned.text
    assert "and 4900 more" in planned.text
    assert len(planned.content) < 100_000


@pytest.mark.parametrize(
    ("content", "status"), [(b"", 400), (b"\xff\xfe", 400), (b"a,b\n1,2\n", 400), (b"x" * (9 << 20), 413)]
)
async def test_what_is_no_list_is_refused(
    federation: Federation, acting: NodeSite, content: bytes, status: int
) -> None:
    """With the reason."""
    assert (await uploads(Person(acting.site.app), content)).status_code == status
    assert await rules(federation) == 0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=", b"--x"),
        ("multipart/form-data; boundary=x", b"--x--x--x" * 10_000),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n" * 10_000),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="form_token"\r\n\r\nno\r\n--x--',
        ),
        ("application/x-www-form-urlencoded", b"a=b"),
    ],
)
async def test_what_is_no_such_form_is_refused(acting: NodeSite, kind: str, body: bytes) -> None:
    """Whatever it pretends to be."""
    person = Person(acting.site.app)
    await person.sees("/blacklist")
    answer = await person.client.post("/blacklist/plan", content=body, headers={"content-type": kind})
    assert answer.status_code in (403, 415)


async def test_only_an_operator_sends_a_list_and_only_from_a_page(
    federation: Federation, make_node_site: MakeNodeSite
) -> None:
    """A viewer's file is not even read; a form without the page's token does nothing."""
    node = make_node_site(federation, Access(accounts=WITH_TOKENS))
    viewer = Person(node.site.app)
    await viewer.logs_in("wall", VIEWER)
    assert (await uploads(viewer, LIST, token="x" * 64)).status_code == 403
    acting = make_node_site(federation, Access(allow_actions=True))
    person = Person(acting.site.app)
    await person.sees("/blacklist")
    assert (await uploads(person, LIST, token="0" * 64)).status_code == 403
    await Program(node.site.app, VIEWER).uploads("/blacklist/import", LIST, kind="text/csv", status=403)
    assert await rules(federation) == 0
