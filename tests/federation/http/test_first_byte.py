"""How long a server may take to begin its answer, and how long to end it: two patiences, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from federation.http.client import FederationClient
from federation.http.errors import NetworkError
from federation.http.messages import Response
from tests.federation.http.conftest import LOOPBACK
from tests.simulation.loop import VirtualLoop

SECOND = timedelta(seconds=1)


class Slow(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """A server whose response begins after so many seconds, and whose body takes so many more."""

    def __init__(self, begins: float, lasts: float) -> None:
        self._begins = begins
        self._lasts = lasts

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(self._begins)
        return httpx.Response(200, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(self._lasts)
        yield b"}"


def fetch(begins: float, lasts: float, *, first_byte: timedelta | None) -> tuple[Response | NetworkError, float]:
    """What came of an exchange with ten seconds, and after how many."""
    loop = VirtualLoop()

    async def exchange() -> Response | NetworkError:
        async with FederationClient(LOOPBACK, Slow(begins, lasts)) as client:
            try:
                return await client.fetch("http://127.0.0.1/", timeout=10 * SECOND, first_byte=first_byte)
            except NetworkError as error:
                return error

    try:
        return loop.run_until_complete(exchange()), loop.time()
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("begins", "lasts", "first_byte", "phase", "after"),
    [
        (4, 0, 3 * SECOND, "before the response", 3),
        (2, 9, 3 * SECOND, "while reading the body", 10),
        (11, 0, None, "before the response", 10),
        (11, 0, 20 * SECOND, "before the response", 10),
    ],
    ids=["no-first-byte", "no-last-byte", "no-patience-of-its-own", "patience-beyond-the-deadline"],
)
def test_each_patience_ends_the_exchange(
    begins: float, lasts: float, first_byte: timedelta | None, phase: str, after: float
) -> None:
    """With its phase; the shorter one never extends the whole."""
    failed, seconds = fetch(begins, lasts, first_byte=first_byte)
    assert isinstance(failed, NetworkError)
    assert (failed.code, phase in failed.detail, seconds) == ("TIMEOUT", True, after)


def test_a_response_that_began_in_time_has_the_whole_deadline_for_its_body() -> None:
    """What a suspect server is not given any more once it answers is time to begin."""
    response, seconds = fetch(2, 7, first_byte=3 * SECOND)
    assert isinstance(response, Response)
    assert (response.body, seconds) == (b"{}", 9)
