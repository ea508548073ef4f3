"""How many attempts one server may have at once, so that a hanging one never holds every worker slot."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from federation.delivery.errors import Parked

MAX_REMEMBERED = 10_000


class ServerSlots:
    """At most `per_server` attempts at one server at a time in this process; the rest are parked for about 1 s."""

    def __init__(self, per_server: int) -> None:
        self._per_server = per_server
        self._used: Counter[str] = Counter()
        self._parked: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def take(self, server_url: str, delivery_id: str) -> Iterator[None]:
        """Hold one of the server's slots.

        Raises:
            Parked: all are taken.
        """
        if self._used[server_url] >= self._per_server:
            # Spread, so that parked jobs do not all come back in the same moment.
            raise Parked(server_url, timedelta(seconds=random.uniform(0.75, 1.25)))  # noqa: S311 - guards nothing
        self._used[server_url] += 1
        self._parked.pop(delivery_id, None)
        try:
            yield
        finally:
            self._used[server_url] -= 1
            if not self._used[server_url]:
                del self._used[server_url]

    def note_parked(self, delivery_id: str) -> bool:
        """Whether this is the first time the delivery is parked since it last had a slot.

        A job waiting behind a hanging server is parked every second; the attempt log wants to know once.
        """
        if delivery_id in self._parked:
            return False
        self._parked[delivery_id] = None
        if len(self._parked) > MAX_REMEMBERED:
            self._parked.popitem(last=False)
        return True
