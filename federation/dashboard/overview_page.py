"""The first page: how the node does, in a sentence, in numbers, and what needs somebody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final

from fastapi import Query
from starlette.responses import Response

from db import AttemptOutcome, DeliveryState
from federation.admin import overview
from federation.admin.doctor.doctor import Finding
from federation.admin.overview import LastHour, Owed
from federation.dashboard.findings import Examination, Examinations
from federation.dashboard.history import FAILED, Span, TimeCount, history, history_charts
from federation.dashboard.orders import Node
from federation.runtime.composition import Federation
from workers.dashboard.api import ApiAnswer, Listing, calls, given
from workers.dashboard.catalog import QueueCatalog, QueueLine, Queues
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.rendering import MenuItem, Templates
from workers.dashboard.site import SitePart
from workers.dashboard.text import counted, grouped, since
from workers.dashboard.visit import Visit

OVERVIEW: Final = MenuItem(title="Overview", path="/")

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

    async def shown(span: Span) -> Mapping[str, object]:
        hour, owed, lines, examined = await _looked(federation, queues, examinations)
        return {
            "lede": _lede(hour, owed),
            "hour": hour,
            "failures": sum(hour.attempts[outcome] for outcome in FAILED),
            "owed": owed,
            "given_up": owed.states[DeliveryState.FAILED] + owed.states[DeliveryState.EXPIRED],
            "spans": list(Span),
            "span": span,
            "charts": history_charts(span, await history(federation.database, span)),
            "examined": examined,
            "is_before": examined is not None and examined.picture != _picture(owed, lines),
            **_of_queues(lines),
        }

    async def page(visit: Visit) -> Response:
        span = _span(visit.query.get("over"))
        return visit.page("overview.html", await shown(span), live="overview", parameters=(("over", span.value),))

    def live(templates: Templates) -> LiveSource:
        async def read(parameters: Parameters) -> Fragments:
            told = await shown(_span(dict(parameters).get("over")))
            return {"overview-live": templates.render("parts/overview.html", **told)}

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


@api.get("/history")
async def show_history(
    node: Node, over: Annotated[Span, Query(description="How far back: `hour`, `day` or `week`.")] = Span.HOUR
) -> Listing[TimeCount]:
    """Show how attempts ended: by the minute over an hour, by ten minutes over a day, by the hour over a week."""
    return Listing(items=tuple(await history(node.database, over)))


async def _looked(
    federation: Federation, queues: QueueCatalog, examinations: Examinations
) -> tuple[LastHour, Owed, list[QueueLine], Examination | None]:
    hour, owed, lines = await asyncio.gather(
        overview.last_hour(federation.database), overview.owed(federation.database), queues.lines()
    )
    return hour, owed, lines, await examinations.last(_picture(owed, lines))


def _picture(owed: Owed, lines: list[QueueLine]) -> tuple[frozenset[str], ...]:
    """Return what a page says in words of the node, and the doctor, too: no number, which would always be another."""
    return (
        frozenset(state.value for state, number in owed.states.items() if number),
        frozenset(line.name for line in lines if line.problem),
        frozenset(line.name for line in lines if line.paused),
        frozenset(line.name for line in lines if line.alive),
    )


def _span(asked: str | None) -> Span:
    return Span(asked) if asked in list(Span) else Span.HOUR


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
    state, number, how = (DeliveryState.HELD, held, "held") if held else (DeliveryState.READY, ready, "on the way")
    if number and owed.counted_at is not None and owed.is_old:
        first = f"{counted(number, 'delivery')} {'was' if number == 1 else 'were'} {how} {since(owed.counted_at)} ago."
    elif number:
        least = "At least " if state in owed.more else ""
        first = f"{least}{counted(number, 'delivery')} {'is' if number == 1 else 'are'} {how}."
    else:
        first = "Nothing is owed."
    delivered = hour.attempts[AttemptOutcome.DELIVERED]
    failed = sum(hour.attempts[outcome] for outcome in FAILED)
    rest = f"{grouped(delivered)} delivered in the last hour, " if delivered else "Nothing delivered in the last hour, "
    return first, rest + (f"{counted(failed, 'attempt')} failed." if failed else "no attempt failed.")
