"""The latest report of the analytics, as they wrote it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.responses import HTMLResponse, Response

from federation.analytics import REPORT_FILE
from workers.dashboard.rendering import MenuItem
from workers.dashboard.site import SitePart
from workers.dashboard.visit import Refusal, Visit
from workers.extras import install

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

ANALYTICS: Final = MenuItem(title="Analytics", path="/analytics")
EXTRA: Final = "analytics"
LARGEST: Final = 8 << 20
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "sandbox"
)
"""The report carries its own style and no scripts. Here it can run none either, and is no page of the dashboard."""


def analytics_part(federation: Federation) -> SitePart:
    """Return the page: the report, or how a node that computes no analytics comes to one."""
    out = federation.settings.federation_analytics_out
    if out is None:
        return SitePart(pages={ANALYTICS.path: _how_to_turn_them_on})

    async def page(_visit: Visit) -> Response:
        report = await asyncio.to_thread(_read, out / REPORT_FILE)
        if report is None:
            raise Refusal(404, "There is no report yet: the scheduler's job `analytics` writes one each night.")
        return HTMLResponse(report, headers={"content-security-policy": POLICY})

    return SitePart(menu=(ANALYTICS,), pages={ANALYTICS.path: page})


async def _how_to_turn_them_on(visit: Visit) -> Response:
    return visit.page("no_analytics.html", {"install": install(EXTRA)})


def _read(file: Path) -> bytes | None:
    try:
        with file.open("rb") as opened:
            return opened.read(LARGEST)
    except OSError:
        return None
