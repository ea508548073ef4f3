"""The page of what others sent: what could not be handled, and having that handled again."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import ReceivedActivity, ReceivedState
from federation.base.settings.settings import Settings
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import HOSTILE, NOT_SHOWN, actions, receive
from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import WITH_TOKENS, Program
from workers.dashboard.access import Access


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(federation_activitypub="1")


async def states(federation: Federation) -> list[str]:
    query = select(col(ReceivedActivity.state)).order_by(col(ReceivedActivity.number))
    return [row.state.value for row in await federation.database.rows(query)]


def plain(page: str) -> str:
    """A page without the places where a long text may break."""
    return page.replace("<wbr>", "")


async def test_what_failed_is_shown_and_handled_again(federation: Federation, acting: NodeSite) -> None:
    """One, and then all; each is asked about first, and is on record."""
    await receive(federation, "one", "two", "three", error=HOSTILE)
    await receive(federation, "waits", state=ReceivedState.NEW, error=None)
    person = Person(acting.site.app)
    page = await person.sees("/received")
    assert "3 of what others sent could not be handled." in page
    assert "1 waiting" in page
    assert [f"/{name}<" in plain(page) for name in ("one", "two", "waits")] == [True, True, False]
    assert ("&lt;script&gt;" in page, "<script>alert" in page, NOT_SHOWN in page) == (True, False, False)
    assert "/waits<" in plain(await person.sees("/received?state=new"))
    assert (await person.sends("/received/retry", ("number", "x"), page="/received")).status_code == 400
    asked = await person.sends("/received/retry", ("number", "2"), page="/received")
    assert "federation activitypub received retry 2" in asked.text
    assert await states(federation) == ["failed", "failed", "failed", "new"]
    answer = await person.confirms(asked)
    assert "1 to be handled again." in await person.sees(answer.headers["location"])
    assert await states(federation) == ["failed", "new", "failed", "new"]
    await person.confirms(await person.sends("/received/retry", page="/received"))
    assert await states(federation) == ["new"] * 4
    assert "All that others sent could be handled." in await person.sees("/received")
    assert [each[2:] for each in await actions(federation)] == [("activitypub received retry", n) for n in (1, 2)]


async def test_a_list_of_what_was_received_goes_on(federation: Federation, acting: NodeSite) -> None:
    await receive(federation, *(f"n{number:03}" for number in range(60)))
    person = Person(acting.site.app)
    first = await person.sees("/received")
    [further] = re.findall(r'<a href="(/received[^"]+after=50[^"]*)">Further', first)
    rest = await person.sees(further.replace("&amp;", "&"))
    assert [len(re.findall('name="number"', page)) for page in (first, rest)] == [50, 10]
    assert "Further" not in rest


async def test_a_node_without_actors_receives_nothing(
    make_settings: MakeSettings, make_node_site: MakeNodeSite
) -> None:
    """Its menu does not lead there."""
    node = Federation(make_settings())
    person = Person(make_node_site(node, Access(allow_actions=True)).site.app)
    assert "/received" not in await person.sees("/")
    assert "FEDERATION_ACTIVITYPUB=1" in await person.sees("/received", status=404)
    await node.close()


async def test_programs_list_and_retry(federation: Federation, make_node_site: MakeNodeSite) -> None:
    """By number, or all; one of the two."""
    await receive(federation, "one", "two", "three")
    program = Program(make_node_site(federation, Access(accounts=WITH_TOKENS)).site.app)
    listed = await program.gets("/received", limit="2")
    assert [each["number"] for each in listed["items"]] == [1, 2]
    further = await program.gets("/received", limit="2", after="2")
    assert ([each["number"] for each in further["items"]], further["next"]) == ([3], None)
    assert await program.posts("/received/retry", numbers=[1, 9]) == {"retried": 1, "hurried": 0}
    await program.posts("/received/retry", status=400)
    await program.posts("/received/retry", status=400, numbers=[2], all=True)
    assert await program.posts("/received/retry", all=True) == {"retried": 2, "hurried": 0}
    assert await states(federation) == ["new"] * 3
