"""`federation doctor` on a node that sends by ActivityPub: its actors, their keys, and what others see of one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update
from sqlmodel import col

from db import ActivityKey, ReceivedActivity, ReceivedState
from federation.activitypub.application import serving_of
from federation.activitypub.documents import NODEINFO_INDEX_PATH, nodeinfo_index
from federation.admin.doctor import activitypub_checks, checks
from federation.admin.doctor.activitypub_checks import received
from federation.admin.doctor.checks import Verdict
from federation.admin.doctor.doctor import examine_node
from federation.base.queues.job_data import ACTIVITY_JOB
from federation.delivery.errors import RetryableFailure
from federation.delivery.wire import Sending, Trace
from federation.http.errors import BlockedUrl
from federation.runtime.composition import Federation
from federation.servers.link_rules import Link
from tests.federation.cli.elsewhere import know
from tests.federation.conftest import MakeSettings
from tests.misbehaving import Exchange, MisbehavingServer, Received, respond
from tests.servers import free_port


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    """What answers by the node's public name."""
    async with MisbehavingServer() as running:
        yield running


@pytest.fixture
async def node(make_settings: MakeSettings, database_url: str, server: MisbehavingServer) -> AsyncIterator[Federation]:
    own = {"database_url": database_url, "better_auth_url": server.url, "federation_activitypub": "1"}
    running = Federation(make_settings(**own))
    yield running
    await running.close()


async def add(node: Federation, name: str = "alice") -> str:
    assert node.activitypub is not None
    async with node.database.transaction() as session:
        return (await session.run_sync(node.activitypub.actors.add, f"{node.own_url}/users/{name}")).id


async def change_keys(node: Federation, **values: object) -> None:
    async with node.database.transaction() as session:
        await session.execute(update(ActivityKey).values(values))


async def test_actors_have_keys_that_open(node: Federation) -> None:
    """Without any that is no problem; with one that is shut or missing it is, and the actor is named."""
    assert (await activitypub_checks.actors(node)).verdict is Verdict.NOTE
    await add(node, "bob")
    alice = await add(node)
    assert (await activitypub_checks.actors(node)).verdict is Verdict.OK

    async with node.database.transaction() as session:
        await session.execute(delete(ActivityKey).where(col(ActivityKey.actor_id) == alice))
    found = await activitypub_checks.actors(node)
    assert (found.verdict, f"1 actor ({alice}) without a key" in found.found) == (Verdict.FAILURE, True)

    await change_keys(node, private="AAAA")
    found = await activitypub_checks.actors(node)
    assert (found.verdict, "/users/bob)" in found.found, "do not open" in found.found) == (Verdict.FAILURE, True, True)
    await change_keys(node, retired_at=node.clock.now() - timedelta(days=1))
    assert "2 actors" in (await activitypub_checks.actors(node)).found


async def test_what_others_sent_is_handled_or_told_of(node: Federation) -> None:
    """That it waits for long, and then that it could not be handled, with what was raised."""
    assert (await received(node)).verdict is Verdict.OK
    made: dict[str, Any] = {"type": "Create", "actor": "https://b.example/bob", "text": "{}"}
    now = node.clock.now()
    for minutes, verdict in ((14, Verdict.OK), (16, Verdict.WARNING)):
        at = now - timedelta(minutes=minutes)
        async with node.database.transaction() as session:
            session.add(ReceivedActivity(**made, activity_hash=str(minutes), received_at=at))
        assert (await received(node)).verdict is verdict
    assert "2 activities wait to be handled, the oldest for 16 min" in (await received(node)).found
    async with node.database.transaction() as session:
        values = {"state": ReceivedState.FAILED, "last_error": "ValueError: why" + "x" * 500}
        await session.execute(update(ReceivedActivity).values(values))
    found = await received(node)
    assert (found.verdict, len(found.found) <= 200) == (Verdict.WARNING, True)
    assert found.found.startswith("2 activities could not be handled; 1: ValueError: why")


async def test_our_own_actor_is_asked_for_by_our_public_name(node: Federation, server: MisbehavingServer) -> None:
    """Another time, no WebFinger, another key, and no document are told, the gravest first."""
    assert (await activitypub_checks.own_actor(node)).verdict is Verdict.NOTE
    alice = await add(node)
    serving, headers, statuses = serving_of(node), dict[str, str](), dict[str, int]()

    async def serve(request: Received, exchange: Exchange) -> None:
        reply = await serving.answer(request.method, request.path, request.headers)
        status = next((each for path, each in statuses.items() if request.path.startswith(path)), reply.status)
        await respond(status, {**reply.headers, **headers}, reply.body)(request, exchange)

    async def seen() -> tuple[Verdict, str]:
        found = await activitypub_checks.own_actor(node)
        return found.verdict, found.found

    server.default = serve
    assert await seen() == (Verdict.OK, f"{alice} shows the key with which it signs, and WebFinger finds it")
    headers["Date"] = format_datetime(datetime.now(UTC) + timedelta(hours=3), usegmt=True)
    verdict, told = await seen()
    assert (verdict, "is answered by a clock that differs from ours by 10" in told) == (Verdict.FAILURE, True)
    statuses["/.well-known"] = 404
    assert await seen() == (
        Verdict.WARNING,
        f"WebFinger answers with status 404 for {alice}: nobody finds it by its name",
    )
    await change_keys(node, public_pem="another")
    assert await seen() == (Verdict.FAILURE, f"{alice} does not show {alice}#main-key, with which it signs")
    statuses["/users"] = 404
    verdict, told = await seen()
    assert (verdict, "is answered with status 404" in told) == (Verdict.FAILURE, True)


async def test_where_an_application_serves_activitypub_alone_no_discover_is_missed(
    node: Federation, server: MisbehavingServer
) -> None:
    """Unless a server with keys is known, the registry cannot be read, or what answers is something else."""
    serving, pages = serving_of(node), dict[str, bytes]()

    async def serve(request: Received, exchange: Exchange) -> None:
        reply = await serving.answer(request.method, request.path, request.headers)
        status, body = (200, pages[request.path]) if request.path in pages else (reply.status, reply.body)
        await respond(status, reply.headers, body)(request, exchange)

    async def seen() -> tuple[Verdict, str]:
        found = await checks.discover(node)
        return found.verdict, found.found

    server.default = serve
    alone = (Verdict.OK, "what answers serves ActivityPub alone, and no server is known here that would need more")
    assert await seen() == alone
    pages["/discover"] = b"<html>"
    assert await seen() == alone
    pages["/.well-known/nodeinfo"] = b"<html>"
    assert (await seen())[0] is Verdict.FAILURE
    del pages["/discover"]
    assert await seen() == (Verdict.WARNING, "answered with status 404")
    del pages["/.well-known/nodeinfo"]
    await know(node)
    assert await seen() == (Verdict.WARNING, "answered with status 404")


async def test_without_its_database_the_doctor_knows_nothing_of_who_needs_discover(
    make_settings: MakeSettings, server: MisbehavingServer, tmp_path: Path
) -> None:
    """It warns of what it sees, and makes no database."""
    gone = tmp_path / "gone.sqlite3"
    for url in (f"sqlite:///{gone}", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/x"):
        node = Federation(make_settings(database_url=url, better_auth_url=server.url, federation_activitypub="1"))
        index = json.dumps(nodeinfo_index(server.url)).encode()
        server.routes = {"/discover": respond(404), NODEINFO_INDEX_PATH: respond(200, {}, index)}
        try:
            assert (await checks.discover(node)).verdict is Verdict.WARNING
        finally:
            await node.close()
    assert not gone.exists()


async def test_the_wire_sees_our_actor_where_the_doctor_does(
    make_settings: MakeSettings, server: MisbehavingServer
) -> None:
    """Our public name may lead to a private address here, to which nothing else is sent."""
    own = {"better_auth_url": server.url, "dev_allowed_hostnames": "", "federation_activitypub": "1"}
    node = Federation(make_settings(**own))
    assert node.activitypub is not None
    try:
        alice, serving = await add(node), serving_of(node)

        async def serve(request: Received, exchange: Exchange) -> None:
            reply = await serving.answer(request.method, request.path, request.headers)
            await respond(reply.status, reply.headers, reply.body)(request, exchange)

        server.default = serve
        assert (await activitypub_checks.own_actor(node)).verdict is Verdict.OK
        with pytest.raises(RetryableFailure, match="although our key is to be seen"):
            await node.activitypub.wire.may_recover(refused(alice), "HTTP_401")
        with pytest.raises(BlockedUrl):
            await node.client.fetch(alice)
    finally:
        await node.close()


def refused(actor: str) -> Sending:
    """A delivery in the actor's name to which a server has answered 401."""
    return Sending(
        job_name=ACTIVITY_JOB,
        delivery_id="d",
        server_url="https://b.example",
        target_url="https://b.example/inbox",
        payload=json.dumps({"id": f"{actor}/1", "type": "Create", "actor": actor}),
        started_at=datetime.now(UTC),
        link=Link(server_url="https://b.example", since=datetime.now(UTC)),
        is_repeat=False,
        first_byte=None,
        seen=Trace(),
        refuse_blacklisted=nobody_is,
    )


async def nobody_is() -> None:
    """No server is blacklisted."""


async def test_a_node_that_is_not_started_has_no_problem(make_settings: MakeSettings) -> None:
    """As with `/discover`."""
    node = Federation(make_settings(better_auth_url=f"http://127.0.0.1:{free_port()}", federation_activitypub="1"))
    try:
        await add(node)
        found = await activitypub_checks.own_actor(node)
        assert (found.verdict, "is not running here" in found.found) == (Verdict.NOTE, True)
    finally:
        await node.close()


async def test_the_doctor_makes_these_checks_where_it_is_on(node: Federation, make_settings: MakeSettings) -> None:
    """And no other node's."""
    told = {each.check: each.verdict for each in await examine_node(node)}
    assert (told["actors"], told["own actor"]) == (Verdict.NOTE, Verdict.NOTE)
    other = Federation(make_settings())
    try:
        assert not {each.check for each in await examine_node(other)} & {"actors", "own actor"}
    finally:
        await other.close()
