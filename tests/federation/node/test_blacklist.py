"""The gate: a blacklisted server is turned away from every endpoint, however it names itself."""

from __future__ import annotations

import json

import pytest

from federation.node.app import FOLLOWS_PATH, POSTS_PATH
from tests.federation.node.conftest import Node
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


async def test_an_entry_in_another_spelling_still_matches_its_own(node: Node) -> None:
    """A list kept by hand may hold a trailing slash: it works for those who write it so."""
    await node.blacklist(EVIL + "/")

    response = await node.client.get("/discover", headers={"Origin": EVIL + "/"})

    assert (response.status_code, response.json()) == REFUSED


@pytest.mark.parametrize("claimed", ["null", "\x00", "x" * 5000, "https://[", ""])
async def test_an_origin_that_is_no_url_is_ignored_by_the_gate(node: Node, claimed: str) -> None:
    """Junk names nobody, and breaks nothing."""
    body = json.dumps({"url": claimed, "serverUrl": {"a": 1}}).encode()

    response = await node.discover(body)

    assert (response.status_code, response.json()) == (400, {"error": "Invalid method"})
