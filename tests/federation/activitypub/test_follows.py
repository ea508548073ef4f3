"""Who follows whom: what others send changes it, and what we answer; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import (
    ActivityActor,
    ActivityFollow,
    ActivityInbox,
    Database,
    FollowDirection,
    FollowState,
    ReceivedActivity,
    ReceivedState,
    UndoneFollow,
)
from federation.activitypub import follows
from federation.activitypub.activities import PUBLIC, create
from federation.activitypub.actors import found_by
from federation.activitypub.follows import BUSY, LONGEST_BUSY, MOST_BACK, FollowHandlers, followers_of
from federation.activitypub.handlers import FollowDecision, Handlers, IncomingActivity, NotTried
from federation.activitypub.inboxes import Inboxes
from federation.activitypub.outbound import Recipient
from federation.activitypub.remote_actors import ActorUnavailable, RemoteActors
from federation.activitypub.undone import MOST_PER_ORIGIN, REMEMBERED, remember
from federation.http.client import FederationClient
from federation.http.errors import NetworkError
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from tests.federation.activitypub.sender import ALICE, NOW, Sender, add_key
from tests.misbehaving import Exchange, MisbehavingServer, Received, close, respond

JSON: Final = {"content-type": "application/activity+json; charset=utf-8"}
PENDING, ACCEPTED, REJECTED = FollowState.PENDING, FollowState.ACCEPTED, FollowState.REJECTED


@dataclass(slots=True)
class Meeting:
    """Alice, who is ours, and bob and carol on another server. `counts`: what came last means something."""

    sender: Sender
    server: MisbehavingServer
    client: FederationClient
    handlers: Handlers
    inboxes: Inboxes
    counts: bool = True

    @property
    def bob(self) -> str:
        return f"{self.server.url}/users/bob"

    @property
    def carol(self) -> str:
        return f"{self.server.url}/users/carol"

    @property
    def own(self) -> FollowHandlers:
        return FollowHandlers(
            database=self.sender.database,
            outbox=self.sender.outbox,
            senders=self.sender.senders,
            blacklist=self.sender.blacklist,
            remote=RemoteActors(self.client),
            inboxes=self.inboxes,
            handlers=self.handlers,
            clock=self.sender.clock,
        )

    def shows(self, actor: str, **members: object) -> None:
        """Its document is to be seen."""
        shown = {"id": actor, "type": "Person", "inbox": f"{actor}/inbox", **members}
        self.server.routes[actor.removeprefix(self.server.url)] = respond(200, JSON, json.dumps(shown).encode())

    def follow(self, number: int = 1, *, by: str | None = None, of: object = ALICE) -> dict[str, Any]:
        actor = by or self.bob
        return {"id": f"{actor}/follows/{number}", "type": "Follow", "actor": actor, "object": of}

    async def receives(self, activity: dict[str, Any], *, by: str | None = None) -> None:
        """An activity that this actor has signed is handled."""
        incoming = IncomingActivity.of(json.dumps(activity), by or self.bob)
        prepared = await self.own.prepare(incoming)
        async with self.sender.outbox.transaction() as session:
            self.counts = await self.own.handle(session, incoming, prepared)

    async def rows(self) -> dict[tuple[str, str], tuple[FollowState, str | None]]:
        """State and Follow of each pair: the other's name, and the direction."""
        async with self.sender.database.read() as session:
            found = (await session.execute(select(ActivityFollow))).scalars()
            return {
                (row.remote_actor.rpartition("/")[2], row.direction.value): (row.state, row.follow_id) for row in found
            }

    async def since(self) -> list[datetime]:
        """Since when each pair is as it is."""
        async with self.sender.database.read() as session:
            return list((await session.execute(select(col(ActivityFollow.since)))).scalars())

    async def answers(self) -> list[tuple[str, str, str]]:
        """What is owed: its type, the Follow that it is about, and the inbox."""
        texts = {text.id: json.loads(text.payload) for text in await self.sender.texts()}
        rows = sorted((await self.sender.rows()).values(), key=lambda row: row.id)
        told = [(texts[str(row.payload_id)], row.target_url) for row in rows]
        return [(made["type"], made["object"]["id"], inbox) for made, inbox in told]

    async def asks(self, of: str | None = None) -> dict[str, Any]:
        """Alice follows somebody."""
        remote = Recipient(id=of or self.bob, inbox=f"{of or self.bob}/inbox")
        made = follows.follow(ALICE, remote.id)
        async with self.sender.outbox.transaction() as session:
            await session.run_sync(follows.followed, following=made, remote=remote, now=NOW)
        return made

    async def has_follower(self, name: str) -> None:
        self.shows(name)
        await self.receives(self.follow(by=name), by=name)


@pytest.fixture
async def meeting(database: Database, ssl_context: ssl.SSLContext) -> AsyncIterator[Meeting]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(MisbehavingServer())
        guard = AddressGuard(frozenset({"127.0.0.1"}))
        client = FederationClient(guard, ConnectionPool(guard, ssl_context=ssl_context))
        stack.push_async_callback(client.close)
        sender = replace(Sender.on(database), allow_http=True)
        stack.push_async_callback(sender.close)
        await add_key(database)
        async with database.transaction() as session:
            session.add(ActivityActor(id=ALICE, name=found_by(ALICE), created_at=NOW))
        inboxes = Inboxes(database, clock=sender.clock)
        stack.push_async_callback(inboxes.close)
        made = Meeting(sender, server, client, Handlers(), inboxes)
        made.shows(made.bob)
        yield made


async def test_a_follow_is_accepted(meeting: Meeting) -> None:
    """The answer is owed with the row, to the follower's own inbox, and names what it answers, without the rest."""
    meeting.shows(meeting.bob, endpoints={"sharedInbox": f"{meeting.server.url}/inbox"})
    await meeting.receives({**meeting.follow(), "content": "much"})
    assert await meeting.rows() == {("bob", "follower"): (ACCEPTED, f"{meeting.bob}/follows/1")}
    [text] = await meeting.sender.texts()
    accept = json.loads(text.payload)
    assert (accept["actor"], accept["type"], accept["to"]) == (ALICE, "Accept", [meeting.bob])
    assert accept["object"] == meeting.follow()
    bob = Recipient(id=meeting.bob, inbox=f"{meeting.bob}/inbox", shared_inbox=f"{meeting.server.url}/inbox")
    async with meeting.sender.database.transaction() as session:
        assert await session.run_sync(followers_of, ALICE) == [bob]
        assert await session.run_sync(followers_of, meeting.bob) == []


async def test_a_repeated_follow_is_answered_again(meeting: Meeting) -> None:
    """By its own id, which counts from now on; who decides is not asked again about whom he has accepted."""
    await meeting.receives(meeting.follow(1))
    meeting.handlers.on_follow(lambda session, activity, actor: "reject")
    await meeting.receives(meeting.follow(2))
    assert await meeting.rows() == {("bob", "follower"): (ACCEPTED, f"{meeting.bob}/follows/2")}
    inbox = f"{meeting.bob}/inbox"
    ids = [f"{meeting.bob}/follows/{number}" for number in (1, 2)]
    assert await meeting.answers() == [("Accept", each, inbox) for each in ids]


async def test_each_answer_has_an_id_of_its_own(meeting: Meeting) -> None:
    """Also to one Follow that is accepted, rejected and accepted, or comes again: who knows the id drops the answer."""
    await meeting.receives(meeting.follow())
    for answer in (FollowDecision.REJECT, FollowDecision.ACCEPT, FollowDecision.REJECT):
        async with meeting.sender.outbox.transaction() as session:
            work = partial(follows.answered, local=ALICE, remote=meeting.bob, answer=answer, now=NOW)
            made, recipient = await session.run_sync(work) or ({}, None)
            assert recipient is not None
            await meeting.sender.send(session, made, recipient)
    await meeting.receives(meeting.follow())
    ids = [json.loads(text.payload)["id"] for text in await meeting.sender.texts()]
    assert len(set(ids)) == 5
    assert {each.partition("#")[2].partition("/")[0] for each in ids} == {"accepts", "rejects"}


@pytest.mark.parametrize(
    ("decision", "state", "answers"),
    [("accept", ACCEPTED, ["Accept"]), ("reject", REJECTED, ["Reject"]), ("pending", PENDING, [])],
)
async def test_the_application_decides(meeting: Meeting, decision: str, state: FollowState, answers: list[str]) -> None:
    """And may say so later."""

    @meeting.handlers.on_follow
    async def decide(session: AsyncSession, activity: IncomingActivity, actor: str) -> str:
        assert (activity.object_id, actor) == (ALICE, meeting.bob)
        return decision

    await meeting.receives(meeting.follow())
    assert (await meeting.rows())["bob", "follower"][0] is state
    assert [name for name, _, _ in await meeting.answers()] == answers
    async with meeting.sender.outbox.transaction() as session:
        owed = await session.run_sync(
            follows.answered, local=ALICE, remote=meeting.bob, answer=FollowDecision.ACCEPT, now=NOW
        )
    assert owed is not None
    assert (owed[0]["type"], owed[1].id) == ("Accept", meeting.bob)
    assert (await meeting.rows())["bob", "follower"][0] is ACCEPTED


async def test_a_decision_that_is_none_undoes_everything(meeting: Meeting) -> None:
    """As whatever else a function raises."""
    meeting.handlers.on_follow(lambda session, activity, actor: None)
    with pytest.raises(ValueError, match="FollowDecision"):
        await meeting.receives(meeting.follow())
    assert await meeting.rows() == {}


async def test_who_has_not_asked_is_not_answered(meeting: Meeting) -> None:
    async with meeting.sender.outbox.transaction() as session:
        with pytest.raises(ValueError, match="does not want to follow"):
            await session.run_sync(
                follows.answered, local=ALICE, remote=meeting.bob, answer=FollowDecision.ACCEPT, now=NOW
            )


@pytest.mark.parametrize(
    "members",
    [
        {"inbox": "https://victim.example/inbox"},
        {"inbox": None},
        {"inbox": "http://127.0.0.1/inbox"},
        {"id": "https://victim.example/users/bob"},
    ],
)
async def test_a_follow_from_who_has_no_inbox_of_its_own_gets_nothing(
    meeting: Meeting, members: dict[str, Any]
) -> None:
    """Nobody may have us post to a third party."""
    meeting.shows(meeting.bob, **members)
    await meeting.receives(meeting.follow())
    assert (await meeting.rows(), await meeting.answers()) == ({}, [])


async def test_a_follow_to_an_inbox_that_cannot_be_spelt_gets_nothing(meeting: Meeting) -> None:
    """On its own origin, but too long as it would be sent. A shared one, such as Hubzilla's was, is left out."""
    meeting.shows(meeting.bob, inbox=meeting.bob + "/\u00e9" * 400)
    await meeting.receives(meeting.follow())
    assert await meeting.rows() == {}
    meeting.shows(meeting.bob, endpoints={"sharedInbox": f"{meeting.server.url}/inbox/[public]"})
    await meeting.receives(meeting.follow())
    assert len(await meeting.answers()) == 1


async def test_a_follower_whose_id_is_not_ascii_is_answered(meeting: Meeting) -> None:
    """It is asked for, and sent to, by escapes; what its server compares with is its id as that writes it."""
    actor = f"{meeting.server.url}/users/b\u00f6b"
    shown = {"id": actor, "type": "Person", "inbox": f"{actor}/inbox"}
    meeting.server.routes["/users/b%C3%B6b"] = respond(200, JSON, json.dumps(shown).encode())
    follow = meeting.follow(by=actor)
    await meeting.receives(follow, by=actor)
    assert await meeting.answers() == [("Accept", follow["id"], f"{meeting.server.url}/users/b%C3%B6b/inbox")]
    [text] = await meeting.sender.texts()
    accept = json.loads(text.payload)
    assert (accept["to"], accept["object"]) == ([actor], follow)
    note = create({"id": f"{ALICE}/notes/1", "type": "Note", "attributedTo": ALICE, "to": [PUBLIC]})
    async with meeting.sender.database.transaction() as session:
        followers = await session.run_sync(followers_of, ALICE)
    assert [each.id for each in followers] == [actor]
    assert len((await meeting.sender.sent(note, *followers)).delivery_ids) == 1


async def test_nobody_is_asked_about_a_follow_that_is_none_of_ours(meeting: Meeting) -> None:
    """Of an actor that is unknown, or was removed; one without an id, which could not be answered."""
    await meeting.receives(meeting.follow(of=f"{ALICE}s"))
    await meeting.receives({"type": "Follow", "actor": meeting.bob, "object": ALICE})
    async with meeting.sender.database.transaction() as session:
        (await session.get_one(ActivityActor, ALICE)).removed_at = NOW
    await meeting.receives(meeting.follow())
    assert (await meeting.rows(), meeting.server.requests) == ({}, [])


async def test_a_server_that_does_not_show_its_actor_now_is_asked_again(meeting: Meeting) -> None:
    """Its failures end the attempt, as that it cannot verify us; an actor that is not there at all gets nothing."""
    path = meeting.bob.removeprefix(meeting.server.url)
    for status in (503, 401):
        meeting.server.routes[path] = respond(status, {}, b"")
        with pytest.raises(ActorUnavailable, match=str(status)):
            await meeting.receives(meeting.follow())
    meeting.server.routes[path] = respond(200, {"content-type": "text/html; charset=utf-8"}, b"<p>back soon</p>")
    with pytest.raises(ActorUnavailable, match="a page"):
        await meeting.receives(meeting.follow())
    meeting.server.routes[path] = close()
    with pytest.raises(NetworkError):
        await meeting.receives(meeting.follow())
    uploaded = json.dumps({"id": meeting.bob, "inbox": f"{meeting.bob}/inbox"}).encode()
    for behaviour in (
        *(respond(status, {}, b"") for status in (403, 404, 410)),
        respond(200, {"content-type": "application/json"}, uploaded),
        respond(200, {"content-type": "application/ld+json"}, uploaded),
    ):
        meeting.server.routes[path] = behaviour
        await meeting.receives(meeting.follow())
    assert await meeting.rows() == {}


async def test_a_server_is_asked_about_two_of_its_actors_at_once(meeting: Meeting) -> None:
    """A further Follow waits, so that a server that never answers does not take every slot of the tasks."""
    own, asked, go_on = meeting.own, asyncio.Semaphore(0), asyncio.Event()
    path = meeting.bob.removeprefix(meeting.server.url)
    show = meeting.server.routes[path]

    async def wait(request: Received, exchange: Exchange) -> None:
        asked.release()
        await go_on.wait()
        await show(request, exchange)

    async def prepare(number: int, by: str) -> Recipient | None:
        return await own.prepare(IncomingActivity.of(json.dumps(meeting.follow(number, by=by)), by))

    meeting.server.routes[path] = wait
    two = [asyncio.create_task(prepare(number, meeting.bob)) for number in (1, 2)]
    for _ in two:
        await asked.acquire()
    pauses = []
    for by in [meeting.bob, meeting.carol] * 2 * MOST_BACK:
        with pytest.raises(NotTried) as caught:
            await prepare(3, by)
        assert caught.value.delay is not None
        pauses.append(caught.value.delay)
    assert set(pauses[:MOST_BACK]) == {BUSY}
    assert 2 * BUSY < pauses[-1] <= LONGEST_BUSY, "a flood of them would come back without end"
    go_on.set()
    assert all(await asyncio.gather(*two))
    assert await prepare(3, meeting.bob) is not None


async def test_all_servers_together_are_asked_about_so_many_at_once(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a slot of tasks, and strangers have as many servers as they like."""
    monkeypatch.setattr(follows, "MOST_AT_ONCE", 1)
    go_on, asked, own = asyncio.Event(), asyncio.Event(), meeting.own
    shows = meeting.server.routes["/users/bob"]

    async def later(request: Received, exchange: Exchange) -> None:
        asked.set()
        await go_on.wait()
        await shows(request, exchange)

    meeting.server.routes["/users/bob"] = later
    first = asyncio.create_task(own.prepare(IncomingActivity.of(json.dumps(meeting.follow()), meeting.bob)))
    await asked.wait()
    another = "https://other.example/users/eve"
    with pytest.raises(NotTried):
        await own.prepare(IncomingActivity.of(json.dumps(meeting.follow(by=another)), another))
    go_on.set()
    assert await first is not None


async def test_only_its_own_actor_undoes_a_follow(meeting: Meeting) -> None:
    """By the Follow itself or by its id; what is undone besides is none of it."""
    await meeting.has_follower(meeting.bob)
    await meeting.has_follower(meeting.carol)
    bobs, carols, both = meeting.follow(), meeting.follow(by=meeting.carol), set(await meeting.rows())
    for thing in (carols, carols["id"], {**bobs, "id": "x", "type": "Like"}, {**bobs, "object": f"{ALICE}s"}, None):
        await meeting.receives({"type": "Undo", "object": thing})
        assert set(await meeting.rows()) == both
    await meeting.receives({"type": "Undo", "object": bobs})
    assert set(await meeting.rows()) == {("carol", "follower")}
    await meeting.receives({"type": "Undo", "object": carols["id"]}, by=meeting.carol)
    assert await meeting.rows() == {}


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_follow_that_comes_after_its_undo_changes_nothing(meeting: Meeting, by_id: bool) -> None:
    """It was overtaken while its server tried again. Once: what Misskey sends later has the same name, and counts."""
    made = meeting.follow()
    await meeting.receives({"type": "Undo", "object": made["id"] if by_id else made})
    for other, by in ((meeting.follow(2), meeting.bob), ({**made, "actor": meeting.carol}, meeting.carol)):
        meeting.shows(by)
        await meeting.receives(other, by=by)
        await meeting.receives({"type": "Undo", "object": other}, by=by)
    answered = len(await meeting.answers())
    await meeting.receives(made)
    assert (await meeting.rows(), len(await meeting.answers()), meeting.counts) == ({}, answered, False)
    await meeting.receives(made)
    assert (await meeting.rows(), meeting.counts) == ({("bob", "follower"): (ACCEPTED, made["id"])}, True)


async def test_an_undo_is_remembered_for_six_hours(meeting: Meeting) -> None:
    for number, wait in enumerate((REMEMBERED - timedelta(seconds=1), REMEMBERED)):
        await meeting.receives({"type": "Undo", "object": meeting.follow(number)})
        meeting.sender.clock.advance(wait)
        await meeting.receives(meeting.follow(number))
        assert meeting.counts == (wait == REMEMBERED)


async def test_an_undo_whose_follow_has_come_is_not_remembered(meeting: Meeting) -> None:
    """Or one whose first Follow was dropped, and who sends the next under its name, would never follow."""
    made = meeting.follow()
    await meeting.receives({"type": "Undo", "object": made})
    async with meeting.sender.database.transaction() as session:
        values = {"type": "Follow", "actor": meeting.bob, "received_at": NOW, "text": ""}
        session.add(ReceivedActivity(activity_hash="first", activity_id=made["id"], **values))
    await meeting.receives(made)
    assert not meeting.counts
    await meeting.receives({"type": "Undo", "object": made})
    await meeting.receives(made)
    assert meeting.counts


async def test_a_follow_that_failed_is_not_tried_again_once_it_is_undone(meeting: Meeting) -> None:
    """An operator who retries all that failed would make a follower who is none; other activities he does retry."""
    made, other = meeting.follow(), meeting.follow(2)
    async with meeting.sender.database.transaction() as session:
        for each in (made, other):
            values = {"type": "Follow", "actor": meeting.bob, "received_at": NOW, "text": json.dumps(each)}
            state = ReceivedState.FAILED
            session.add(ReceivedActivity(activity_hash=each["id"], activity_id=each["id"], state=state, **values))
    await meeting.receives({"type": "Undo", "object": other}, by=meeting.carol)
    await meeting.receives({"type": "Undo", "object": made})
    async with meeting.sender.database.read() as session:
        rows = (await session.execute(select(ReceivedActivity))).scalars()
        found = {row.activity_id: (row.state, row.text) for row in rows}
    kept = (ReceivedState.FAILED, json.dumps(other))
    assert found == {made["id"]: (ReceivedState.DONE, ""), other["id"]: kept}


@pytest.mark.parametrize("type_", ["Like", "Announce", ["Block"]])
async def test_an_undo_of_something_else_is_no_follows(meeting: Meeting, type_: object) -> None:
    made = meeting.follow()
    await meeting.receives({"type": "Undo", "object": {**made, "type": type_}})
    await meeting.receives(made)
    assert meeting.counts


async def test_so_many_undos_are_remembered_of_an_origin(meeting: Meeting) -> None:
    """The latest."""
    async with meeting.sender.database.transaction() as session:
        for number in range(MOST_PER_ORIGIN + 2):
            at = NOW + timedelta(seconds=number)
            await session.run_sync(remember, meeting.bob, f"{meeting.bob}/follows/{number}", at)
        await session.run_sync(remember, "https://c.example/carol", "https://c.example/1", NOW)
    async with meeting.sender.database.read() as session:
        rows = (await session.execute(select(UndoneFollow).order_by(col(UndoneFollow.undone_at)))).scalars().all()
    theirs = [row.undone_at for row in rows if row.server_url == meeting.server.url]
    assert (len(theirs), theirs[0], len(rows)) == (MOST_PER_ORIGIN, NOW + timedelta(seconds=2), MOST_PER_ORIGIN + 1)


@pytest.mark.parametrize("status", [404, 410])
async def test_a_follow_that_comes_after_the_end_of_its_actor_changes_nothing(meeting: Meeting, status: int) -> None:
    """His server says that there is nobody."""
    await meeting.receives({"type": "Delete", "object": meeting.bob})
    meeting.server.routes["/users/bob"] = respond(status)
    await meeting.receives(meeting.follow())
    assert await meeting.rows() == {}
    assert await meeting.answers() == []


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(("name", "state"), [("Accept", ACCEPTED), ("Reject", REJECTED)])
async def test_only_who_was_asked_answers(meeting: Meeting, name: str, state: FollowState, by_id: bool) -> None:
    """For a follow that is pending. What another one says of it changes nothing."""
    made = await meeting.asks()
    answer = {"type": name, "object": made["id"] if by_id else made}
    await meeting.receives(answer, by=meeting.carol)
    assert await meeting.rows() == {("bob", "following"): (PENDING, made["id"])}
    await meeting.receives(answer)
    assert await meeting.rows() == {("bob", "following"): (state, made["id"])}


@pytest.mark.parametrize("name", ["Follow", "Undo", "Accept", "Reject"])
async def test_what_no_database_holds_is_about_nothing(meeting: Meeting, name: str) -> None:
    """PostgreSQL takes no NUL: nobody waits for one that will never be handled, and nobody is told of it."""
    made = await meeting.asks()
    for thing in (f"{ALICE}\0", {"type": "Follow", "id": "\0", "actor": f"{ALICE}\0", "object": f"{ALICE}\0"}):
        await meeting.receives({"id": f"{meeting.bob}/1", "type": name, "object": thing})
    assert await meeting.rows() == {("bob", "following"): (PENDING, made["id"])}


async def test_what_was_accepted_may_be_rejected_later_and_not_the_other_way(meeting: Meeting) -> None:
    """By a Reject servers remove their followers. An Accept that comes again revives nothing."""
    made = await meeting.asks()
    for name, state in (("Accept", ACCEPTED), ("Reject", REJECTED), ("Accept", REJECTED)):
        await meeting.receives({"type": name, "object": made})
        assert (await meeting.rows())["bob", "following"][0] is state
    again = await meeting.asks()
    assert await meeting.rows() == {("bob", "following"): (PENDING, again["id"])}


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(("name", "state"), [("Accept", ACCEPTED), ("Reject", REJECTED)])
async def test_an_answer_that_comes_again_changes_nothing(
    meeting: Meeting, name: str, state: FollowState, by_id: bool
) -> None:
    """Not even since when it is so; and an Accept after it revives nothing that was rejected."""
    made, at = await meeting.asks(), meeting.sender.clock.now()
    thing = made["id"] if by_id else made
    for number in range(3):
        told = "Accept" if number == 2 else name
        await meeting.receives({"id": f"{meeting.bob}/answers/{number}", "type": told, "object": thing})
        assert await meeting.rows() == {("bob", "following"): (state, made["id"])}
        assert await meeting.since() == [at]
        meeting.sender.clock.advance(timedelta(minutes=1))


async def test_an_accept_may_be_taken_back(meeting: Meeting) -> None:
    """By its Undo: the follow waits again. Nobody else takes it back, and what was rejected stays so."""
    made = await meeting.asks()
    accept = {"id": f"{meeting.bob}/1", "type": "Accept", "actor": meeting.bob, "object": made}
    undo = {"id": f"{meeting.bob}/2", "type": "Undo", "object": accept}
    for activity, by, state in (
        (accept, meeting.bob, ACCEPTED),
        (undo, meeting.carol, ACCEPTED),
        ({**undo, "object": {**accept, "type": "Reject"}}, meeting.bob, ACCEPTED),
        (undo, meeting.bob, PENDING),
        (accept, meeting.bob, ACCEPTED),
        ({**undo, "object": {**accept, "object": made["id"]}}, meeting.bob, PENDING),
        ({"type": "Reject", "object": made}, meeting.bob, REJECTED),
        (undo, meeting.bob, REJECTED),
    ):
        await meeting.receives(activity, by=by)
        assert await meeting.rows() == {("bob", "following"): (state, made["id"])}


@pytest.mark.parametrize("thing", [ALICE, [ALICE], {"id": ALICE, "type": "Person"}])
async def test_who_blocks_one_of_ours_is_followed_no_more(meeting: Meeting, thing: object) -> None:
    """As several servers end a follow by Block alone. Whom he follows himself he says by himself."""
    await meeting.has_follower(meeting.bob)
    await meeting.receives({"type": "Accept", "object": (made := await meeting.asks())})
    before = await meeting.rows()
    for by in (meeting.carol, meeting.bob):
        assert await meeting.rows() == before
        await meeting.receives({"type": "Block", "object": thing}, by=by)
    assert await meeting.rows() == before | {("bob", "following"): (REJECTED, made["id"])}


async def test_a_list_of_one_is_that_one(meeting: Meeting) -> None:
    """In JSON-LD; of several nobody knows which is meant."""
    for things in ([ALICE, ALICE], [], [[ALICE]]):
        await meeting.receives(meeting.follow(of=things))
        assert await meeting.rows() == {}
    await meeting.receives(meeting.follow(of=[ALICE]))
    made = await meeting.asks()
    await meeting.receives({"type": "Accept", "object": [{**made, "actor": [{"id": ALICE}], "object": [meeting.bob]}]})
    assert {state for state, _ in (await meeting.rows()).values()} == {ACCEPTED}
    await meeting.receives({"type": "Undo", "object": [meeting.follow(of=[ALICE])]})
    assert set(await meeting.rows()) == {("bob", "following")}


@pytest.mark.parametrize("name", ["Accept", "Reject"])
async def test_a_follow_that_has_ended_is_not_answered(meeting: Meeting, name: str) -> None:
    """It is not made anew by an answer, and one that names it by its id is not about the follow after it."""
    ended = await meeting.asks()
    async with meeting.sender.outbox.transaction() as session:
        await session.run_sync(follows.unfollow, local=ALICE, remote=meeting.bob)
    for thing in (ended, ended["id"]):
        await meeting.receives({"type": name, "object": thing})
        assert await meeting.rows() == {}
    made = await meeting.asks()
    await meeting.receives({"type": name, "object": ended["id"]})
    assert await meeting.rows() == {("bob", "following"): (PENDING, made["id"])}


@pytest.mark.parametrize(("name", "state"), [("Accept", ACCEPTED), ("Reject", REJECTED)])
async def test_a_late_answer_with_the_whole_follow_is_about_the_next_one(
    meeting: Meeting, name: str, state: FollowState
) -> None:
    """A limit that the manual names: what others write into an answer for an id is not relied on."""
    ended = await meeting.asks()
    async with meeting.sender.outbox.transaction() as session:
        await session.run_sync(follows.unfollow, local=ALICE, remote=meeting.bob)
    made = await meeting.asks()
    await meeting.receives({"type": name, "object": ended})
    assert await meeting.rows() == {("bob", "following"): (state, made["id"])}


async def test_an_answer_is_not_about_what_another_one_was_asked(meeting: Meeting) -> None:
    """Neither his own follow nor hers is answered by what bob says of the Follow that carol got."""
    his, hers = await meeting.asks(), await meeting.asks(meeting.carol)
    for thing in (hers, hers["id"]):
        for name in ("Accept", "Reject"):
            await meeting.receives({"type": name, "object": thing})
    waiting = {("bob", "following"): (PENDING, his["id"]), ("carol", "following"): (PENDING, hers["id"])}
    assert await meeting.rows() == waiting


async def test_a_follower_is_not_accepted_by_itself(meeting: Meeting) -> None:
    """An answer is about our own follows alone."""
    meeting.handlers.on_follow(lambda session, activity, actor: "pending")
    await meeting.receives(meeting.follow())
    for thing in (meeting.follow(), meeting.follow()["id"], {"type": "Follow", "actor": ALICE, "object": meeting.bob}):
        await meeting.receives({"type": "Accept", "object": thing})
    assert (await meeting.rows())["bob", "follower"][0] is PENDING


async def test_the_follows_of_an_actor_end_with_it(meeting: Meeting) -> None:
    """In both directions; the Delete of anything else, or by another one, ends none."""
    await meeting.has_follower(meeting.bob)
    await meeting.asks()
    await meeting.has_follower(meeting.carol)
    three = set(await meeting.rows())
    await meeting.receives({"type": "Delete", "object": meeting.bob}, by=meeting.carol)
    await meeting.receives({"type": "Delete", "object": f"{meeting.bob}/notes/1"})
    assert set(await meeting.rows()) == three
    await meeting.receives({"type": "Delete", "object": {"id": meeting.bob, "type": "Tombstone"}})
    assert set(await meeting.rows()) == {("carol", "follower")}


async def test_a_follow_of_ours_is_ended_by_its_undo(meeting: Meeting) -> None:
    """Of the Follow that was sent; a second time there is nothing to undo."""
    made = await meeting.asks()
    direction = FollowDirection.FOLLOWING.value
    async with meeting.sender.outbox.transaction() as session:
        owed = await session.run_sync(follows.unfollow, local=ALICE, remote=meeting.bob)
        assert await session.run_sync(follows.unfollow, local=ALICE, remote=meeting.bob) is None
    assert owed is not None
    assert (owed[0]["type"], owed[0]["object"]["id"], owed[1].inbox) == ("Undo", made["id"], f"{meeting.bob}/inbox")
    assert ("bob", direction) not in await meeting.rows()


async def inboxes_of(meeting: Meeting) -> dict[str, tuple[str, str | None]]:
    """The inboxes of each other actor, by its name."""
    async with meeting.sender.database.read() as session:
        rows = (await session.execute(select(ActivityFollow))).scalars()
        return {row.remote_actor.rpartition("/")[2]: (row.inbox, row.shared_inbox) for row in rows}


async def test_who_has_other_inboxes_is_sent_to_there(meeting: Meeting) -> None:
    """As an Update of the actor says: what stood there when he followed may be answered by nobody any more."""
    await meeting.has_follower(meeting.bob)
    await meeting.asks(meeting.carol)
    before = await inboxes_of(meeting)
    inbox, shared = f"{meeting.server.url}/ap/bob/inbox", f"{meeting.server.url}/ap/inbox"
    person = {"id": meeting.bob, "type": "Person", "inbox": inbox, "endpoints": {"sharedInbox": shared}}
    update = {"id": f"{meeting.bob}#updates/1", "type": "Update", "actor": meeting.bob}
    for thing, by in (
        (person, meeting.carol),
        ({**person, "id": f"{meeting.bob}/notes/1"}, meeting.bob),
        ({**person, "inbox": "https://victim.example/inbox"}, meeting.bob),
        ({**person, "inbox": f"{meeting.bob}/{'i' * 2048}"}, meeting.bob),
        ({**person, "inbox": None}, meeting.bob),
    ):
        await meeting.receives({**update, "actor": by, "object": thing}, by=by)
        assert await inboxes_of(meeting) == before
    await meeting.receives({**update, "object": person})
    assert await inboxes_of(meeting) == {**before, "bob": (inbox, shared)}
    elsewhere = {**person, "endpoints": {"sharedInbox": "https://victim.example/inbox"}}
    await meeting.receives({**update, "object": [elsewhere]})
    assert await inboxes_of(meeting) == {**before, "bob": (inbox, None)}
    assert len(meeting.server.requests) == 1, "that of the Follow"
    meeting.shows(meeting.bob, endpoints={"sharedInbox": shared})
    await meeting.receives({**update, "object": meeting.bob})
    assert await inboxes_of(meeting) == {**before, "bob": (f"{meeting.bob}/inbox", shared)}


async def test_nobody_is_asked_about_who_changes_and_is_a_stranger(meeting: Meeting) -> None:
    for number, thing in enumerate((meeting.bob, {"id": meeting.bob, "type": "Person"})):
        update = {"id": f"{meeting.bob}#updates/{number}", "type": "Update", "actor": meeting.bob, "object": thing}
        await meeting.receives(update)
    assert (await meeting.rows(), meeting.server.requests) == ({}, [])


async def test_the_gone_inbox_of_who_follows_is_known_again(meeting: Meeting) -> None:
    """Which its Follow shows, though no row has it: else the answer would be skipped, and nobody would follow."""
    inbox = f"{meeting.bob}/inbox"
    await meeting.sender.lose_inbox(inbox)
    await meeting.receives(meeting.follow())
    assert await meeting.answers() == [("Accept", f"{meeting.bob}/follows/1", inbox)]


async def test_whoever_sends_something_has_an_inbox_again(meeting: Meeting) -> None:
    """The one of his follows; not by the news of his end, and not by what others send."""
    await meeting.has_follower(meeting.bob)
    inbox = f"{meeting.bob}/inbox"
    await meeting.inboxes.gone(inbox, meeting.server.url, delivery_id="d")
    await meeting.receives({"type": "Create", "object": {}}, by=meeting.carol)
    await meeting.receives({"type": "Delete", "object": meeting.bob})
    await meeting.asks()
    async with meeting.sender.database.read() as session:
        assert await session.get(ActivityInbox, inbox) is not None
    await meeting.receives({"type": "Create", "object": {}})
    async with meeting.sender.database.read() as session:
        assert await session.get(ActivityInbox, inbox) is None
