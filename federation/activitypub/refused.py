"""Who sends something to an inbox, as far as that is known, and why he is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from typing import Protocol, Self, TypeAlias

from federation.activitypub.replies import Reply, problem
from federation.http.addresses import is_globally_routable
from workers.forwarded import Address, forwarded_client, read_address, site, subscriber

Network: TypeAlias = IPv4Network | IPv6Network


class Asker(Protocol):
    """Where a request came from, as far as that is known: its client's address, and the network of that."""

    @property
    def client(self) -> str | None: ...
    @property
    def network(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Anybody:
    """Somebody of whom nothing is known, or no more than this."""

    client: str | None = None
    network: str | None = None


class HeaderLines:
    """The headers of a request, by line."""

    def __init__(self, lines: Iterable[tuple[str, str]]) -> None:
        self._lines = [(name.lower(), value) for name, value in lines]

    @classmethod
    def of_scope(cls, raw: Iterable[tuple[bytes, bytes]]) -> Self:
        """Return those of an ASGI scope."""
        return cls((name.decode("latin-1"), value.decode("latin-1")) for name, value in raw)

    def getlist(self, key: str, /) -> list[str]:
        return [value for name, value in self._lines if name == key]


def asker_of(host: str, headers: HeaderLines, proxies: Sequence[Network]) -> Anybody:
    """Return who asks, if it is somebody on the Internet. One of *proxies* says for whom it does.

    Any other private address is most likely that of a proxy, too, and nobody is counted by it.
    """
    address = read_address(host)
    if address is not None and _is_among(proxies, address):
        address = forwarded_client(headers, partial(_is_among, proxies)) or address
    elif address is not None and not is_globally_routable(address):
        address = None
    return Anybody() if address is None else Anybody(client=subscriber(address), network=site(address))


def _is_among(proxies: Sequence[Network], address: Address) -> bool:
    return any(address in network for network in proxies)


class Why(StrEnum):
    """Why an activity is refused, for those who count."""

    BLACKLISTED = "blacklisted"
    TYPE = "type"
    """It is no activity by its `Content-Type`, or encoded."""
    TARGET = "target"
    SIZE = "size"
    SLOW = "slow"
    """Its body did not arrive."""
    SIGNATURE = "signature"
    KEY = "key"
    """Nobody would believe its key."""
    KEY_AWAY = "key_away"
    """Its key cannot be had now."""
    OWNER = "owner"
    """Who signed it may not speak for its actor."""
    MALFORMED = "malformed"
    LIMIT = "limit"
    """Somebody asks for too much, or all together do."""
    QUEUE = "queue"


Admit: TypeAlias = Callable[[Asker], Awaitable[None]]
"""Counts a request; raises a `Refused` for who has come too often."""


async def everybody(_asker: Asker) -> None:
    """Let everybody in."""


AdmitFetch: TypeAlias = Callable[[Asker, bool], Awaitable[None]]
"""Raises a `Refused` if who asks may not make us fetch a key, of a server that is known or is not."""


class Refused(Exception):
    """The request is answered with this status, and nothing is stored. The text quotes nothing of it."""

    def __init__(self, why: Why, status: int, text: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(text)
        self.why = why
        self.status = status
        self.text = text
        self.headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}

    def reply(self) -> Reply:
        """Return the answer."""
        return problem(self.status, self.text, self.headers)
