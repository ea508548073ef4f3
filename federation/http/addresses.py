"""Which IP addresses belong to the public Internet: pure functions."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# Special networks that `is_global` of some supported Python versions still lets through.
_ALSO_SPECIAL_V4 = (IPv4Network("192.88.99.0/24"), IPv4Network("192.0.0.0/24"))
_ALSO_SPECIAL_V6 = (IPv6Network("3fff::/20"), IPv6Network("2001::/23"))
# What clouds offer to their guests alone, by numbers that look public. That of others lies in special networks.
_OF_CLOUDS_V4 = (
    # Azure's host: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
    IPv4Network("168.63.129.16/32"),
    # Google's APIs for guests without a public address: cloud.google.com/vpc/docs/configure-private-google-access
    IPv4Network("199.36.153.4/30"),
    IPv4Network("199.36.153.8/30"),
    # IBM's services, and its "cloud service endpoints": cloud.ibm.com/docs/vpc?topic=vpc-service-endpoints-for-vpc
    IPv4Network("161.26.0.0/16"),
    IPv4Network("166.8.0.0/14"),
)
_OF_CLOUDS_V6 = (
    # Google's APIs, as above
    IPv6Network("2600:2d00:2:1000::/64"),
    IPv6Network("2600:2d00:2:2000::/64"),
)


def is_globally_routable(address: Address) -> bool:
    """Tell whether *address* is a unicast address of the public Internet, even if it is IPv4 wrapped in IPv6.

    IPv4-mapped, NAT64 (64:ff9b::/96) and 6to4 (2002::/16) addresses count as the IPv4 address they lead to. Teredo,
    IPv4-compatible, site-local and everything else outside 2000::/3 is refused outright, and so are addresses
    at which a cloud serves its guests.
    """
    if isinstance(address, IPv6Address):
        embedded = embedded_ipv4(address)
        if embedded is None:
            special = any(address in network for network in (*_ALSO_SPECIAL_V6, *_OF_CLOUDS_V6))
            return address in _GLOBAL_UNICAST and address.is_global and not special
        address = embedded
    special = any(address in network for network in (*_ALSO_SPECIAL_V4, *_OF_CLOUDS_V4))
    return address.is_global and not address.is_multicast and not address.is_reserved and not special


def embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that *address* leads to, if it is one wrapped in IPv6; see `is_globally_routable`."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
