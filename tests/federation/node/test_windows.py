"""How many deliveries a server and a client may bring, whatever others send in their names."""

from __future__ import annotations

from datetime import timedelta

from federation.node.app import FOLLOWS_PATH
from federation.node.limits import Limit
from federation.protocol.keys import generate_own_keys
from tests.federation.node.conftest import Node, serving
from tests.federation.node.remote_server import RemoteServer


async def test_a_server_has_a_window_that_nobody_else_can_spend(database_url: str, node: Node) -> None:
    """The next is told when to come back; what it did not sign does not count, nor what others sent."""
    alice, mallory = (
        RemoteServer(url=f"https://{name}.example", keys=generate_own_keys()) for name in ("alice", "mallory")
    )
    forger = RemoteServer(url=alice.url, keys=mallory.keys)
    async with serving(database_url, per_origin=Limit(requests=2, window=timedelta(seconds=10))) as limited:
        await limited.know(alice)
        await limited.know(mallory)
        forged = [await limited.follow(forger) for _ in range(3)]
        taken = [await limited.follow(alice), await limited.post(alice)]
        refused = await limited.follow(alice)
        another = await limited.follow(mallory)

    assert {each.status_code for each in forged} == {403}
    assert [each.status_code for each in taken] == [200, 200]
    assert (refused.status_code, refused.json()["code"]) == (429, "RATE_LIMITED")
    assert refused.headers["Retry-After"] == "10"
    assert another.status_code == 200


async def test_a_client_has_a_window_for_each_inbox(database_url: str, node: Node, peer: RemoteServer) -> None:
    """Counted before its body is read."""
    limit = Limit(requests=2, window=timedelta(seconds=10))
    async with serving(database_url, client_address="8.8.8.8", per_client=limit) as limited:
        taken = [await limited.follow(peer), await limited.follow(peer)]
        refused = await limited.send(FOLLOWS_PATH, b" " * 1024 * 1024, peer.headers())
        post = await limited.post(peer)

    assert [each.status_code for each in (*taken, post)] == [200] * 3
    assert (refused.status_code, refused.headers["Retry-After"], refused.headers["Connection"]) == (429, "10", "close")
