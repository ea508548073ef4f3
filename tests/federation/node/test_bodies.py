"""Bodies are bounded in time and memory, whoever sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from starlette.requests import Request

from federation.node.bodies import BodyReader
from federation.node.refusals import Refusal

Message = dict[str, object]


def request(receive: Callable[[], Awaitable[Message]], **headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def sending(*chunks: bytes) -> Callable[[], Awaitable[Message]]:
    """The chunks, and then silence without an end."""
    left = list(chunks)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return receive


def complete(body: bytes) -> Callable[[], Awaitable[Message]]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def refusal(reader: BodyReader, asked: Request, limit: int = 100) -> Refusal:
    with pytest.raises(Refusal) as caught:
        async with reader.read(asked, limit=limit):
            pass
    return caught.value


async def test_a_body_that_never_ends_is_given_up() -> None:
    """408, and the connection closes: what may still come cannot be told from a next request."""
    reader = BodyReader(timeout=timedelta(milliseconds=20))

    refused = await refusal(reader, request(sending(b"a", b"b")))

    assert (refused.status, refused.code, refused.headers["Connection"]) == (408, "REQUEST_TIMEOUT", "close")


async def test_the_time_for_a_body_is_not_the_handlers() -> None:
    """Once the body is there, the work on it may take longer."""
    reader = BodyReader(timeout=timedelta(milliseconds=20))

    async with reader.read(request(complete(b"body")), limit=100) as body:
        await asyncio.sleep(0.05)

    assert body == b"body"


async def test_a_body_that_breaks_off_is_refused() -> None:
    """The answer reaches nobody, but the attempt ends as a refusal, not as a crash."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert (await refusal(BodyReader(), request(receive))).status == 408


async def test_an_endless_body_is_refused() -> None:
    """413 in the end, after a bounded amount of it was dropped."""
    chunk = b"x" * 65536

    async def receive() -> Message:
        return {"type": "http.request", "body": chunk, "more_body": True}

    assert (await refusal(BodyReader(), request(receive))).status == 413


@pytest.mark.parametrize("announced", [str(2**30), "9" * 5000])
async def test_an_announced_length_far_over_the_limit_is_refused_unread(announced: str) -> None:
    """413 before anything is received."""
    headers = {"content-length": announced}

    assert (await refusal(BodyReader(), request(sending(), **headers))).status == 413


async def test_all_bodies_together_have_a_limit_and_memory_comes_back() -> None:
    """503 while others hold the memory; room again as soon as they end."""
    reader = BodyReader(memory=100)

    async with reader.read(request(complete(b"x" * 60)), limit=100):
        refused = await refusal(reader, request(complete(b"x" * 60)))
    async with reader.read(request(complete(b"x" * 60)), limit=100) as body:
        pass

    assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
    assert len(body) == 60


async def test_a_moderate_body_over_the_limit_is_taken_and_dropped() -> None:
    """A client still sending when the 413 comes would see a reset connection instead."""
    left = [b"x" * 60] * 10

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    assert (await refusal(BodyReader(), request(receive))).status == 413
    assert left == []
