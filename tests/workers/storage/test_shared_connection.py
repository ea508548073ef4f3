"""What calls that share one connection to a Redis server can do to each other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TypeAlias

import pytest
from redis import exceptions
from redis.asyncio import ConnectionPool, Redis

from tests.servers import ValkeyProcess
from workers import StorageUnavailable
from workers.storage.on_redis.server import RedisServer
from workers.storage.on_redis.shared_connection import SharedConnection
from workers.testing.steps import PATIENCE

Serve: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GREETED = b"+OK\r\n+OK\r\n"
"""What a server says to redis-py, which tells its name and version."""
SHORT = timedelta(milliseconds=100)
LARGE = "x" * 1_000_000


@asynccontextmanager
async def shared(url: str, seconds: float = PATIENCE, *, text: bool = True) -> AsyncIterator[SharedConnection]:
    pool = ConnectionPool.from_url(url, protocol=2, decode_responses=text)
    try:
        yield SharedConnection(
            await pool.get_connection(),  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            seconds,
            text=text,
        )
    finally:
        await pool.disconnect()


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # what it has not read, it has not taken
    server = await asyncio.start_server(serve, sock=listener)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that says this to an ECHO, and then ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETED)
        await reader.readuntil(b"ECHO")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with listening(serve) as url:
        yield url


async def test_each_call_gets_its_own_answers(redis_url: str) -> None:
    """Also if the calls beside it were given up, whose answers nobody takes."""
    async with shared(redis_url) as connection:
        calls = [
            asyncio.create_task(connection.ask([("ECHO", str(number))] * (number % 3 + 1))) for number in range(100)
        ]
        await asyncio.sleep(0)  # all are sent
        for call in calls[::2]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[1::2] == [[str(number)] * (number % 3 + 1) for number in range(1, 100, 2)]
        assert await connection.ask([("ECHO", "last")]) == ["last"]


async def test_an_error_is_an_answer(redis_url: str) -> None:
    """The commands after it are answered, too."""
    async with shared(redis_url) as connection:
        before, wrong, after = await connection.ask([("ECHO", "1"), ("EVALSHA", "0" * 40, 0), ("ECHO", "2")])
    assert (before, type(wrong), after) == ("1", exceptions.NoScriptError, "2")


async def test_bytes_of_others_go_both_ways(redis_url: str) -> None:
    """As surrogates where replies are text, and as they are elsewhere."""
    async with shared(redis_url) as connection:
        assert await connection.ask([("ECHO", "\udcff")]) == ["\udcff"]
    async with shared(redis_url, text=False) as connection:
        assert await connection.ask([("ECHO", b"\xff")]) == [b"\xff"]


async def test_a_server_that_goes_on_answering_is_not_silent() -> None:
    """However long the last of several calls has to wait for its own answer."""
    names = [f"call-{number}" for number in range(4)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETED)
        for name in names:
            await asyncio.sleep(0.5)  # is how slow the server is
            writer.write(f"+{name}\r\n".encode())
        await reader.read()
        writer.close()

    async with asyncio.timeout(PATIENCE), listening(serve) as url, shared(url, 1.5) as connection:
        assert await asyncio.gather(*(connection.ask([("ECHO", name)]) for name in names)) == [[name] for name in names]


async def test_an_answer_that_stops_after_half_is_none() -> None:
    """The server is absent when it has been silent for as long as that may last, counted from the last byte."""
    stopped = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETED)
        await reader.readuntil(b"ECHO")
        await asyncio.sleep(0.5)  # is how slow the server is
        writer.write(b"$10\r\nhalf")
        await writer.drain()
        stopped.set_result(asyncio.get_running_loop().time())
        await reader.read()
        writer.close()

    async with asyncio.timeout(PATIENCE), listening(serve) as url, shared(url, 1) as connection:
        with pytest.raises(TimeoutError):
            await connection.ask([("ECHO", "x")])
        assert connection.closed
        assert asyncio.get_running_loop().time() - await stopped >= 0.9


async def test_what_takes_long_to_send_is_no_silence() -> None:
    """As long as the server takes more of it."""
    size, pace = 16_000_000, 5_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETED)
        taken = 0
        while taken < size:
            taken += (read := len(await reader.read(pace // 50)))
            await asyncio.sleep(read / pace)  # is how slow the line is
        writer.write(b"+all\r\n")
        await reader.read()
        writer.close()

    async with asyncio.timeout(3 * PATIENCE), listening(serve) as url, shared(url, 2) as connection:
        assert await connection.ask([("ECHO", "x" * size)]) == ["all"]


async def test_a_connection_that_was_idle_is_not_silent(redis_url: str) -> None:
    """What counts is how long nothing has come although something was asked."""
    async with shared(redis_url, 2) as connection:
        await connection.ask([("PING",)])
        await asyncio.sleep(1.5)  # is the idle time
        assert await connection.ask([("BLPOP", "test-nothing", 1)]) == [None]


async def test_a_silent_server_is_given_up(own_server: ValkeyProcess) -> None:
    """All calls fail in time, and the next one has a connection of its own."""
    server = RedisServer(own_server.url, SHORT, scripts=list, text=True)
    await server.open()
    own_server.hang()
    answers = await asyncio.gather(*(server.run([("PING",)]) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageUnavailable] * 3
    own_server.kill()
    own_server.restart()
    assert await server.run([("PING",)]) == ["PONG"]
    await server.close()


async def test_a_connection_that_is_given_up_answers_first(redis_url: str) -> None:
    """What was asked on it before, as when a cluster's queue has moved meanwhile; it takes nothing more."""
    async with shared(redis_url) as connection:
        asked = asyncio.create_task(connection.ask([("BLPOP", "test-nothing", 0.1)]))
        await asyncio.sleep(0)  # it is sent
        await connection.close_when_answered()
        assert await asked == [None]
        with pytest.raises(exceptions.ConnectionError):
            await connection.ask([("PING",)])


async def test_a_server_that_ends_the_connection_fails_its_calls(redis_url: str) -> None:
    """At once, and what is asked next is asked on another one."""
    server = RedisServer(redis_url, timedelta(seconds=PATIENCE), scripts=list, text=True)
    await server.open()
    [number] = await server.run([("CLIENT", "ID")])
    waiting = asyncio.create_task(server.run([("BLPOP", "test-nothing", 0)]))
    await asyncio.sleep(0)  # it is sent
    async with Redis.from_url(redis_url) as client:
        await client.client_kill_filter(_id=number)
    with pytest.raises(StorageUnavailable):
        await waiting
    [another] = await server.run([("CLIENT", "ID")])
    assert another != number
    await server.close()


@pytest.mark.parametrize("answer", [b"what is this\r\n", b"+1\r\n+unasked\r\n"])
async def test_a_server_that_answers_something_else_is_not_listened_to(answer: bytes) -> None:
    """Whose answer it would be is unknown, so the connection ends, and no later call gets it."""
    async with asyncio.timeout(PATIENCE), answering(answer) as url, shared(url) as connection:
        with contextlib.suppress(exceptions.ConnectionError):
            assert await connection.ask([("ECHO", "1")]) == ["1"]
        with pytest.raises(exceptions.ConnectionError):
            await connection.ask([("ECHO", "2")])


async def test_what_a_server_does_not_read_is_not_piled_up(own_server: ValkeyProcess) -> None:
    """Calls wait until it reads on, or their time is over; they have not been sent then."""
    async with shared(own_server.url, SHORT.total_seconds()) as connection:
        own_server.hang()
        calls = [asyncio.create_task(connection.ask([("ECHO", LARGE)])) for _ in range(30)]
        await asyncio.sleep(0)
        assert connection._transport.get_write_buffer_size() < 3 * len(LARGE)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {TimeoutError, exceptions.ConnectionError}
