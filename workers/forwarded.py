"""Whose request it is: addresses, and what a proxy says of its clients.

A request's `X-Forwarded-For` and `Forwarded` are written by whoever sends it; only what a proxy of ours appended is
true. Entries are therefore read from the right, and only if the connection comes from a proxy that the operator named.

Most proxies append to one of the two and pass on whatever a client wrote into the other, and which one that is cannot
be seen. So if both are there, they have to name the same client. All that a client gains by a header of its own is to
be counted as the proxy itself, together with all others who tried that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, Protocol, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address

_IPV4_SITE_BITS: Final = 24
_IPV6_SITE_BITS: Final = 48
_IPV6_SUBSCRIBER_BITS: Final = 64
"""The network of one subscriber: limiting single addresses within it would limit nobody."""

_PAIR: Final = re.compile(r"""[ \t]*([\w!#$%&'*+.^`|~-]+)=([^\s;,"]+|"(?:[^"\\]|\\.)*")[ \t]*([;,]|$)""", re.ASCII)
"""A parameter of RFC 7239, and its end: `;` before the next one, `,` before those of the next proxy."""


class HeaderLines(Protocol):
    """The headers of a request, as Starlette has them."""

    def getlist(self, key: str, /) -> list[str]: ...


def read_address(text: str) -> Address | None:
    """Return the address in a text, which may have a port; None if there is none. An IPv4 address in IPv6 is IPv4."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def subscriber(address: Address) -> str:
    """Return what stands for all addresses of one subscriber: for IPv6 its network."""
    if isinstance(address, IPv6Address):
        return str(ip_network((address, _IPV6_SUBSCRIBER_BITS), strict=False).network_address)
    return str(address)


def site(address: Address) -> str:
    """Return the /24 or /48 that a provider gave to whoever has this address and its neighbours."""
    bits = _IPV6_SITE_BITS if isinstance(address, IPv6Address) else _IPV4_SITE_BITS
    return str(ip_network((address, bits), strict=False))


def forwards(headers: HeaderLines) -> bool:
    """Tell whether the headers name a client of whoever connected."""
    return any(headers.getlist(name) for name in _CHAINS)


def forwarded_client(headers: HeaderLines, is_proxy: Callable[[Address], bool]) -> Address | None:
    """Return for whom a proxy asks, or None if it does not say, or the headers say two things."""
    clients = {_first_client(steps(headers), is_proxy) for name, steps in _CHAINS.items() if headers.getlist(name)}
    return clients.pop() if len(clients) == 1 else None


def _first_client(chain: Iterable[str], is_proxy: Callable[[Address], bool]) -> Address | None:
    """Return the last step that is no proxy of ours, or None if a step does not name the one before."""
    for step in chain:
        client = read_address(step)
        if client is None:
            return None
        if not is_proxy(client):
            return client
    return None


def _forwarded_for(headers: HeaderLines) -> Iterator[str]:
    """Return the entries, beginning with the one that the nearest proxy wrote."""
    entries = ",".join(headers.getlist("x-forwarded-for")).split(",")
    return (entry.strip() for entry in reversed(entries))


def _forwarded(headers: HeaderLines) -> Iterator[str]:
    """Yield the same as `_forwarded_for`, by RFC 7239; an entry that names nobody becomes an empty one.

    Each line is read by itself, and a malformed line names nobody: a quote that a client opens must not swallow what
    the proxy wrote after it.
    """
    for line in reversed(headers.getlist("forwarded")):
        yield from reversed(_steps(line))


_CHAINS: Final[Mapping[str, Callable[[HeaderLines], Iterator[str]]]] = {
    "x-forwarded-for": _forwarded_for,
    "forwarded": _forwarded,
}


def _steps(line: str) -> list[str]:
    steps: list[str] = []
    names: dict[str, str] = {}
    position, end = 0, ","
    while end:
        pair = _PAIR.match(line, position)
        if pair is None or pair[1].lower() in names:
            return [""]
        position, end = pair.end(), pair[3]
        names[pair[1].lower()] = _unquoted(pair[2])
        if end != ";":
            steps.append(names.get("for", ""))
            names = {}
    return steps


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
