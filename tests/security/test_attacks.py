"""The attacks of strangers on a node as a process: what each is answered, and what good servers notice of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select

from db import Follow
from federation.node.follows import FOLLOWS_PATH
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import follow_activity, unfollow_activity
from federation.protocol.discovery import register_request
from federation.protocol.encodings import dump_json, encode_base64
from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.runtime.composition import Federation
from tests.acceptance.test_fresh_node import FreshNode, initialised
from tests.federation.node.remote_server import RemoteServer
from tests.federation.test_run import Command
from tests.patience import PATIENCE_SECONDS
from tests.peer import Peer, introduce
from tests.squatters import Squatter

BEGAN = datetime(2026, 1, 2, tzinfo=UTC)
JUNK = b'{"method":"FEDERATE","junk":[' + b"{}," * 1_300_000 + b"{}]}"
"""Four megabytes that were thirty times as much once they were parsed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The node, the application's view of it, and a registered server that has business with it."""

    node: FreshNode
    process: Command
    view: Federation
    keys: OwnKeys
    client: httpx.AsyncClient
    friend: Peer

    async def register(self, server: Peer, shown: OwnKeys | None = None, **changes: object) -> httpx.Response:
        body = json.loads(register_request(url=server.url, keys=shown or server.keys))
        return await self.client.post("/discover", content=dump_json({**body, **changes}))

    async def send(self, server: Peer, text: str, method: str = "FEDERATE") -> httpx.Response:
        remote = RemoteServer(url=server.url, keys=server.keys)
        body = remote.delivery(text, method, self.keys)
        return await self.client.post(FOLLOWS_PATH, content=body, headers=remote.headers())

    async def follow(self, server: Peer, follow_id: str, at: datetime = BEGAN) -> httpx.Response:
        text = follow_activity(
            federation_url=server.url,
            follow_id=follow_id,
            created_at=at,
            follower_id=f"of-{follow_id}",
            following_id="bob",
            follower_server_url=None,
        )
        return await self.send(server, text)

    async def follows(self) -> int:
        async with self.view.database.read() as session:
            return (await session.execute(select(func.count()).select_from(Follow))).scalar_one()

    def resident(self) -> float:
        """MiB."""
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


@pytest.fixture
async def loopback() -> AsyncIterator[AsyncExitStack]:
    """What is entered here serves until the test ends."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def target(tmp_path: Path, loopback: AsyncExitStack) -> Target:
    node = await loopback.enter_async_context(initialised(tmp_path / "node"))
    await node.command("users", "add", "bob")
    process = await node.start()
    view = await loopback.enter_async_context(node.view())
    assert view.keys is not None
    client = httpx.AsyncClient(
        base_url=node.url, headers={"Content-Type": "application/json"}, timeout=PATIENCE_SECONDS
    )
    await loopback.enter_async_context(client)
    friend = await loopback.enter_async_context(Peer(generate_own_keys()))
    found = Target(node, process, view, view.keys.pairs()[0], client, friend)
    introduce(friend, node.url, found.keys)
    assert (await found.register(friend)).status_code == 200
    assert (await found.follow(friend, "first")).status_code == 200
    return found


async def test_nobody_is_registered_for_keys_that_are_not_its_own(target: Target, loopback: AsyncExitStack) -> None:
    """Not for a victim's, whoever comes first, nor for the node's, nor for such as anybody could open for."""
    victim = await loopback.enter_async_context(Peer(generate_own_keys()))
    squatter = await loopback.enter_async_context(Squatter(victim))
    for server in (victim, squatter):
        introduce(server, target.node.url, target.keys)
    assert (await target.register(squatter, squatter.shown)).status_code == 200  # it seems to know no pings
    assert (await target.register(victim)).status_code == 200
    assert (await target.follow(victim, "of-the-victim")).status_code == 200
    assert (await target.register(squatter, squatter.shown)).status_code == 409

    squatter.shown = target.keys
    assert (await target.register(squatter, target.keys)).status_code == 409
    low = await target.register(squatter, target.keys, encryptionPublicKey=encode_base64(bytes(32)))
    assert low.status_code == 400


async def test_megabytes_of_strangers_cost_next_to_nothing(target: Target) -> None:
    """They are refused by their heads, and in a registered name nothing is built of them."""
    before = target.resident()

    async def send(claims: str) -> int:
        headers = {"Origin": claims, "X-Federation-Origin": claims}
        return (await target.client.post(POSTS_PATH, content=JUNK, headers=headers)).status_code

    names = ["https://stranger.example", target.friend.url] * 7
    answers = await asyncio.gather(*(send(name) for name in names), target.follow(target.friend, "meanwhile"))
    assert answers.pop().status_code == 200  # type: ignore[union-attr] # the last one is the follow's
    assert set(answers) <= {400, 403, 429, 503}
    assert target.resident() - before < 64


async def test_silent_connections_shut_nobody_out(target: Target, loopback: AsyncExitStack) -> None:
    """Of however many addresses."""
    address = httpx.URL(target.node.url)
    for number in range(460):
        own = (f"127.0.2.{1 + number % 20}", 0)
        loopback.enter_context(socket.create_connection((address.host, address.port), PATIENCE_SECONDS, own))
    async with httpx.AsyncClient(base_url=target.node.url) as stranger:
        assert (await stranger.get("/discover")).status_code == 200
    assert (await target.follow(target.friend, "meanwhile")).status_code == 200


async def test_what_is_over_does_not_begin_again(target: Target) -> None:
    """An old follow and an old unfollow, byte for byte, are acknowledged and change nothing."""
    ended = unfollow_activity(
        federation_url=target.friend.url,
        follower_id="of-first",
        following_id="bob",
        follow_id="first",
        ended_at=BEGAN.replace(day=3),
    )
    assert await target.follows() == 1
    assert (await target.send(target.friend, ended, "UNFOLLOW")).status_code == 200
    assert await target.follows() == 0
    assert (await target.follow(target.friend, "first")).status_code == 200
    assert await target.follows() == 0
