"""Server names: one spelling per server, so that strings can be compared.

This follows the WHATWG URL rules for http and https where they decide which host is meant (numeric IPv4 forms, IDNA,
default ports), and refuses what could be read in two ways. It looks nothing up.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from urllib.parse import urlsplit

import idna

from federation.protocol.errors import UrlError

MAX_URL_CHARACTERS = 2048

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_MAX_HOST_CHARACTERS = 253
_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+)(:(?P<port>[0-9]{0,9}))?")
# Host names must not contain underscores, but container networks use them and resolvers accept them.
_HOST = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")


@lru_cache(maxsize=1024)
def canonical_origin(url: str) -> str:
    """Return `scheme://host[:port]` of *url*: lower case, IDNA, no default port, no path, no slash at the end.

    Raises:
        UrlError: not http or https, no host, userinfo, or a host or port that cannot be.
    """
    if len(url) > MAX_URL_CHARACTERS:
        raise UrlError(f"longer than {MAX_URL_CHARACTERS} characters")
    # urlsplit drops tabs and newlines silently; browsers do, too, but other parsers see another host.
    if not url.isprintable() or " " in url:
        raise UrlError("white space or control characters")
    try:
        scheme, netloc, *_ = urlsplit(url)
    except ValueError:
        raise UrlError("the host is no valid name or address") from None
    if scheme not in _DEFAULT_PORTS:
        raise UrlError("the scheme must be http or https")
    if "@" in netloc:
        raise UrlError("user name or password before the host")
    authority = _AUTHORITY.fullmatch(netloc)
    if authority is None:
        raise UrlError("no host, or no valid host and port")
    port = int(authority["port"] or _DEFAULT_PORTS[scheme])
    if not 0 < port <= _MAX_PORT:
        raise UrlError(f"the port is outside 1 to {_MAX_PORT}")
    suffix = "" if port == _DEFAULT_PORTS[scheme] else f":{port}"
    return f"{scheme}://{_canonical_host(authority['host'])}{suffix}"


# The same rule, under the name that fits where a full URL goes in.
origin_of = canonical_origin


def peer_registry_url(url: str | None, own_origin: str) -> str | None:
    """Return the origin under which *url*'s server is registered here, or None for ourselves, nothing or a bad URL.

    The rows of follows refer to the registry by it, and a node is not in its own registry.
    """
    if not url:
        return None
    try:
        origin = canonical_origin(url)
    except UrlError:
        return None
    return None if origin == own_origin else origin


def host_of(origin: str) -> str:
    """Return the host of a canonical origin, an IPv6 address without its brackets."""
    authority = origin.partition("://")[2]
    return authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]


def with_port(host: str, port: int) -> str:
    """Return a host and its port in the form of a URL; *host* is as `host_of` returns it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _canonical_host(host: str) -> str:
    if host.startswith("["):
        return f"[{_canonical_ipv6(host[1:-1])}]"
    name = _ascii_name(host).removesuffix(".")
    if len(name) > _MAX_HOST_CHARACTERS or not _HOST.fullmatch(name):
        raise UrlError("the host is no valid name")
    last = name.rpartition(".")[2]
    return _canonical_ipv4(name) if _NUMBER.fullmatch(last) else name


def _ascii_name(host: str) -> str:
    if host.isascii():
        return host.lower()
    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except UnicodeError:  # idna's own errors are subclasses of it
        raise UrlError("the host is no valid international name") from None


def _canonical_ipv6(host: str) -> str:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise UrlError("the host is no valid IPv6 address") from None
    if address.scope_id is not None:
        raise UrlError("an IPv6 zone means nothing on another machine")
    if address.ipv4_mapped is not None:
        # Formatted here, because Python versions disagree on the dotted form, which browsers never write.
        return f"::ffff:{int(address.ipv4_mapped) >> 16:x}:{int(address.ipv4_mapped) & 0xFFFF:x}"
    return address.compressed


def _canonical_ipv4(name: str) -> str:
    """Return the dotted form of a host that ends in a number: `2130706433`, `127.1` and `0x7f.1` all mean 127.0.0.1."""
    numbers = [_ipv4_number(part) for part in name.split(".")]
    leading, last = numbers[:-1], numbers[-1]
    if len(leading) > 3 or any(number > 255 for number in leading) or last >= 256 ** (4 - len(leading)):
        raise UrlError("the host is no valid IPv4 address")
    value = last + sum(number << 8 * (3 - position) for position, number in enumerate(leading))
    return str(ipaddress.IPv4Address(value))


def _ipv4_number(part: str) -> int:
    if not _NUMBER.fullmatch(part):
        raise UrlError("the host is no valid IPv4 address")
    try:
        if part[:2] in ("0x", "0X"):
            return int(part[2:] or "0", 16)
        return int(part, 8) if part.startswith("0") else int(part)
    except ValueError:  # an octal number with an 8 or 9
        raise UrlError("the host is no valid IPv4 address") from None
