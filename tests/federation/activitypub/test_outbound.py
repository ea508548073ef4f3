"""Activities that are owed: who gets them, by which inbox, in which order; and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from structlog.testing import capture_logs

from db import Database, DeliveryState, HoldReason
from federation.activitypub.activities import LARGE_BYTES, delete, follow, undo
from federation.activitypub.outbound import Recipient, Sent, Skipped, SkipReason
from federation.delivery.ledger.ledger import Ledger
from federation.http.guard import parse_target
from tests.federation.activitypub.sender import ALICE, OWN, Sender, add_key, follower, note

INBOX = "https://b.example/inbox"
NOBODY_ASKS = "sqlite:////tmp/nobody-asks.sqlite3"


class Interrupted(Exception):
    """What a test raises in a transaction."""


@pytest.fixture
async def sender(database: Database) -> AsyncIterator[Sender]:
    made = Sender.on(database)
    await add_key(database)
    yield made
    await made.close()


@pytest.fixture
async def bare() -> AsyncIterator[Sender]:
    """Without a database that anybody asks."""
    database = Database(NOBODY_ASKS)
    yield Sender.on(database)
    await database.close()


async def test_an_activity_is_owed_to_each_inbox(sender: Sender) -> None:
    """Its text is stored once, as it was handed in, under its id and its actor."""
    text = json.dumps(note(), indent=1)
    sent = await sender.sent(text, follower(), follower("carol", host="c.example", shared=False))
    rows = await sender.rows()
    assert sent == Sent(activity_id=note()["id"], delivery_ids=tuple(rows))
    assert [(rows[each].target_url, rows[each].server_url) for each in sent.delivery_ids] == [
        (INBOX, "https://b.example"),
        ("https://c.example/users/carol/inbox", "https://c.example"),
    ]
    assert {(row.job_name, row.wire, row.state) for row in rows.values()} == {
        ("deliver-activity", "activitypub", DeliveryState.READY)
    }
    (stored,) = await sender.texts()
    assert (stored.payload, stored.refs) == (text, 2)
    assert (stored.activity_id, stored.actor) == (note()["id"], ALICE)
    assert await sender.jobs() == {*sent.delivery_ids}


async def test_what_is_rolled_back_never_was(sender: Sender) -> None:
    """No row, no text, no job."""
    with suppress(Interrupted):
        async with sender.outbox.transaction() as session:
            await sender.send(session, note(), follower())
            raise Interrupted
    assert (await sender.rows(), await sender.texts(), await sender.jobs()) == ({}, [], set())


async def test_recipients_of_one_inbox_are_one_delivery(sender: Sender) -> None:
    """The shared one of their server, or, without it or on request, their own; the same one is asked once."""
    everybody = [follower("bob"), follower("carol"), follower("dave", shared=False), follower("bob")]
    assert len((await sender.sent(note(1), *everybody)).delivery_ids) == 2
    own = await sender.sent(note(2), *everybody, prefer_shared_inbox=False)
    rows = await sender.rows()
    assert [rows[each].target_url for each in own.delivery_ids] == [
        f"https://b.example/users/{name}/inbox" for name in ("bob", "carol", "dave")
    ]


async def test_who_gets_nothing_is_told(sender: Sender) -> None:
    """With the reason; each of those who share an inbox."""
    await sender.blacklist_server("*.spam.example")
    await sender.lose_inbox("https://gone.example/inbox")
    skipped = {
        follower("me", host="a.example"): SkipReason.OWN,
        follower("x", host="x.example"): SkipReason.EXCLUDED,
        follower("s", host="very.spam.example"): SkipReason.BLACKLISTED,
        follower("g", host="gone.example"): SkipReason.GONE,
        follower("h", host="gone.example"): SkipReason.GONE,
    }
    sent = await sender.sent(note(), *skipped, follower(), exclude=["HTTPS://X.example:443/"])
    (delivery,) = sent.delivery_ids
    assert {each.recipient: each.reason for each in sent.skipped} == skipped
    assert (await sender.rows())[delivery].target_url == INBOX
    (stored,) = await sender.texts()
    assert stored.refs == 1


async def test_a_shared_inbox_that_is_gone_is_tried_once_a_day(sender: Sender) -> None:
    """By one activity; that of a single actor is not."""
    own = follower("carol").inbox
    for inbox in (INBOX, own):
        await sender.lose_inbox(inbox, since=sender.clock.now() - timedelta(days=2))
    alone = follower("carol", shared=False)
    first, second = [await sender.sent(note(number), follower(), alone) for number in (1, 2)]
    rows = await sender.rows()
    assert [rows[each].target_url for each in first.delivery_ids] == [INBOX]
    assert [each.recipient for each in first.skipped] == [alone]
    assert second.delivery_ids == ()


async def test_without_recipients_nothing_is_written(sender: Sender) -> None:
    """None, and none that gets anything."""
    mine = follower("me", host="a.example")
    assert await sender.sent(note()) == Sent(activity_id=note()["id"])
    assert await sender.sent(note(), mine) == Sent(
        activity_id=note()["id"], skipped=(Skipped(recipient=mine, reason=SkipReason.OWN),)
    )
    await sender.lose_inbox(INBOX)
    assert (await sender.sent(note(), follower())).delivery_ids == ()
    assert (await sender.rows(), await sender.texts()) == ({}, [])


async def test_what_is_about_one_object_arrives_in_order(sender: Sender) -> None:
    """Create, Update, Delete of a note, one after the other at each inbox; another note goes at once."""
    made = note()
    about = [made, {**made, "type": "Update", "id": f"{ALICE}/2"}, delete(ALICE, made["object"]["id"])]
    at_b, at_c = follower(), follower(host="c.example")
    lines = [(await sender.sent(each, at_b, at_c)).delivery_ids for each in about]
    (other,) = (await sender.sent(note(2), at_b)).delivery_ids
    rows, ledger = await sender.rows(), Ledger(sender.database, clock=sender.clock)
    assert [rows[first].held_reason for first, _ in lines] == [None, HoldReason.ORDER, HoldReason.ORDER]
    for number, (here, there) in enumerate(lines):
        ready = {each.id for each in (await sender.rows()).values() if each.state is DeliveryState.READY}
        assert ready == {here, other, lines[0][1]}, number
        assert there in await sender.rows()
        await ledger.gone(here)
    await ledger.close()


async def test_an_undo_waits_for_what_it_undoes(sender: Sender) -> None:
    """Without a word of the caller's about order."""
    asked = follow(ALICE, "https://b.example/users/bob", activity_id=f"{ALICE}#follows/1")
    await sender.sent(asked, follower(), prefer_shared_inbox=False)
    (undone,) = (await sender.sent(undo(asked), follower(), prefer_shared_inbox=False)).delivery_ids
    assert (await sender.rows())[undone].held_reason is HoldReason.ORDER


async def test_the_caller_may_choose_another_order_or_none(sender: Sender) -> None:
    """A key of its own has a line at each inbox, also where they are on one server."""
    people = follower("bob", shared=False), follower("carol", shared=False)
    chosen = [await sender.sent(note(number), *people, key="alice") for number in (1, 2)]
    free = [await sender.sent(note(3), *people, key=None) for _ in range(2)]
    rows = await sender.rows()
    assert [[rows[each].held_reason for each in sent.delivery_ids] for sent in chosen] == [
        [None, None],
        [HoldReason.ORDER, HoldReason.ORDER],
    ]
    assert len({rows[each].ordering_key for sent in chosen for each in sent.delivery_ids}) == len(people)
    assert {rows[each].ordering_key for sent in free for each in sent.delivery_ids} == {None}
    assert {rows[each].held_reason for sent in free for each in sent.delivery_ids} == {None}


@pytest.mark.parametrize(
    ("key", "may_send"),
    [
        ({"retired_at": timedelta(seconds=1)}, True),
        ({"retired_at": timedelta(0)}, False),
        ({"actor_id": f"{OWN}/users/carol"}, False),
    ],
)
async def test_the_actor_needs_a_key_here(database: Database, key: dict[str, Any], may_send: bool) -> None:
    """One that is not retired. It may have been made in the same transaction."""
    sender = Sender.on(database)
    await add_key(
        database,
        **{name: sender.clock.now() + value if isinstance(value, timedelta) else value for name, value in key.items()},
    )
    if may_send:
        assert (await sender.sent(note(), follower())).delivery_ids
    else:
        with pytest.raises(ValueError, match=r"actor: https://a.example/users/alice has no key here"):
            await sender.sent(note(), follower())
        assert (await sender.rows(), await sender.texts()) == ({}, [])
    await sender.close()


@pytest.mark.parametrize(
    ("inbox", "named"),
    [
        ("", "no canonical URL"),
        (None, "no canonical URL"),
        ("b.example/inbox", "no canonical URL"),
        ("ftp://b.example/inbox", "no canonical URL"),
        ("https:///inbox", "no canonical URL"),
        ("https://b.example", "no canonical URL"),
        ("https://b.example?x", "no canonical URL"),
        ("HTTPS://b.example/inbox", "no canonical URL"),
        ("https://B.example/inbox", "no canonical URL"),
        ("https://b.example:443/inbox", "no canonical URL"),
        ("https://b.example./inbox", "no canonical URL"),
        ("https://127.1/inbox", "no canonical URL"),
        ("https://[::0001]/inbox", "no canonical URL"),
        ("https://bob@b.example/inbox", "no canonical URL"),
        ("https://b.example/inbox#main", "no canonical URL"),
        ("https://b.example/inbox ", "no canonical URL"),
        ("https://b.example/in\nbox", "no canonical URL"),
        ("https://b.example/inbox\n", "no canonical URL"),
        ("https://b.example\\@c.example/inbox", "no canonical URL"),
        ("https://b.example/\u00e9", "no canonical URL"),
        ("https://\u00e9.example/inbox", "no canonical URL"),
        ("https://b.example/a%2", "no canonical URL"),
        ("https://b.example/<>", "no canonical URL"),
        ("https://b.example/inbox?", "no canonical URL"),
        ("https://b.example/a/../inbox", "no canonical URL"),
        ("https://b.example/.", "no canonical URL"),
        ("https://b.example:0/inbox", "the port"),
        ("https://b..example/inbox", "the host"),
        ("https://b.example/" + "x" * 2048, "longer than 2048"),
        ("http://b.example/inbox", "http: without FEDERATION_ACTIVITYPUB_HTTP=1"),
    ],
)
async def test_a_bad_inbox_refuses_all(bare: Sender, inbox: Any, named: str) -> None:
    """Before anything is asked or written, also where it would not be used; the recipient is named."""
    plain = Recipient(id="bob", inbox=inbox)
    unused = Recipient(id="bob", inbox=inbox, shared_inbox=INBOX)
    shared = Recipient(id="bob", inbox=INBOX, shared_inbox=inbox)
    for bad in (plain, unused, *([shared] if inbox is not None else [])):
        with pytest.raises(ValueError, match=rf"^(shared_)?inbox: .*{named}.*, for bob") as error:
            bare.senders.addressed(note(), [follower(), bad], prefer_shared_inbox=bad is not shared)
        assert str(error.value).startswith("shared") is (bad is shared)


@pytest.mark.parametrize(
    "inbox",
    [
        "https://b.example/",
        "https://b.example:8443/users/b.b/inbox?rest_route=/x&y=%2F?",
        "https://[::1]:8443/~bob/.well...known/..x/inbox",
        "https://127.0.0.1/@bob/inbox",
    ],
)
async def test_these_are_inboxes(bare: Sender, inbox: str) -> None:
    """With another port, an address, a query."""
    assert [*bare.senders.addressed(note(), [Recipient(id="bob", inbox=inbox)]).servers] == [inbox]


@given(st.text("a./?:@%#[]2f~&='!$()*+,; \\\u00e9", max_size=20).map(lambda rest: f"https://b.example/{rest}"))
def test_what_is_taken_is_sent_as_it_is_spelt(inbox: str) -> None:
    """The HTTP client changes nothing of it, which a signature would not cover."""
    try:
        Sender.on(Database(NOBODY_ASKS)).senders.addressed(note(), [Recipient(id="bob", inbox=inbox)])
    except ValueError:
        return
    assert str(parse_target(inbox).url) == inbox
    assert quote(inbox, safe=";/?:@&=+$,%!~*'()#[]") == inbox


async def test_plain_http_may_be_allowed(bare: Sender) -> None:
    """By the setting for all, or by the host, with a port for that one."""
    inbox = Recipient(id="bob", inbox="http://b.example:8080/inbox")
    allowed = [
        dataclasses.replace(bare, allow_http=True),
        *(dataclasses.replace(bare, allowed_hostnames=frozenset({each})) for each in ("b.example", "b.example:8080")),
    ]
    for sender in allowed:
        assert sender.senders.addressed(note(), [inbox]).servers == {inbox.inbox: "http://b.example:8080"}
    with pytest.raises(ValueError, match="http: without"):
        dataclasses.replace(bare, allowed_hostnames=frozenset({"b.example:80"})).senders.addressed(note(), [inbox])
    six = Recipient(id="bob", inbox="http://[::1]/inbox")
    for name in ("::1", "[::1]:80"):
        assert dataclasses.replace(bare, allowed_hostnames=frozenset({name})).senders.addressed(note(), [six]).servers


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        ({"activity": {**note(), "actor": None}}, ValueError, "actor: missing"),
        ({"activity": "s3cret"}, ValueError, "activity: no JSON"),
        ({"to": ["https://b.example/inbox"]}, TypeError, "to: a Recipient, not str"),
        ({"exclude": ["b.example"]}, ValueError, "exclude: the scheme"),
        ({"key": ""}, ValueError, "ordering_key"),
        ({"key": "x" * 500}, ValueError, "ordering_key"),
        ({"key": 5}, TypeError, "ordering_key"),
    ],
)
async def test_bad_input_is_refused(bare: Sender, wrong: dict[str, Any], error: type[Exception], named: str) -> None:
    """Before anything is asked or written."""
    with pytest.raises(error, match=named):
        bare.senders.addressed(**{"activity": note(), "to": [follower()], **wrong})


async def test_a_large_activity_is_logged_once(sender: Sender) -> None:
    """However many get it; its text is not."""
    with capture_logs() as logs:
        await sender.sent(note(1, name="x" * LARGE_BYTES), follower(), follower(host="c.example"))
        await sender.sent(note(2), follower())
    (large,) = (each for each in logs if each["event"] == "activity_large")
    assert (large["activity"], large["limit"]) == (note(1)["id"], LARGE_BYTES)
    assert large["bytes"] > LARGE_BYTES
    assert "s3cret" not in str(large)


async def test_an_update_of_an_actor_that_hides_its_key_is_logged(sender: Sender) -> None:
    """Mastodon forgets the key, and has all followers there follow anew. The document as it is served shows it."""
    person = {"id": ALICE, "type": "Person", "name": "s3cret"}
    update = {"id": f"{ALICE}#updates/1", "type": "Update", "actor": ALICE, "object": person}
    shown = {**person, "publicKey": {"id": f"{ALICE}#main-key", "owner": ALICE, "publicKeyPem": "PEM"}}
    with capture_logs() as logs:
        for number, thing in enumerate((shown, ALICE, {**person, "id": f"{ALICE}/notes/1"}, [person, person])):
            await sender.sent({**update, "id": f"{ALICE}#updates/{number}", "object": thing}, follower())
        assert [each for each in logs if each["event"] == "activity_hides_key"] == []
        await sender.sent({**update, "id": f"{ALICE}#updates/9"}, follower())
    [told] = [each for each in logs if each["event"] == "activity_hides_key"]
    assert (told["activity"], told["actor"]) == (f"{ALICE}#updates/9", ALICE)
    assert "s3cret" not in str(told)


async def test_many_inboxes_take_few_statements(sender: Sender, full: bool) -> None:
    """20 000 in 100, fewer in proportion; on PostgreSQL one lock; so does a second activity about the same object."""
    inboxes = 20_000 if full else 4_000  # four times as many as one statement takes
    everybody = [follower(host=f"s{number}.example") for number in range(inboxes)]
    seen: list[str] = []
    for number in range(2):
        async with sender.outbox.transaction() as session:
            connection = (await session.connection()).sync_connection
            assert connection is not None
            event.listen(connection, "before_cursor_execute", lambda *details: seen.append(details[2]))
            sent = await sender.send(session, {**note(), "id": f"{ALICE}/{number}"}, *everybody)
        assert len(sent.delivery_ids) == inboxes
        assert inboxes / 500 <= len(seen) <= inboxes / 200
        assert sum("pg_advisory" in each for each in seen) == (0 if sender.database.is_sqlite else 1)
        seen.clear()
