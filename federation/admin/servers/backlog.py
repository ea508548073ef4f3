"""What is owed to one server, at a glance: a server that is down may have a million deliveries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Select, literal, select, union_all
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState
from federation.admin.deliveries.deliveries import DeliveryStats, age, summed
from federation.admin.servers.pages import summary_of

MOST_LOOKED_AT: Final = 100
"""How many rows of each state are looked at, the oldest first."""


async def backlog_of(database: Database, server_url: str) -> DeliveryStats:
    """Return where the server's deliveries stand. Less than a thousand rows are read, however many there are.

    Of a state with more than a hundred, the number is that of the last count, which the job `rollups` makes; ages,
    reasons and codes are then of the oldest hundred.
    """
    parts = [_oldest(server_url, state).subquery(f"oldest_{state.value}") for state in DeliveryState]
    seen = summed(await database.rows(select(union_all(*(select(part) for part in parts)).subquery())))
    summary = await summary_of(database, server_url)
    if summary is None:
        return seen

    def number(looked_at: int, counted: int) -> int:
        return looked_at if looked_at < MOST_LOOKED_AT else max(looked_at, counted)

    ready, held = number(seen.ready, summary.ready), number(seen.held, summary.held)
    failed, expired = number(seen.failed, summary.failed), number(seen.expired, summary.expired)
    return replace(seen, open=ready + held, ready=ready, held=held, failed=failed, expired=expired)


def _oldest(server_url: str, state: DeliveryState) -> Select[*tuple[Any, ...]]:
    """Return the query for the oldest of its deliveries in a state, by an index, each as a group of its own."""
    made = col(DeliveryJob.created_at)
    return (
        select(
            col(DeliveryJob.state),
            col(DeliveryJob.held_reason),
            col(DeliveryJob.error_code),
            age().label("age"),
            literal(1).label("number"),
            made,
        )
        .where(col(DeliveryJob.server_url) == server_url, col(DeliveryJob.state) == state)
        .order_by(made, col(DeliveryJob.id))
        .limit(MOST_LOOKED_AT)
    )
