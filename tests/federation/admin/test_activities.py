"""Where activities went, to whom, in whose name, and by what way servers are reached, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import update
from sqlmodel import col

from db import DEFAULT_WIRE, ActivityKey, DeliveryState
from federation.activitypub.activities import WIRE
from federation.activitypub.actors import ROTATION_AHEAD
from federation.admin import activitypub, inboxes
from federation.admin.activitypub import KeyState
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import Selection
from federation.admin.deliveries.pages import page_of_deliveries
from federation.admin.sent_activities import find, whereabouts
from federation.admin.servers import servers
from federation.admin.why import explain
from federation.runtime.composition import Federation
from tests.federation.activitypub.sender import ALICE
from tests.federation.admin.activities import (
    HOSTS,
    NOTE,
    B,
    C,
    D,
    add_alice,
    end,
    fall,
    hold_for,
    lose_inbox,
    send_note,
)
from tests.federation.cli.elsewhere import PEER, at_work, know
from tests.federation.conftest import OWN_URL, MakeSettings
from workers.clock import ManualClock, SystemClock


@pytest.fixture
async def node(make_settings: MakeSettings, database_url: str) -> AsyncIterator[Federation]:
    """A node that sends activities, with one actor."""
    clock = ManualClock(SystemClock().now())
    running = Federation(make_settings(database_url=database_url, federation_activitypub="1"), clock=clock)
    await add_alice(running)
    yield running
    await running.close()


def later(node: Federation, time: timedelta) -> None:
    assert isinstance(node.clock, ManualClock)
    node.clock.advance(time)


async def test_an_activity_is_found_whatever_became_of_it(node: Federation) -> None:
    """What arrived has no row, what was given up and purged neither; what waits says why, by its server."""
    sent = await send_note(node, *HOSTS, "e.example")
    other = await send_note(node, number=2)
    ids = dict(zip((B, C, D, "https://e.example"), sent.delivery_ids, strict=True))
    await end(node, ids[B], B)
    await end(node, ids["https://e.example"], "https://e.example", code="INBOX_GONE")
    await hold_for(node, C)
    await fall(node, C)

    told = await whereabouts(node, NOTE)

    assert told is not None
    activity = told.activity
    assert activity.states == {"delivered": 1, "ready": 1, "held": 1, "gone": 1}
    assert (activity.actor, activity.arrived) == (ALICE, False)
    assert {each.server_url for each in activity.deliveries} == {C, D}
    assert {each.delivery_id for each in activity.attempts} == {ids[B], ids["https://e.example"]}
    assert list(told.waits) == [C]
    assert told.waits[C][0].startswith("It is down since")
    text = "\n".join(told.sentences())
    assert "to 4 inboxes: 1 delivered, 1 ready, 1 held, 1 gone." in text
    assert f"held for server: {C}/inbox ({ids[C]}), the last attempt ended with TIMEOUT." in text
    assert other.activity_id not in text


async def test_an_activity_that_arrived_everywhere_is_known_by_its_attempts(node: Federation) -> None:
    """Its text is gone by then; and one that nobody sent is not known."""
    sent = await send_note(node, "b.example")
    await end(node, sent.delivery_ids[0], B)
    found = await find(node.database, NOTE)
    assert found is not None
    assert (found.states, found.arrived) == ({"delivered": 1}, True)
    assert await whereabouts(node, f"{ALICE}/notes/7#create") is None


async def test_deliveries_are_chosen_by_activity_and_by_inbox(node: Federation) -> None:
    """And each says which activity it sends, and in whose name."""
    first, second = await send_note(node), await send_note(node, number=2)
    for chosen, ids in (
        (Selection(activity_id=NOTE), {*first.delivery_ids}),
        (Selection(inbox=f"{C}/inbox"), {first.delivery_ids[1], second.delivery_ids[1]}),
        (Selection(activity_id=NOTE, inbox=f"{C}/inbox"), {first.delivery_ids[1]}),
        (Selection(inbox=f"{C}/inbox", state=DeliveryState.HELD), set[str]()),
        (Selection(inbox=f"{C}/users/bob/inbox"), set[str]()),
    ):
        page = await deliveries.list_deliveries(node.database, chosen)
        aged = await page_of_deliveries(node.database, chosen)
        assert {each.id for each in page.deliveries} == {each.id for each in aged.rows} == ids
    [one, *_] = (await deliveries.list_deliveries(node.database, Selection(activity_id=NOTE))).deliveries
    assert (one.activity_id, one.actor) == (NOTE, ALICE)
    shown = await deliveries.show(node.database, first.delivery_ids[0])
    assert shown is not None
    assert (shown[0].activity_id, shown[0].actor) == (NOTE, ALICE)


async def test_a_server_of_activities_alone_needs_no_registry(node: Federation) -> None:
    """Whether anything is known of its link, or only that something is owed to it."""
    await send_note(node, "b.example")
    await at_work(node)
    for _ in range(2):
        told = await explain(node, B)
        assert [way.wire for way in told.ways] == [WIRE]
        assert not told.in_the_way
        assert f"Deliveries go to it by {WIRE} alone, which needs no registry." in [*told.sentences()]
        await node.links.of(WIRE).succeeded(B)
    later(node, timedelta(minutes=1))
    await fall(node, B)
    told = await explain(node, B)
    assert (told.in_the_way, told.link.wire) == (True, WIRE)
    assert "Nothing is held for it; the next delivery is held" in " ".join(told.sentences())


async def test_an_operators_hold_adds_no_wire(node: Federation) -> None:
    """It is written to the links by all wires, and says of none that the server speaks it."""
    await node.links.of(WIRE).succeeded(B)
    await node.links.hold(B)
    told = await explain(node, B)
    assert [way.wire for way in told.ways] == [WIRE]
    assert "Deliveries to it are held by an operator" in " ".join(told.sentences())
    await node.links.release(B)
    assert [way.wire for way in (await explain(node, B)).ways] == [WIRE]


async def test_a_server_of_two_wires_is_told_by_both_links(node: Federation) -> None:
    """Each with what is held by it; the one in the way is the link."""
    await node.links.unavailable(B, "TIMEOUT")
    await send_note(node, "b.example")
    await hold_for(node, B)
    await fall(node, B, code="CONN_REFUSED")

    told = await explain(node, B)

    assert [(way.wire, way.held) for way in told.ways] == [(DEFAULT_WIRE, 0), (WIRE, 1)]
    assert told.link.wire == WIRE
    sentences = [*told.hindrances()]
    assert sentences[0].startswith(f"By {DEFAULT_WIRE}: Deliveries to it are sent")
    assert sentences[2].startswith(f"By {WIRE}: It is down since")
    assert sentences[3].startswith(f"By {WIRE}: 1 delivery is held for it")


async def test_the_kind_of_signature_is_told_that_a_server_takes(node: Federation) -> None:
    """Once it has refused the other."""
    await node.links.of(WIRE).set_signature(B, "rfc9421")
    told = await explain(node, B)
    assert "It takes signatures of the kind rfc9421, and refused the other." in [*told.sentences()]


async def test_an_inbox_is_explained_with_its_server(node: Federation) -> None:
    """By its own URL, or by that of an actor above it; a gone one is in the way, and other inboxes say nothing."""
    await send_note(node, "b.example")
    await lose_inbox(node, B)
    told = await explain(node, B, typed=f"{B}/inbox")
    [inbox] = told.inboxes
    assert (inbox.url, inbox.ready, inbox.gone_code, told.in_the_way) == (f"{B}/inbox", 1, 410, True)
    sentences = [*told.sentences()]
    assert "is gone since" in sentences[0]
    assert "but for one activity a day" in sentences[0]
    assert sentences[1] == f"Deliveries to the inbox {B}/inbox: 1 ready."
    for typed in (B, f"{B}/", f"{B}/INBOX", f"{B}/in", "b.example", f"{C}/inbox"):
        assert not await inboxes.inboxes_at(node.database, typed), typed


async def test_inboxes_that_are_gone_are_listed(node: Federation) -> None:
    """Those since then, the first one first."""
    for server, days in ((B, 3), (C, 40), (D, 5)):
        await lose_inbox(node, server, days=days)
    found = await inboxes.gone(node.database, node.clock.now() - timedelta(days=30))
    assert [each.server_url for each in found] == [D, B]


async def test_an_actor_of_ours_is_explained_by_its_keys_and_what_is_owed(node: Federation) -> None:
    """A key that waits, and one that this node's keys do not open."""
    await send_note(node)
    await hold_for(node, B)
    rotated = await activitypub.rotate(node, ALICE)
    told = await activitypub.own_actor(node, ALICE)
    assert told is not None
    assert ([key.state for key in told.keys], told.is_well) == ([KeyState.IN_USE, KeyState.NEXT], True)
    assert told.states == {"held": 1, "ready": 2}
    assert any(rotated.key_id in sentence for sentence in told.sentences())

    later(node, ROTATION_AHEAD)
    async with node.database.transaction() as session:
        wrong = update(ActivityKey).where(col(ActivityKey.key_id) == rotated.key_id).values(private="AAAA")
        await session.execute(wrong)
    told = await activitypub.own_actor(node, ALICE)
    assert told is not None
    assert ([key.state for key in told.keys], told.is_well) == ([KeyState.RETIRED, KeyState.IN_USE], False)
    assert "this node's keys do not open it" in " ".join(told.sentences())
    assert await activitypub.own_actor(node, f"{OWN_URL}/users/bob") is None


async def test_actors_and_keys_are_listed_a_page_at_a_time(node: Federation) -> None:
    """By URL. Removed ones are among them."""
    bob = f"{OWN_URL}/users/bob"
    await activitypub.add_actor(node, bob, is_instance=True)
    assert await activitypub.remove_actor(node, ALICE)
    assert not await activitypub.remove_actor(node, ALICE)
    page = await activitypub.list_actors(node, limit=1)
    assert ([each.id for each in page.actors], page.after) == ([ALICE], ALICE)
    assert page.actors[0].removed_at is not None
    rest = await activitypub.list_actors(node, limit=1, after=page.after)
    assert ([(each.id, each.is_instance) for each in rest.actors], rest.after) == ([(bob, True)], None)
    keys = await activitypub.list_keys(node, limit=1)
    assert ([key.key_id for key in keys.keys], keys.after) == ([f"{ALICE}#main-key"], ALICE)
    assert keys.keys[0].opens
    assert [key.actor for key in (await activitypub.list_keys(node, limit=1, after=ALICE)).keys] == [bob]


async def test_servers_without_a_row_in_the_registry_are_listed_by_their_links(node: Federation) -> None:
    """Among the others, by URL and once; but not where a health is asked for, of which they have none."""
    await know(node)
    for url in (B, PEER, "https://z.example"):
        await node.links.of(WIRE).succeeded(url)
    first = await servers.list_servers(node.database, limit=2)
    assert ([each.url for each in first.servers], first.others, first.after) == ([PEER], (B,), PEER)
    rest = await servers.list_servers(node.database, limit=2, after=first.after)
    assert (rest.servers, rest.urls, rest.after) == ((), ["https://z.example"], None)
    assert (await servers.list_servers(node.database)).urls == [B, PEER, "https://z.example"]
    assert (await servers.list_servers(node.database, healthy=True)).urls == [PEER]


async def test_links_are_told_by_wire(node: Federation) -> None:
    """What is held is counted for each; the one link of a server that has two is the one that is not up."""
    await node.links.succeeded(B)
    await send_note(node, "b.example")
    await hold_for(node, B)
    await fall(node, B)
    by_wire = (await servers.links_by_wire(node.database, [B]))[B]
    assert [(each.wire, each.state, each.held) for each in by_wire] == [(WIRE, "down", 1), (DEFAULT_WIRE, "up", 0)]
    found = await servers.links(node.database, [B, C])
    assert (found[B].wire, found[B].held, found[C].wire, found[C].held) == (WIRE, 1, DEFAULT_WIRE, 0)
