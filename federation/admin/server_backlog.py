"""What is owed to one server, at a glance: a server that is down may have a million deliveries."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from db import Database
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
    summary = await summary_of(database, server_url)
    if summary is None:
        return seen

    def number(looked_at: int, counted: int) -> int:
        return looked_at if looked_at < MOST_LOOKED_AT else max(looked_at, counted)

    ready, held = number(seen.ready, summary.ready), number(seen.held, summary.held)
    failed, expired = number(seen.failed, summary.failed), number(seen.expired, summary.expired)
    return replace(seen, open=ready + held, ready=ready, held=held, failed=failed, expired=expired)
