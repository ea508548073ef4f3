"""Whose request it is: the address that limits per client are counted by, as far as it can be known.

What a proxy says of its clients is read in `workers.forwarded`.

Some clients only cost us: they were refused again and again, and never brought anything that a server had signed.
Refusing a request takes a few milliseconds of the process that also delivers, so two hundred a second from all over the
world would leave it little time for anything else. A *barred* client is answered at its connection, before a byte is
read. A client that brought an accepted delivery is not barred for an hour: one address may stand for many, a server as
well as somebody who hopes to have it shut out. For the same reason, a proxy that nobody named is never barred if the
headers show it, and a single mistake bars nobody.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network
from typing import Final, TypeAlias, TypeVar

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request

from federation.http.addresses import is_globally_routable
from federation.node.refusals import Refusal
from workers.forwarded import Address, forwarded_client, forwards, read_address, site, subscriber

Network: TypeAlias = IPv4Network | IPv6Network
Unnamed: TypeAlias = Callable[[str], None]
"""Called with the address of a proxy that nobody named, at each of its requests."""

_FORWARDING_HEADERS: Final = ("x-forwarded-for", "forwarded", "x-real-ip", "via")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a request came from, as far as that is known.

    Limits count by *client* and *network*. *holders* are those whose shares it uses (see `shares`): the client, and its
    network; of one that comes from a private address only the client, whom limits do not count.
    """

    client: str | None
    network: str | None
    holders: tuple[str, ...]


class Clients:
    """Names clients by address; *proxies* are trusted to append to `X-Forwarded-For` or `Forwarded`."""

    def __init__(self, proxies: Collection[Network] = (), *, unnamed: Unnamed | None = None) -> None:
        self._proxies = tuple(proxies)
        self._unnamed = unnamed

    def address(self, request: Request) -> str | None:
        """Return the client's address, for IPv6 its network, or None if it cannot be known.

        It cannot be known behind a proxy that nobody named: what connects from a private address is most likely one,
        and counting by it would shut out everybody at once. All clients behind a named proxy that does not say for whom
        it asks count as one client.
        """
        peer = read_address(request.client.host if request.client else "")
        if peer is None:
            return None
        if self._is_proxy(peer):
            return subscriber(self._behind_proxies(request.headers) or peer)
        if is_globally_routable(peer):
            return subscriber(peer)
        if self._unnamed is not None and forwards(request.headers):
            self._unnamed(str(peer))
        return None

    def certain_address(self, request: Request) -> Address | None:
        """Return the client's address, even a private one, or None if the headers show a proxy that nobody named."""
        peer = read_address(request.client.host if request.client else "")
        if peer is None:
            return None
        if self._is_proxy(peer):
            return self._behind_proxies(request.headers)
        return None if any(name in request.headers for name in _FORWARDING_HEADERS) else peer

    def asker(self, request: Request) -> Address | None:
        """Return the same as `certain_address`, but a named proxy that forwards nobody's request asks for itself.

        Only for what the operator opens to a proxy's own address: whoever comes through a proxy that says nothing of
        its clients, then, is taken for the proxy.
        """
        peer = read_address(request.client.host if request.client else "")
        has_passed_on = any(name in request.headers for name in _FORWARDING_HEADERS)
        return peer if peer is not None and not has_passed_on else self.certain_address(request)

    def name(self, request: Request) -> str | None:
        """Return the same as `address`, but for private addresses, too, unless the headers show an unnamed proxy.

        Clients behind a named proxy that does not say for whom it asks get None.
        """
        peer = read_address(request.client.host if request.client else "")
        if peer is None or self._is_proxy(peer) or not is_globally_routable(peer):
            peer = self.certain_address(request)
        return None if peer is None else subscriber(peer)

    def source(self, request: Request) -> Source:
        """Return where the request came from.

        What a client writes into its headers never takes it out of all shares: behind a named proxy, it then counts as
        the proxy itself.
        """
        client, network = self.address(request), self.network(request)
        holder = client or self.name(request)
        public = network if client is not None else None
        return Source(
            client=client, network=network, holders=tuple(name for name in (holder, public) if name is not None)
        )

    def network(self, request: Request) -> str | None:
        """Return the /24 or /48 that the client's provider gave to it and its neighbours.

        Returns None if the headers show a proxy that nobody named.
        """
        address = self.certain_address(request)
        return None if address is None else site(address)

    def of_connection(self, host: str) -> str | None:
        """Return whose connection comes from *host*, or None if it is a trusted proxy's, which has many clients."""
        peer = read_address(host)
        return None if peer is None or self._is_proxy(peer) else subscriber(peer)

    def _behind_proxies(self, headers: Headers) -> Address | None:
        return forwarded_client(headers, self._is_proxy)

    def _is_proxy(self, address: Address) -> bool:
        return any(address in network for network in self._proxies)


log = structlog.get_logger(__name__)

T = TypeVar("T")

REFUSALS: Final = 5
WINDOW: Final = timedelta(seconds=10)
"""The time in which `REFUSALS` refusals bar a client; each further try while it is barred counts as one more."""
KEEP_PROVED: Final = timedelta(hours=1)
MAX_CLIENTS: Final = 10_000
"""How many clients a process remembers of each kind; those heard of least recently are dropped first."""

BLAMED: Final = frozenset({400, 403, 408, 413, 415, 429})
"""The statuses of refusals that a well-behaved server hardly ever gets; it gets 404 and 409 every day."""


class ClientStanding:
    """What this process has seen of clients, by their names (see `Clients`)."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, refusals: int = REFUSALS) -> None:
        self._now = now
        self._refusals = refusals
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()
        self._proved: OrderedDict[str, float] = OrderedDict()

    def proved(self, client: str | None) -> None:
        """Note that the client brought what a registered server had signed."""
        if client is not None:
            _keep(self._proved, client, self._now())
            self._refused.pop(client, None)

    def refused(self, client: str | None, status: int) -> None:
        """Note that a request of the client was refused."""
        if client is None or status not in BLAMED or self._is_proved(client):
            return
        times = self._refused.get(client) or deque(maxlen=self._refusals)
        was_barred = self._is_recent(times)
        times.append(self._now())
        _keep(self._refused, client, times)
        if not was_barred and self._is_recent(times):
            log.warning("client_barred", client=client, refused=self._refusals, seconds=WINDOW.total_seconds())

    def turns_away(self, client: str | None) -> bool:
        """Tell whether to refuse what the client just began, a connection or a request.

        If so, it counts as one more refusal.
        """
        if client is None or client not in self._refused or not self._is_recent(self._refused[client]):
            return False
        self._refused[client].append(self._now())
        return True

    def _is_recent(self, times: deque[float]) -> bool:
        return len(times) == self._refusals and self._now() - times[0] < WINDOW.total_seconds()

    def _is_proved(self, client: str) -> bool:
        since = self._proved.get(client)
        return since is not None and self._now() - since < KEEP_PROVED.total_seconds()


def turned_away() -> Refusal:
    """Return the refusal of a barred client, whatever it asks."""
    pause = str(round(WINDOW.total_seconds()))
    text = "Too many of your requests were refused; come back later"
    return Refusal(429, text, reason="CLIENT_BARRED", headers={"Retry-After": pause})


def _keep(remembered: OrderedDict[str, T], client: str, value: T) -> None:
    remembered[client] = value
    remembered.move_to_end(client)
    if len(remembered) > MAX_CLIENTS:
        remembered.popitem(last=False)
