"""How fast a server takes activities, which were signed before the clock starts, over connections that stay open.

Theory of operation. The actors that send are shown by a server in this process, so that their keys can be had, and all
keys are known before the clock starts. Each connection sends one request at a time. The server that is measured is a
process of its own and stores what it takes: nobody works it off. Others may name keys of a server that takes
connections and never answers, each as a client of its own; their answers do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias
from uuid import uuid4

from bench.sending import WORDS
from bench.server_cpu import cpu_of
from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.keys import public_pem
from federation.activitypub.signatures import SignatureKind, SigningKey, sign
from tests.federation.activitypub.remote import loaded, private_key

Serve: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ACTORS: Final = 50
WARM: Final = 4
"""So many of each actor are sent before: the keys are known then, and V8 has compiled what is hot."""
PAUSE_SECONDS: Final = 0.5
STUCK_PAUSE_SECONDS: Final = 5
"""Between two requests of somebody who names keys that cannot be had: what these cost by themselves is little."""
START_SECONDS: Final = 60
TAKEN: Final = 202

_TICKS: Final = os.sysconf("SC_CLK_TCK")


NODE: Final = [sys.executable, "-m", "federation", "--log-level", "error", "node", "serve"]


def settings(port: int) -> dict[str, str]:
    """Return those of a node of ours that is measured."""
    return {
        "BETTER_AUTH_URL": f"http://127.0.0.1:{port}",
        "FEDERATION_ACTIVITYPUB": "1",
        "FEDERATION_PORT": str(port),
        "FEDERATION_TRUSTED_PROXIES": "127.0.0.1",
    }


def prepare(environment: Mapping[str, str]) -> None:
    """Make the tables of a node of ours."""
    upgrade = [sys.executable, "-m", "federation", "upgrade"]
    subprocess.run(upgrade, check=True, env={**environment}, stdout=subprocess.DEVNULL)


async def receive_all(
    command: Sequence[str], environment: Mapping[str, str], *, port: int, each: int, connections: int, hanging: int
) -> dict[str, float]:
    """Let a server take `each` activities of every actor, and return what it took."""
    async with _actors() as own_url, _server(_hang) as stuck_url:
        warm, measured = (
            [_request(port, own_url, actor) for _ in range(many) for actor in range(ACTORS)] for many in (WARM, each)
        )
        with _process(command, environment) as process:
            await _listening(process, port)
            await _sent(port, warm[:ACTORS], 1)  # has the keys fetched, one at a time
            await _sent(port, warm[ACTORS:], connections)
            beside = [cpu_of(environment.get("DATABASE_URL", "")), cpu_of(environment.get("REDIS_URL", ""))]
            stuck = [asyncio.create_task(_name_stuck_keys(port, stuck_url, number)) for number in range(hanging)]
            if stuck:
                await asyncio.sleep(PAUSE_SECONDS)  # until the first of them wait for their keys
            before = [_cpu_of_process(process.pid), *(each.seconds() for each in beside)]
            started = time.perf_counter()
            waits = await _sent(port, measured, connections)
            seconds = time.perf_counter() - started
            after = [_cpu_of_process(process.pid), *(each.seconds() for each in beside)]
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
    return {
        "requests_per_s": len(measured) / seconds,
        "cpu_each_ms": (sum(after) - sum(before)) * 1000 / len(measured),
        "server_cpu_each_ms": (after[0] - before[0]) * 1000 / len(measured),
        "median_ms": statistics.median(waits) * 1000,
        "p95_ms": statistics.quantiles(waits, n=20)[-1] * 1000,
    }


def _request(port: int, server: str, actor: int, *, client: str | None = None, key: str | None = None) -> bytes:
    """Return a signed POST of the Create of a new note of 2.4 KB, as it goes over a connection."""
    who, own = f"{server}/users/{key or actor}", f"http://127.0.0.1:{port}"
    note = {"id": f"{who}/notes/{uuid4()}", "type": "Note", "attributedTo": who, "to": [own], "content": WORDS}
    activity = {
        "@context": "https://www.w3.org/ns/activitystreams",
        "id": f"{note['id']}#create",
        "type": "Create",
        "actor": who,
        "to": [own],
        "object": note,
    }
    body = json.dumps(activity).encode()
    headers = sign(
        SignatureKind.CAVAGE,
        method="POST",
        url=f"{own}/inbox",
        body=body,
        content_type=ACTIVITY_JSON,
        at=datetime.now(UTC),
        key=SigningKey(f"{who}#main-key", loaded(private_key())),
    )
    headers |= {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body))}
    headers["X-Forwarded-For"] = client or f"93.184.216.{actor + 1}"
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(["POST /inbox HTTP/1.1", *lines, "", ""]).encode() + body


async def _sent(port: int, requests: Sequence[bytes], connections: int) -> list[float]:
    """Send these over so many connections, each of which waits for its answer; return the seconds of each.

    Exits if one is not taken.
    """
    left, waits = iter(requests), []

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in left:
            started = time.perf_counter()
            if (status := await _asked(reader, writer, request)) != TAKEN:
                raise SystemExit(f"a request was answered by {status}")
            waits.append(time.perf_counter() - started)
        writer.close()

    await asyncio.gather(*(send() for _ in range(connections)))
    return waits


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    if length:
        await reader.readexactly(int(length))
    elif b"chunked" in head:
        await reader.readuntil(b"0\r\n\r\n")
    return int(head.split()[1])


async def _name_stuck_keys(port: int, server: str, number: int) -> None:
    """Send activities by new keys of a server that hangs, until this is cancelled; each of another network."""
    for turn in itertools.count():
        client = f"{60 + number}.{turn // 200}.{turn % 200}.1"
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await _asked(reader, writer, _request(port, server, 0, client=client, key=f"{number}-{turn}"))
            finally:
                writer.close()
        await asyncio.sleep(STUCK_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def _actors() -> AsyncIterator[str]:
    """Serve the documents of all actors, who have one key."""

    async def show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                url = f"http://127.0.0.1:{writer.get_extra_info('sockname')[1]}{head.split()[1].decode()}"
                key = {"id": f"{url}#main-key", "owner": url, "publicKeyPem": public_pem(private_key())}
                context = ["https://www.w3.org/ns/activitystreams", "https://w3id.org/security/v1"]
                shown = {"@context": context, "id": url, "type": "Person", "inbox": f"{url}/inbox", "publicKey": key}
                body = json.dumps(shown).encode()
                told = f"HTTP/1.1 200 OK\r\nContent-Type: {ACTIVITY_JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(told.encode() + body)

    async with _server(show) as url:
        yield url


async def _hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


@contextlib.asynccontextmanager
async def _server(serve: Serve) -> AsyncIterator[str]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # at the end of the loop; asyncio would log it
            await serve(reader, writer)

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env={**environment}, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _listening(process: subprocess.Popen[bytes], port: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while process.poll() is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(PAUSE_SECONDS)
    raise SystemExit(f"{process.args!r} has ended")


def _cpu_of_process(pid: int) -> float:
    """Return the processor time of a process so far, in seconds, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / _TICKS
