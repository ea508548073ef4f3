"""What is owed to one server, at a glance: a server that is down may have a million deliveries."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from db import Database, DeliveryState
from federation.admin.deliveries import DeliveryStats, Selection, stats
from federation.admin.server_pages import summary_of

MOST_LOOKED_AT: Final = 100
"""How many rows of each state are looked at, the oldest first."""


async def backlog_of(database: Database, server_url: str) -> DeliveryStats:
    """Return where the server's deliveries stand. Less than a thousand rows are read, however many there are.

    Of a state with more than a hundred, the number is that of the last count, which the job `rollups` makes; ages,
    reasons and codes are then of the oldest hundred.
    """
    seen = await stats(database, Selection(server_url=server_url), servers=1, oldest=MOST_LOOKED_AT)
    looked_at = {state: int(getattr(seen, state.value)) for state in DeliveryState}
    if max(looked_at.values()) < MOST_LOOKED_AT:
        return seen
    summary = await summary_of(database, server_url)
    number = {
        state.value: count
        if summary is None or count < MOST_LOOKED_AT
        else max(count, int(getattr(summary, state.value)))
        for state, count in looked_at.items()
    }
    return replace(seen, **number, open=number[DeliveryState.READY.value] + number[DeliveryState.HELD.value])
