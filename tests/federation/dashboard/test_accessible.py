"""A node's pages for people who do not see them, or use no mouse, on every width, in both themes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import delete
from sqlmodel import col

from db import DeliveryJob, DeliveryState
from federation.app import Federation
from federation.dashboard.node_site import NodeSite
from federation.rollups.job import Rollups
from tests.browser.axe import violations
from tests.browser.chromium import chromium
from tests.browser.serving import served
from tests.federation.dashboard.test_pages import PAGES, PEER, know, owe
from tests.workers.dashboard.browsing import Person

ONE_OF_EACH = (
    f"/server?url={PEER}",
    "/delivery?id=held",
    "/queue?name=federation-delivery",
    f"/blacklist?check={PEER}",
    "/delivery?id=gone",
)


@pytest.mark.full
async def test_every_page_can_be_used_by_everybody(federation: Federation, acting: NodeSite, tmp_path: Path) -> None:
    """By the rules of axe, with the pages' policy on; and no page is wider than its window."""
    await know(federation, PEER)
    await owe(federation, "held", "\u202ehostile<b>" + "x" * 300)
    await owe(federation, "failed", "gone", state=DeliveryState.FAILED)
    async with federation.database.transaction() as session:
        await session.execute(delete(DeliveryJob).where(col(DeliveryJob.id) == "gone"))
    await Rollups(federation.database)()
    rule = (("rule", "*.x.example"), ("reason", "spam"), ("confirmed", "yes"))
    await Person(acting.site.app).sends("/blacklist/add", *rule, page="/blacklist")
    async with served(acting.site) as url, chromium(tmp_path) as browser:
        for width in (390, 768, 1440):
            for dark in (False, True):
                async with browser.window(width=width, dark=dark) as window:
                    for path in (*PAGES, *ONE_OF_EACH):
                        await window.open(f"{url}{path}")
                        assert await violations(window) == [], (path, width, dark)
                        assert await window.ask("document.documentElement.scrollWidth") <= width, path
                    assert window.errors == []
