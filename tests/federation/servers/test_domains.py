"""Which servers count as one owner's."""

from __future__ import annotations

import pytest

from federation.sealed.relays.peers import first_of_each_domain, registrable_domain, spread_over_domains


@pytest.mark.parametrize(
    ("origin", "domain"),
    [
        ("https://a.example", "a.example"),
        ("https://deep.below.a.example:8443", "a.example"),
        ("http://localhost:4000", "localhost"),
        ("https://a.co.uk", "co.uk"),
        ("http://192.0.2.7:8080", "192.0.2.0/24"),
        ("http://[2001:db8:1:2::3]", "2001:db8:1::/48"),
        ("http://[::ffff:c000:207]:1", "192.0.2.0/24"),
        ("http://[64:ff9b::c000:207]", "192.0.2.0/24"),
        ("http://[2002:c000:207::1]", "192.0.2.0/24"),
    ],
)
def test_what_a_server_belongs_to(origin: str, domain: str) -> None:
    """The last two labels of its name, the network of its address; never its port."""
    assert registrable_domain(origin) == domain


def test_no_domain_crowds_out_another() -> None:
    """The first of each comes before the second of any, and the order is kept apart from that."""
    origins = ["https://1.a.test", "https://2.a.test", "https://3.a.test", "https://b.test", "https://1.c.test"]
    assert spread_over_domains(origins) == [origins[0], *origins[3:], origins[1], origins[2]]
    assert first_of_each_domain(origins) == [origins[0], *origins[3:]]
