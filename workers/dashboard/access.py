"""Whom a dashboard lets in, and what they may do there."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from workers.dashboard.accounts import NAME_FORM, Account, Role

Network: TypeAlias = IPv4Network | IPv6Network

NOBODY: Final = "local"
"""The name in the log of whoever uses a dashboard that asks nobody who they are."""
USER_HEADER: Final = "x-dashboard-user"
ROLE_HEADER: Final = "x-dashboard-role"
SECRET_HEADER: Final = "x-dashboard-secret"  # noqa: S105 - the name of a header
SHORTEST_SECRET: Final = 16
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class AccessError(ValueError):
    """A dashboard must not be started like this; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who asks. `logs_in` tells whether they came by a login, which they can end."""

    name: str
    role: Role
    logs_in: bool = False

    @property
    def acts(self) -> bool:
        return self.role is Role.OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedProxy:
    """A proxy that has asked who it is, and says so in headers; only from these addresses, and with the secret."""

    networks: Sequence[Network]
    secret: str = field(repr=False)

    def visitor(self, connection: HTTPConnection) -> Visitor | None:
        """Return whom the proxy has let in; None if this is not the proxy, or it names nobody."""
        headers = connection.headers
        address = _address(connection)
        if address is None or not any(address in network for network in self.networks):
            return None
        given = headers.get(SECRET_HEADER, "").encode(errors="replace")
        if not hmac.compare_digest(given, self.secret.encode(errors="replace")):
            return None
        name, role = headers.get(USER_HEADER, ""), headers.get(ROLE_HEADER, Role.VIEWER)
        if not NAME_FORM.fullmatch(name) or role not in list(Role):
            return None
        return Visitor(name=name, role=Role(role))


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rules of a dashboard.

    Without accounts and without a proxy everybody who reaches it is let in, and acts only with `allow_actions`. `url`
    is what browsers call it where a proxy stands before it.
    """

    accounts: Sequence[Account] = ()
    proxy: TrustedProxy | None = None
    allow_actions: bool = False
    url: str | None = None
    bind: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.proxy is not None and len(self.proxy.secret) < SHORTEST_SECRET:
            raise AccessError(
                f"the secret that a proxy shares with the dashboard has at least {SHORTEST_SECRET} characters"
            )
        if self.is_open and not is_loopback(self.bind):
            raise AccessError(f"without an account it listens on loopback only, not on {self.bind}")
        if self.url is not None and (urlsplit(self.url).scheme not in ("http", "https") or not self._url_host):
            raise AccessError("the dashboard's URL is written as https://dashboard.example")

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return not self.accounts and self.proxy is None

    @property
    def is_behind_proxy(self) -> bool:
        """Whether connections are a proxy's, and not those of browsers."""
        return self.url is not None or self.proxy is not None

    @property
    def is_https(self) -> bool:
        """Whether browsers reach it over TLS, which a proxy ends."""
        return self.url is not None and self.url.startswith("https:")

    @property
    def hosts(self) -> frozenset[str]:
        """The names by which browsers may ask for it. A page of another site cannot choose one of these.

        That site could point its own name at our address (DNS rebinding); then the browser would name it here.
        """
        is_everywhere = self.bind in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
        names = LOOPBACK_NAMES if is_everywhere or is_loopback(self.bind) else {self.bind}
        return frozenset({*names, *([self._url_host] if self._url_host else [])})

    @property
    def _url_host(self) -> str | None:
        return urlsplit(self.url).hostname if self.url else None

    def open_visitor(self) -> Visitor:
        """Return whoever uses a dashboard that asks nobody."""
        return Visitor(name=NOBODY, role=Role.OPERATOR if self.allow_actions else Role.VIEWER)


def host_of(header: str) -> str:
    """Return the name in a `Host` header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(bind: str) -> bool:
    """Tell whether only this machine reaches what listens on the address."""
    try:
        return ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def _address(connection: HTTPConnection) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(connection.client.host if connection.client else "")
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
