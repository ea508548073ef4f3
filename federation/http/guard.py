"""Which URLs and addresses this node may be made to talk to (SSRF guard).

Theory of operation. Every outbound request passes two checks. `check_url` looks at the URL alone: it rebuilds it in
one canonical spelling, so that no later parser can read another host out of it, and refuses literal addresses that
are not public. `vet` looks at what a host name resolved to; the transport calls it between resolution and connection
and dials exactly the addresses vetted here, so a name that changes its mind in between gains nothing. The HTTP
library never asks its resolver about literal addresses, which is why the first check may not be skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

import httpx
import idna

from federation.http.addresses import Address, ends_in_number, is_globally_routable, parse_ipv4
from federation.http.errors import BlockedAddress, BlockedUrl

MAX_URL_CHARS = 2048
_DEFAULT_PORTS = {"http": 80, "https": 443}
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog"})
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# Parsers disagree about these: some drop them, some end the host at a backslash.
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A URL in canonical spelling; `address` is set if its host is a literal address."""

    url: httpx.URL
    origin: str
    host: str
    address: Address | None


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Lets outbound requests reach the public Internet, and besides it only the hosts in `allowed_hostnames`."""

    allowed_hostnames: frozenset[str] = frozenset()

    def check_url(self, url: str) -> Target:
        """*url* is acceptable as far as its text tells; the answer is its canonical form.

        Raises:
            BlockedUrl: not an absolute http(s) URL, has user information, names a metadata service, or its host is a
                literal address (in any spelling) that is not globally routable.
        """
        target = parse_target(url)
        if target.host in self.allowed_hostnames:
            return target
        if target.host in _METADATA_NAMES:
            raise BlockedUrl(f"{target.origin} is a cloud metadata service")
        if target.address is not None and not is_globally_routable(target.address):
            raise BlockedUrl(f"{target.origin} is not a public address; {_HOW_TO_ALLOW}")
        return target

    def vet(self, host: str, addresses: Sequence[str]) -> None:
        """All *addresses*, to which *host* resolved just now, may be dialled.

        Raises:
            BlockedAddress: there is none, or one of them is not globally routable (one is enough: a name that mixes
                public and internal addresses is an attack or a mistake).
        """
        if not addresses:
            raise BlockedAddress(host, "the name resolves to no address")
        if host in self.allowed_hostnames:
            return
        for address in addresses:
            if not is_globally_routable(ip_address(address)):
                raise BlockedAddress(host, f"the name resolves to {address}, not a public address; {_HOW_TO_ALLOW}")


_HOW_TO_ALLOW = "DEV_ALLOWED_HOSTNAMES can exempt the host"


@lru_cache(maxsize=1024)
def parse_target(url: str) -> Target:
    """*url* in canonical spelling: lower-case host without trailing dot, addresses decoded, no default port.

    Raises:
        BlockedUrl: not an absolute http(s) URL of at most 2048 characters with a usable host and no user information.
    """
    if len(url) > MAX_URL_CHARS:
        raise BlockedUrl(f"the URL has {len(url)} characters, more than {MAX_URL_CHARS}")
    try:
        return _parse(url)
    except (ValueError, httpx.InvalidURL) as exc:  # idna's errors are ValueErrors
        raise BlockedUrl(f"not a URL that can be fetched: {exc}") from exc


def _parse(url: str) -> Target:
    if _AMBIGUOUS.search(url):
        raise ValueError("it contains white space, a control character or a backslash")
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("its scheme is neither http nor https")
    if "@" in parts.netloc:
        raise ValueError("it contains user information")
    if parts.port == 0:
        raise ValueError("its port is 0")
    address, host = canonical_host(_host_text(parts.netloc))
    port = "" if parts.port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{parts.port}"
    origin = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"
    query = f"?{parts.query}" if parts.query else ""
    return Target(url=httpx.URL(f"{origin}{parts.path or '/'}{query}"), origin=origin, host=host, address=address)


def _host_text(netloc: str) -> str:
    """The host of *netloc* with its brackets, which `urlsplit().hostname` drops."""
    if netloc.startswith("["):
        host, bracket, rest = netloc.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("its IPv6 address is not well formed")
        return f"{host}]"
    return netloc.partition(":")[0]


def canonical_host(text: str) -> tuple[Address | None, str]:
    """The literal address *text* stands for, if any, and the host in the one spelling that is compared and dialled.

    Raises:
        ValueError: neither an address nor a host name.
    """
    if text.startswith("["):
        if not text.endswith("]") or "%" in text:
            raise ValueError("its IPv6 address is not well formed")
        address = IPv6Address(text[1:-1])
        return address, address.compressed
    host = (text if text.isascii() else idna.encode(text, uts46=True).decode("ascii")).lower().removesuffix(".")
    if ends_in_number(host):
        literal = parse_ipv4(host)
        return literal, str(literal)
    if _NAME.fullmatch(host) is None:
        raise ValueError("its host is not a valid name")
    return None, host


def parse_allowed_hostnames(text: str) -> frozenset[str]:
    """The hosts named in a comma list of `host`, `host:port` or URLs, possibly quoted; only the host part counts.

    Raises:
        ValueError: an entry has no host; it is named in the message.
    """
    return frozenset(
        _allowed_host(entry) for part in text.strip().strip("\"'").split(",") if (entry := part.strip(" \t\"'"))
    )


def _allowed_host(entry: str) -> str:
    bare_ipv6 = entry.count(":") > 1 and "://" not in entry and not entry.startswith("[")
    try:
        netloc = urlsplit(entry if "://" in entry else f"//{entry}").netloc.rpartition("@")[2]
        return canonical_host(f"[{entry}]" if bare_ipv6 else _host_text(netloc))[1]
    except ValueError as exc:
        raise ValueError(f"DEV_ALLOWED_HOSTNAMES: {entry!r} names no host: {exc}") from exc
