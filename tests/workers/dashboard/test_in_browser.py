"""The dashboard of queues in a real browser."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from tests.browser.axe import violations
from tests.browser.chromium import chromium
from tests.browser.serving import served
from tests.patience import until
from tests.workers.dashboard.conftest import ACCOUNTS, PASSWORD, MakeSite
from tests.workers.dashboard.test_queue_pages import HOSTILE, fail_all
from workers.crons import Cron
from workers.dashboard.access import Access
from workers.jobs import JobState
from workers.limits import Limit
from workers.queue import Queue
from workers.specs import JobSpec

SOON = timedelta(milliseconds=50)


async def test_an_operator_retries_failed_jobs_by_clicking(make_site: MakeSite, queue: Queue, tmp_path: Path) -> None:
    """What changes is seen without a reload; no script of a stranger runs, and the policy breaks nothing of ours."""
    await queue.enqueue_many([JobSpec(payload=1, id=text) for text in (*HOSTILE, "mail-1")])
    await fail_all(queue, len(HOSTILE) + 1)
    site = make_site(Access(accounts=ACCOUNTS), interval=SOON)
    async with served(site) as url, chromium(tmp_path) as browser, browser.window() as window:
        await window.open(f"{url}/queues")
        await window.sees("Password or token")
        await window.fill("#name", "olga")
        await window.fill("#secret", "wrong")
        await window.press("Enter")
        await window.sees("The name or the password is wrong.")
        await window.fill("#name", "olga")
        await window.fill("#secret", PASSWORD)
        await window.press("Enter")
        await window.sees(f"{len(HOSTILE) + 1} jobs failed.")
        await window.sees("live")
        await queue.enqueue(1, id="mail-2")
        await window.sees("0 running, 1 waiting")

        await window.click("mail")
        await window.sees("mail-1")
        await window.click("css=input[data-all]")
        await window.click("Retry")
        await window.sees(f"Queue {len(HOSTILE) + 1} jobs again, with fresh attempts?")
        await window.click("Retry")
        await window.sees(f"{len(HOSTILE) + 1} jobs are queued again.")
        assert (await queue.counts())[JobState.FAILED] == 0

        await window.click("css=.states li:first-child a")
        await window.sees("mail-2")
        await window.click("Pause")
        await window.sees("is waiting in it" if not HOSTILE else "are waiting in it")
        await window.click("Leave it as it is")
        await window.sees("mail-2")
        assert not await queue.manage.is_paused()
        await window.click("Log out")
        await window.sees("Password or token")
        assert [error for error in window.errors if "401" not in error] == []


async def test_without_scripts_everything_but_liveness_works(make_site: MakeSite, queue: Queue, tmp_path: Path) -> None:
    """Forms and links are all it takes. Scripts tell times in the reader's own zone, with UTC beside."""
    await queue.enqueue_many([JobSpec(payload=1, id=f"mail-{number}") for number in range(2)])
    await fail_all(queue, 2)
    site = make_site(Access(allow_actions=True))
    async with served(site) as url, chromium(tmp_path) as browser, browser.window() as window:
        await window.scripts(allowed=False)
        await window.open(f"{url}/queue?name=mail")
        await window.click("css=td input")
        await window.click("Remove")
        await window.sees("without a trace?")
        await window.click("Remove")
        await window.sees("1 job is removed.")
        assert (await queue.counts())[JobState.FAILED] == 1
        assert not site.feed._topics
        await window.lives_in("Asia/Tokyo")
        time = "document.querySelector('td time').innerText"
        assert re.fullmatch(r"\d\d \w{3} \d\d:\d\d:\d\d UTC", await window.ask(time))
        await window.scripts(allowed=True)
        await window.open(f"{url}/queue?name=mail")
        told = re.fullmatch(r"\d\d \w{3}, (\d\d):(\d\d:\d\d) · (\d\d):(\d\d:\d\d) UTC", await window.ask(time))
        assert told is not None
        assert (int(told[1]) - int(told[3])) % 24 == 9
        assert told[2] == told[4]


async def test_a_page_that_nobody_sees_listens_to_nothing(make_site: MakeSite, queue: Queue, tmp_path: Path) -> None:
    """Browsers open six connections to one host; so ten windows work if hidden ones close theirs."""
    site = make_site(Access(), interval=SOON)

    def listening() -> int:
        return sum(len(topic.listeners) for topic in site.feed._topics.values())

    async with served(site) as url, chromium(tmp_path) as browser, browser.window() as window:
        await window.open(f"{url}/queues")
        await until(lambda: listening() == 1)
        await window.hides(True)
        await until(lambda: listening() == 0)
        await queue.enqueue(1)
        await window.hides(False)
        await window.sees("0 running, 1 waiting")
        await window.open("about:blank")
        await until(lambda: listening() == 0)


@pytest.mark.full
async def test_people_who_do_not_see_the_pages_can_use_them(make_site: MakeSite, queue: Queue, tmp_path: Path) -> None:
    """By the rules of axe, in both themes and at three widths; and nothing is wider than the window."""
    await queue.enqueue_many([JobSpec(payload=1, id=text) for text in HOSTILE])
    await fail_all(queue, 3)
    queue.declare_limits({"*": Limit("10/s", concurrency=2)})
    queue.crons.add(Cron(name=HOSTILE[1], job="clean", pattern="@daily"))
    await queue.crons.declare()
    open_, locked = make_site(Access(allow_actions=True)), make_site(Access(accounts=ACCOUNTS))
    async with served(open_) as url, served(locked) as other, chromium(tmp_path) as browser:
        pages = (f"{url}/queues", f"{url}/queue?name=mail", f"{url}/queue?name=mail&state=completed", f"{url}/workers",
                 f"{url}/recurring", f"{url}/tasks")  # fmt: skip
        for width in (390, 768, 1440):
            for dark in (False, True):
                async with browser.window(width=width, dark=dark) as window:
                    for page in (*pages, f"{url}/nowhere", f"{other}/login"):
                        await window.open(page)
                        assert await violations(window) == [], (page, width, dark)
                        assert await window.ask("document.documentElement.scrollWidth") <= width, page
                    await window.open(f"{url}/queue?name=mail")
                    await window.click("css=td input")
                    await window.click("Retry")
                    await window.sees("The same without this page")
                    assert await violations(window) == []


async def test_the_keyboard_is_enough(make_site: MakeSite, queue: Queue, tmp_path: Path) -> None:
    """The first key leads over the menu to the content; what has the focus is seen."""
    await queue.enqueue(1, id="mail-1")
    await fail_all(queue, 1)
    site = make_site(Access(allow_actions=True))
    async with served(site) as url, chromium(tmp_path) as browser, browser.window() as window:
        await window.open(f"{url}/queue?name=mail")
        await window.press("Tab")
        assert await window.ask("document.activeElement.innerText") == "Skip to the content"
        await window.press("Enter")
        await window.tab_to("document.activeElement.type === 'checkbox' && document.activeElement.name === 'id'")
        assert await window.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await window.press(" ")
        await window.tab_to("document.activeElement.innerText === 'Retry'")
        await window.press("Enter")
        await window.sees("Queue job mail-1 again")
