"""Bodies are bounded in time and memory, whoever sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest
from starlette.requests import Request

from federation.node.bodies import BODY_WEIGHT, BodyReader
from federation.node.heavy import HEAVY_BYTES, HeavyWork
from federation.node.refusals import Refusal
from federation.node.shares import SHARES
from tests.patience import until

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
    reader = BodyReader(memory=100 * BODY_WEIGHT)

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


async def nobody() -> None:
    raise Refusal(403, "nobody vouches for you")


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_is_read_only_if_somebody_vouches_for_its_sender(announced: bool) -> None:
    """Refused unread by its announced length, or as soon as too much of it has come."""
    left = [b"x" * 1024] * 1024

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    asked = request(receive, **({"content-length": str(1024 * 1024)} if announced else {}))
    with pytest.raises(Refusal) as caught:
        async with BodyReader().read(asked, limit=2 * 1024 * 1024, vouch=nobody):
            pass

    assert caught.value.status == 403
    assert len(left) == 1024 - (0 if announced else HEAVY_BYTES // 1024 + 1)


async def test_a_small_body_needs_nobody_to_vouch_for_it() -> None:
    """Up to 64 KiB everybody may say what they want."""
    async with BodyReader().read(request(complete(b"x" * HEAVY_BYTES)), limit=HEAVY_BYTES, vouch=nobody) as body:
        assert len(body) == HEAVY_BYTES


async def test_large_bodies_are_worked_on_by_weight() -> None:
    """One waits until there is room for what it will take, however many times its bytes are free on the way in."""
    large = b"x" * (HEAVY_BYTES + 1)
    reader = BodyReader(heavy=HeavyWork(memory=len(large) * BODY_WEIGHT, patience=timedelta(milliseconds=20)))

    async with reader.read(request(complete(large)), limit=len(large)):
        refused = await refusal(reader, request(complete(large)), limit=len(large))
    async with reader.read(request(complete(large)), limit=len(large)) as body:
        pass

    assert (refused.status, refused.reason, refused.headers["Retry-After"]) == (503, "BODY_MEMORY", "5")
    assert len(body) == len(large)


CLIENT, NEIGHBOUR, STRANGER = ("8.8.8.1", "8.8.8.0/24"), ("8.8.8.2", "8.8.8.0/24"), ("9.9.9.9", "9.9.9.0/24")


@dataclass(eq=False)
class Sender:
    """A body of some bytes that never ends, and what came of it."""

    reader: BodyReader
    holders: Sequence[str]
    length: int
    refused: Refusal | None = None

    async def read(self) -> None:
        asked = request(sending(b"x" * self.length))
        try:
            async with self.reader.read(asked, limit=1000, holders=self.holders):
                pass
        except Refusal as refusal:
            self.refused = refusal


@asynccontextmanager
async def arriving(reader: BodyReader, *bodies: tuple[Sequence[str], int]) -> AsyncIterator[list[Sender]]:
    """Bodies that begin one after the other."""
    senders = [Sender(reader, holders, length) for holders, length in bodies]
    reading = []
    try:
        for sender in senders:
            reading.append(asyncio.create_task(sender.read()))
            await asyncio.sleep(0)
        yield senders
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def gave_way(senders: Sequence[Sender]) -> list[int]:
    return [number for number, sender in enumerate(senders) if sender.refused is not None]


async def test_the_slowest_body_of_a_client_gives_way_to_its_next() -> None:
    """Where the client has its share; those of others stay."""
    bodies = [(STRANGER, 60), (CLIENT, 60), (CLIENT, 30), (CLIENT, 30)]
    async with arriving(BodyReader(memory=100 * SHARES), *bodies) as senders:
        await until(lambda: bool(gave_way(senders)))
        assert gave_way(senders) == [1]

    refused = senders[1].refused
    assert refused is not None
    assert (refused.status, refused.reason) == (503, "BODY_MEMORY")


async def test_a_network_has_a_share_too() -> None:
    """In it, whoever has most gives way."""
    async with arriving(BodyReader(memory=100 * SHARES), (NEIGHBOUR, 20), (CLIENT, 60), (NEIGHBOUR, 30)) as senders:
        await until(lambda: bool(gave_way(senders)))
        assert gave_way(senders) == [1]


async def test_where_all_is_taken_the_slowest_body_of_the_largest_gives_way() -> None:
    """Whoever sends them at once gets in; its own are the last to be given up."""
    crowd = [((f"client-{number}",), 95) for number in range(SHARES - 1)]
    reader = BodyReader(memory=100 * SHARES)
    async with arriving(reader, (STRANGER, 50), (STRANGER, 49), *crowd) as senders:
        async with reader.read(request(complete(b"x" * 12)), limit=100, holders=CLIENT) as body:
            assert len(body) == 12

        await until(lambda: bool(gave_way(senders)))
        assert gave_way(senders) == [0]


async def test_one_body_is_within_every_share() -> None:
    """While it arrives and while it is worked on, however small the share."""
    asked = request(complete(b"x" * 150))
    async with BodyReader(memory=100 * SHARES).read(asked, limit=150, holders=CLIENT) as body:
        assert len(body) == 150


async def test_the_work_on_a_clients_bodies_has_a_share_for_which_they_wait() -> None:
    """Work ends by itself, so that nobody is refused who waits a moment; others do not wait for it."""
    reader = BodyReader(memory=100 * SHARES)
    begun: list[str] = []

    async def work(name: str, holders: Sequence[str]) -> None:
        async with reader.read(request(complete(b"x" * 10)), limit=100, holders=holders):
            begun.append(name)

    async with asyncio.TaskGroup() as working, reader.read(request(complete(b"x" * 10)), limit=100, holders=CLIENT):
        working.create_task(work("its next", CLIENT))
        working.create_task(work("another's", STRANGER))
        await until(lambda: bool(begun))
        assert begun == ["another's"]
    assert begun == ["another's", "its next"]
