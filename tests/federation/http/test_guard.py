"""Which URLs and which resolved addresses the guard lets through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.base.settings.types import parse_allowed_hostnames
from federation.http.errors import BlockedAddress, BlockedUrl
from federation.http.guard import AddressGuard
from federation.http.threat_policy import NetworkErrorCode

GUARD = AddressGuard()

SPELLINGS_OF_LOOPBACK = [
    "http://127.0.0.1",
    "http://2130706433",
    "http://127.1",
    "http://127.0.1",
    "http://0x7f000001",
    "http://0X7F.0.0.1",
    "http://0x7f.1",
    "http://017700000001",
    "http://0177.0.0.1",
    "http://127.0.0.1.",
    "http://127\u30020\u30020\u30021",
    "http://\uff11\uff12\uff17.0.0.1",
    "http://[::ffff:127.0.0.1]",
    "http://[::ffff:7f00:1]",
    "http://[::127.0.0.1]",
    "http://[64:ff9b::7f00:1]",
    "http://[64:ff9b::127.0.0.1]",
    "http://[2002:7f00:1::]",
]
INTERNAL_LITERALS = [
    "http://0.0.0.0",
    "http://0",
    "http://0x",
    "http://[::]",
    "http://[::1]",
    "http://[0:0:0:0:0:0:0:1]",
    "http://169.254.169.254",
    "http://127.255.255.254",
    "http://10.1.2.3",
    "http://172.16.0.1",
    "http://172.31.255.255",
    "http://192.168.1.1",
    "http://0.1.2.3",
    "http://100.64.0.1",
    "http://198.18.0.1",
    "http://198.19.255.255",
    "http://192.0.0.8",
    "http://192.0.2.1",
    "http://192.88.99.1",
    "http://224.0.0.1",
    "http://240.0.0.1",
    "http://255.255.255.255",
    "http://[fc00::1]",
    "http://[fd12:3456::1]",
    "http://[fe80::1]",
    "http://[fe80::1%25eth0]",
    "http://[fec0::1]",
    "http://[ff02::1]",
    "http://[64:ff9b:1::1]",
    "http://[2001::1]",
    "http://[2001:db8::1]",
    "http://[3fff::1]",
    "http://[2002:a01:203::1]",
    "http://[64:ff9b::a9fe:a9fe]",
]
METADATA_NAMES = [
    "http://metadata.google.internal",
    "http://metadata.goog/",
    "http://METADATA.google.internal.",
]
NOT_FETCHABLE = [
    "",
    "b.example",
    "//b.example/",
    "http://",
    "http:///path",
    "ftp://b.example",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "http://user@b.example",
    "http://user:secret@b.example",
    "http://@b.example",
    "http://b.example\\@127.0.0.1/",
    "http://b.exa mple",
    " http://b.example",
    "http://b.example\t",
    "http://b.exam\nple",
    "http://b.example:0",
    "http://b.example:99999",
    "http://b.example:http",
    "http://b..example",
    "http://.b.example",
    "http://b.example..",
    "http://%31%32%37.0.0.1",
    "http://b_ex*ample",
    "http://256.1.1.1",
    "http://1.2.3.4.5",
    "http://1.2.3.09",
    "http://b.example.1",
    "http://[::1",
    "http://[::1]x",
    "http://[b.example]",
    f"http://{'b' * 64}.example",
    f"http://b.example/{'x' * 2048}",
]
PUBLIC = {
    "https://b.example": "https://b.example/",
    "HTTPS://B.Example:443/p?q=1": "https://b.example/p?q=1",
    "http://b.example:80": "http://b.example/",
    "http://b.example.:8080/": "http://b.example:8080/",
    "https://bücher.example/": "https://xn--bcher-kva.example/",
    "http://8.8.8.8/": "http://8.8.8.8/",
    "http://134744072/": "http://8.8.8.8/",
    "http://[2001:4860:4860:0::8888]:81/": "http://[2001:4860:4860::8888]:81/",
    "http://[64:ff9b::808:808]/": "http://[64:ff9b::808:808]/",
    "https://b.example/x#fragment": "https://b.example/x",
    "http://172.32.0.1/": "http://172.32.0.1/",
    "http://7.example/": "http://7.example/",
}


@pytest.mark.parametrize("url", [*SPELLINGS_OF_LOOPBACK, *INTERNAL_LITERALS, *METADATA_NAMES, *NOT_FETCHABLE])
def test_url_is_blocked(url: str) -> None:
    """What is no public http(s) URL is refused for good, however it is spelled."""
    with pytest.raises(BlockedUrl):
        GUARD.check_url(url)


@pytest.mark.parametrize("url", PUBLIC)
def test_public_url_is_canonical(url: str) -> None:
    """A public URL passes, in the one spelling every later parser reads alike."""
    assert str(GUARD.check_url(url).url) == PUBLIC[url]


@pytest.mark.parametrize("url", ["http://localhost", "http://localhost.", "http://foo.localhost", "http://intranet"])
def test_internal_names_are_left_to_vetting(url: str) -> None:
    """A name that only DNS reveals as internal passes the text check: its block must stay retryable."""
    assert GUARD.check_url(url).address is None


@settings(deadline=None)  # the first name outside ASCII loads large tables
@given(st.text(max_size=60))
def test_any_text_is_a_target_or_blocked(text: str) -> None:
    """No text makes the check raise anything but `BlockedUrl`, or yields a host other than the one that is dialled."""
    try:
        target = GUARD.check_url(f"http://{text}")
    except BlockedUrl:
        return
    assert target.url.raw_host == target.host.encode("ascii")


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        ["127.0.0.1"],
        ["::1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["0.0.0.0"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["2002:a00:1::"],
        ["fe80::1%eth0"],
        ["fec0::1"],
        ["100.64.0.1"],
        ["224.0.0.1"],
        ["8.8.8.8", "127.0.0.1"],
        ["2001:4860:4860::8888", "fd00::1"],
    ],
)
def test_addresses_are_refused_together(addresses: list[str]) -> None:
    """One address that is not public, or none at all, blocks the name for now."""
    with pytest.raises(BlockedAddress) as caught:
        GUARD.vet("b.example", addresses, port=443)
    assert caught.value.code is NetworkErrorCode.DNS_BLOCKED


def test_public_addresses_pass() -> None:
    """A name with public addresses only, wrapped ones included, may be dialled."""
    GUARD.vet("b.example", ["8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808", "2002:808:808::1"], port=443)


def test_allowed_hostname_exempts_that_host_only() -> None:
    """An exempt name may lead to loopback; other names that lead there, and the literal itself, may not."""
    guard = AddressGuard(frozenset({"peer-b"}))
    guard.check_url("http://peer-b:8080/")
    guard.vet("peer-b", ["127.0.0.1"], port=8080)
    with pytest.raises(BlockedAddress):
        guard.vet("peer-c", ["127.0.0.1"], port=8080)
    with pytest.raises(BlockedUrl):
        guard.check_url("http://127.0.0.1/")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://2130706433/", "http://127.1"])
def test_allowed_literal_in_any_spelling(url: str) -> None:
    """An exempt literal address is exempt in every spelling of it."""
    assert AddressGuard(frozenset({"127.0.0.1"})).check_url(url).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("entry", "url", "elsewhere"),
    [
        ("127.0.0.1:4000", "http://127.0.0.1:4000/x", "http://127.0.0.1:6379"),
        ("127.0.0.1:4000", "https://2130706433:4000", "https://127.0.0.1"),
        ("127.0.0.1:80", "http://127.0.0.1", "https://127.0.0.1"),
        ("[::1]:4000", "http://[::1]:4000", "http://[::1]:4001"),
    ],
)
def test_an_entry_with_a_port_opens_that_port_alone(entry: str, url: str, elsewhere: str) -> None:
    """No job of ours speaks to the database beside the peer of a developer's machine."""
    guard = AddressGuard(parse_allowed_hostnames(entry))
    guard.check_url(url)
    with pytest.raises(BlockedUrl):
        guard.check_url(elsewhere)
