"""Which URLs and addresses this node may be made to talk to (SSRF guard).

Theory of operation. Every outbound request passes two checks. `check_url` looks at the URL alone: it rebuilds it in one
canonical spelling, so that no later parser can read another host out of it, and refuses literal addresses that are not
public. `vet` looks at what a host name resolved to. The transport calls it between resolution and connection, and
connects to exactly the addresses checked here, so a name that resolves differently in between gains nothing. The HTTP
library never asks its resolver about literal addresses, which is why the first check may not be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx

from federation.http.addresses import Address, is_globally_routable
from federation.http.errors import BlockedAddress, BlockedUrl
from federation.protocol.urls import canonical_origin, host_of, with_port

_DEFAULT_PORTS = {"http": 80, "https": 443}
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A URL in canonical spelling; `address` is set if its host is a literal address."""

    url: httpx.URL
    origin: str
    host: str
    port: int
    address: Address | None


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Lets outbound requests reach the public Internet, and apart from that only what is in `allowed_hostnames`.

    These are hosts at any port, and hosts with a port, as `peer:4000` or `[::1]:4000`, at that one.
    """

    allowed_hostnames: frozenset[str] = frozenset()

    def check_url(self, url: str) -> Target:
        """Check that the text of *url* is acceptable, and return its canonical form.

        Raises:
            BlockedUrl: not an absolute http(s) URL, has user information, names a metadata service, or its host is a
                literal address (in any spelling) that is not globally routable.
        """
        target = parse_target(url)
        if self._allows(target.host, target.port):
            return target
        if target.host in _METADATA_NAMES:
            raise BlockedUrl(f"{target.origin} is a cloud metadata service")
        if target.address is not None and not is_globally_routable(target.address):
            raise BlockedUrl(f"{target.origin} is not a public address; {_HOW_TO_ALLOW}")
        return target

    def vet(self, host: str, addresses: Sequence[str], *, port: int) -> None:
        """Check that all *addresses*, to which *host* resolved just now, may be connected to at *port*.

        Raises:
            BlockedAddress: there is none, or one of them is not globally routable (one is enough: a name that mixes
                public and internal addresses is an attack or a mistake).
        """
        if not addresses:
            raise BlockedAddress(host, "the name resolves to no address")
        if self._allows(host, port):
            return
        for address in addresses:
            if not _is_public(address):
                raise BlockedAddress(host, f"the name resolves to {address}, not a public address; {_HOW_TO_ALLOW}")

    def _allows(self, host: str, port: int) -> bool:
        return host in self.allowed_hostnames or with_port(host, port) in self.allowed_hostnames


_HOW_TO_ALLOW = "DEV_ALLOWED_HOSTNAMES can exempt the host"


@lru_cache(maxsize=1024)
def parse_target(url: str) -> Target:
    """Parse *url* into canonical spelling: lower-case host without trailing dot, addresses decoded, no default port.

    Raises:
        BlockedUrl: not an absolute http(s) URL of at most 2048 characters with a usable host and no user information.
    """
    try:
        origin = canonical_origin(url)
        parts = urlsplit(url)
        query = f"?{parts.query}" if parts.query else ""
        target = httpx.URL(f"{origin}{parts.path or '/'}{query}")
    except (ValueError, httpx.InvalidURL) as exc:  # every error of the parser is a ValueError
        raise BlockedUrl(f"not a URL that can be fetched: {exc}") from exc
    host = host_of(origin)
    port = target.port or _DEFAULT_PORTS[target.scheme]
    return Target(url=target, origin=origin, host=host, port=port, address=_literal(host))


def _is_public(text: str) -> bool:
    address = _literal(text)
    return address is not None and is_globally_routable(address)


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
