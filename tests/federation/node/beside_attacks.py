"""How long an honest server waits for the answer to a follow, alone and beside each attack: p50 and p95.

    python -m tests.federation.node.beside_attacks [--seconds 10]

The node is a process of its own, behind its listener, on SQLite. The attacks come from this process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import structlog

from db import User, create_host_tables
from federation.node.app import FOLLOWS_PATH
from federation.protocol.keys import generate_own_keys
from federation.protocol.relaying import RELAY_PATH
from tests.federation.conftest import make_all_tables
from tests.federation.node.conftest import serving
from tests.federation.node.remote_server import RemoteServer
from tests.federation.node.test_slow_bodies import JUST_A_PROXY, LENGTH, SENT, door
from tests.federation.protocol import vectors
from tests.misbehaving import MisbehavingServer, hang

PEER = RemoteServer(url="https://a.example", keys=vectors.A.keys)
TARGETS = 8
JSON = {"Content-Type": "application/json", "X-Federation-Origin": PEER.url}


def serve(url: str, behind_proxy: bool, hanging: Sequence[str], told: Connection) -> None:
    """Run the node until the parent has heard enough."""
    logging.disable()  # what is being answered when it stops
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    asyncio.run(_serve(url, behind_proxy, hanging, told))


async def _serve(url: str, behind_proxy: bool, hanging: Sequence[str], told: Connection) -> None:
    async with serving(url) as node:
        async with node.database.transaction() as session:
            await (await session.connection()).run_sync(create_host_tables)
        await node.add(User(id="user-b"))
        await node.know(PEER)
        for server in hanging:
            await node.know(RemoteServer(url=server, keys=generate_own_keys()))
    async with door(url, JUST_A_PROXY if behind_proxy else ()) as opened:
        told.send(opened.port)
        await asyncio.to_thread(told.recv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What each of so many senders at so many addresses does again and again, *pause* seconds apart."""

    name: str
    act: Callable[[int, str, Mapping[str, str]], Awaitable[object]]
    senders: int
    addresses: int = 1
    pause: float = 1
    behind_proxy: bool = False

    async def run(self, port: int, number: int) -> None:
        await asyncio.sleep(self.pause * number / self.senders)  # so that they do not come all at once
        address = "127.0.0.1" if self.behind_proxy else f"127.0.1.{number % self.addresses + 1}"
        headers = {"X-Forwarded-For": f"192.0.2.{number % self.addresses + 1}"} if self.behind_proxy else {}
        while True:
            with suppress(OSError, httpx.HTTPError):
                await self.act(port, address, headers)
            await asyncio.sleep(self.pause)


async def slow_body(port: int, address: str, headers: Mapping[str, str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        head = {"Host": "b.example", **JSON, "Content-Length": str(LENGTH), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"POST {FOLLOWS_PATH} HTTP/1.1\r\n{lines}\r\n".encode() + SENT)
        await reader.read()
    finally:
        writer.transport.abort()


def asking(path: str, bodies: Sequence[bytes]) -> Callable[[int, str, Mapping[str, str]], Awaitable[object]]:
    """An act that posts one body after the other."""
    turn = iter(range(1_000_000))

    async def ask(port: int, address: str, headers: Mapping[str, str]) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            body = bodies[next(turn) % len(bodies)]
            return await client.post(f"http://127.0.0.1:{port}{path}", content=body, headers={**JSON, **headers})

    return ask


def attacks(hanging: Sequence[str]) -> list[Attack]:
    relays = [PEER.proxied("{}", url, vectors.B.keys) for url in hanging]
    closed = [PEER.proxied("{}", f"http://127.0.0.1:{port}", vectors.B.keys) for port in range(1, 9)]
    registrations = [RemoteServer(url=url, keys=generate_own_keys()).register() for url in hanging]
    relay, discover = asking(RELAY_PATH, relays), asking(RELAY_PATH, closed)
    register = asking("/discover", registrations)
    return [
        Attack(name="nothing", act=slow_body, senders=0),
        Attack(name="slow bodies of 5 addresses", act=slow_body, senders=320, addresses=5, pause=10),
        Attack(name="slow bodies of 20 addresses", act=slow_body, senders=380, addresses=20, pause=10),
        Attack(name="relays to servers that hang", act=relay, senders=25, pause=5),
        Attack(name="relays to unknown servers", act=discover, senders=5),
        Attack(name="registrations that hang", act=register, senders=10, addresses=2),
        Attack(name="nothing, behind a proxy", act=slow_body, senders=0, behind_proxy=True),
        Attack(name="slow bodies of one behind a proxy", act=slow_body, senders=380, pause=10, behind_proxy=True),
    ]


async def times(port: int, seconds: float, *, behind_proxy: bool) -> tuple[list[float], int]:
    """How long each follow took, ten a second, and how many were not taken."""
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.1" if behind_proxy else "127.0.0.6")
    headers = {**PEER.headers(), **({"X-Forwarded-For": "198.51.100.1"} if behind_proxy else {})}
    took, refused, end = [], 0, time.monotonic() + seconds
    async with httpx.AsyncClient(transport=transport, timeout=30) as client:
        while time.monotonic() < end:
            body = PEER.delivery(PEER.follow(f"user-{len(took)}"), "FEDERATE", vectors.B.keys)
            began = time.monotonic()
            answer = await client.post(f"http://127.0.0.1:{port}{FOLLOWS_PATH}", content=body, headers=headers)
            took.append(1000 * (time.monotonic() - began))
            refused += answer.status_code != 200
            await asyncio.sleep(0.1)
    return took, refused


async def measure(attack: Attack, hanging: Sequence[str], seconds: float, directory: Path) -> str:
    url = f"sqlite:///{directory / attack.name.replace(' ', '-')}.sqlite3"
    make_all_tables(url)
    ours, theirs = multiprocessing.Pipe()
    node = multiprocessing.get_context("spawn").Process(target=serve, args=(url, attack.behind_proxy, hanging, theirs))
    node.start()
    port = await asyncio.to_thread(ours.recv)
    tasks = [asyncio.create_task(attack.run(port, number)) for number in range(attack.senders)]
    await asyncio.sleep(3)
    took, refused = await times(port, seconds, behind_proxy=attack.behind_proxy)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ours.send("enough")
    await asyncio.to_thread(node.join)
    p95 = statistics.quantiles(took, n=20)[-1]
    return f"| {attack.name} | {len(took)} | {refused} | {statistics.median(took):.0f} | {p95:.0f} |"


async def main(seconds: float) -> None:
    print("| beside | follows | refused | p50 ms | p95 ms |\n| --- | --- | --- | --- | --- |")
    servers = [MisbehavingServer() for _ in range(TARGETS)]
    for server in servers:
        server.default = hang()
        await server.start()
    with tempfile.TemporaryDirectory() as directory:
        urls = [server.url for server in servers]
        for attack in attacks(urls):
            print(await measure(attack, urls, seconds, Path(directory)), flush=True)
    for server in servers:
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    asyncio.run(main(parser.parse_args().seconds))
