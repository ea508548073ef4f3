"""What of a page is seen in a narrow window, and what of a word in a wide one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import update

from db import DeliveryAttempt, DeliveryState
from federation.dashboard.node_site import NodeSite
from federation.rollups.job import Rollups
from federation.runtime.composition import Federation
from tests.browser.chromium import chromium
from tests.browser.serving import served
from tests.federation.dashboard.test_pages import PAGES, know, owe
from workers.crons import Cron
from workers.jobs import new_worker_id
from workers.testing import steps

PHONE: Final = 360
SERVER: Final = "http://127.0.0.1:18452"
CUT: Final = """[...document.querySelectorAll("body *")]
  .filter(e => getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1)
  .map(e => e.outerHTML.slice(0, 100) + " " + getComputedStyle(e).backgroundAttachment)"""
"""What has more in it than is seen, and whether shadows say so."""
OUTSIDE: Final = """[...document.querySelectorAll("main *, .top *")]
  .filter(e => !e.closest(".scroll, .skip-title") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 100))"""
BROKEN: Final = """(() => {
  const broken = [], walk = document.createTreeWalker(document.querySelector("tbody"), NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode());) for (const word of text.data.matchAll(/[\\w.:/]+/g)) {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
  }
  return broken;
})()"""
"""Words of a table that begin in one line and end in the next."""


async def filled(federation: Federation) -> None:
    """Something on every page, with names as long as they come."""
    await know(federation, SERVER, text="CONN_REFUSED")
    for number, state in enumerate(DeliveryState):
        ids = [f"01a21dfa-42b4-7652-bed4-7ce9de{number}0afe{each}" for each in range(3)]
        await owe(federation, *ids, state=state, text="CONN_REFUSED", url=SERVER)
    said = {"remote_code": "INVALID_FEDERATED_POST_PAYLOAD", "http_status": 400, "relayed_by": "https://relay.example"}
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryAttempt).values(**said))
    await federation.delivery_queue.start()
    await steps.claim(federation.delivery_queue.storage, worker_id=new_worker_id())
    await federation.tasks_queue.start()
    await federation.tasks_queue.enqueue({}, name="clean")
    federation.tasks_queue.crons.add(Cron(name="night", job="clean", pattern="@daily"))
    await federation.tasks_queue.crons.declare()
    await Rollups(federation.database)()


async def test_a_phone_cuts_nothing(federation: Federation, acting: NodeSite, tmp_path: Path) -> None:
    """Rows are cards there. Without scripts a table is wider than its place, and a shadow says so."""
    await filled(federation)
    paths = (*PAGES, f"/server?url={SERVER}", "/queue?name=federation-tasks", "/delivery?id=01a21dfa-42b4-7652-bed4")
    async with served(acting.site) as url, chromium(tmp_path) as browser, browser.window(width=PHONE) as window:
        for scripts in (True, False):
            await window.scripts(scripts)
            for path in paths:
                await window.open(url + path)
                assert await window.ask("document.documentElement.scrollWidth") <= PHONE, path
                assert await window.ask(OUTSIDE) == [], path
                cut = await window.ask(CUT)
                assert [each for each in cut if scripts or "local, local" not in each] == [], path
            await window.open(f"{url}/deliveries")
            assert bool(await window.ask(CUT)) is not scripts
        await window.scripts(allowed=True)
        await window.open(f"{url}/deliveries")
        names = "[...document.querySelectorAll('tbody tr:first-child td')].map(e => e.dataset.name)"
        assert [each for each in await window.ask(names) if each] == [
            *("Delivery", "Kind", "Server", "State", "Attempts", "Made", "Last error")
        ]


async def test_no_word_is_broken_where_there_is_room(federation: Federation, acting: NodeSite, tmp_path: Path) -> None:
    """In the lists of a window of 1280 pixels, with times in two zones: a code, a server's address, a part of an id."""
    await filled(federation)
    async with served(acting.site) as url, chromium(tmp_path) as browser, browser.window(width=1280) as window:
        await window.lives_in("Asia/Tokyo")
        for path in ("/live-attempts", "/deliveries", "/servers", f"/server?url={SERVER}", "/workers"):
            await window.open(url + path)
            assert await window.ask(BROKEN) == [], path
            assert await window.ask(CUT) == [], path
