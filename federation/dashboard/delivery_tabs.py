"""The tabs above a list of deliveries, with how many there are in each state as of the last count: no page counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlmodel import col

from db import Database, DeliveryState, DeliveryTotal, ServerSummary
from federation.admin.deliveries.deliveries import OPEN, AnyState, Selection
from federation.delivery.rows import OPEN_STATES

TABS: Final[tuple[AnyState | None, ...]] = (None, OPEN, *DeliveryState)
"""What a list is of: deliveries in any state, those that are owed, those in one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """How many deliveries are in each state, as of `counted_at`."""

    counted_at: datetime
    states: Mapping[DeliveryState, int]

    def of(self, tab: AnyState | None) -> int:
        """Return how many a tab has."""
        chosen = OPEN_STATES if tab == OPEN else [*DeliveryState] if tab is None else [DeliveryState(tab)]
        return sum(self.states[state] for state in chosen)


async def state_counts(database: Database, selection: Selection) -> StateCounts | None:
    """Return what the recurring job `rollups` counted of all deliveries, or of those to one server.

    None if it has counted nothing yet, and for what it does not count: deliveries by code or age.
    """
    totals = await database.rows(_TOTALS)
    everywhere = replace(selection, state=None, server_url=None).is_everything
    if not totals or not everywhere:
        return None
    counted_at = max(row.counted_at for row in totals)
    if selection.server_url is None:
        return StateCounts(counted_at=counted_at, states=_every({row.state: int(row.number) for row in totals}))
    found = await database.rows(_OF_SERVER, {"url": selection.server_url})
    return StateCounts(
        counted_at=counted_at,
        states=_every({state: int(row._mapping[state.value]) for row in found for state in DeliveryState}),
    )


def _every(counts: Mapping[DeliveryState, int]) -> Mapping[DeliveryState, int]:
    return {state: counts.get(state, 0) for state in DeliveryState}


_TOTALS: Final = select(
    col(DeliveryTotal.state),
    func.sum(col(DeliveryTotal.deliveries)).label("number"),
    func.max(col(DeliveryTotal.counted_at)).label("counted_at"),
).group_by(col(DeliveryTotal.state))
_OF_SERVER: Final = select(*(col(getattr(ServerSummary, state.value)) for state in DeliveryState)).where(
    col(ServerSummary.server_url) == bindparam("url")
)
