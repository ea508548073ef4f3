"""What a server by Fedify sends to processes of ours: it follows, answers and leaves, and is heard once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select, text
from sqlmodel import col

from db import ActivityFollow, FollowDirection, FollowState, ReceivedActivity, ReceivedState
from federation import activitypub
from federation.activitypub.signatures import SignatureKind
from tests.acceptance.actors import ActorsProcess, Author
from tests.acceptance.stranger import Door, Stranger
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.activitypub.remote import shows
from tests.interop.activitypub.peer import Fedify, fedify_server
from tests.misbehaving import MisbehavingServer, redirect, respond
from tests.patience import PATIENCE_SECONDS, eventually, until
from workers.clock import SystemClock

APPLICATION = """
import os, signal
from pathlib import Path

from sqlalchemy import text

from federation import activitypub

DIES = Path(__file__).with_name("dies-within")

@activitypub.on("Create", "Accept", "Reject")
async def heard(session, activity, actor):
    await session.execute(text("INSERT INTO replies VALUES (:id, :actor)"), {"id": activity.id, "actor": actor})
    dies_once()

@activitypub.on_follow
def decided(session, activity, actor):
    dies_once()
    return "accept"

def dies_once():
    if DIES.exists():
        DIES.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""
ANSWERED = {"Accept": FollowState.ACCEPTED, "Reject": FollowState.REJECTED}
APPLICATION_SETTINGS = {"FEDERATION_TASKS": "an_application", "FEDERATION_TRUSTED_PROXIES": "127.0.0.1"}
# If there is a file that says so, a process dies once an activity is committed and before anything else is done, before
# the first statement of the transaction that handles one, or once that is committed. The sweep, which else leaves what
# is new to its job for a minute, looks at it after a moment.
DIES_AROUND_COMMITS = """
import os, signal
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Engine, Pool, event

from federation.activitypub import received

STORES, HANDLES = "INSERT INTO activitypub_received", "UPDATE activitypub_received SET state"
received.PATIENCE = timedelta(milliseconds=10)

def dies_once(where):
    file = Path(__file__).with_name(f"dies-{where}")
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

@event.listens_for(Engine, "before_cursor_execute")
def begins(connection, cursor, statement, *_):
    if statement.startswith(HANDLES):
        dies_once("before-handling")

@event.listens_for(Engine, "after_cursor_execute")
def written(connection, cursor, statement, *_):
    if statement.startswith((STORES, HANDLES)):
        connection.info["written"] = "after-commit" if statement.startswith(STORES) else "after-handling"

@event.listens_for(Pool, "checkin")
def committed(_, record):
    if (where := record.info.pop("written", None)) is not None:
        dies_once(where)
"""


@pytest.fixture
async def fedify(request: pytest.FixtureRequest) -> AsyncIterator[Fedify]:
    async with fedify_server(*getattr(request, "param", [])) as server:
        yield server


@pytest.fixture
def serving(tmp_path: Path, place: dict[str, object]) -> Iterator[ActorsProcess]:
    directory = tmp_path / "serving"
    directory.mkdir()
    (directory / "an_application.py").write_text(APPLICATION)
    process = ActorsProcess.at(place, directory, site=DIES_AROUND_COMMITS, **APPLICATION_SETTINGS)
    yield process
    process.kill()


@pytest.fixture
def environment(serving: ActorsProcess) -> dict[str, str]:
    return serving.environment


@pytest.fixture
async def alice(serving: ActorsProcess, worker: WorkerProcess) -> AsyncIterator[Author]:
    """She is to be seen; her application writes each reply into a table in which nothing is unique."""
    async with Author.present(serving, worker) as alice:
        async with alice.view.database.transaction() as session:
            await session.execute(text("CREATE TABLE replies (id TEXT, actor TEXT)"))
        yield alice


async def replies(alice: Author) -> list[str]:
    async with alice.view.database.read() as session:
        return list((await session.execute(text("SELECT id FROM replies"))).scalars())


async def states(alice: Author) -> dict[str | None, ReceivedState]:
    query = select(col(ReceivedActivity.activity_id), col(ReceivedActivity.state))
    return {row.activity_id: row.state for row in await alice.view.database.rows(query)}


async def follow(alice: Author, direction: FollowDirection) -> tuple[str, FollowState] | None:
    """Who follows or is followed, and how far that has come."""
    query = select(col(ActivityFollow.remote_actor), col(ActivityFollow.state))
    rows = await alice.view.database.rows(query.where(col(ActivityFollow.direction) == direction))
    return (rows[0].remote_actor, rows[0].state) if rows else None


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fedify", [["draft-cavage-http-signatures-12"]], indirect=True, ids=["cavage"])
async def test_somebody_follows_and_is_followed(alice: Author, fedify: Fedify) -> None:
    """Each side knows of it, until it is undone; what goes to followers goes to who is one.

    The worker that is asked first is killed while it decides: the Follow is answered once all the same.
    """
    await alice.worker.start()
    bob = fedify.follower()
    dies(alice, "within")
    await fedify.follow(alice.id)
    await alice.worker.died()
    assert await follow(alice, FollowDirection.FOLLOWER) is None
    await alice.worker.start()
    assert await eventually(lambda: fedify.collection("following"), bool) == [alice.id]
    assert await follow(alice, FollowDirection.FOLLOWER) == (bob.id, FollowState.ACCEPTED)

    assert len(await sends_to_followers(alice, "note-1")) == 1
    await until(lambda: objects_heard(fedify, "Create"))
    await fedify.unfollow(alice.id)
    await eventually(lambda: follow(alice, FollowDirection.FOLLOWER), lambda found: found is None)
    assert await sends_to_followers(alice, "note-2") == []

    async with alice.view.outbox.transaction() as session:
        await activitypub.follow_actor(session, alice.id, bob)
    accepted = (bob.id, FollowState.ACCEPTED)
    await eventually(lambda: follow(alice, FollowDirection.FOLLOWING), lambda found: found == accepted)
    assert await fedify.collection("followers") == [alice.id]
    async with alice.view.outbox.transaction() as session:
        await activitypub.unfollow_actor(session, alice.id, bob.id)
    assert await eventually(lambda: fedify.collection("followers"), lambda found: not found) == []
    assert await objects_heard(fedify, "Create") == [f"{alice.id}/notes/note-1"]
    assert len(await objects_heard(fedify, "Accept")) == 1
    assert alice.worker.terminate() == 0


async def sends_to_followers(alice: Author, name: str) -> list[str]:
    async with alice.view.outbox.transaction() as session:
        sent = await activitypub.send(session, activitypub.create(alice.note(name)), to=activitypub.FOLLOWERS)
    return list(sent.delivery_ids)


async def objects_heard(fedify: Fedify, kind: str) -> list[str | None]:
    return [each.object for each in await fedify.heard() if each.type == kind]


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_what_is_sent_has_its_effect_once_wherever_we_are_killed(alice: Author, fedify: Fedify) -> None:
    """After the commit and before the answer, after the answer, and within the handler; a replay has none."""
    dies(alice, "after-commit")
    first = await fedify.create("first", to=alice.id)
    await alice.serving.died()
    assert not await was_taken(fedify, first)
    assert await states(alice) == {first: ReceivedState.NEW}
    await alice.serving.start()
    await until(lambda: was_taken(fedify, first))
    assert await states(alice) == {first: ReceivedState.NEW}, "it is sent again, and known"
    await alice.worker.start()
    await eventually(lambda: replies(alice), lambda found: found == [first])
    alice.worker.kill()

    second = await fedify.create("second", to=alice.id)
    await until(lambda: was_taken(fedify, second))
    alice.serving.kill()
    await alice.serving.start()
    await alice.worker.start()
    await eventually(lambda: replies(alice), lambda found: found == [first, second])

    dies(alice, "within")
    third = await fedify.create("third", to=alice.id)
    await alice.worker.died()
    assert await replies(alice) == [first, second]
    assert (await states(alice))[third] is ReceivedState.NEW
    await alice.worker.start()
    await eventually(lambda: replies(alice), lambda found: found == [first, second, third])

    for said in await fedify.sent():
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            assert (await client.post(said.url, content=said.body, headers=said.headers)).status_code == 202
    last = await fedify.create("last", to=alice.id)
    await eventually(lambda: replies(alice), lambda found: last in found)
    assert Counter(await replies(alice)) == Counter([first, second, third, last])
    assert set((await states(alice)).values()) == {ReceivedState.DONE}
    assert alice.worker.terminate() == 0


def dies(alice: Author, where: str) -> None:
    """The process that comes there next is killed by itself."""
    (alice.serving.directory / f"dies-{where}").touch()


async def was_taken(fedify: Fedify, activity_id: str) -> bool:
    return (activity_id, 202) in [(each.id, each.status) for each in await fedify.sent()]


@pytest.fixture
async def door(alice: Author) -> AsyncIterator[Door]:
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        yield Door(alice, client)


@pytest.fixture
async def away() -> AsyncIterator[MisbehavingServer]:
    """Another server, with nothing on it."""
    async with MisbehavingServer() as server:
        server.default = respond(404)
        yield server


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*ANSWERED])
async def test_an_answer_to_our_follow_counts_once_wherever_we_are_killed(
    alice: Author, door: Door, away: MisbehavingServer, kind: str
) -> None:
    """After its commit and before the 202, after that, and before, within and after the transaction that handles it."""
    in_worker = ("before-handling", "within", "after-handling")
    people = {name: Stranger(away, f"/users/{name}") for name in ("after-commit", "after-202", *in_worker)}
    asked = await follows(alice, away, [who.id for who in people.values()])
    unheard, heard = (FollowState.PENDING, ReceivedState.NEW), (ANSWERED[kind], ReceivedState.DONE)

    async def answers(name: str) -> int:
        who = people[name]
        return await door.post(who, SignatureKind.CAVAGE, id=f"{who.id}/answer", type=kind, object=asked[who.id])

    async def known(name: str) -> tuple[FollowState, ReceivedState | None]:
        who = people[name]
        return (await followed(alice))[who.id][0], (await states(alice)).get(f"{who.id}/answer")

    dies(alice, "after-commit")
    with pytest.raises(httpx.TransportError):
        await answers("after-commit")
    await alice.serving.died()
    assert await known("after-commit") == unheard
    await alice.serving.start()
    assert await answers("after-commit") == 202, "it is sent again, and known"
    assert await answers("after-202") == 202
    alice.serving.kill()
    assert await known("after-202") == unheard
    await alice.serving.start()
    await alice.worker.start()
    for name in ("after-commit", "after-202"):
        await eventually(partial(known, name), lambda found: found == heard)
    for name in in_worker:
        dies(alice, name)
        assert await answers(name) == 202
        await alice.worker.died()
        assert await known(name) == (heard if name == "after-handling" else unheard)
        await alice.worker.start()
        await eventually(partial(known, name), lambda found: found == heard)

    before, lasts = await followed(alice), []
    for name, who in people.items():
        assert await answers(name) == 202
        assert await door.post(who, SignatureKind.CAVAGE) == 202
        lasts.append(door.last)
    await eventually(lambda: replies(alice), lambda found: {*lasts} <= {*found})
    assert Counter(await replies(alice)) == Counter([*(f"{who}/answer" for who in asked), *lasts])
    assert set((await states(alice)).values()) == {ReceivedState.DONE}
    assert await followed(alice) == before
    assert alice.worker.terminate() == 0


async def follows(alice: Author, away: MisbehavingServer, people: Sequence[str]) -> dict[str, dict[str, object]]:
    """Alice follows them: the Follow that each has got. No worker runs afterwards."""
    away.default = respond(202)
    async with alice.view.outbox.transaction() as session:
        for who in people:
            await activitypub.follow_actor(session, alice.id, activitypub.Recipient(id=who, inbox=f"{who}/inbox"))
    await alice.worker.start()
    await eventually(alice.rows, lambda rows: not rows)
    assert alice.worker.terminate() == 0
    got = [json.loads(each.body) for each in away.requests if each.method == "POST"]
    assert sorted(each["object"] for each in got) == sorted(people)
    return {each["object"]: each for each in got}


async def followed(alice: Author) -> dict[str, tuple[FollowState, datetime]]:
    """How far each follow of hers has come, and since when."""
    query = select(col(ActivityFollow.remote_actor), col(ActivityFollow.state), col(ActivityFollow.since))
    rows = await alice.view.database.rows(query.where(col(ActivityFollow.direction) == FollowDirection.FOLLOWING))
    return {row.remote_actor: (row.state, row.since) for row in rows}


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_what_is_not_proved_is_refused(alice: Author, door: Door, away: MisbehavingServer) -> None:
    """By 401, or 422 for what is not his who signs; no function hears of it, and the same without that is taken."""
    await alice.worker.start()
    async with MisbehavingServer() as elsewhere:
        taken = []
        for kind in SignatureKind:
            bob, eve = Stranger(away, f"/{kind}/bob"), Stranger(away, f"/{kind}/eve")
            found = {"no signature": await door.post(bob, kind, drop="Signature")}
            for left_out in ("digest", "method", "host"):
                found[f"leaves out {left_out}"] = await door.post(bob, kind, without=left_out)
            found["another body"] = await door.post(bob, kind, sent=b'{"type": "Create"}')
            found["stale"] = await door.post(bob, kind, at=SystemClock().now() - timedelta(hours=2))
            assert away.hits == 0, "nobody is asked for a key by which it could not be valid"
            found["for another host"] = await door.post(bob, kind, origin="https://c.example")
            found["of eve, by bob's key"] = await door.post(bob, kind, actor=eve.id)
            assert await door.post(bob, kind) == 202
            taken.append(door.last)
            found["of eve, by bob's cached key"] = await door.post(bob, kind, actor=eve.id)
            mallory = Stranger(away, f"/{kind}/mallory")
            elsewhere.default = away.routes[mallory.path]
            away.routes[mallory.path] = redirect(elsewhere.url + mallory.path)
            found["key is shown elsewhere"] = await door.post(mallory, kind)
            owned = Stranger(away, f"/{kind}/owned")
            lent = f"{owned.id}/key"
            away.routes[f"{owned.path}/key"] = shows(owned.shown_key(id=lent))
            found["owner does not list the key"] = await door.post(owned, kind, key_id=lent)
            assert found == {name: 422 if name.startswith("of eve") else 401 for name in found}
            assert elsewhere.hits == 0
            away.requests.clear()
    await eventually(lambda: replies(alice), lambda found: len(found) >= len(taken))
    assert await replies(alice) == taken
    assert await states(alice) == dict.fromkeys(taken, ReceivedState.DONE)


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_nobody_is_asked_about_who_ends_unknown(
    alice: Author, door: Door, away: MisbehavingServer, full: bool
) -> None:
    """Many such Deletes are acknowledged, and leave nothing."""
    for number in range(1_000 if full else 100):
        bob = Stranger(away, f"/users/{number}")
        end = {"type": "Delete", "id": f"{bob.id}#delete", "object": bob.id}
        assert await door.post(bob, SignatureKind.CAVAGE, **end) == 202
    assert (away.hits, await states(alice)) == (0, {})
