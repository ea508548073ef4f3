"""Which clients do nothing but cost: those refused again and again that never brought anything a server had signed.

Refusing a request takes a few milliseconds of the process that delivers as well, so two hundred a second from all over
the world would leave it little time for anything else. Whoever is *barred* is answered at its connection, before a byte
is read.

Whoever brought a delivery that was taken is not barred for an hour: behind one address there may be many, a server as
well as somebody who hopes to have it shut out. That is why a proxy that nobody named is never barred where it shows in
the headers, and why nobody is by a single mistake.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import structlog

from federation.node.refusals import Refusal

log = structlog.get_logger(__name__)

T = TypeVar("T")

REFUSALS: Final = 5
WINDOW: Final = timedelta(seconds=10)
"""So many refusals in this time bar a client; each further try while it is barred counts as one more."""
KEEP_PROVED: Final = timedelta(hours=1)
MAX_CLIENTS: Final = 10_000
"""How many a process remembers of each kind; those heard of least recently go first."""

BLAMED: Final = frozenset({400, 403, 413, 415, 429})
"""The statuses of refusals that a server in good order hardly ever gets; 404 and 409 it gets every day."""


class ClientStanding:
    """What this process has seen of clients, by their names (see `Clients`)."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, refusals: int = REFUSALS) -> None:
        self._now = now
        self._refusals = refusals
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()
        self._proved: OrderedDict[str, float] = OrderedDict()

    def proved(self, client: str | None) -> None:
        """It brought what a registered server had signed."""
        if client is not None:
            _keep(self._proved, client, self._now())
            self._refused.pop(client, None)

    def refused(self, client: str | None, status: int) -> None:
        """A request of it was refused."""
        if client is None or status not in BLAMED or self._is_proved(client):
            return
        times = self._refused.get(client) or deque(maxlen=self._refusals)
        was_barred = self._is_recent(times)
        times.append(self._now())
        _keep(self._refused, client, times)
        if not was_barred and self._is_recent(times):
            log.warning("client_barred", client=client, refused=self._refusals, seconds=WINDOW.total_seconds())

    def turns_away(self, client: str | None) -> bool:
        """Whether what it just began, a connection or a request, is to be refused; that counts as one more refusal."""
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
    """What a barred client is told, whatever it asks."""
    pause = str(round(WINDOW.total_seconds()))
    text = "Too many of your requests were refused; come back later"
    return Refusal(429, text, reason="CLIENT_BARRED", headers={"Retry-After": pause})


def _keep(remembered: OrderedDict[str, T], client: str, value: T) -> None:
    remembered[client] = value
    remembered.move_to_end(client)
    if len(remembered) > MAX_CLIENTS:
        remembered.popitem(last=False)
