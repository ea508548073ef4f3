"""The port for those who watch: it opens on all addresses of a name that are there, or on none."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.servers import free_port
from workers.supervisor.http_port import HttpAnswer, HttpPort

WELL = HttpAnswer(status=200, content_type="text/plain", body=b"well")
ADDRESSES = ("127.0.0.1", "127.0.0.2")
MOST_OPEN = 100
"""More than a test has open."""


async def answer(_path: str) -> HttpAnswer:
    return WELL


async def ask(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.transport.abort()


@pytest.fixture
async def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names stand for two addresses of this machine."""

    async def found(_name: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ADDRESSES]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)


class WithoutIPv6(socket.socket):
    """A machine whose IPv6 is switched off: there is no such family, or none of its addresses."""

    has_family = False

    def __init__(self, family: int = -1, *rest: Any, **named: Any) -> None:
        if family == socket.AF_INET6 and not self.has_family:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(socket.AF_INET if family == socket.AF_INET6 else family, *rest, **named)
        self._is_absent = family == socket.AF_INET6

    def bind(self, address: Any) -> None:
        if self._is_absent:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        super().bind(address)

    def setsockopt(self, level: int, *rest: Any) -> None:  # type: ignore[override] # of three overloads
        if level != socket.IPPROTO_IPV6:
            super().setsockopt(level, *rest)


class WithoutAddresses(WithoutIPv6):
    has_family = True


@pytest.mark.parametrize("machine", [WithoutIPv6, WithoutAddresses])
async def test_without_ipv6_it_opens_on_the_rest(machine: type[WithoutIPv6], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is no rest."""
    port, chosen = HttpPort(answer), free_port()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both_families)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", machine)
        await port.start("localhost", chosen)
        with pytest.raises(OSError, match=r"supported|assign"):
            await HttpPort(answer).start("::1", chosen)
    assert (await ask("127.0.0.1", chosen)).endswith(b"well")
    await port.close()


@pytest.mark.usefixtures("two_addresses")
async def test_an_address_that_is_taken_opens_none() -> None:
    """Nor does it leave one open."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        chosen = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await HttpPort(answer).start("watched.example", chosen)
        require_closed("127.0.0.1", chosen)


@pytest.mark.usefixtures("two_addresses")
async def test_without_descriptors_it_opens_on_none() -> None:
    """There are three: for two addresses, and for what the first one keeps."""
    chosen = free_port()
    with descriptors(3):
        with pytest.raises(OSError, match="Too many open files"):
            await HttpPort(answer).start("watched.example", chosen)
        assert free_descriptors() == 3
    for host in ADDRESSES:
        require_closed(host, chosen)


@pytest.mark.usefixtures("two_addresses")
async def test_all_addresses_are_closed_before_what_arrives_is_waited_for() -> None:
    """Otherwise the others would go on accepting."""
    port, chosen = HttpPort(answer), free_port()
    await port.start("watched.example", chosen)
    with socket.create_connection(("127.0.0.1", chosen)):
        while not port._acceptors[0]._arriving:
            await asyncio.sleep(0)
        closing = asyncio.create_task(port.close())
        await asyncio.sleep(0)
        assert not closing.done()
        for host in ADDRESSES:
            require_closed(host, chosen)
        await closing


async def both_families(name: str, port: int, **_: object) -> list[Any]:
    """A name stands for addresses of both families."""
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
    return [six] if ":" in name else [six, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


def require_closed(host: str, port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


@contextmanager
def descriptors(free: int) -> Iterator[None]:
    """No more than so many are free."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[0], MOST_OPEN) + 50, before[1]))
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(free):
        os.close(taken.pop())
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for each in taken:
        os.close(each)


def free_descriptors() -> int:
    opened: list[int] = []
    with suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    for each in opened:
        os.close(each)
    return len(opened)
