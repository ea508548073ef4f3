"""The gate: a blacklisted server is turned away from every endpoint, however it names itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from db import BlacklistedServer
from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from tests.federation.node.conftest import Node, on_both_databases
from tests.federation.node.remote_server import RemoteServer

EVIL = "https://evil.example"
REFUSED = (403, {"error": "Your server has been blacklisted."})


@pytest.mark.parametrize("path", ["/discover", FOLLOWS_PATH, POSTS_PATH])
@pytest.mark.parametrize("header", ["Origin", "X-Federation-Origin"])
@pytest.mark.parametrize("claimed", [EVIL, "HTTPS://Evil.example:443/"])
async def test_a_blacklisted_server_in_a_header_is_refused(node: Node, path: str, header: str, claimed: str) -> None:
    """403 without a code, before anything else is looked at."""
    await node.blacklist(EVIL)

    response = await node.client.post(path, headers={header: claimed})

    assert (response.status_code, response.json()) == REFUSED


async def test_a_blacklisted_server_may_not_read_either(node: Node) -> None:
    """GET is gated, too."""
    await node.blacklist(EVIL)

    response = await node.client.get("/discover", headers={"Origin": EVIL})

    assert (response.status_code, response.json()) == REFUSED


@pytest.mark.parametrize("path", ["/discover", FOLLOWS_PATH])
@pytest.mark.parametrize("member", ["url", "serverUrl"])
async def test_a_blacklisted_server_in_the_body_is_refused(node: Node, path: str, member: str) -> None:
    """Also if the headers say nothing."""
    await node.blacklist(EVIL)

    response = await node.send(path, json.dumps({member: EVIL}).encode(), {"Content-Type": "application/json"})

    assert (response.status_code, response.json()) == REFUSED


async def test_naming_ourselves_as_origin_opens_nothing(node: Node) -> None:
    """Anyone can write our name into a header."""
    await node.blacklist(EVIL)

    response = await node.client.post(
        FOLLOWS_PATH, headers={"Origin": "https://b.example", "X-Federation-Origin": EVIL}
    )

    assert (response.status_code, response.json()) == REFUSED


async def test_a_blacklisted_author_is_refused_without_headers(node: Node, peer: RemoteServer) -> None:
    """The name inside the envelope counts as well; the registered, soundly signed post is not stored."""
    await node.blacklist(peer.url)

    response = await node.send(
        POSTS_PATH, peer.delivery(peer.post(), "FEDERATE_POST", node.keys), {"Content-Type": "application/json"}
    )

    assert (response.status_code, response.json()) == REFUSED
    assert await node.posts() == []


@pytest.mark.parametrize("claimed", [EVIL, EVIL + "/", "HTTPS://EVIL.example.:443"])
async def test_an_entry_in_another_spelling_is_of_the_same_server(node: Node, claimed: str) -> None:
    """A list kept by hand may hold a trailing slash."""
    await node.blacklist(EVIL + "/")

    response = await node.client.get("/discover", headers={"Origin": claimed})

    assert (response.status_code, response.json()) == REFUSED


@pytest.mark.parametrize("path", ["/discover", FOLLOWS_PATH, POSTS_PATH])
@pytest.mark.parametrize("claimed", ["https://evil.example", "http://a.b.evil.example:8080", "https://A.Evil.example."])
async def test_a_blacklisted_domain_is_refused_with_all_below_it(node: Node, path: str, claimed: str) -> None:
    """In a header and in the body, with any scheme and port."""
    await node.blacklist("*.evil.example")

    in_header = await node.client.post(path, headers={"X-Federation-Origin": claimed})
    in_body = await node.send(path, json.dumps({"url": claimed}).encode(), {"Content-Type": "application/json"})

    assert (in_header.status_code, in_header.json()) == REFUSED
    assert (in_body.status_code, in_body.json()) == REFUSED


async def test_a_neighbour_of_a_blacklisted_domain_is_welcome(node: Node, peer: RemoteServer) -> None:
    """A name that only ends alike is another domain."""
    await node.blacklist("*.notb.example")
    await node.blacklist(f"*.{peer.url.removeprefix('https://')}.org")

    assert (await node.post(peer)).status_code == 200


async def test_an_author_of_a_blacklisted_domain_is_refused_under_another_name(
    node: Node, peer: RemoteServer, other: RemoteServer
) -> None:
    """Headers that name somebody who is welcome, or us, open nothing: the signed author counts."""
    await node.blacklist(f"*.{peer.url.removeprefix('https://')}")
    body = peer.delivery(peer.post(), "FEDERATE_POST", node.keys)

    for claimed in (other.url, "https://b.example"):
        headers = {"Content-Type": "application/json", "Origin": claimed, "X-Federation-Origin": claimed}
        response = await node.send(POSTS_PATH, body, headers)
        assert (response.status_code, response.json()) == REFUSED
    assert await node.posts() == []


async def test_an_expired_entry_refuses_nobody(node: Node, peer: RemoteServer) -> None:
    """Its row may stay."""
    past = datetime(2025, 1, 1, tzinfo=UTC)
    await node.add(BlacklistedServer(server_url=peer.url, created_at=past, reason="test", expires_at=past))
    node.registry.forget(peer.url)

    assert (await node.post(peer)).status_code == 200


@on_both_databases
async def test_while_the_blacklist_was_never_read_everybody_is_told_to_come_back(
    node: Node, peer: RemoteServer
) -> None:
    """Whoever asks might be on it."""
    async with node.database.transaction() as session:
        await session.execute(text("ALTER TABLE blacklist_revision RENAME TO gone"))

    response = await node.client.get("/discover", headers={"Origin": peer.url})

    assert response.status_code >= 500
    async with node.database.transaction() as session:
        await session.execute(text("ALTER TABLE gone RENAME TO blacklist_revision"))
    assert (await node.client.get("/discover", headers={"Origin": peer.url})).status_code == 200


@pytest.mark.parametrize("claimed", ["null", "\x00", "x" * 5000, "https://[", ""])
async def test_an_origin_that_is_no_url_is_ignored_by_the_gate(node: Node, claimed: str) -> None:
    """Junk names nobody, and breaks nothing."""
    body = json.dumps({"url": claimed, "serverUrl": {"a": 1}}).encode()

    response = await node.discover(body)

    assert (response.status_code, response.json()) == (400, {"error": "Invalid method"})
