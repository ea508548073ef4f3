"""A node works off what was received: in the queues beside its tables and elsewhere, and after it was killed."""

from __future__ import annotations

import json
import os
import signal
from hashlib import sha256
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import ActivityFollow, ActivityInbox, DeliveryJob, FollowState, ReceivedActivity, ReceivedState
from federation import activitypub
from federation.activitypub.handlers import HANDLERS, IncomingActivity
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt, release
from federation.runtime.workers import FederationWorkers
from tests.federation.activitypub.sender import ALICE, note
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.protocol.vectors import A
from tests.federation.test_run import Folder
from tests.misbehaving import MisbehavingServer, respond
from tests.patience import until
from workers import JobState

BOB = "https://b.example/users/bob"


async def keep(node: Federation, activity: dict[str, object]) -> bool:
    """It was received, and verified."""
    assert node.activitypub is not None
    text, actor = json.dumps(activity), str(activity["actor"])
    return await node.activitypub.received.keep(
        activity_hash=sha256(f"{actor} {activity['id']}".encode()).hexdigest(),
        activity_id=str(activity["id"]),
        type=str(activity["type"]),
        actor=actor,
        text=text,
    )


async def states(node: Federation) -> list[ReceivedState]:
    return [row.state for row in await node.database.rows(select(col(ReceivedActivity.state)))]


async def is_done(node: Federation) -> bool:
    return set(await states(node)) == {ReceivedState.DONE}


async def written(node: Federation) -> list[str]:
    """What handlers have written."""
    rows = await node.database.rows(select(col(ActivityInbox.url)).order_by(col(ActivityInbox.url)))
    return [row.url for row in rows]


async def test_the_workers_of_a_node_handle_what_arrives(
    make_settings: MakeSettings, queue_settings: dict[str, object]
) -> None:
    """On every storage, once: the functions of this process; nothing is left in the queue. A known one has no job."""
    name = f"Tests{len(queue_settings)}{os.urandom(4).hex()}"

    @HANDLERS.on(name)
    async def write(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        session.add(ActivityInbox(url=str(activity.id), server_url=actor))

    node = Federation(make_settings(**queue_settings, federation_activitypub="1"))
    workers = FederationWorkers(node)
    try:
        workers.start()
        for number in (1, 2, 3):
            assert await keep(node, {"id": f"{BOB}/{number}", "type": name, "actor": BOB})
        await until(lambda: is_done(node))
        assert not await keep(node, {"id": f"{BOB}/1", "type": name, "actor": BOB})
        await until(lambda: is_empty(node))
        assert await written(node) == [f"{BOB}/{number}" for number in (1, 2, 3)]
    finally:
        await workers.stop()
        await node.close()


async def is_empty(node: Federation) -> bool:
    return not any((await node.tasks_queue.counts()).values())


async def test_a_follower_gets_the_accept_and_what_is_sent_to_followers(
    make_settings: MakeSettings, database_url: str
) -> None:
    """From the Follow to the post, on a node as it runs; and one of ours follows back, and ends it."""
    node = Federation(
        make_settings(database_url=database_url, federation_activitypub="1", federation_activitypub_http="1")
    )
    adopt(node)
    workers = FederationWorkers(node)
    try:
        async with MisbehavingServer() as server:
            server.default = respond(202)
            bob = f"{server.url}/users/bob"
            shown = {"id": bob, "inbox": f"{bob}/inbox", "endpoints": {"sharedInbox": f"{server.url}/inbox"}}
            headers = {"content-type": "application/activity+json"}
            server.routes["/users/bob"] = respond(200, headers, json.dumps(shown).encode())
            async with node.outbox.transaction() as session:
                await activitypub.add_actor(session, ALICE)
            workers.start()
            assert await keep(node, {"id": f"{bob}/1", "type": "Follow", "actor": bob, "object": ALICE})
            await until(lambda: arrived(server, "Accept"))
            async with node.outbox.transaction() as session:
                sent = await activitypub.send(session, note(), to=activitypub.FOLLOWERS)
                remote = activitypub.Recipient(id=bob, inbox=f"{bob}/inbox")
                assert len((await activitypub.follow_actor(session, ALICE, remote)).delivery_ids) == 1
            assert len(sent.delivery_ids) == 1
            await until(lambda: arrived(server, "Create") and arrived(server, "Follow"))
            async with node.outbox.transaction() as session:
                assert await activitypub.unfollow_actor(session, ALICE, bob)
                assert await activitypub.unfollow_actor(session, ALICE, bob) is None
                assert await activitypub.answer_follow(session, ALICE, bob, "reject")
            await until(lambda: arrived(server, "Undo") and arrived(server, "Reject"))
            [left] = await node.database.rows(select(col(ActivityFollow.state)))
            assert left.state is FollowState.REJECTED
    finally:
        await workers.stop()
        release()
        await node.close()


def arrived(server: MisbehavingServer, name: str) -> bool:
    return name in [json.loads(request.body)["type"] for request in server.requests if request.body]


async def test_who_gets_nothing_is_not_followed(make_settings: MakeSettings) -> None:
    """Nothing is noted of what is not sent."""
    node = Federation(make_settings(federation_activitypub="1"))
    adopt(node)
    try:
        async with node.outbox.transaction() as session:
            await activitypub.add_actor(session, ALICE)
            ours = activitypub.Recipient(id=f"{ALICE}s", inbox=f"{ALICE}s/inbox")
            assert (await activitypub.follow_actor(session, ALICE, ours)).skipped
        assert not await node.database.rows(select(col(ActivityFollow.state)))
        assert not await node.database.rows(select(col(DeliveryJob.id)))
    finally:
        release()
        await node.close()


APPLICATION = """
import os, signal
from pathlib import Path

from db import ActivityInbox
from federation import activitypub

BEFORE = Path(__file__).with_name("was-here")

@activitypub.on("Create")
async def write(session, activity, actor):
    session.add(ActivityInbox(url=activity.id, server_url=actor))
    await session.flush()
    if not BEFORE.exists():
        BEFORE.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(120)
async def test_a_node_killed_before_and_within_the_handler_has_its_effect_once(
    make_settings: MakeSettings, database_url: str, tmp_path: Path
) -> None:
    """The first process only takes it. The second dies in the middle of it, the third does it."""
    (tmp_path / "an_application.py").write_text(APPLICATION)
    folder = Folder(tmp_path)
    values = {
        "BETTER_AUTH_URL": OWN_URL,
        **A.env,
        "DATABASE_URL": database_url,
        "FEDERATION_ACTIVITYPUB": "1",
        "FEDERATION_LEASE": "2s",
        "FEDERATION_TASKS": "an_application",
    }
    node = Federation(make_settings(database_url=database_url, federation_activitypub="1"))
    try:
        for number in (1, 2):
            assert await keep(node, {"id": f"{BOB}/{number}", "type": "Create", "actor": BOB})
        killed = await folder.start("federation", "workers", "run", **values)
        assert await killed.ended() == -signal.SIGKILL
        assert await states(node) == [ReceivedState.NEW] * 2
        assert await written(node) == []
        command = await folder.start("federation", "workers", "run", **values)
        await until(lambda: is_done(node))
        command.process.send_signal(signal.SIGTERM)
        assert await command.ended() == 0
        assert await written(node) == [f"{BOB}/1", f"{BOB}/2"]
        assert (await node.tasks_queue.counts())[JobState.FAILED] == 0
    finally:
        await folder.close()
        await node.close()
