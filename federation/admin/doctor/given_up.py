"""A check of the doctor: which deliveries were given up in the last days, why, and to whom they were.

Nobody tries them again by themselves, and after a week they are purged. The check costs the same however many there
are. Rows that versions without states gave up are not among them: to find these, all that is ready would be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Integer, Select, bindparam, func, select, union_all
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState
from federation.admin.doctor.checks import Found, ok, warning
from federation.admin.words import counted
from federation.delivery.error_codes import BLACKLISTED
from federation.runtime.composition import Federation

MOST_LOOKED_AT: Final = 5_000
"""How many are looked at in each state, those that were made last."""
NAMED: Final = 3
"""How many codes and servers are named, the worst first."""


async def given_up(federation: Federation) -> Found:
    """Warn of deliveries that were given up, but for those that a rule of the blacklist ended: that was on purpose."""
    return await look(federation.database)


async def look(database: Database) -> Found:
    """Look at those that were made last."""
    looked_at, states = Counter[DeliveryState](), Counter[DeliveryState]()
    codes, servers = Counter[str](), Counter[str]()
    for state, code, server_url, number in await database.rows(_GIVEN_UP, {"most": MOST_LOOKED_AT}):
        looked_at[state] += number
        if code != BLACKLISTED:
            states[state] += number
            codes[code or "never tried"] += number
            servers[server_url or "unnamed servers"] += number
    if not states:
        return ok("no delivery was given up in the last days")
    least = "at least " if MOST_LOOKED_AT in looked_at.values() else ""
    by_state = ", ".join(f"{number} {state.value}" for state, number in states.most_common())
    why, to = _worst(codes), _worst(servers)
    text = f"{least}{counted(states.total())} given up in the last days: {by_state}; because of {why}; to {to}"
    return warning(text, _advice([state for state, _ in states.most_common()]))


def _worst(numbers: Counter[str]) -> str:
    first = sorted(numbers.items(), key=lambda each: (-each[1], each[0]))[:NAMED]
    named = ", ".join(f"{name} ({number})" for name, number in first)
    return named if len(numbers) <= NAMED else f"{named} and {len(numbers) - NAMED} more"


def _advice(states: Sequence[DeliveryState]) -> str:
    chosen = f"--state {states[0].value}"
    also = f"; likewise with `--state {states[1].value}`" if len(states) > 1 else ""
    return (
        f"`federation deliveries list {chosen}` says more; `deliveries retry {chosen}` owes them again,"
        f" `deliveries drop {chosen}` forgets them{also}"
    )


_MOST: Final = bindparam("most", type_=Integer)


def _latest(state: DeliveryState) -> Select[*tuple[Any, ...]]:
    made, row = col(DeliveryJob.created_at), col(DeliveryJob.id)
    chosen = select(col(DeliveryJob.state), col(DeliveryJob.error_code), col(DeliveryJob.server_url))
    latest = chosen.where(col(DeliveryJob.state) == state).order_by(made.desc(), row.desc()).limit(_MOST)
    return select(latest.subquery(state.value))


_LATEST: Final = union_all(_latest(DeliveryState.FAILED), _latest(DeliveryState.EXPIRED)).subquery()
_GIVEN_UP: Final = select(_LATEST, func.count()).group_by(*_LATEST.c)
