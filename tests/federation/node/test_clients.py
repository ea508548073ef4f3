"""Whose request it is: what a client writes cannot change it."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from starlette.requests import Request

from federation.node.clients import Clients

PROXIES = [ip_network("10.0.0.0/8"), ip_network("2606:4700::/32")]


def request(peer: str | None, *forwarded: str) -> Request:
    """A request from *peer*, with so many headers."""
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
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
        (["10.1.2.3, 10.1.2.4"], None),
        (["1.1.1.1, unknown"], None),
        (["1.1.1.1,"], None),
        ([], None),
    ],
)
def test_a_named_proxy_is_believed_about_the_last_step(forwarded: list[str], address: str | None) -> None:
    """The entry nearest to it that is no proxy; what stands before it is the client's own writing."""
    assert Clients(PROXIES).address(request("10.0.0.1", *forwarded)) == address
