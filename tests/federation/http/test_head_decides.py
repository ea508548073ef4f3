"""Requests of which the answer's head is all that matters: whatever its body is, there is an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from federation.http import client as client_module
from federation.http import connection
from federation.http.client import FederationClient
from federation.http.errors import BodyTooLarge, NetworkError
from federation.http.guard import AddressGuard
from federation.http.messages import Response
from tests.misbehaving import (
    Behaviour,
    MisbehavingServer,
    bad_chunk,
    drip_body,
    huge_body,
    reset,
    reset_mid_body,
    respond,
    stall_body,
    truncate,
)

MOST = 1000
BODIES: dict[str, tuple[Behaviour, int]] = {
    "as long as may be": (respond(200, body=bytes(MOST)), MOST),
    "longer": (respond(200, body=bytes(MOST + 1)), MOST),
    "endless": (huge_body(), MOST),
    "announced as endless": (huge_body(announced=True), MOST),
    "closed half-way": (truncate(), 50),
    "reset half-way": (reset_mid_body(), 50),
    "stalled half-way": (stall_body(), 50),
    "badly framed": (bad_chunk(), 2),
    "said to be compressed": (respond(200, {"Content-Encoding": "gzip"}, b"no gzip"), 7),
}


async def ask(client: FederationClient, url: str, *, head_decides: bool = True) -> Response:
    return await client.fetch(
        url, method="POST", body=b"{}", max_bytes=MOST, head_decides=head_decides, timeout=timedelta(seconds=5)
    )


@pytest.mark.parametrize(("behaviour", "length"), BODIES.values(), ids=BODIES)
async def test_a_body_of_any_kind_fails_nothing(
    client: FederationClient,
    server: MisbehavingServer,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behaviour,
    length: int,
) -> None:
    """What came of it within the limits is there, and the next exchange is not disturbed by the rest."""
    monkeypatch.setattr(connection, "BODY_PATIENCE", timedelta(seconds=0.2))
    server.upcoming += [behaviour, respond(202, body=b"next")]
    response = await ask(client, server.url)
    assert (response.status, len(response.body)) == (200, length)
    following = await ask(client, server.url)
    assert (following.status, following.body) == (202, b"next")


async def test_a_body_that_drips_is_not_waited_for_until_the_deadline(
    client: FederationClient, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the deadline, which is about the head, end the exchange while the body is read."""
    monkeypatch.setattr(connection, "BODY_PATIENCE", timedelta(seconds=0.3))
    server.default = drip_body()
    response = await client.fetch(server.url, head_decides=True, timeout=timedelta(seconds=0.2))
    assert response.status == 200
    assert 0 < len(response.body) < MOST


async def test_without_a_head_there_is_no_answer(client: FederationClient, server: MisbehavingServer) -> None:
    server.default = reset()
    with pytest.raises(NetworkError):
        await ask(client, server.url)


async def test_a_body_that_matters_is_refused_as_ever(client: FederationClient, server: MisbehavingServer) -> None:
    server.default = respond(200, body=bytes(MOST + 1))
    with pytest.raises(BodyTooLarge):
        await ask(client, server.url, head_decides=False)


class Breaking(httpx.AsyncByteStream):
    """A body that breaks off after a piece."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"<html>"
        raise httpx.ReadError("gone")


async def test_an_injected_transport_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BODY_PATIENCE", timedelta(seconds=0.2))
    bodies = [httpx.ByteStream(bytes(MOST + 1)), Breaking()]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=bodies.pop(0)))
    async with FederationClient(AddressGuard(), transport) as injected:
        found = [(await ask(injected, "https://b.example/")).body for _ in range(2)]
    assert found == [bytes(MOST), b"<html>"]
