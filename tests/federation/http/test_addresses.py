"""What the client makes of names and addresses: refused, unresolvable, or not to be connected to."""

from __future__ import annotations

import asyncio
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from federation.base.settings.types import parse_allowed_hostnames
from federation.http.client import FederationClient
from federation.http.errors import BlockedAddress, BlockedUrl, NetworkError
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.http.threat_policy import NetworkErrorCode as Code
from federation.node.callback import MAX_CALLBACKS
from tests.federation.http.conftest import SHORT, ScriptedResolver
from tests.misbehaving import (
    MisbehavingServer,
)
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port


async def test_refused(client: FederationClient) -> None:
    """A port nobody listens on is CONN_REFUSED."""
    with pytest.raises(NetworkError) as caught:
        await client.fetch(f"http://127.0.0.1:{free_port()}")
    assert caught.value.code is Code.CONN_REFUSED


async def test_refused_on_every_address() -> None:
    """A name with several addresses, all of which refuse, is CONN_REFUSED."""
    resolver = ScriptedResolver(b_test=[["127.0.0.1", "127.0.0.2"]])
    guard = AddressGuard(frozenset({"b.test"}))
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch(f"http://b.test:{free_port()}")
    assert caught.value.code is Code.CONN_REFUSED


async def test_name_that_does_not_resolve() -> None:
    """NXDOMAIN is DNS_BLOCKED."""
    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=ScriptedResolver())) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch("https://b.test/inbox")
    assert (caught.value.code, caught.value.origin) == (Code.DNS_BLOCKED, "https://b.test")


async def test_resolver_that_hangs() -> None:
    """A name service that does not answer is a TIMEOUT at the deadline."""

    class HangingResolver:
        async def resolve(self, host: str, port: int) -> list[str]:
            await asyncio.Event().wait()
            return []

    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=HangingResolver())) as client:
        with pytest.raises(NetworkError) as caught:
            await client.fetch("https://b.test/inbox", timeout=SHORT)
    assert caught.value.code is Code.TIMEOUT


@pytest.mark.parametrize("host", ["localhost", "localhost.", "foo.localhost", "intranet", "b.example"])
async def test_name_that_leads_to_loopback_is_refused(server: MisbehavingServer, host: str) -> None:
    """A name that resolves to loopback is refused, retryably, before any connection."""
    names = ("localhost", "foo_localhost", "intranet", "b_example")
    resolver = ScriptedResolver(**{name: [["127.0.0.1"]] for name in names})
    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for(host))
    assert server.connections == 0


async def test_mixed_answer_is_refused(server: MisbehavingServer) -> None:
    """One internal address among public ones is enough to refuse the name."""
    resolver = ScriptedResolver(b_test=[["8.8.8.8", "127.0.0.1"]])
    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for("b.test"))
    assert server.connections == 0


async def test_rebinding_between_check_and_connection(server: MisbehavingServer) -> None:
    """The name is asked once, and the vetted address dialled: a second, other answer is never used."""
    resolver = ScriptedResolver(b_test=[["127.0.0.1"], ["127.0.0.2"]])
    guard = AddressGuard(frozenset({"b.test"}))
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        assert (await client.fetch(server.url_for("b.test"))).ok
    assert (resolver.asked, server.requests[0].headers["host"]) == (["b.test"], f"b.test:{server.port}")


async def test_block_heals_with_the_name(server: MisbehavingServer) -> None:
    """A refused answer is not remembered: the name is asked again and again vetted."""
    resolver = ScriptedResolver(b_test=[["10.0.0.1"], ["192.168.0.1"]])
    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        for address in ("10.0.0.1", "192.168.0.1"):
            with pytest.raises(BlockedAddress, match=address):
                await client.fetch(server.url_for("b.test"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_literal_address_is_refused_without_asking(server: MisbehavingServer, host: str) -> None:
    """A literal loopback address is refused for good, whoever would have resolved it."""
    resolver = ScriptedResolver()
    guard = AddressGuard()
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        with pytest.raises(BlockedUrl):
            await client.fetch(server.url_for(host))
    assert (server.connections, resolver.asked) == (0, [])


async def test_system_resolver_finds_localhost(server: MisbehavingServer) -> None:
    """Without an injected resolver the operating system's answers are vetted: an exempt localhost is reached."""
    guard = AddressGuard(frozenset({"localhost"}))
    async with FederationClient(guard) as client:
        assert (await client.fetch(server.url_for("localhost"))).ok
    async with FederationClient(AddressGuard()) as client:
        with pytest.raises(BlockedAddress):
            await client.fetch(server.url_for("localhost"))


async def test_lookups_that_hang_leave_room_for_others(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers can make us look up names: as many as they can have under way do not delay another's."""
    released = threading.Event()
    getaddrinfo = socket.getaddrinfo

    def slow_for_strangers(host: str, port: int, **options: Any) -> Any:
        if host.endswith(".test"):
            released.wait(PATIENCE_SECONDS)
        return getaddrinfo("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_for_strangers)
    guard = AddressGuard(frozenset({"known"}))
    async with FederationClient(guard) as client:
        for batch in range(3):  # a lookup that was given up goes on for about two deadlines more
            lookups = [client.fetch(f"http://{batch}-{n}.test", timeout=SHORT) for n in range(MAX_CALLBACKS)]
            failures = await asyncio.gather(*lookups, return_exceptions=True)
            assert {str(failure).partition(" ")[0] for failure in failures} == {"TIMEOUT"}
        try:
            assert (await client.fetch(server.url_for("known"), timeout=timedelta(seconds=PATIENCE_SECONDS / 2))).ok
        finally:
            released.set()


async def test_too_many_open_files_is_not_the_servers_fault(
    client: FederationClient, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of descriptors is not a NetworkError: no healthy server may be marked for it."""

    def no_socket(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(Exception, match="Too many open files") as caught:
        await client.fetch(server.url)
    assert not isinstance(caught.value, NetworkError)


async def test_a_name_with_a_port_may_lead_inside_at_that_port_alone() -> None:
    """Also once the name was resolved for that port: another one is looked at for itself."""
    port, other = free_port(), free_port()
    guard = AddressGuard(parse_allowed_hostnames(f"b.test:{port}"))
    resolver = ScriptedResolver(b_test=[["127.0.0.1"], ["127.0.0.1"]])
    async with FederationClient(guard, ConnectionPool(guard, resolver=resolver)) as client:
        with pytest.raises(NetworkError) as allowed:
            await client.fetch(f"http://b.test:{port}")
        with pytest.raises(NetworkError) as blocked:
            await client.fetch(f"http://b.test:{other}")
    assert (allowed.value.code, blocked.value.code) == (Code.CONN_REFUSED, Code.DNS_BLOCKED)
