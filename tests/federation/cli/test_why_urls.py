"""`federation why` of URLs with a path: actors of ours and of others, and what nobody here knows."""

from __future__ import annotations

import pytest
from sqlalchemy import insert

from db import DeliveryAttempt, FollowDirection, FollowState, ReceivedState, RemoteActorKey
from federation.activitypub.activities import JOB
from federation.runtime.composition import Federation
from tests.federation.activitypub.sender import ALICE, OWN
from tests.federation.admin.activities import NOTE, B, C, add_alice, befriend, fall, lose_inbox, receive, send_note
from tests.federation.cli.conftest import Command
from tests.federation.cli.elsewhere import at_work, on_the_node
from tests.federation.cli.test_json import SCHEMA, matches

pytestmark = pytest.mark.spread("database_url")

BOB, CAROL = f"{B}/users/bob", f"{C}/users/carol"
NOBODY = "Nobody here knows it: this node has no such actor, and no activity of that id is owed, or on record as sent."


@pytest.fixture
def activitypub(command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Command:
    """Commands of a node with alice, whose note is owed to bob's server and two more; that is down."""
    monkeypatch.setenv("FEDERATION_ACTIVITYPUB", "1")
    monkeypatch.setenv("DATABASE_URL", database_url)
    on_the_node(add_alice)
    on_the_node(send_note)
    on_the_node(lambda node: fall(node, B))
    return command


def test_an_actor_of_ours_is_told_with_its_follows(activitypub: Command) -> None:
    """How many follow it, ask to, and are followed; and what lists them."""
    alone = activitypub("why", ALICE)
    assert alone.status == 0
    assert alone.stdout.splitlines()[-2:] == ["  Its followers: 0.", "  It follows 0."]
    on_the_node(lambda node: befriend(node, BOB))
    on_the_node(lambda node: befriend(node, CAROL, state=FollowState.PENDING))
    on_the_node(lambda node: befriend(node, f"{C}/users/dan", state=FollowState.REJECTED))
    on_the_node(lambda node: befriend(node, CAROL, direction=FollowDirection.FOLLOWING, state=FollowState.PENDING))
    on_the_node(lambda node: befriend(node, BOB, local=f"{OWN}/users/zoe"))
    told = activitypub("why", ALICE)
    assert told.stdout.splitlines()[-4:] == [
        "  Deliveries in its name: 3 ready.",
        "  Its followers: 1; 1 more to be answered.",
        "  It follows 0, and has asked 1 more.",
        f"  `federation activitypub follows --actor {ALICE}` lists them.",
    ]
    document = activitypub("why", ALICE, "--json").json
    assert matches(document, SCHEMA["types"]["WhyActor"]), told
    assert isinstance(document, dict)
    assert document["follows"]["follower"] == {"accepted": 1, "pending": 1, "rejected": 1}
    assert activitypub("why", ALICE.removeprefix("https://")).stdout == told.stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (f"{OWN}/users/alcie", [ALICE]),
        (f"{ALICE}/", [ALICE]),
        (f"{ALICE}/inbox", [ALICE]),
        (f"{ALICE}#main-key", [ALICE]),
        (f"{ALICE}/notes/1#crate", [ALICE, NOTE]),
        (f"{ALICE}/notes/1", [ALICE, NOTE]),
        (f"{OWN}/posts/17", []),
    ],
)
def test_what_nobody_knows_of_ours_is_told_with_what_may_be_meant(
    activitypub: Command, typed: str, meant: list[str]
) -> None:
    """Actors and activities; status 1, and not a word of a server."""
    done, document = activitypub("why", typed), activitypub("why", typed, "--json").json
    title, said, *question = done.stdout.splitlines()
    assert (done.status, title, said) == (1, typed, f"  {NOBODY}")
    assert question == ([f"  Is {' or '.join(meant)} meant?"] if meant else [])
    assert matches(document, SCHEMA["types"]["Named"]), document
    assert isinstance(document, dict)
    assert (document["known"], document["meant"]) == (False, meant)


def test_an_activity_that_has_arrived_is_meant_as_well(activitypub: Command) -> None:
    """It is known by its attempts alone, however many there are of another one."""
    on_the_node(lambda node: attempted(node, f"{ALICE}/notes/20#create", 300))
    on_the_node(lambda node: attempted(node, f"{ALICE}/notes/21#create", 1))
    [_, _, question] = activitypub("why", f"{ALICE}/notes/2#create").stdout.splitlines()
    assert all(f"{ALICE}/notes/{number}#create" in question for number in (1, 20, 21))


async def attempted(node: Federation, activity_id: str, times: int) -> None:
    """It was delivered so often."""
    attempt = {"job_name": JOB, "server_url": C, "series": 0, "attempt": 1, "outcome": "delivered", "duration_ms": 1}
    values = {**attempt, "started_at": node.clock.now(), "activity_id": activity_id}
    async with node.database.transaction() as session:
        rows = [{**values, "delivery_id": f"{activity_id} {number}"} for number in range(times)]
        await session.execute(insert(DeliveryAttempt), rows)


def test_an_actor_of_others_is_told_by_its_follows_and_key(activitypub: Command) -> None:
    """And then its server; what nobody knows there is said to be so, with status 1."""
    on_the_node(lambda node: befriend(node, CAROL))
    on_the_node(lambda node: befriend(node, CAROL, direction=FollowDirection.FOLLOWING, state=FollowState.REJECTED))
    on_the_node(lambda node: know_key(node, CAROL))
    on_the_node(at_work)
    done = activitypub("why", CAROL)
    title, first, *_ = done.stdout.splitlines()
    assert (done.status, title) == (0, C)
    told = (
        f"  {CAROL} is an actor: follows 1 actor of this node, has refused 1 actor of this node, its key was fetched at"
    )
    assert first.startswith(told)
    mistyped = f"{C}/users/carrol"
    done, document = activitypub("why", mistyped), activitypub("why", mistyped, "--json").json
    assert done.status == 1
    assert done.stdout.splitlines()[1:4] == [
        f"  Nobody here knows {mistyped}: no inbox, actor or activity of that name is on record.",
        f"  Is {CAROL} meant?",
        "  What follows is about its server.",
    ]
    assert matches(document, SCHEMA["commands"]["why"]), document


async def know_key(node: Federation, actor: str) -> None:
    async with node.database.transaction() as session:
        session.add(RemoteActorKey(key_id=f"{actor}#key", owner=actor, public_pem="", fetched_at=node.clock.now()))


def test_what_others_sent_and_their_inboxes_may_be_meant(activitypub: Command) -> None:
    """Also by a wrong name of their server, and of this node."""
    on_the_node(lambda node: receive(node, "activities/17", state=ReceivedState.DONE))
    on_the_node(lambda node: lose_inbox(node, C))
    for typed, meant in (
        (f"{BOB}/activities/71", f"Is {BOB}/activities/17 meant?"),
        (f"{C}/inbx", f"Is {C}/inbox meant?"),
        ("https://b.exmaple/users/bob/activities/17", f"Is {BOB}/activities/17 meant?"),
        (ALICE.replace("https", "http"), f"Is {ALICE} meant?"),
        (ALICE.replace("a.example", "www.a.example"), f"Is {ALICE} meant?"),
    ):
        done = activitypub("why", typed)
        assert (done.status, meant in done.stdout) == (1, True), done.stdout


def test_the_likeliest_comes_first(activitypub: Command) -> None:
    """The whole rest may be right where only the host is mistyped."""
    for name in ("bob1", "bob", "bob2"):
        on_the_node(lambda node, name=name: befriend(node, f"{B}/users/{name}"))
    assert f"Is {BOB}, {BOB}1 or {BOB}2 meant?" in activitypub("why", "https://b.exampel/users/bob").stdout


def test_a_server_without_a_registry_may_be_meant(activitypub: Command) -> None:
    """It is known by its link."""
    assert f"Is {B} meant?" in activitypub("why", "https://b.exmaple").stdout


@pytest.mark.parametrize("account", ["@bob@b.example", "bob@b.example", "acct:bob@b.example"])
def test_an_account_is_told_from_a_url(activitypub: Command, account: str) -> None:
    """Wrong usage, which asks for what is taken."""
    done = activitypub("why", account)
    assert (done.status, done.stdout) == (2, "")
    assert f"{account} is an account; give the URL of its actor" in done.stderr
    assert f"Is {B} meant?" in done.stderr


@pytest.mark.parametrize("end", ["x" * 1_900, "?" * 1_900, "/a" * 900, "%00", "\u202e"])
def test_no_url_is_too_much_to_look_for(activitypub: Command, end: str) -> None:
    """What was to be named is looked for all the same, among many that are alike."""
    on_the_node(lambda node: many_like(node, f"{ALICE}/{'x' * 1_800}"))
    for origin in (OWN, B):
        done = activitypub("why", f"{origin}/users/alice/{end}")
        assert done.status in (1, 2)
        assert done.stderr == "" or done.status == 2


async def many_like(node: Federation, activity_id: str) -> None:
    for number in range(60):
        await attempted(node, f"{activity_id}{number}", 1)
