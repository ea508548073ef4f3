"""What deliveries say: shown to an operator who asks for it, where that was allowed, and written down."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, update

from db import ActionSource, DeliveryJob, DeliveryPayload
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import HOSTILE, NOT_SHOWN, actions, now, owe
from tests.workers.dashboard.browsing import Person
from tests.workers.dashboard.calling import OPERATOR, VIEWER, WITH_TOKENS, Program
from workers.dashboard.access import Access

PAGE = "/delivery?id=one"
ASKED = ("/delivery/payload", ("id", "one"))


@pytest.fixture
async def showing(federation: Federation, make_node_site: MakeNodeSite) -> NodeSite:
    await owe(federation, "one")
    return make_node_site(federation, Access(accounts=WITH_TOKENS), shows_texts=True)


async def test_an_operator_sees_it_by_a_button_and_that_is_recorded(federation: Federation, showing: NodeSite) -> None:
    """The page itself does not have it; each look is a line of its own."""
    person = Person(showing.site.app)
    await person.logs_in("robot", OPERATOR)
    page = await person.sees(PAGE)
    assert NOT_SHOWN not in page
    assert 'action="/delivery/payload"' in page
    shown = await person.sends(*ASKED, page=PAGE)
    assert NOT_SHOWN in shown.text
    assert shown.headers["cache-control"] == "no-store"
    told = await Program(showing.site.app).posts("/delivery/payload", id="one")
    assert told == {"id": "one", "text": NOT_SHOWN}
    assert await actions(federation) == [
        ("robot", ActionSource.DASHBOARD, "deliveries payload", 1),
        ("robot", ActionSource.API, "deliveries payload", 1),
    ]
    assert NOT_SHOWN not in await person.sees("/actions")


async def test_a_viewer_does_not_see_it(federation: Federation, showing: NodeSite) -> None:
    """Neither the button, nor by a form of their own, nor by the API."""
    person = Person(showing.site.app)
    await person.logs_in("wall", VIEWER)
    page = await person.sees(PAGE)
    assert "/delivery/payload" not in page
    refused = await person.sends(*ASKED, page="/login")
    assert refused.status_code == 403
    assert NOT_SHOWN not in refused.text
    await Program(showing.site.app, VIEWER).posts("/delivery/payload", id="one", status=403)
    assert await actions(federation) == []


async def test_nobody_sees_it_unless_the_dashboard_was_started_to_show_it(
    federation: Federation, make_node_site: MakeNodeSite
) -> None:
    """There is neither a page nor a call for it."""
    await owe(federation, "one")
    node = make_node_site(federation, Access(allow_actions=True))
    person = Person(node.site.app)
    assert "/delivery/payload" not in await person.sees(PAGE)
    refused = await person.sends(*ASKED, page="/deliveries")
    assert refused.status_code in (404, 405)
    program = Program(make_node_site(federation, Access(accounts=WITH_TOKENS)).site.app)
    await program.posts("/delivery/payload", id="one", status=404)
    assert await actions(federation) == []


async def test_a_shared_text_is_shown_and_one_that_is_gone_is_not(federation: Federation, showing: NodeSite) -> None:
    """Whatever is in it does nothing; a look at nothing is not recorded."""
    async with federation.database.transaction() as session:
        payload = {"id": "shared", "payload": HOSTILE * 10, "refs": 1, "created_at": now()}
        await session.execute(insert(DeliveryPayload).values(**payload))
        await session.execute(update(DeliveryJob).values(payload="", payload_id="shared"))
    person = Person(showing.site.app)
    await person.logs_in("robot", OPERATOR)
    shown = (await person.sends(*ASKED, page=PAGE)).text
    assert "<script>alert" not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert "\u202e" not in shown
    assert len(shown) < 100_000
    gone = await person.sends("/delivery/payload", ("id", "none"), page=PAGE)
    assert gone.status_code == 404
    assert len(await actions(federation)) == 1
