"""GET `/discover`, and what POST makes of requests that are neither of the two it knows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, update
from sqlmodel import col

from db import Server
from federation.node.discover import MAX_PEERS
from federation.protocol.discovery import MAX_DISCOVER_BYTES, parse_discover_document
from tests.federation.node.conftest import OWN_URL, Node
from tests.federation.node.remote_server import RemoteServer


async def test_the_document_identifies_this_node_and_its_healthy_peers(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """Our own parser reads it; peers come with the one seen last first, sick ones not at all."""
    await node.know(other)
    await node.know(RemoteServer(url="https://sick.example", keys=node.keys))
    await node.registry.mark_unhealthy("https://sick.example", "TIMEOUT")
    async with node.database.transaction() as session:
        later = datetime.now(UTC) + timedelta(minutes=1)
        await session.execute(update(Server).where(col(Server.url) == peer.url).values(last_seen=later))

    response = await node.client.get("/discover")

    document = parse_discover_document(response.content)
    assert (response.status_code, document.url) == (200, OWN_URL)
    assert document.public_key == node.keys.signing.public_text
    assert document.encryption_public_key == node.keys.encryption.public_text
    assert response.json()["peers"] == [{"url": peer.url, "isHealthy": True}, {"url": other.url, "isHealthy": True}]
    assert response.headers["content-type"] == "application/json"


async def test_the_document_stays_readable_however_many_servers_register(node: Node) -> None:
    """Peers refuse documents over 256 KiB; the longest names of a full list stay below."""
    name = ".".join(["a" * 61] * 4)
    now = datetime.now(UTC)
    async with node.database.transaction() as session:
        await session.execute(delete(Server))
        for number in range(MAX_PEERS + 1):
            session.add(
                Server(
                    url=f"https://{number:03}{name}:65535",
                    public_key=str(number),
                    encryption_public_key=str(number),
                    last_seen=now,
                    created_at=now,
                    updated_at=now,
                    is_healthy=True,
                )
            )

    response = await node.client.get("/discover")

    assert len(response.json()["peers"]) == MAX_PEERS
    assert len(response.content) < MAX_DISCOVER_BYTES


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 16_000], ids=["empty", "cut", "bytes", "deep"])
async def test_a_body_that_is_not_json_is_invalid(node: Node, body: bytes) -> None:
    """400 INVALID_JSON."""
    response = await node.discover(body)

    assert (response.status_code, response.json()) == (400, {"error": "Invalid JSON", "code": "INVALID_JSON"})


@pytest.mark.parametrize("body", [b"null", b"[]", b"{}", b'{"method":"register"}', b'{"method":["REGISTER"]}'])
async def test_another_method_is_invalid(node: Node, body: bytes) -> None:
    """400, also for JSON that is no object."""
    response = await node.discover(body)

    assert (response.status_code, response.json()) == (400, {"error": "Invalid method"})


async def test_a_large_question_is_refused(node: Node) -> None:
    """Nothing asked here needs more than 16 KiB."""
    response = await node.discover(b" " * 16_385)

    assert response.status_code == 413


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/discover/", "/"])
async def test_nothing_else_is_served(node: Node, path: str) -> None:
    """No generated documentation, no redirects."""
    assert (await node.client.get(path)).status_code == 404


async def test_other_http_methods_are_refused(node: Node) -> None:
    """405 rather than a guess."""
    assert (await node.client.put("/discover")).status_code == 405
