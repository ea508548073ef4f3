"""The door of `/proxy` and of `/discover`: size, origin, and how often; and what is no request at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ipaddress import ip_network

import httpx
import pytest

from federation.node.clients import ClientStanding
from federation.node.limits import MemoryWindows
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH
from tests.federation.node.conftest import Node, serving
from tests.federation.node.remote_server import RemoteServer

ORIGIN = "https://a.example"
CLIENT = "8.8.8.8"


def code(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json().get("code")


async def ask(
    node: Node, body: bytes | AsyncIterator[bytes] = b"{}", origin: str | None = ORIGIN, **headers: str
) -> httpx.Response:
    claimed = {} if origin is None else {"X-Federation-Origin": origin}
    return await node.client.post(RELAY_PATH, content=body, headers={**claimed, **headers})


async def stream(size: int) -> AsyncIterator[bytes]:
    """So many bytes, announced nowhere."""
    for start in range(0, size, 65536):
        yield b" " * min(65536, size - start)


@pytest.mark.parametrize("origin", [ORIGIN, None])
async def test_an_announced_length_over_the_limit_is_refused_first(node: Node, origin: str | None) -> None:
    """413 before anything else is looked at."""
    assert code(await ask(node, b" " * (MAX_RELAYED_BYTES + 1), origin)) == (413, "PAYLOAD_TOO_LARGE")


async def test_a_gigantic_announcement_is_not_waited_for(node: Node) -> None:
    """413, though not a byte of it comes."""
    assert code(await ask(node, b"", **{"Content-Length": str(10**10)})) == (413, "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize("size", [MAX_RELAYED_BYTES + 1, 32 * 1024 * 1024])
async def test_a_body_that_grows_over_the_limit_is_refused(node: Node, size: int) -> None:
    """413 by counting, also where the rest is never read."""
    assert code(await ask(node, stream(size))) == (413, "PAYLOAD_TOO_LARGE")


async def test_a_body_at_the_limit_is_read(node: Node) -> None:
    """It is no JSON, and that is what is wrong with it."""
    assert code(await ask(node, b" " * MAX_RELAYED_BYTES)) == (400, "INVALID_PROXY_DATA")
    assert code(await ask(node, stream(MAX_RELAYED_BYTES))) == (400, "INVALID_PROXY_DATA")


@pytest.mark.parametrize("origin", [None, ""])
async def test_a_request_says_for_whom_it_is(node: Node, origin: str | None) -> None:
    """400 without the header, whatever the body."""
    assert code(await ask(node, stream(MAX_RELAYED_BYTES + 1), origin)) == (400, "MISSING_FED_ORIGIN_HEADER")


BODIES = {
    "empty": b"",
    "not JSON": b"relay me",
    "not UTF-8": b'{"method":"\xff"}',
    "null": b"null",
    "array": b"[]",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "no method": b"{}",
    "unknown method": b'{"method":"PING"}',
    "method no text": b'{"method":["PROXY"]}',
    "no payload": b'{"method":"TARGETED"}',
    "payload no envelope": b'{"method":"TARGETED","payload":{"iv":"x"}}',
    "payload with NUL": b'{"method":"TARGETED","payload":'
    b'{"iv":"\\u0000","ciphertext":"","authTag":"","ephemeralPublicKey":""}}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_what_is_no_proxy_request_is_invalid(node: Node, body: bytes) -> None:
    """400 INVALID_PROXY_DATA."""
    assert code(await ask(node, body)) == (400, "INVALID_PROXY_DATA")


@asynccontextmanager
async def public(database_url: str, address: str = CLIENT) -> AsyncIterator[Node]:
    """A node whose requests come from a public address, or through a proxy it trusts; windows alone refuse them."""
    async with serving(
        database_url,
        windows=MemoryWindows(),
        client_address=address,
        proxies=[ip_network("10.0.0.0/8")],
        standing=ClientStanding(refusals=1_000),
    ) as node:
        yield node


def origins() -> Iterator[str]:
    return (f"https://{number}.example" for number in range(1000))


async def relay(node: Node, sender: RemoteServer, client: str = CLIENT, **changes: object) -> httpx.Response:
    """The answer to a request to relay from *sender* to itself, which is refused once the sender is known."""
    body = sender.proxied("text", sender.url, node.keys, **changes)
    return await ask(node, body, **{"Content-Type": "application/json", "X-Forwarded-For": client})


async def test_an_origin_has_a_hundred_a_minute(database_url: str, node: Node, peer: RemoteServer) -> None:
    """The next is told when to come back; who writes its name, with other keys or from elsewhere, spends another's."""
    wrong = {"publicSigningKey": node.keys.signing.public_text}
    async with public(database_url, "10.0.0.1") as visited:
        forged = [await relay(visited, peer, "9.9.9.9", **wrong) for _ in range(15)]
        elsewhere = [await relay(visited, peer, "9.9.9.9") for _ in range(100)]
        taken = [await relay(visited, peer) for _ in range(100)]
        refused = await relay(visited, peer)

    assert {code(each) for each in forged} == {(403, "INCORRECT_KEYS")}
    assert {code(each) for each in (*elsewhere, *taken)} == {(400, "INVALID_PROXY_DATA")}
    assert code(refused) == (429, "RATE_LIMITED")
    assert refused.headers["Retry-After"] == "60"


async def test_an_address_has_a_hundred_and_twenty_a_minute(database_url: str, node: Node) -> None:
    """Whatever origins it claims, and whatever it says of its address."""
    async with public(database_url) as visited:
        answers = [
            await ask(visited, origin=origin, **{"X-Forwarded-For": f"1.1.1.{number}"})
            for number, origin in zip(range(121), origins(), strict=False)
        ]

    assert [answer.status_code for answer in answers] == [400] * 120 + [429]
    assert code(answers[-1]) == (429, None)
    assert answers[-1].headers["Retry-After"] == "60"


async def test_clients_behind_a_trusted_proxy_are_told_apart(database_url: str, node: Node) -> None:
    """By what the proxy appended; what they wrote before that does not count."""
    async with public(database_url, "10.0.0.1") as visited:
        for number, origin in zip(range(120), origins(), strict=False):
            await ask(visited, origin=origin, **{"X-Forwarded-For": f"1.1.1.{number}, {CLIENT}"})
        refused = await ask(visited, **{"X-Forwarded-For": f"1.1.1.1, {CLIENT}"})
        another = await ask(visited, **{"X-Forwarded-For": "9.9.9.9"})

    assert (refused.status_code, another.status_code) == (429, 400)


async def test_an_address_has_ten_introductions_an_hour(database_url: str, node: Node, peer: RemoteServer) -> None:
    """The next is told to come back in one; looking is free."""
    async with public(database_url) as visited:
        answers = [await visited.discover(b"{}") for _ in range(11)]
        shown = await visited.client.get("/discover")

    assert [answer.status_code for answer in answers] == [400] * 10 + [429]
    assert (answers[-1].headers["Retry-After"], shown.status_code) == ("3600", 200)
