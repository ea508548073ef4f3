"""Three nodes as processes: A cannot resolve C's name, B can, and A's user follows C's."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob, Follow, Server, User
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.acceptance.node_process import NodeProcess
from tests.federation.protocol.vectors import A, B
from tests.patience import PATIENCE_SECONDS, eventually
from tests.peer import settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The three processes, and this test's own view of A's and C's databases."""

    a: NodeProcess
    b: NodeProcess
    c: NodeProcess
    at_a: Federation
    at_c: Federation

    async def follow(self) -> str:
        """A's user asks to follow C's; the delivery's id."""
        async with self.at_a.outbox.transaction() as session:
            requested = await self.at_a.producers.request_follow(
                session, follower_id="alice", following_id="carol", server_url=self.c.url
            )
        return requested.delivery_id

    async def attempts(self, delivery: str) -> list[DeliveryAttempt]:
        async with self.at_a.database.read() as session:
            query = select(DeliveryAttempt).where(col(DeliveryAttempt.delivery_id) == delivery)
            return list((await session.execute(query.order_by(col(DeliveryAttempt.id)))).scalars())

    async def delivered(self, delivery: str) -> list[DeliveryAttempt]:
        """The attempts of a delivery, once its row is gone and the last of them is on record."""
        attempts = await eventually(
            lambda: self.attempts(delivery), lambda found: found and found[-1].outcome == "delivered"
        )
        async with self.at_a.database.read() as session:
            assert await session.get(DeliveryJob, delivery) is None
        return attempts


@pytest.fixture(params=["sqlite", "bullmq"])
def shared(request: pytest.FixtureRequest) -> dict[str, str]:
    """Settings of all three: nothing but their SQLite files, or one Redis besides."""
    return {} if request.param == "sqlite" else {"REDIS_URL": str(request.getfixturevalue("redis_url"))}


@pytest.fixture
async def network(migrated_file: Path, tmp_path: Path, shared: dict[str, str]) -> AsyncIterator[Network]:
    """A knows B and C, C knows A, B knows A; nothing runs yet."""

    def node(name: str, keys: object, knows: str) -> NodeProcess:
        directory = tmp_path / name
        directory.mkdir()
        database = shutil.copy(migrated_file, directory / "node.sqlite3")
        prefix = {"FEDERATION_QUEUE_PREFIX": f"{tmp_path.name}-{name}"} if shared else {}
        assert isinstance(keys, type(A.keys))
        return NodeProcess(
            name=name,
            keys=keys,
            directory=directory,
            database_url=f"sqlite:///{database}",
            settings={**shared, **prefix},
            knows=[f"{each}.test" for each in knows],
        )

    a, b, c = node("a", A.keys, "ab"), node("b", B.keys, "abc"), node("c", generate_own_keys(), "abc")
    async with beside(a) as at_a, beside(b) as at_b, beside(c) as at_c:
        for site, known in ((at_a, b), (at_a, c), (at_b, a), (at_c, a)):
            await site.registry.register(
                url=known.url,
                public_key=known.keys.signing.public_text,
                encryption_public_key=known.keys.encryption.public_text,
            )
        await settle(at_a, "alice")
        await settle(at_c, "carol")
        try:
            yield Network(a=a, b=b, c=c, at_a=at_a, at_c=at_c)
        finally:
            for each in (a, b, c):
                each.kill()
            await forget(shared, f"{tmp_path.name}-", f"rl:proxy:{a.url}")


@contextlib.asynccontextmanager
async def beside(node: NodeProcess) -> AsyncIterator[Federation]:
    """The application beside a process, on its database and queues."""
    site = Federation(node.own_settings)
    yield site
    await site.close()


async def forget(shared: dict[str, str], *prefixes: str) -> None:
    """What a test wrote is gone from the Redis it shared."""
    if not shared:
        return
    async with Redis.from_url(shared["REDIS_URL"]) as redis:
        for prefix in prefixes:
            async for key in redis.scan_iter(f"{prefix}*"):
                await redis.delete(key)


async def everywhere(do: Callable[[NodeProcess], Awaitable[None]], *nodes: NodeProcess) -> None:
    await asyncio.gather(*(do(node) for node in nodes))


async def rows(site: Federation, model: type[Follow] | type[Server]) -> list[Follow | Server]:
    async with site.database.read() as session:
        return list((await session.execute(select(model))).scalars())


@pytest.mark.spread("shared")
async def test_a_follow_reaches_a_server_whose_name_only_the_relay_resolves(
    network: Network, shared: dict[str, str]
) -> None:
    """B, who never heard of C, discovers it and passes the follow on; C accepts, and A hears of it through B."""
    a, b, c = network.a, network.b, network.c
    await everywhere(NodeProcess.start, a, b, c)

    attempts = await network.delivered(await network.follow())

    assert [(attempt.outcome, attempt.relayed_by, attempt.error_code) for attempt in attempts] == [
        ("delivered", b.url, None)
    ]
    [ours] = await rows(network.at_a, Follow)
    [theirs] = await rows(network.at_c, Follow)
    assert isinstance(ours, Follow)
    assert isinstance(theirs, Follow)
    assert (ours.accepted, ours.follower_server_url) == (True, c.url)
    assert (theirs.follower_id, theirs.following_id, theirs.accepted, theirs.acknowledged) == (
        *("alice", "carol"),
        *(True, True),
    )
    assert (theirs.follower_server_url, theirs.following_server_url) == (a.url, None)
    [sick] = [row for row in await rows(network.at_a, Server) if isinstance(row, Server) and row.url == c.url]
    assert (sick.is_healthy, sick.unhealthy_reason) == (False, "DNS_BLOCKED")
    [line] = a.events("delivery_attempt")
    assert (line["outcome"], line["relayed_by"]) == ("delivered", b.url)
    [forwarded] = b.events("relay_forwarded")
    assert (forwarded["sender"], forwarded["target"], forwarded["status"]) == (a.url, c.url, 200)
    if shared:
        async with Redis.from_url(shared["REDIS_URL"]) as redis:
            assert await redis.zcard(f"rl:proxy:{a.url}") == 1
    for node in (a, b, c):
        assert node.stop() == 0
        assert "Traceback" not in node.log.read_text()


@pytest.mark.parametrize("shared", ["sqlite"], indirect=True)
async def test_a_relay_that_was_down_is_found_again(network: Network) -> None:
    """A holds its only relay for sick; the sweep finds it well, and the follow goes out through it at once."""
    a, b, c = network.a, network.b, network.c
    await network.at_a.registry.mark_unhealthy(b.url, "CONN_REFUSED")
    await everywhere(NodeProcess.start, a, b, c)

    [attempt] = await network.delivered(await network.follow())

    assert attempt.relayed_by == b.url
    [swept] = a.events("relay_sweep")
    assert (swept["probed"], swept["healed"]) == (1, 1)


@pytest.mark.parametrize("shared", ["sqlite"], indirect=True)
async def test_a_refusal_at_the_target_is_known_at_the_sender(network: Network) -> None:
    """C does not know the followed user: A's log and row say so, though B is all that A talked to."""
    a, b, c = network.a, network.b, network.c
    async with network.at_c.database.transaction() as session:
        await session.delete(await session.get(User, "carol"))
    await everywhere(NodeProcess.start, a, b, c)

    delivery = await network.follow()
    [first, *_] = await eventually(lambda: network.attempts(delivery), bool)

    assert (first.outcome, first.error_code, first.relayed_by) == ("retryable", "DNS_BLOCKED", None)
    refused = a.events("relay_refused")[0]
    assert (refused["relayed_by"], refused["target"]) == (b.url, c.url)
    assert (refused["code"], refused["target_code"], refused["target_status"]) == (
        "INVALID_RESPONSE_FROM_TARGET",
        "USER_NOT_FOUND",
        404,
    )


@pytest.mark.parametrize("shared", ["sqlite"], indirect=True)
async def test_a_listener_is_not_held_by_what_it_will_not_read(network: Network) -> None:
    """Announced gigabytes and an endless stream are answered 413, nonsense in A's name 400 until whoever sends it is
    turned away with 429; each answer arrives, nobody waits, and none of it spends what A may relay.
    """
    b = network.b
    await b.start()
    head = f"POST /proxy HTTP/1.1\r\nHost: {b.host}\r\nX-Federation-Origin: {network.a.url}\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"

    large = (head + "Content-Length: 12000000\r\n\r\n").encode() + b" " * 12_000_000
    written = await asyncio.to_thread(told_at_the_end, b.port, large)
    announced = await told(b.port, (head + "Content-Length: 10000000000\r\n\r\n").encode(), b"")
    endless = await told(b.port, (head + "Transfer-Encoding: chunked\r\n\r\n").encode(), chunk)
    body = (head + "Content-Length: 200000\r\n\r\n").encode() + b" " * 200_000
    answers = {await told(b.port, body, b"") for _ in range(101)}

    assert (written, announced, endless) == (413, 413, 413)
    assert answers == {400, 429}


async def told(port: int, request: bytes, more: bytes) -> int:
    """The status that answers a request, which goes on with *more*, for ever, until it is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(request)
            answer = asyncio.ensure_future(reader.readuntil(b"\r\n"))
            with contextlib.suppress(ConnectionError):  # cut off, after the answer
                while more and not answer.done():
                    writer.write(more)
                    await writer.drain()
            return int((await answer).split(b" ")[1])
    finally:
        writer.transport.abort()


def told_at_the_end(port: int, request: bytes) -> int:
    """The same for a client that reads nothing before all is written."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(request)
        return int(client.recv(64).split(b" ")[1])
