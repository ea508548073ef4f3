"""When the fault is ours: senders are told to come back, and the log says what happened, not what was sent."""

from __future__ import annotations

from collections.abc import MutableMapping

import pytest
from sqlalchemy import text, update
from sqlmodel import col

from db import Server
from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from tests.federation.node.conftest import Node, on_both_databases, serving
from tests.federation.node.remote_server import RemoteServer
from tests.servers import free_port

Events = list[MutableMapping[str, object]]


async def test_a_database_out_of_reach_is_unavailable(peer: RemoteServer, events: Events) -> None:
    """503 with `Retry-After` from every endpoint."""
    async with serving(f"postgresql://nobody:secret@127.0.0.1:{free_port()}/none") as node:
        answers = [
            await node.client.get("/discover"),
            await node.follow(peer),
            await node.post(peer),
        ]

    assert [(each.status_code, each.headers["Retry-After"]) for each in answers] == [(503, "5")] * 3
    outages = [event["path"] for event in events if event["event"] == "inbound_database_unavailable"]
    assert outages == ["/discover", FOLLOWS_PATH, POSTS_PATH]
    assert "secret" not in repr(events)


GAPS = [
    ('ALTER TABLE "user" RENAME TO users', "user"),
    ("ALTER TABLE blocks RENAME COLUMN blocker_id TO who", "blocks.blocker_id"),
    ("ALTER TABLE follows RENAME TO edges", "follows"),
]


@on_both_databases
@pytest.mark.parametrize(("change", "name"), GAPS)
async def test_a_missing_table_or_column_is_named_and_no_outage(
    node: Node, peer: RemoteServer, events: Events, change: str, name: str
) -> None:
    """503 with its name and a code of its own, without a promise that it passes in seconds; the log has it, too."""
    async with node.database.transaction() as session:
        await session.execute(text(change))

    response = await node.follow(peer)

    assert response.status_code == 503
    assert response.json() == {"error": f"The database of this server lacks {name}", "code": "INCOMPLETE_DATABASE"}
    assert "Retry-After" not in response.headers
    [event] = [each for each in events if each["event"] == "inbound_tables_missing"]
    assert (event["missing"], event["path"]) == ([name], FOLLOWS_PATH)
    assert not [each for each in events if each["event"] == "inbound_database_unavailable"]


@on_both_databases
async def test_once_the_host_has_migrated_nothing_needs_a_restart(node: Node, peer: RemoteServer) -> None:
    """The posts that were refused meanwhile are taken when they come again."""
    async with node.database.transaction() as session:
        await session.execute(text("ALTER TABLE posts RENAME TO moved"))
    refused = await node.post(peer)
    async with node.database.transaction() as session:
        await session.execute(text("ALTER TABLE moved RENAME TO posts"))
    taken = await node.post(peer)
    assert (refused.status_code, taken.status_code) == (503, 200)


async def test_a_fault_of_ours_is_an_internal_error(node: Node, peer: RemoteServer, events: Events) -> None:
    """500 in JSON; the log has the frames, and neither the post nor the key that was at fault."""
    async with node.database.transaction() as session:
        damage = update(Server).where(col(Server.url) == peer.url).values(encryption_public_key="a-secret-key")
        await session.execute(damage)
    node.registry.forget(peer.url)

    response = await node.deliver(peer, peer.post(text="a secret thought"), "FEDERATE_POST")

    assert (response.status_code, response.json()["code"]) == (500, "INTERNAL_SERVER_ERROR")
    [failure] = [event for event in events if event["event"] == "inbound_failed"]
    assert (failure["error_type"], failure["path"]) == ("KeyMaterialError", POSTS_PATH)
    assert "acknowledge" in str(failure["stack"])
    assert "secret" not in repr(events) + response.text
