"""Whose request it is: the address that limits per client count by, as far as it can be known.

A request's `X-Forwarded-For` is written by whoever sends it; only what a proxy of ours appended is true. Entries are
therefore read from the right, and only where the connection comes from a proxy the operator named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

from starlette.requests import Request

from federation.http.addresses import Address, is_globally_routable

Network: TypeAlias = IPv4Network | IPv6Network

_FORWARDING_HEADERS: Final = ("x-forwarded-for", "forwarded", "x-real-ip", "via")
_IPV6_SUBSCRIBER_BITS: Final = 64
"""What one subscriber has: limiting single addresses of it would limit nobody."""
_IPV4_SITE_BITS: Final = 24
_IPV6_SITE_BITS: Final = 48


class Clients:
    """Names clients by address; *proxies* are trusted to append theirs to `X-Forwarded-For`."""

    def __init__(self, proxies: Collection[Network] = ()) -> None:
        self._proxies = tuple(proxies)

    def address(self, request: Request) -> str | None:
        """The client's address, of IPv6 its network; None where nothing can be known.

        That is so behind a proxy nobody named: what connects from a private address is most likely one, and counting
        by it would shut out everybody at once.
        """
        peer = _address(request.client.host if request.client else "")
        if peer is None:
            return None
        if not self._is_proxy(peer):
            return _name(peer) if is_globally_routable(peer) else None
        client = self._behind_proxies(request)
        return None if client is None else _name(client)

    def certain_address(self, request: Request) -> Address | None:
        """The client's address, private ones too; None if a proxy nobody named shows in the request's headers."""
        peer = _address(request.client.host if request.client else "")
        if peer is None:
            return None
        if self._is_proxy(peer):
            return self._behind_proxies(request)
        return None if any(name in request.headers for name in _FORWARDING_HEADERS) else peer

    def network(self, request: Request) -> str | None:
        """What the client's provider gave it and its neighbours, /24 or /48; None if a proxy nobody named shows."""
        address = self.certain_address(request)
        if address is None:
            return None
        bits = _IPV6_SITE_BITS if isinstance(address, IPv6Address) else _IPV4_SITE_BITS
        return str(ip_network((address, bits), strict=False))

    def of_connection(self, host: str) -> str | None:
        """Whose connection it is that comes from *host*; None if a trusted proxy's, which is many clients'."""
        peer = _address(host)
        return None if peer is None or self._is_proxy(peer) else _name(peer)

    def _behind_proxies(self, request: Request) -> Address | None:
        for entry in _forwarded_for(request):
            client = _address(entry)
            if client is None:
                return None
            if not self._is_proxy(client):
                return client
        return None

    def _is_proxy(self, address: Address) -> bool:
        return any(address in network for network in self._proxies)


def _forwarded_for(request: Request) -> Iterator[str]:
    """The entries, the one the nearest proxy wrote first."""
    entries = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
    return (entry.strip() for entry in reversed(entries))


def _address(text: str) -> Address | None:
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


def _name(address: Address) -> str:
    if isinstance(address, IPv6Address):
        return str(ip_network((address, _IPV6_SUBSCRIBER_BITS), strict=False).network_address)
    return str(address)
