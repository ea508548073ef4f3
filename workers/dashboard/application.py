"""The dashboard of queues alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from starlette.responses import RedirectResponse, Response

from workers.dashboard.access import Access
from workers.dashboard.catalog import QueueCatalog, told
from workers.dashboard.feed import INTERVAL
from workers.dashboard.queue_pages import QUEUES, queue_part
from workers.dashboard.site import Site, log_action
from workers.dashboard.throttle import LoginThrottle
from workers.dashboard.visit import SEE_OTHER, Record, Visit
from workers.queue import Queue


def queue_site(
    queues: Sequence[Queue],
    *,
    access: Access,
    title: str = "Queues",
    record: Record = log_action,
    throttle: LoginThrottle | None = None,
    interval: timedelta = INTERVAL,
) -> tuple[Site, QueueCatalog]:
    """Make the dashboard of these queues, whose first page is that of all of them."""
    catalog = QueueCatalog(queues)
    part = queue_part(catalog)
    part = replace(part, pages={**part.pages, "/": _first_page})
    site = Site([part], title=title, access=access, teller=told, record=record, throttle=throttle, interval=interval)
    return site, catalog


async def _first_page(_visit: Visit) -> Response:
    return RedirectResponse(QUEUES.path, status_code=SEE_OTHER)
