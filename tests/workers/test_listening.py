"""Whoever listens closes what it accepted, whatever happens meanwhile, and goes on while anything else listens."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE_SECONDS
from workers.listening import Acceptor, ConnectionLimits, Connections, EverybodyEnters

FILLED = 64


class Idle:
    """A connection that we owe nothing."""

    def __init__(self, bound: Connections) -> None:
        self.was_cut = False
        bound.admit(self, "192.0.2.1")
        bound.rests(self)

    def cut(self) -> None:
        self.was_cut = True


@pytest.fixture
def bound() -> Connections:
    return Connections(ConnectionLimits(), EverybodyEnters())


@pytest.fixture
def scarce() -> Iterator[None]:
    """So many descriptors are taken that a new connection is accepted only in place of an idle one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < FILLED:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] * 4 // 3, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for each in taken:
        os.close(each)


def acceptor(bound: Connections) -> tuple[Acceptor, tuple[str, int]]:
    """One that accepts, and where."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = Acceptor(listener, asyncio.Protocol, bound=bound)
    accepting.start()
    return accepting, listener.getsockname()


async def end_of(at: tuple[str, int]) -> bytes:
    """What somebody reads who connects there."""
    reader, writer = await asyncio.open_connection(*at)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.usefixtures("scarce")
async def test_what_arrives_while_the_port_is_closed_is_closed(bound: Connections) -> None:
    """After room was made for it, and none was free yet: nobody is left to make more."""
    accepting, at = acceptor(bound)

    class Last(Idle):
        def cut(self) -> None:
            accepting.close()

    Last(bound)
    assert await end_of(at) == b""
    await accepting.wait_closed()


@pytest.mark.usefixtures("scarce")
async def test_a_port_makes_room_after_another_with_the_same_connections_is_closed(bound: Connections) -> None:
    """As those of one name with two addresses are."""
    (first, _), (second, at) = acceptor(bound), acceptor(bound)
    idle = Idle(bound)
    first.close()
    assert await end_of(at) == b""
    assert idle.was_cut
    second.close()
    await second.wait_closed()


async def test_what_its_protocol_fails_for_is_closed(bound: Connections) -> None:
    """A fault of ours leaves no connection open."""
    failed = False

    def make() -> asyncio.Protocol:
        nonlocal failed
        failed = True
        raise LookupError

    listener = socket.create_server(("127.0.0.1", 0))
    accepting = Acceptor(listener, make, bound=bound)
    accepting.start()
    assert await end_of(listener.getsockname()) == b""
    assert failed
    accepting.close()
    await accepting.wait_closed()


async def test_a_port_that_never_accepted_is_closed(bound: Connections) -> None:
    """As one is whose neighbour could not be opened. Repeating it does nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = Acceptor(listener, asyncio.Protocol, bound=bound)
    accepting.close()
    accepting.close()
    assert listener.fileno() < 0
