"""A node for the time of a test: what it takes over, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import federation
from db import DeliveryState
from federation import activitypub
from federation.base.errors import ConfigurationError
from federation.runtime.nodes import has_nodes
from federation.testing import (
    FakeRemote,
    FederationNode,
    MovableClock,
    SyncFakeRemote,
    SyncFederationNode,
    Trouble,
)
from tests.federation.testing.application import join, join_plainly, post, post_plainly
from tests.patience import until


async def test_its_settings_are_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no others; afterwards there are those of before, and nothing is left of the node."""
    monkeypatch.setenv("BETTER_AUTH_URL", "https://mine.example")
    monkeypatch.setenv("REDIS_URL", "redis://mine.example")
    monkeypatch.delenv("FEDERATION_ACTIVITYPUB", raising=False)
    before = dict(os.environ)
    async with FederationNode({"FEDERATION_DELIVERY_ATTEMPTS": "2"}, folder=tmp_path) as node:
        assert os.environ["BETTER_AUTH_URL"] == node.url == "https://node.example"
        assert os.environ["DATABASE_URL"] == node.database_url == f"sqlite:///{tmp_path}/federation.sqlite3"
        assert os.environ["FEDERATION_DELIVERY_ATTEMPTS"] == "2"
        assert node.settings.federation_delivery_attempts == 2
        assert "REDIS_URL" not in os.environ
    assert dict(os.environ) == before
    assert not has_nodes()


async def test_it_leaves_no_port_thread_or_file(tmp_path: Path) -> None:
    """Although the test ended with a remote that hangs, and left everything open."""
    async with FederationNode() as node:
        folder = Path(urlsplit(node.database_url).path[1:]).parent
        assert folder.exists()
        remote = FakeRemote(node)
        remote.open()
        remote.answers(Trouble.HANGS)
        await join(node)
        await post(node, remote.actor().recipient)
        await node.deliver()
        address = urlsplit(remote.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST /inbox HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        await until(lambda: len(remote.requests) == 2)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b"", "the connection was ended"
    writer.close()
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(address.hostname), int(address.port or 0)))
    assert [thread.name for thread in threading.enumerate() if "sqlite" in thread.name.lower()] == []


def test_a_loop_that_lasts_gets_the_node_of_each_test() -> None:
    """Where tests share a loop: the connections that it has to the first one are closed in it."""
    with asyncio.Runner() as runner:
        for number in (1, 2):
            with SyncFederationNode() as node:
                runner.run(join(node))
                to = activitypub.Recipient(id="https://b.example/bob", inbox="https://b.example/inbox")
                runner.run(post(node, to, number=number))
                assert len(node.owed()) == 1


def test_plain_code_owes_and_delivers() -> None:
    """Without a loop of its own."""
    with SyncFederationNode() as node, SyncFakeRemote(node) as remote:
        alice = join_plainly(node)
        remote.follow(alice)
        node.receive()
        post_plainly(node)
        assert [each.type for each in node.owed()] == ["Accept", "Create"]
        node.deliver()
        assert [each.type for each in remote.received] == ["Accept", "Create"]
        remote.away()
        post_plainly(node, number=2)
        node.deliver(within=timedelta(hours=1))
        assert [each.state for each in node.owed()] == [DeliveryState.HELD]
        remote.back()
        node.deliver(within=timedelta(hours=1))
        assert len(remote.received) == 3


async def test_a_process_has_one_at_a_time() -> None:
    """A second one, or one that comes late, says what to do."""
    async with FederationNode():
        with pytest.raises(RuntimeError, match="has a node already"):
            await FederationNode().__aenter__()
        async with federation.transaction():
            pass
    async with FederationNode() as again:
        assert again.owed() == []


async def test_what_is_not_open_says_so() -> None:
    node = FederationNode()
    with pytest.raises(RuntimeError, match="this FederationNode is not open"):
        await node.deliver()
    with pytest.raises(RuntimeError, match="this FederationNode is not open"):
        FakeRemote(node).open()
    async with node:
        with pytest.raises(RuntimeError, match="this FakeRemote is not open"):
            FakeRemote(node).actor()


async def test_bad_settings_are_named_and_leave_nothing() -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigurationError, match="FEDERATION_DELIVERY_ATTEMPTS"):
        await FederationNode({"FEDERATION_DELIVERY_ATTEMPTS": "no"}).__aenter__()
    assert dict(os.environ) == before
    assert not has_nodes()


async def test_who_has_no_actor_is_told_which() -> None:
    """The application has forgotten to add it."""
    async with FederationNode() as node, FakeRemote(node) as remote:
        with pytest.raises(ValueError, match="add_actor"):
            await post(node, remote.actor().recipient)


async def test_all_times_go_by_its_clock() -> None:
    """Also those of the nodes of other loops."""
    async with FederationNode() as node, FakeRemote(node) as remote:
        await join(node)
        node.clock.advance(timedelta(days=400))
        await post(node, remote.actor().recipient)
        [owed] = node.owed()
        assert owed.state is DeliveryState.READY
        assert abs(owed.owed_since - node.clock.now()) < timedelta(days=1)
        await node.deliver()
        assert len(remote.received) == 1


def test_a_clock_goes_one_way() -> None:
    clock = MovableClock()
    before = clock.now()
    clock.advance_to(before + timedelta(hours=1))
    clock.advance_to(before)
    assert clock.now() >= before + timedelta(hours=1)
    with pytest.raises(ValueError, match="never back"):
        clock.advance(timedelta(seconds=-1))
