"""Server names have one spelling, and what could be read in two ways has none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin, origin_of, peer_registry_url


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://a.example", "https://a.example"),
        ("https://a.example/", "https://a.example"),
        ("https://a.example///", "https://a.example"),
        ("HTTPS://A.Example:443/Path?q=1#f", "https://a.example"),
        ("https://a.example?@b.example", "https://a.example"),
        ("https://a.example#@b.example", "https://a.example"),
        ("http://a.example:80", "http://a.example"),
        ("http://a.example:443", "http://a.example:443"),
        ("https://a.example:", "https://a.example"),
        ("https://a.example:08443/x", "https://a.example:8443"),
        ("https://a.example.", "https://a.example"),
        ("https://a.example.:8443/", "https://a.example:8443"),
        ("https://bücher.example", "https://xn--bcher-kva.example"),
        ("https://BÜCHER.example", "https://xn--bcher-kva.example"),
        ("https://xn--bcher-kva.example", "https://xn--bcher-kva.example"),
        ("http://my_service:3000", "http://my_service:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://2130706433", "http://127.0.0.1"),
        ("http://127.1", "http://127.0.0.1"),
        ("http://0x7f000001", "http://127.0.0.1"),
        ("http://0177.0.0.0x1.", "http://127.0.0.1"),
        ("http://127\u30020\u30020\u30021", "http://127.0.0.1"),
        ("http://\uff11\uff12\uff17.0.0.1", "http://127.0.0.1"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://[2001:DB8:0:0::1]", "http://[2001:db8::1]"),
        ("http://[::ffff:127.0.0.1]", "http://[::ffff:7f00:1]"),
    ],
)
def test_canonical(url: str, origin: str) -> None:
    """Every spelling of a server becomes the one, which is its own canonical form."""
    assert canonical_origin(url) == origin
    assert canonical_origin(origin) == origin
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "scheme"),
        ("a.example", "scheme"),
        ("//a.example", "scheme"),
        ("ftp://a.example", "scheme"),
        ("javascript:alert(1)", "scheme"),
        ("https:a.example", "no host"),
        ("https:///a.example", "no host"),
        ("https://", "no host"),
        ("https://:443", "no host"),
        ("https://.", "no valid name"),
        ("https://a..example", "no valid name"),
        ("https://a.example..", "no valid name"),
        ("https://user@a.example", "user name"),
        ("https://user:password@a.example", "user name"),
        ("https://@a.example", "user name"),
        ("https://b.example\\@a.example", "user name"),
        ("https://a.example\\b", "no valid name"),
        ("https://%61.example", "no valid name"),
        ("https://a.example:0", "port"),
        ("https://a.example:65536", "port"),
        ("https://a.example:-1", "port"),
        ("https://a.example:x", "port"),
        ("https://a.example:1:2", "port"),
        ("https://a .example", "white space"),
        (" https://a.example", "white space"),
        ("https://a.exam\nple", "white space"),
        ("https://a.example/\ud800", "white space or control"),
        ("https://a\u200b.example", "white space or control"),
        ("https://xn--\u00e9.example", "no valid international name"),
        ("https://" + "a" * 64 + ".example", "no valid name"),
        ("https://" + "a." * 126 + "example", "no valid name"),
        ("https://" + "a" * 3000, "longer than"),
        ("http://256.0.0.1", "IPv4"),
        ("http://1.2.3.4.5", "IPv4"),
        ("http://09.0.0.1", "IPv4"),
        ("http://a.1", "IPv4"),
        ("http://4294967296", "IPv4"),
        ("http://[::1", "no valid"),
        ("http://[::1]x", "no valid"),
        ("http://x[::1]", "no valid"),
        ("http://[fe80::1%25eth0]", "IPv6"),
        ("http://[127.0.0.1]", "valid"),
    ],
)
def test_refused(url: str, reason: str) -> None:
    """What names no server, or more than one, is refused with the reason."""
    with pytest.raises(UrlError, match=reason) as caught:
        canonical_origin(url)
    assert "password@" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, None),
        ("", None),
        ("nonsense", None),
        ("https://own.example", None),
        ("https://OWN.example:443/users/1", None),
        ("https://peer.example/users/1", "https://peer.example"),
        ("http://own.example", "http://own.example"),
    ],
)
def test_peer_registry_url(url: str | None, expected: str | None) -> None:
    """A peer has its origin; ourselves, nothing and nonsense have none."""
    assert peer_registry_url(url, "https://own.example") == expected


@given(rest=st.text(max_size=60), scheme=st.sampled_from(["http://", "https://", ""]))
def test_fuzzed_urls(rest: str, scheme: str) -> None:
    """Any text is refused, or has a canonical form that is stable and plain ASCII."""
    try:
        origin = canonical_origin(scheme + rest)
    except UrlError:
        return
    assert origin.isascii()
    assert canonical_origin(origin) == origin
