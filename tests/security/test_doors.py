"""Every door has the bounds of the front door: who asks nothing keeps nobody out, whatever port it is."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from starlette.types import Receive, Scope, Send

from tests import warm
from tests.patience import PATIENCE_SECONDS, until
from tests.security.doors import HALF_A_HEAD, MOST, REQUEST, ask, idle_connections, open_door, serving, still_open
from workers.dashboard.serving import LIMITS, DashboardServer

SOON = timedelta(milliseconds=300)
A_WHILE = timedelta(seconds=2)
DESCRIPTORS, ENOUGH = 4_096, 2_400


@pytest.mark.parametrize("door", MOST)
async def test_idle_connections_shut_no_door(door: str) -> None:
    """230 of them, silent or with half a head: a good client is served, while they have all the time of the world."""
    async with open_door(door) as port, idle_connections(port, 230) as held:
        answers = [await ask(port) for _ in range(5)]

        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        assert still_open(held) <= MOST[door]


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough of them for both ends of 1 100 connections; a shell's usual limit is 1 024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    assert most >= ENOUGH, f"these tests need {ENOUGH} descriptors: raise the hard limit, `ulimit -Hn`, which is {hard}"
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("door", MOST)
async def test_more_connections_than_a_door_has_are_cut(door: str) -> None:
    """1 100 of them: no more than it may have take descriptors, and a good client is served."""
    async with open_door(door) as port, idle_connections(port, 1_100) as held:
        await until(lambda: still_open(held) <= MOST[door])

        assert (await ask(port)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("door", MOST)
async def test_one_address_has_a_share_of_each_door(door: str) -> None:
    """Its own idle connections go for its new ones, and not those of others."""
    async with open_door(door) as port:
        async with (
            idle_connections(port, 8, ["127.0.2.1"]) as others,
            idle_connections(port, 150, ["127.0.2.2"]) as own,
        ):
            await until(lambda: still_open(own) <= 100)

            assert still_open(others) == 8
        assert (await ask(port)).startswith(b"HTTP/1.1 200 ")


async def test_behind_a_proxy_no_address_has_a_share() -> None:
    """All connections are the proxy's."""
    limits = replace(LIMITS, per_client=2)
    server = DashboardServer(_silent, before_stop=lambda: None, behind_proxy=True, limits=limits)
    async with serving(server) as port, idle_connections(port, 8, ["127.0.2.1"]) as held:
        await until(lambda: len(server.server_state.connections) == 8)
        assert still_open(held) == 8


async def test_a_body_that_does_not_come_ends_its_connection() -> None:
    """Its time is shorter than that of an answer, which counts on from the head."""
    server = DashboardServer(_reading, before_stop=lambda: None, limits=replace(LIMITS, body=SOON))
    async with serving(server) as port:
        unfinished = HALF_A_HEAD.replace(b"GET", b"POST") + b"Content-Length: 2\r\n\r\nx"
        assert await ask(port, unfinished) == b""
        assert (await ask(port, unfinished.replace(b"Host", b"Connection: close\r\nHost") + b"x")).count(b"read")


async def test_a_stream_lives_for_as_long_as_it_is_read() -> None:
    """Longer than an answer may take; one whose reader takes nothing ends."""
    server = DashboardServer(_streaming, before_stop=lambda: None, limits=replace(LIMITS, answer=A_WHILE))
    async with serving(server) as port:
        answer = await ask(port)
        assert answer.count(b"tick") == TICKS

        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport reads, too
        writer.write(REQUEST.replace(b"/healthz", b"/flood"))
        await until(lambda: bool(server.server_state.tasks))
        await until(lambda: not server.server_state.connections)
        writer.transport.abort()


async def test_what_strangers_send_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The same warning comes once a minute, however often there is reason for it."""
    async with open_door("dashboard") as port:
        for _ in range(50):
            assert b" 400 " in await ask(port, b"nonsense\r\n\r\n")

    assert len(caplog.records) < 10


FULL = """
import asyncio, contextlib, json, logging, os, resource, sys
from tests.security.doors import open_door

logged = []
class Kept(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger().addHandler(Kept())

async def main():
    loop = asyncio.get_running_loop()
    told = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    async with open_door(sys.argv[1]) as port:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        print(port, flush=True)
        await told.readline()
        for each in taken:
            os.close(each)
        print(json.dumps(logged), flush=True)
        await told.readline()

asyncio.run(main())
"""


@pytest.mark.parametrize("door", MOST)
async def test_without_a_descriptor_left_a_door_is_quiet(door: str) -> None:
    """Each connection is cut at once, of which the log has one line a minute; with descriptors there are answers."""
    process = await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-c", FULL, door), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        port = int(await process.stdout.readline())
        answers = [await ask(port) for _ in range(200)]
        process.stdin.write(b"\n")
        logged = json.loads(await process.stdout.readline())
        served = await ask(port)
        process.stdin.write(b"\n")
        assert await process.wait() == 0

    assert answers == [b""] * 200
    assert [line.split()[0] for line in logged] == ["descriptors_short"]
    assert served.startswith(b"HTTP/1.1 200 ")


TICKS = 40


async def _silent(_scope: Scope, _receive: Receive, _send: Send) -> None:
    await asyncio.Event().wait()


async def _reading(_scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"read"})


async def _streaming(scope: Scope, _receive: Receive, send: Send) -> None:
    """Write something for twice as long as an answer may take, or more than anybody could take."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/flood":
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                await asyncio.sleep(0)
    for _ in range(TICKS):
        await asyncio.sleep(2 * A_WHILE.total_seconds() / TICKS)
        await send({"type": "http.response.body", "body": b"tick", "more_body": True})
    await send({"type": "http.response.body", "body": b""})
