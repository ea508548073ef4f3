"""The tabs above a list of deliveries, with how many there are in each state as of the last count, if that is news."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sqlalchemy import bindparam, func, select
from sqlmodel import col

from db import Database, DeliveryState, DeliveryTotal, ServerSummary
from federation.admin.deliveries.deliveries import OPEN, AnyState, Selection
from federation.admin.overview import Counts, brought_up_to_date
from federation.delivery.rows import OPEN_STATES
from workers.dashboard.text import grouped

TABS: Final[tuple[AnyState | None, ...]] = (None, OPEN, *DeliveryState)
"""What a list is of: deliveries in any state, those that are owed, those in one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """How many deliveries are in each state."""

    counts: Counts

    def of(self, tab: AnyState | None) -> str:
        """Return how many a tab has, with a plus if there may be more."""
        chosen = OPEN_STATES if tab == OPEN else [*DeliveryState] if tab is None else [DeliveryState(tab)]
        number = grouped(sum(self.counts.states[state] for state in chosen))
        return f"{number}+" if self.counts.more.intersection(chosen) else number


async def state_counts(database: Database, selection: Selection) -> StateCounts | None:
    """Return what the recurring job `rollups` counted of all deliveries, or of those to one server, or what is there.

    None for what it does not count: deliveries by code or age.
    """
    if not replace(selection, state=None, server_url=None).is_everything:
        return None
    totals = await database.rows(_TOTALS)
    states = {row.state: int(row.number) for row in totals}
    if selection.server_url is not None:
        found = await database.rows(_OF_SERVER, {"url": selection.server_url})
        states = {state: int(row._mapping[state.value]) for row in found for state in DeliveryState}
    last = Counts(
        counted_at=max((row.counted_at for row in totals), default=None),
        states={state: states.get(state, 0) for state in DeliveryState},
        held_by_reason={},
    )
    return StateCounts(counts=await brought_up_to_date(database, last, server_url=selection.server_url))


_TOTALS: Final = select(
    col(DeliveryTotal.state),
    func.sum(col(DeliveryTotal.deliveries)).label("number"),
    func.max(col(DeliveryTotal.counted_at)).label("counted_at"),
).group_by(col(DeliveryTotal.state))
_OF_SERVER: Final = select(*(col(getattr(ServerSummary, state.value)) for state in DeliveryState)).where(
    col(ServerSummary.server_url) == bindparam("url")
)
