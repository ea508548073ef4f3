"""Which clients only cost us: they were refused again and again, and never brought anything that a server had signed.

Refusing a request takes a few milliseconds of the process that also delivers, so two hundred a second from all over the
world would leave it little time for anything else. A *barred* client is answered at its connection, before a byte is
read.

A client that brought an accepted delivery is not barred for an hour: one address may stand for many, a server as well
as somebody who hopes to have it shut out. For the same reason, a proxy that nobody named is never barred if the headers
show it, and a single mistake bars nobody.
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
"""The time in which `REFUSALS` refusals bar a client; each further try while it is barred counts as one more."""
KEEP_PROVED: Final = timedelta(hours=1)
MAX_CLIENTS: Final = 10_000
"""How many clients a process remembers of each kind; those heard of least recently are dropped first."""

BLAMED: Final = frozenset({400, 403, 413, 415, 429})
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
