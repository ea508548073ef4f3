"""The addresses that host names lead to: looked up, vetted by the guard, and remembered for seconds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final, Protocol

from federation.base.cache import LoadingCache
from federation.http.guard import AddressGuard

REMEMBERED: Final = timedelta(seconds=10)
_MAX_NAMES: Final = 2048
_THREADS: Final = 80


class Resolver(Protocol):
    """Resolves host names to addresses."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of *host*, in the order in which to try them.

        Raises:
            OSError: `socket.gaierror` if the name has none or the name service does not answer.
        """


class SystemResolver:
    """The operating system's resolver, on threads of its own.

    A lookup that hangs holds its thread for up to half a minute, even when nobody waits for it any more. In the event
    loop's shared pool, a few of them would stop everything else that needs a thread. Strangers can make the inbound
    side look up names of their choice; there are more threads here than lookups that they can have under way.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resolve")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _getaddrinfo, host, port)


def _getaddrinfo(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(sockaddr[0]) for *_, sockaddr in found]


class VettedNames:
    """Gives only addresses that have passed the guard: what is remembered for ten seconds, and connected to."""

    def __init__(self, guard: AddressGuard, resolver: Resolver) -> None:
        self._guard = guard
        self._resolver = resolver
        self._known: LoadingCache[Sequence[str]] = LoadingCache(self._look_up, ttl=REMEMBERED, max_entries=_MAX_NAMES)

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses to connect to at *port*. Whoever asks for the same at a time shares one lookup.

        Raises:
            BlockedAddress: the name leads to an address that is not public.
            OSError: as `Resolver.resolve`.
        """
        return await self._known.get(f"{host} {port}")

    async def close(self) -> None:
        """End lookups that nobody waits for any more."""
        await self._known.close()

    async def _look_up(self, key: str) -> Sequence[str]:
        host, port = key.split(" ")
        addresses = await self._resolver.resolve(host, int(port))
        self._guard.vet(host, addresses, port=int(port))
        return addresses
