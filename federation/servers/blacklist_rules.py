"""What a blacklist rule means: which server URLs it covers, and how a URL finds its rule among a hundred thousand.

A rule is an origin, `https://evil.example` or `http://evil.example:8080`, or a domain written with a star,
`*.evil.example`. The star covers the domain itself and every name below it, with any scheme and port, because whoever
blocks a domain means its owner. Rules and URLs are compared in canonical spelling, and an IPv4 address that is wrapped
in IPv6 as that address, since both lead to one machine; a text that has no such spelling covers only itself, byte for
byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from federation.http.addresses import embedded_ipv4
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin

STAR = "*."
ALL_LABELS = 127
"""A host name has no more labels than this."""

# URLs that are easily recognised as canonical: the last label of their domain does not begin like a number.
_PLAIN_ORIGIN = re.compile(r"(https?)://(?:[a-z0-9_-]{1,63}\.)*[a-z_-][a-z0-9_-]{0,62}(?::([1-9][0-9]{0,4}))?")
_MAX_PLAIN_CHARACTERS = 253
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535


def canonical_rule(text: str) -> str:
    """Return the one spelling of the rule *text*: an origin, or `*.` and a domain.

    Raises:
        UrlError: it is no rule: no http(s) URL and no domain with a star, or a URL that goes on after the host.
    """
    if text.startswith(STAR):
        return STAR + _canonical_domain(text[len(STAR) :])
    origin = _canonical(text)
    parts = urlsplit(text)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise UrlError("a rule covers a whole server; leave out what follows the host")
    return origin


def rules_covering(url: str, *, labels: int = ALL_LABELS) -> Iterator[str]:
    """Yield every rule that would cover *url*, in canonical spelling. Domains may have up to *labels* labels."""
    yield url
    try:
        origin = _canonical(url)
    except UrlError:
        return
    if origin != url:
        yield origin
    host = _host(origin)
    at = len(host)
    for _ in range(labels):
        at = host.rfind(".", 0, at)
        yield STAR + host[at + 1 :]
        if at < 0:
            return


class RuleSet:
    """Rules and until when each is in force.

    A look-up costs a few dictionary accesses, however many rules there are.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._labels = 0

    def __len__(self) -> int:
        return len(self._until)

    def add(self, text: str, expires_at: datetime | None, *, known: RuleSet | None = None) -> None:
        """Add the rule *text*, in any spelling, to be in force until *expires_at* at least; None means for good.

        A rule that *known* holds need not be parsed again, which is most of the work.
        """
        rule = text if known is not None and text in known._until else _rule_or_text(text)
        until = math.inf if expires_at is None else expires_at.timestamp()
        self._until[rule] = max(until, self._until.get(rule, until))
        if rule.startswith(STAR):
            self._labels = max(self._labels, rule.count("."))

    def covering(self, url: str, now: float) -> str | None:
        """Return a rule in force at *now*, a POSIX timestamp, that covers *url*, or None if there is none."""
        until = self._until
        for rule in rules_covering(url, labels=self._labels):
            end = until.get(rule)
            if end is not None and end > now:
                return rule
        return None


def _rule_or_text(text: str) -> str:
    try:
        return canonical_rule(text)
    except UrlError:
        return text


def _canonical(url: str) -> str:
    plain = _PLAIN_ORIGIN.fullmatch(url) if len(url) <= _MAX_PLAIN_CHARACTERS else None
    if plain is not None:
        scheme, port = plain.groups()
        if port is None or (int(port) <= _MAX_PORT and int(port) != _DEFAULT_PORTS[scheme]):
            return url
    return _unwrapped(canonical_origin(url))


def _unwrapped(origin: str) -> str:
    """Return a canonical origin with the IPv4 address that its IPv6 address leads to, if it does."""
    before, bracket, behind = origin.partition("[")
    if not bracket:
        return origin
    address, _, port = behind.partition("]")
    ipv4 = embedded_ipv4(IPv6Address(address))
    return origin if ipv4 is None else f"{before}{ipv4}{port}"


def _canonical_domain(domain: str) -> str:
    if not domain or any(character in "/\\?#@:[]" for character in domain):
        raise UrlError("after the star comes a domain alone, without scheme, port and path")
    return _host(_canonical(f"https://{domain}"))


def _host(origin: str) -> str:
    authority = origin.partition("://")[2]
    return authority.partition("]")[0] + "]" if authority.startswith("[") else authority.partition(":")[0]
