"""What programs ask of the node as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from federation.admin import overview
from federation.admin.doctor import Finding
from federation.admin.overview import LastHour, Owed
from federation.dashboard.findings import Examinations
from workers.dashboard.calls import AnyCall, Call, Caller, NothingAsked
from workers.dashboard.catalog import QueueCatalog, QueueLine

if TYPE_CHECKING:
    from federation.runtime.composition import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewAnswer:
    """How the node does. `findings` are those of the doctor that matter, as of `examined_at`, which may be null."""

    hour: LastHour
    owed: Owed
    queues: Sequence[QueueLine]
    examined_at: datetime | None
    findings: Sequence[Finding]


def overview_calls(federation: Federation, queues: QueueCatalog, examinations: Examinations) -> Sequence[AnyCall]:
    """Return the calls."""

    async def shown(_caller: Caller, _asked: NothingAsked) -> OverviewAnswer:
        hour, owed, lines, examined = await asyncio.gather(
            overview.last_hour(federation.database),
            overview.owed(federation.database),
            queues.lines(),
            examinations.last(),
        )
        return OverviewAnswer(
            hour=hour,
            owed=owed,
            queues=lines,
            examined_at=None if examined is None else examined.at,
            findings=() if examined is None else examined.matters,
        )

    return (
        Call(
            method="GET",
            path="/overview",
            summary="Show how the node does.",
            asks=NothingAsked,
            answers=OverviewAnswer,
            code=shown,
        ),
    )
