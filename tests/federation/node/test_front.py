"""When the fault is ours: senders are told to come back, and the log says what happened, not what was sent."""

from __future__ import annotations

from collections.abc import MutableMapping

from sqlalchemy import update
from sqlmodel import col

from db import Server
from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from tests.federation.node.conftest import Node, serving
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
