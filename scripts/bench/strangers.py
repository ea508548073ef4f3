"""What strangers who flood a node cost those who use it properly: a real process on SQLite."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final

import httpx

from bench.deliveries import enqueue, node_environment, own_keys, register
from bench.hostile import FOLLOWS, MEBIBYTE, Hostile, delivery, follow, hostile_requests, send
from bench.outage.figure import Figure
from bench.peer_servers import Peers, peer_process
from db import User, create_host_tables
from federation.app import Federation
from federation.base.settings import Settings
from federation.cli.running import upgrade
from federation.protocol.keys import OwnKeys, generate_own_keys
from tests.servers import free_port

VICTIM: Final = "https://victim.example"
FOLLOWED: Final = "followed"
FOLLOWS_PER_SECOND: Final = 10
PEERS: Final = 20
ENQUEUED_EVERY: Final = 0.5
CALM: Final = 2.0
"""Seconds without load, in which a process comes to rest."""
CALM_TRIES: Final = 10
LARGE: Final = ("large junk of a stranger", "large junk in a known name")


@dataclass(slots=True)
class Node:
    """The process of `federation run`, and what is needed to use it properly."""

    process: subprocess.Popen[bytes]
    port: int
    keys: OwnKeys
    federation: Federation
    peers: Peers
    friend: OwnKeys
    followers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def memory(self) -> float:
        """Return the resident memory in MiB."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    def cpu(self) -> float:
        """Return the seconds of CPU so far."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def good_follow(self) -> Hostile:
        """Return a new, valid follow of a registered server."""
        text = follow(VICTIM, f"follower-{next(self.followers)}", FOLLOWED)
        body = delivery(text, "FEDERATE", self.friend, self.keys.encryption.public)
        return Hostile(path=FOLLOWS, body=body, claims=VICTIM)

    def hostile(self) -> dict[str, Hostile]:
        return hostile_requests(victim=VICTIM, recipient=self.keys.encryption.public, followed=FOLLOWED)


@contextlib.asynccontextmanager
async def running_node() -> AsyncIterator[Node]:
    """Run a node that knows some servers, one of which everybody else pretends to be."""
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(node_environment("sqlite"))
        keys, port, friend = own_keys(environment), free_port(), generate_own_keys()
        peers = stack.enter_context(peer_process(PEERS, keys))
        environment |= {"FEDERATION_PORT": str(port), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        settings = Settings.from_values(environment)
        await asyncio.to_thread(upgrade, settings)
        federation = Federation(settings)
        await _furnish(federation, peers, friend)
        process = stack.enter_context(_process(environment))
        await _until_serving(port)
        try:
            yield Node(process, port, keys, federation, peers, friend)
        finally:
            await federation.close()


@contextlib.contextmanager
def _process(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "federation", "--log-level", "warning", "run"]
    with tempfile.TemporaryDirectory(prefix="fd-bench-") as directory, open(f"{directory}/log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def _furnish(federation: Federation, peers: Peers, friend: OwnKeys) -> None:
    async with federation.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        session.add(User(id=FOLLOWED))
    shown = {"public": friend.signing.public_text, "encryption": friend.encryption.public_text}
    await register(federation, [*peers.servers, {"url": VICTIM, **shown}])


async def _until_serving(port: int) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{port}/discover")
                return
            await asyncio.sleep(0.1)
    sys.exit("the node did not start")


@dataclass(slots=True)
class Business:
    """What good servers saw in one stretch of time: how long their follows took, and which were refused."""

    milliseconds: list[float] = field(default_factory=list)
    lost: int = 0
    delivered_per_s: float = 0
    memory: float = 0

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.milliseconds, n=20)[18]


async def measure(*, rate: float, seconds: float, offered: float) -> list[Figure]:
    """Measure a flood of *rate* requests a second against the same time without one.

    *offered* deliveries a second are owed meanwhile.
    """
    async with running_node() as node:
        await _do_business(node, 3, offered)  # so that what is done only the first time is done
        await asyncio.sleep(CALM)
        calm = await _calm(node, seconds, offered)
        before = node.memory()
        flooding = await _flooding(node, rate, seconds)
        flooded = await _do_business(node, seconds, offered)
        answers = json.loads((await flooding.communicate())[0])
    print(json.dumps(answers), file=sys.stderr)
    labels: dict[str, object] = {"rate": rate, "seconds": seconds}
    return [
        Figure(
            name="p95 of good follows, ms",
            labels=labels,
            value=flooded.p95,
            bar=250,
            has_to_be="at most",
            details={"without_ms": calm.p95, "p50_ms": statistics.median(flooded.milliseconds)},
        ),
        Figure(name="good follows lost", labels=labels, value=flooded.lost, bar=0, has_to_be="at most"),
        Figure(
            name="growth of resident memory, MiB",
            labels=labels,
            value=flooded.memory - before,
            bar=64,
            has_to_be="at most",
            details={"before": before},
        ),
        Figure(
            name="deliveries, part of their rate",
            labels={**labels, "offered": offered},
            value=flooded.delivered_per_s / calm.delivered_per_s,
            bar=0.8,
            has_to_be="at least",
            details={"per_s": flooded.delivered_per_s, "without_per_s": calm.delivered_per_s},
        ),
    ]


async def _calm(node: Node, seconds: float, offered: float) -> Business:
    """Return what good servers see without a flood, as soon as the machine lets the node deliver anything."""
    for _ in range(CALM_TRIES):
        calm = await _do_business(node, seconds, offered)
        if calm.delivered_per_s:
            return calm
    sys.exit(f"nothing was delivered in {CALM_TRIES} times {seconds} s: this machine is too busy to measure")


async def _flooding(node: Node, rate: float, seconds: float) -> asyncio.subprocess.Process:
    task = {
        "victim": VICTIM,
        "recipient": node.keys.encryption.public.hex(),
        "followed": FOLLOWED,
        "port": node.port,
        "rate": rate,
        "seconds": seconds,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.hostile",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task).encode())
    process.stdin.close()
    await process.stdout.readline()
    return process


async def _do_business(node: Node, seconds: float, offered: float) -> Business:
    business, ends = Business(), time.monotonic() + seconds
    taken = node.peers.tell("taken")
    async with asyncio.TaskGroup() as group:
        group.create_task(_owe(node, ends, offered))
        group.create_task(_watch_memory(node, ends, business))
        number, began = 0, time.monotonic()
        while time.monotonic() < ends:
            group.create_task(_follow(node, business))
            number += 1
            await asyncio.sleep(max(0.0, began + number / FOLLOWS_PER_SECOND - time.monotonic()))
        delivered = await asyncio.to_thread(node.peers.tell, "taken")
        business.delivered_per_s = (delivered - taken) / (time.monotonic() - began)
    return business


async def _owe(node: Node, ends: float, offered: float) -> None:
    """Owe *offered* deliveries a second, half a second ahead."""
    began, owed = time.monotonic(), 0
    while time.monotonic() < ends:
        due = round(offered * (time.monotonic() - began + ENQUEUED_EVERY)) - owed
        await enqueue(node.federation, node.peers.urls, max(due, 0))
        owed += max(due, 0)
        await asyncio.sleep(ENQUEUED_EVERY)


async def _watch_memory(node: Node, ends: float, business: Business) -> None:
    while time.monotonic() < ends:
        business.memory = max(business.memory, node.memory())
        await asyncio.sleep(0.1)


async def _follow(node: Node, business: Business) -> None:
    request, began = node.good_follow(), time.perf_counter()
    status = await send(request, node.port)
    business.milliseconds.append((time.perf_counter() - began) * 1000)
    business.lost += status != 200


async def costs(*, requests: int) -> list[Figure]:
    """Measure the process's CPU for each refused request, one after the other, against that of a good follow."""
    figures = []
    async with running_node() as node:
        await asyncio.sleep(CALM)
        idle = await _idle_cpu(node)
        for _ in range(20):
            await send(node.good_follow(), node.port)
        good = await _cost(node, [node.good_follow() for _ in range(requests)], idle)
        for name, request in node.hostile().items():
            size = len(request.body) / MEBIBYTE
            cost = await _cost(node, [request] * requests, idle)
            figures.append(
                Figure(
                    name="CPU of a refused request, ms",
                    labels={"kind": name},
                    value=cost,
                    bar=round(good + 20 * size, 2),
                    has_to_be="at most",
                    details={"good_follow": good, "mebibytes": size},
                )
            )
    return figures


async def bodies(*, at_once: int) -> list[Figure]:
    """Measure the process's memory while large bodies come at the same moment, from a stranger and in a known name."""
    figures = []
    for kind in LARGE:
        async with running_node() as node:
            await asyncio.sleep(CALM)
            before, seen, ends = node.memory(), Business(), time.monotonic() + CALM
            request = node.hostile()[kind]
            watching = asyncio.create_task(_watch_memory(node, ends, seen))
            answers = await asyncio.gather(*(send(request, node.port) for _ in range(at_once)))
            await watching
        refused = sum(status is not None and status != 200 for status in answers)
        if not refused:
            sys.exit(f"no {kind} was refused: {answers}")
        figures.append(
            Figure(
                name="growth of resident memory, MiB",
                labels={"kind": kind, "at_once": at_once},
                value=seen.memory - before,
                bar=64,
                has_to_be="at most",
                details={"before": before, "refused": refused},
            )
        )
    return figures


async def _idle_cpu(node: Node) -> float:
    """Return the seconds of CPU per second while idle."""
    before = node.cpu()
    await asyncio.sleep(CALM)
    return (node.cpu() - before) / CALM


async def _cost(node: Node, requests: list[Hostile], idle: float) -> float:
    before, began = node.cpu(), time.monotonic()
    for request in requests:
        await send(request, node.port)
    return (node.cpu() - before - idle * (time.monotonic() - began)) * 1000 / len(requests)
