"""The list of deliveries: what it says of each, and how many there are in each state."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape

import pytest
from sqlalchemy import update

from db import DeliveryJob, DeliveryState, DeliveryTotal
from federation.dashboard.node_site import NodeSite
from federation.rollups.job import Rollups
from federation.runtime.composition import Federation
from tests.federation.dashboard.node_data import PEER, now, owe
from tests.federation.rows_read import watched
from tests.workers.dashboard.browsing import Person

OTHER = "https://other.example"


def tabs(page: str) -> dict[str, int | None]:
    """The number of each tab; None for one that tells none."""
    [states] = re.findall(r'<nav aria-label="States">(.*?)</nav>', page, flags=re.DOTALL)
    found = re.findall(r"<a[^>]*>(\w+)(?: <b>(\d+)</b>)?</a>", states)
    return {name: int(number) if number else None for name, number in found}


async def test_tabs_say_how_many_there_are(federation: Federation, acting: NodeSite) -> None:
    """In each state, of all or to one server, as they were counted last; each leads to these."""
    person = Person(acting.site.app)
    await owe(federation, "a", "b", "c")
    await owe(federation, "d", "e", state=DeliveryState.FAILED)
    await owe(federation, "f", state=DeliveryState.EXPIRED, url=OTHER)
    await Rollups(federation.database)()
    page = await person.sees("/deliveries?state=failed")
    assert tabs(page) == {"all": 6, "open": 3, "ready": 0, "held": 3, "failed": 2, "expired": 1}
    assert re.findall(r'aria-current="page">(\w+)', page) == ["Deliveries", "failed"]
    page = await person.sees("/deliveries?server=other.example&state=failed")
    assert tabs(page) == {"all": 1, "open": 0, "ready": 0, "held": 0, "failed": 0, "expired": 1}
    leads = re.search(r'<a href="([^"]+)">expired <b>', page)
    assert leads is not None
    assert 'href="/delivery?id=f"' in await person.sees(unescape(leads[1]))
    assert set(tabs(await person.sees("/deliveries?code=TIMEOUT")).values()) == {None}
    assert set(tabs(await person.sees("/deliveries?older=2h")).values()) == {None}


async def test_tabs_of_a_node_that_is_down_count_what_is_there(federation: Federation, acting: NodeSite) -> None:
    """Nobody counts for them: a last count, if there is one, is long ago."""
    person = Person(acting.site.app)
    await owe(federation, "a", "b")
    await owe(federation, "c", url=OTHER)
    page = await person.sees("/deliveries")
    assert tabs(page) == {"all": 3, "open": 3, "ready": 0, "held": 3, "failed": 0, "expired": 0}
    await Rollups(federation.database)()
    await owe(federation, "d", url=OTHER)
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryTotal).values(counted_at=now() - timedelta(minutes=7)))
    assert tabs(await person.sees("/deliveries"))["held"] == 4
    assert tabs(await person.sees(f"/deliveries?server={OTHER}"))["held"] == 2


@pytest.mark.parametrize("query", ["", "?state=held", f"?server={PEER}"])
async def test_a_list_counts_nothing(federation: Federation, acting: NodeSite, query: str) -> None:
    """However many there are: its numbers are read from what was counted."""
    await owe(federation, *"abc")
    await Rollups(federation.database)()
    with watched() as asked:
        await Person(acting.site.app).sees(f"/deliveries{query}")
    assert asked
    assert [statement for statement, _ in asked if "count(" in statement] == []


async def test_a_list_says_what_each_is_and_why_it_failed(federation: Federation, acting: NodeSite) -> None:
    """Its kind, and its last error: shortened, without the code twice or the server that stands beside it."""
    await owe(federation, "a")
    error = f"TIMEOUT from {PEER}: " + "no answer " * 30
    row = {"job_name": "DELIVER_POST", "error_code": "TIMEOUT", "last_error": error}
    async with federation.database.transaction() as session:
        await session.execute(update(DeliveryJob).values(**row))
    page = await Person(acting.site.app).sees("/deliveries")
    assert '<td class="nowrap">DELIVER_POST</td>' in page
    assert 'TIMEOUT <span class="soft">no answer no answer' in page
    assert "TIMEOUT from" not in page
    assert "no answer " * 12 not in page
