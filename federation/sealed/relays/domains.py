"""Which servers probably have one owner: those of one domain that somebody had to register, or of one network.

This uses a simple rule, not the list of public suffixes: the last two labels of a name. Hosts below a suffix of two
labels, such as `a.co.uk` and `b.co.uk`, count as one owner, which costs a candidate; but the owner of one domain never
counts as two. An IPv4 address, also one wrapped in IPv6, stands for its /24, an IPv6 address for its /48. Ports are
ignored: whoever has a host has all of its ports.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable

from federation.http.addresses import embedded_ipv4
from federation.protocol.urls import host_of

_LABELS = 2
_IPV4_PREFIX, _IPV6_PREFIX = 24, 48


def registrable_domain(origin: str) -> str:
    """Return the domain, or the network, that a canonical *origin* belongs to."""
    host = host_of(origin)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.split(".")[-_LABELS:])
    if isinstance(address, ipaddress.IPv6Address):
        address = embedded_ipv4(address) or address
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))


def first_of_each_domain(origins: Iterable[str]) -> list[str]:
    """Return the *origins* without those whose domain an earlier one has."""
    firsts: dict[str, str] = {}
    for origin in origins:
        firsts.setdefault(registrable_domain(origin), origin)
    return list(firsts.values())


def spread_over_domains(origins: Iterable[str]) -> list[str]:
    """Return the first of each domain in the order given, then the second of each, and so on."""
    before: Counter[str] = Counter()
    turns: list[tuple[int, str]] = []
    for origin in origins:
        domain = registrable_domain(origin)
        turns.append((before[domain], origin))
        before[domain] += 1
    return [origin for _, origin in sorted(turns, key=lambda turn: turn[0])]
