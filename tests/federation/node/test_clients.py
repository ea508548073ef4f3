"""Whose request it is: what a client writes cannot change it."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from federation.node.clients import Clients

PROXY = "10.0.0.1"
PROXIES = [ip_network("10.0.0.0/8"), ip_network("2606:4700::/32")]


def request(peer: str | None, *forwarded_for: str, forwarded: Sequence[str] = ()) -> Request:
    """A request from *peer*, with so many headers."""
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded_for]
    headers += [(b"forwarded", value.encode()) for value in forwarded]
    return Request({"type": "http", "headers": headers, "client": (peer, 1) if peer is not None else None})


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("8.8.8.8", "8.8.8.8"),
        ("::ffff:8.8.8.8", "8.8.8.8"),
        ("2001:4860:4860:0:1:2:3:4", "2001:4860:4860::"),
        ("127.0.0.1", None),
        ("192.168.1.1", None),
        ("10.0.0.1", None),
        ("::1", None),
        ("fe80::1%eth0", None),
        ("testclient", None),
        ("", None),
        (None, None),
    ],
)
def test_a_public_address_is_its_own_name(peer: str | None, address: str | None) -> None:
    """Of IPv6 its network; a private one is a proxy's that nobody named, and says nothing."""
    assert Clients().address(request(peer)) == address


def test_who_is_no_proxy_is_not_believed() -> None:
    """A header of the client's own changes nothing."""
    assert Clients(PROXIES).address(request("8.8.8.8", "1.1.1.1")) == "8.8.8.8"
    assert Clients().address(request("127.0.0.1", "1.1.1.1")) is None


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        (["8.8.8.8"], "8.8.8.8"),
        (["1.1.1.1, 8.8.8.8"], "8.8.8.8"),
        (["1.1.1.1", "8.8.8.8"], "8.8.8.8"),
        (["8.8.8.8, 10.1.2.3"], "8.8.8.8"),
        (["1.1.1.1, 8.8.8.8, 2606:4700::1, 10.1.2.3"], "8.8.8.8"),
        (["8.8.8.8:4711"], "8.8.8.8"),
        (["[2001:4860:4860::8888]:4711"], "2001:4860:4860::"),
        (["192.168.7.7"], "192.168.7.7"),
        (["10.1.2.3, 10.1.2.4"], PROXY),
        (["1.1.1.1, unknown"], PROXY),
        (["1.1.1.1,"], PROXY),
        ([], PROXY),
    ],
)
def test_a_named_proxy_is_believed_about_the_last_step(forwarded: list[str], address: str) -> None:
    """The entry nearest to it that is no proxy; what stands before it is the client's own writing. Where it does not
    say for whom it asks, all behind it are one client.
    """
    assert Clients(PROXIES).address(request(PROXY, *forwarded)) == address


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        (["for=8.8.8.8"], "8.8.8.8"),
        (["FOR=8.8.8.8:4711;proto=https;by=10.1.2.3"], "8.8.8.8"),
        (["for=1.1.1.1, for=8.8.8.8 ;proto=http, for=10.1.2.3"], "8.8.8.8"),
        (["for=1.1.1.1", "proto=https;for=8.8.8.8"], "8.8.8.8"),
        (['for="[2001:4860:4860::8888]:4711"'], "2001:4860:4860::"),
        ([r'for="8.8.8\.8";ext="a\",b;c"'], "8.8.8.8"),
        (["for=1.1.1.1, for=unknown"], PROXY),
        (["for=1.1.1.1, for=_hidden"], PROXY),
        (["for=1.1.1.1, proto=https"], PROXY),
        (["for=1.1.1.1;for=8.8.8.8"], PROXY),
        (["for=1.1.1.1,"], PROXY),
        (["for=1.1.1.1 for=8.8.8.8"], PROXY),
        ([""], PROXY),
        # A client's quote that the proxy's own entry would be a part of.
        (['for=1.1.1.1;a=", for=8.8.8.8'], PROXY),
        (['for=1.1.1.1;a=", for="[2001:4860:4860::8888]"'], PROXY),
        (['for=1.1.1.1;a="', "for=8.8.8.8"], "8.8.8.8"),
    ],
)
def test_a_named_proxy_may_say_it_as_rfc_7239_has_it(lines: list[str], address: str) -> None:
    """By the same rules; a line that is not as it should be says nothing."""
    assert Clients(PROXIES).address(request(PROXY, forwarded=lines)) == address


def test_a_proxy_that_says_it_twice_has_to_say_the_same() -> None:
    """Else one of the two is what a client wrote, and nobody can tell which: neither is believed."""
    clients = Clients(PROXIES)
    assert clients.address(request(PROXY, "8.8.8.8", forwarded=["for=8.8.8.8;proto=https"])) == "8.8.8.8"
    assert clients.address(request(PROXY, "8.8.8.8", forwarded=["for=1.1.1.1"])) == PROXY
    assert clients.address(request(PROXY, "1.1.1.1", forwarded=["for=unknown"])) == PROXY
    assert clients.certain_address(request(PROXY, "8.8.8.8", forwarded=["for=127.0.0.1"])) is None


@given(
    st.text(st.characters(max_codepoint=255), max_size=60) | st.text('for="=;,[]:1.\\ ', max_size=30),
    st.sampled_from(["x-forwarded-for", "forwarded"]),
)
def test_nothing_a_client_writes_before_the_proxys_own_entry_counts(text: str, header: str) -> None:
    """Whatever it is, it ends in the client's own address or in the proxy's, and never in an exception."""
    own = "8.8.8.8" if header == "x-forwarded-for" else "for=8.8.8.8"
    raw = [(header.encode(), f"{text}, {own}".encode("latin-1"))]
    found = Clients(PROXIES).address(Request({"type": "http", "headers": raw, "client": (PROXY, 1)}))
    assert found in ("8.8.8.8", PROXY)


def test_a_private_peer_that_forwards_unnamed_is_told_of() -> None:
    """Not one that is named, that comes from elsewhere, or that forwards for nobody."""
    told: list[str] = []
    clients = Clients(PROXIES, unnamed=told.append)
    for peer in ("192.168.1.1", "127.0.0.1", "fd00::1", "fe80::1%eth0", "8.8.8.8", PROXY):
        clients.address(request(peer, "1.1.1.1"))
        clients.address(request(peer, forwarded=["for=1.1.1.1"]))
        clients.address(request(peer))
    assert told == [each for each in ("192.168.1.1", "127.0.0.1", "fd00::1", "fe80::1") for _ in range(2)]


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "holders"),
    [
        ("8.8.8.8", [], ("8.8.8.8", "8.8.8.0/24")),
        ("2001:4860:4860:0:1:2:3:4", [], ("2001:4860:4860::", "2001:4860:4860::/48")),
        ("127.0.0.2", [], ("127.0.0.2",)),
        ("127.0.0.2", ["8.8.8.8"], ()),
        (PROXY, ["8.8.8.8"], ("8.8.8.8", "8.8.8.0/24")),
        (PROXY, [], (PROXY,)),
        (PROXY, ["unknown"], (PROXY,)),
        (None, [], ()),
    ],
)
def test_whose_share_a_request_uses(peer: str | None, forwarded_for: list[str], holders: tuple[str, ...]) -> None:
    """Its client's and that one's network's, as the proxy says. A proxy that names no client has the client's place."""
    assert Clients(PROXIES).source(request(peer, *forwarded_for)).holders == holders


def test_two_headers_that_differ_take_nobody_out_of_the_shares() -> None:
    """All who try that share what a proxy has that names no client."""
    asked = request(PROXY, "8.8.8.8", forwarded=["for=9.9.9.9"])
    assert Clients(PROXIES).source(asked).holders == (PROXY,)
