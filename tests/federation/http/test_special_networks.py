"""Which addresses belong to the public Internet: by IANA's registries, and by what clouds keep for their guests."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

import pytest

from federation.http.addresses import Address, embedded_ipv4, is_globally_routable

REGISTRY = Path(__file__).with_name("special_networks.txt")
LINES = [line.split() for line in REGISTRY.read_text().splitlines() if not line.startswith("#")]
WRAPPERS = ("::ffff:0:0/96", "64:ff9b::/96", "2002::/16")
"""An address in these leads to the one of IPv4 in it, by which it is judged."""


def some_of(block: str) -> list[Address]:
    """The first and last address of the block, and one between them."""
    network = ip_network(block)
    return [network[0], network[network.num_addresses // 2], network[-1]]


@pytest.mark.parametrize("block", [block for block, reach in LINES if reach != "True" and block not in WRAPPERS])
def test_what_is_special_is_refused(block: str) -> None:
    """Whatever a version of Python thinks of it, also by another name in IPv6."""
    for address in some_of(block):
        assert not is_globally_routable(address)
        if isinstance(address, IPv4Address):
            assert not is_globally_routable(IPv6Address(f"::ffff:{address}"))
            assert not is_globally_routable(IPv6Address(int(ip_address("64:ff9b::")) | int(address)))


@pytest.mark.parametrize("block", WRAPPERS)
def test_a_wrapper_is_what_is_in_it(block: str) -> None:
    """The registry has each of these, and one that leads to 8.8.8.8 is not special."""
    assert block in dict(LINES)
    shift = 80 if block.startswith("2002") else 0
    public = IPv6Address(int(ip_network(block)[0]) | int(ip_address("8.8.8.8")) << shift)
    private = IPv6Address(int(ip_network(block)[0]) | int(ip_address("10.0.0.1")) << shift)
    assert embedded_ipv4(public) == ip_address("8.8.8.8")
    assert (is_globally_routable(public), is_globally_routable(private)) == (True, False)


@pytest.mark.parametrize("block", [block for block, reach in LINES if reach == "True" and block not in WRAPPERS])
def test_what_is_reachable_is_taken_unless_it_names_no_server(block: str) -> None:
    """Anycast and identifiers within IANA's networks for protocols are refused with these."""
    network = ip_network(block)
    protocols = [ip_network(each) for each in ("192.0.0.0/24", "2001::/23")]
    refused = any(each.version == network.version and network.subnet_of(each) for each in protocols)  # type: ignore[arg-type] # of one version
    assert {is_globally_routable(address) for address in some_of(block)} == {not refused}


@pytest.mark.parametrize(
    "address",
    [
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "199.36.153.4",
        "199.36.153.11",
        "161.26.0.10",
        "166.9.250.1",
        "2600:2d00:2:1000::1",
        "2600:2d00:2:2000::1",
        "100.100.100.200",
        "192.0.0.192",
        "169.254.169.254",
        "fd00:ec2::254",
    ],
)
def test_what_a_cloud_has_for_its_guests_is_refused(address: str) -> None:
    """Azure, Google, IBM; Alibaba, Oracle and those with link-local addresses are refused as special networks."""
    assert not is_globally_routable(ip_address(address))


@pytest.mark.parametrize("address", ["168.63.129.15", "199.36.153.12", "166.12.0.0", "8.8.8.8", "2600:2d00:2:3000::1"])
def test_their_neighbours_are_public(address: str) -> None:
    """Nobody is shut out with them."""
    assert is_globally_routable(ip_address(address))
