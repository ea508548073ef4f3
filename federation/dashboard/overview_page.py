"""The first page: how the node does, in a sentence, in numbers, and what needs somebody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final

from starlette.responses import Response

from db import AttemptOutcome, DeliveryState
from federation.admin import overview
from federation.admin.doctor.doctor import Finding
from federation.admin.overview import LastHour, Owed
from federation.dashboard.findings import Examination, Examinations
from federation.dashboard.orders import Node
from federation.runtime.composition import Federation
from workers.dashboard import charts
from workers.dashboard.api import ApiAnswer, calls, given
from workers.dashboard.catalog import QueueCatalog, QueueLine, Queues
from workers.dashboard.charts import Columns, Layer
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.rendering import MenuItem, Templates
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, grouped
from workers.dashboard.visit import Visit

OVERVIEW: Final = MenuItem(title="Overview", path="/")
_FAILED: Final = (AttemptOutcome.RETRYABLE, AttemptOutcome.PERMANENT)

api: Final = calls()


class OverviewAnswer(ApiAnswer):
    """How the node does. `findings` are those of the doctor that matter, as of `examined_at`, which may be null."""

    hour: LastHour
    owed: Owed
    queues: list[QueueLine]
    examined_at: datetime | None
    findings: list[Finding]


def overview_part(federation: Federation, queues: QueueCatalog, examinations: Examinations) -> SitePart:
    """Return the page, and the call."""

    async def shown() -> Mapping[str, object]:
        hour, owed, lines, examined = await _looked(federation, queues, examinations)
        return {
            "lede": _lede(hour, owed),
            "hour": hour,
            "failures": sum(hour.attempts[outcome] for outcome in _FAILED),
            "owed": owed,
            "given_up": owed.states[DeliveryState.FAILED] + owed.states[DeliveryState.EXPIRED],
            "charts": _charts(hour),
            "examined": examined,
            **_of_queues(lines),
        }

    async def page(visit: Visit) -> Response:
        return visit.page("overview.html", await shown(), live="overview")

    def live(templates: Templates) -> LiveSource:
        async def read(_parameters: Parameters) -> Fragments:
            return {"overview-live": templates.render("parts/overview.html", **await shown())}

        return read

    return SitePart(
        menu=(OVERVIEW,), pages={"/": page}, live={"overview": live}, calls=api.routes, gives=(examinations,)
    )


@api.get("/overview")
async def show_overview(
    node: Node, queues: Queues, examinations: Annotated[Examinations, given(Examinations)]
) -> OverviewAnswer:
    """Show how the node does."""
    hour, owed, lines, examined = await _looked(node, queues, examinations)
    return OverviewAnswer(
        hour=hour,
        owed=owed,
        queues=lines,
        examined_at=None if examined is None else examined.at,
        findings=[] if examined is None else [*examined.matters],
    )


async def _looked(
    federation: Federation, queues: QueueCatalog, examinations: Examinations
) -> tuple[LastHour, Owed, list[QueueLine], Examination | None]:
    return await asyncio.gather(
        overview.last_hour(federation.database), overview.owed(federation.database), queues.lines(), examinations.last()
    )


def _of_queues(lines: list[QueueLine]) -> dict[str, object]:
    workers = {worker.id for line in lines for worker in line.alive}
    return {
        "workers": len(workers),
        "lost": len({worker.id for line in lines for worker in line.workers} - workers),
        "waiting": sum(line.waiting for line in lines),
        "running": sum(line.running for line in lines),
        "silent": [line for line in lines if line.problem],
        "paused": [line for line in lines if line.paused],
    }


def _lede(hour: LastHour, owed: Owed) -> tuple[str, str]:
    """Say first what stands, then what was done."""
    held, ready = owed.states[DeliveryState.HELD], owed.states[DeliveryState.READY]
    if held:
        first = f"{counted(held, 'delivery')} {'is' if held == 1 else 'are'} held."
    elif ready:
        first = f"{counted(ready, 'delivery')} {'is' if ready == 1 else 'are'} on the way."
    else:
        first = "Nothing is owed."
    delivered = hour.attempts[AttemptOutcome.DELIVERED]
    failed = sum(hour.attempts[outcome] for outcome in _FAILED)
    rest = f"{grouped(delivered)} delivered in the last hour, " if delivered else "Nothing delivered in the last hour, "
    return first, rest + (f"{counted(failed, 'attempt')} failed." if failed else "no attempt failed.")


def _charts(hour: LastHour) -> list[tuple[str, str, Columns]]:
    labels = [hour.minutes[place].at.strftime("%H:%M UTC") for place in (0, 30, -1)]
    delivered = [float(minute.attempts[AttemptOutcome.DELIVERED]) for minute in hour.minutes]
    failed = [float(sum(minute.attempts[outcome] for outcome in _FAILED)) for minute in hour.minutes]
    return [
        _chart("Delivered", "a minute, over the last hour", delivered, "main", labels),
        _chart("Failed attempts", "a minute, over the last hour", failed, "bad", labels),
    ]


def _chart(name: str, what: str, values: list[float], style: str, labels: list[str]) -> tuple[str, str, Columns]:
    highest = grouped(round(max(values)))
    title = f"{name} {what}: {grouped(round(sum(values)))} in all, at most {highest} in one minute"
    return name, what, charts.columns(title, [Layer(name=name, values=values, style=style)], labels)
