"""A node's pages for people who do not see them, or use no mouse, on every width, in both themes."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import delete
from sqlmodel import col

from db import ActionSource, BulkVerb, DeliveryJob, DeliveryState
from federation.admin.deliveries.bulk_jobs import BulkJobs
from federation.admin.deliveries.deliveries import Selection
from federation.base.audit import Order
from federation.dashboard import import_pages
from federation.dashboard.node_site import NodeSite
from federation.rollups.job import Rollups
from federation.runtime.composition import Federation
from tests.browser.axe import violations
from tests.browser.chromium import chromium
from tests.browser.serving import served
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.dashboard.node_data import NOT_SHOWN, PAGES, PEER, know, owe, owe_activity
from tests.federation.dashboard.test_import import uploads
from tests.workers.dashboard.browsing import Person
from workers.crons import Cron
from workers.dashboard.access import Access

ONE_OF_EACH = (
    f"/server?url={PEER}",
    "/delivery?id=held",
    "/queue?name=federation-delivery",
    f"/blacklist?check={PEER}",
    "/delivery?id=gone",
    "/activity?id=posted",
)
BEHIND_BUTTONS = (
    (f"/server?url={PEER}", "button[value=hold]", "federation deliveries hold"),
    ("/recurring", "button[value=remove]", "Remove night?"),
    ("/delivery?id=held", "form[action='/delivery/payload'] button", NOT_SHOWN),
)
"""Pages that only a form leads to: where it is, its button, and what is seen then."""
EACH_KIND = b"server_url,reason\n*.new.example,spam\n*.x.example,worse\n*.new.example,spam\nno rule,x\n"
ORDER = Order(actor="anna", source=ActionSource.CLI, action="deliveries hold")


@pytest.mark.full
async def test_every_page_can_be_used_by_everybody(
    federation: Federation, make_node_site: MakeNodeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of axe, with the pages' policy on; and no page is wider than its window."""
    monkeypatch.setattr(import_pages, "WAITS", 0)
    acting = make_node_site(federation, Access(allow_actions=True), shows_texts=True)
    await know(federation, PEER)
    await owe(federation, "held", "\u202ehostile<b>" + "x" * 300)
    await owe_activity(federation, "a", "b", activity="posted")
    await owe(federation, "failed", "gone", state=DeliveryState.FAILED)
    async with federation.database.transaction() as session:
        await session.execute(delete(DeliveryJob).where(col(DeliveryJob.id) == "gone"))
    await Rollups(federation.database)()
    rule = (("rule", "*.x.example"), ("reason", "spam"), ("confirmed", "yes"))
    person = Person(acting.site.app)
    await person.sends("/blacklist/add", *rule, page="/blacklist")
    federation.tasks_queue.crons.add(Cron(name="night", job="clean", pattern="@daily"))
    await federation.tasks_queue.crons.declare()
    bulk = await BulkJobs(federation).start_deliveries(BulkVerb.DROP, Selection(server_url=PEER), order=ORDER)
    async with served(acting.site) as url, chromium(tmp_path) as browser:
        for width in (390, 768, 1440):
            for dark in (False, True):
                planned = (await uploads(person, EACH_KIND)).headers["location"]
                await acting._imports._lists[parse_qs(urlsplit(planned).query)["key"][0]].comparing
                async with browser.window(width=width, dark=dark) as window:
                    for path in (*PAGES, *ONE_OF_EACH, f"/bulk?id={bulk}", planned, "/nowhere"):
                        await window.open(f"{url}{path}")
                        assert await violations(window) == [], (path, width, dark)
                        assert await window.ask("document.documentElement.scrollWidth") <= width, path
                    for path, button, told in BEHIND_BUTTONS:
                        await window.open(f"{url}{path}")
                        await window.click(f"css={button}")
                        await window.sees(told)
                        assert await violations(window) == [], (path, button, width, dark)
                    async with acting._imports._one_at_a_time:
                        waits = (await uploads(person, EACH_KIND)).headers["location"]
                        await window.open(f"{url}{waits}")
                        await window.hides(True)  # so that it does not look again meanwhile
                        assert await violations(window) == [], (waits, width, dark)
                    assert window.errors == []


async def test_a_page_that_waits_looks_again(
    federation: Federation, acting: NodeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody sees it: by the page's script, which people who need more time can do without."""
    monkeypatch.setattr(import_pages, "WAITS", 0)
    async with served(acting.site) as url, chromium(tmp_path) as browser, browser.window() as window:
        async with acting._imports._one_at_a_time:
            planned = (await uploads(Person(acting.site.app), EACH_KIND)).headers["location"]
            await window.open(f"{url}{planned}")
            await window.sees("is being compared with the rules")
        await window.sees("Import 2 rules?")
        assert window.errors == []
