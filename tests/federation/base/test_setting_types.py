"""The kinds of values a setting may have, parsed from text."""

from __future__ import annotations

import pytest

from federation.base.settings.types import parse_allowed_hostnames, parse_duration


@pytest.mark.parametrize("text", ["", "s", "5 5s", "1e3s", "5S", "\u0665s", "nan", "inf", "5s;", "0x5s", "1.s", ".5s"])
def test_other_spellings_are_no_durations(text: str) -> None:
    """Only digits, an optional fraction and one of five units."""
    with pytest.raises(ValueError, match="write a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", set()),
        ("localhost", {"localhost"}),
        ('"localhost, peer-b:8080"', {"localhost", "peer-b:8080"}),
        ("http://Peer-B:3000/path?q, 'x.test', https://y.test/", {"peer-b:3000", "x.test", "y.test"}),
        ("127.0.0.1:99,[::1]:80,::1,[fd00::2]", {"127.0.0.1:99", "[::1]:80", "::1", "fd00::2"}),
        (",, localhost. ,", {"localhost"}),
    ],
)
def test_allowed_hostnames_are_parsed(text: str, hosts: set[str]) -> None:
    """A comma list of hosts, hosts with ports and URLs, quoted or not, names its hosts, with the ports it names."""
    assert parse_allowed_hostnames(text) == hosts


@pytest.mark.parametrize("text", ["good.test,http://", "a b", "*"])
def test_wrong_allowed_hostname_is_named(text: str) -> None:
    """An entry without a host is an error that quotes it."""
    with pytest.raises(ValueError, match="DEV_ALLOWED_HOSTNAMES"):
        parse_allowed_hostnames(text)
