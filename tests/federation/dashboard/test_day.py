"""A day of an operator, by clicking: from an outage to the last retry, in a real browser, on a node that delivers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryJob, DeliveryState
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from tests.browser.chromium import Window, chromium
from tests.browser.serving import served
from tests.federation.conftest import MakeSettings
from tests.federation.dashboard.conftest import MakeNodeSite
from tests.federation.test_node_workers import owe
from tests.misbehaving import reset, respond
from tests.patience import eventually, until
from tests.peer import Peer, acquaint
from tests.workers.dashboard.conftest import ACCOUNTS, PASSWORD
from workers.dashboard.access import Access


async def rows(federation: Federation, state: DeliveryState | None = None) -> int:
    query = select(func.count()).select_from(DeliveryJob)
    if state is not None:
        query = query.where(col(DeliveryJob.state) == state)
    async with federation.database.read() as session:
        return int((await session.execute(query)).scalar_one())


async def are(federation: Federation, number: int, state: DeliveryState | None = None) -> bool:
    return await rows(federation, state) == number


async def is_down(federation: Federation, peer: Peer) -> None:
    """Nobody is there, and the node has noticed."""
    peer.server.routes["/discover"] = reset()
    peer.server.default = reset()
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    await federation.links.exhausted(peer.url, "CONN_RESET", first_attempted_at=hour_ago)


async def count_now(window: Window) -> None:
    """The operator does not wait for the next count; at this moment the node itself may be counting."""

    async def counts() -> str:
        await window.click("Scheduler")
        await window.click("css=button[aria-label='Run now: rollups']")
        await window.sees("Run rollups now?")
        await window.click("Run now")
        return await eventually(window.text, lambda text: "rollups: " in text or "rollups is running" in text)

    await eventually(counts, lambda text: "rollups: done" in text)


@pytest.fixture
def places(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings that put everything on SQLite, or the rows on PostgreSQL and the queues on BullMQ."""
    if request.param == "sqlite":
        return {}
    return {
        "database_url": request.getfixturevalue("migrated_postgres_url"),
        "redis_url": request.getfixturevalue("redis_url"),
        "federation_queue_prefix": request.getfixturevalue("queue_prefix"),
    }


@pytest.fixture
async def node(places: dict[str, object], make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """A node that delivers."""
    federation = Federation(make_settings(**places))
    workers = FederationWorkers(federation)
    workers.start()
    yield federation
    workers.request_stop()
    await workers.stop()
    await federation.close()


BOTH = ["sqlite", pytest.param("bullmq and postgres", marks=pytest.mark.full)]


@pytest.mark.parametrize("places", BOTH, indirect=True)
async def test_an_operators_day(node: Federation, make_node_site: MakeNodeSite, peer: Peer, tmp_path: Path) -> None:
    """What is held is found, understood, and sent; what failed is retried; and the log says who did it."""
    await acquaint(node, peer)
    well, answers = peer.server.routes["/discover"], peer.server.default
    peer.server.default = respond(422)
    await owe(node, peer)
    await until(lambda: rows(node, DeliveryState.FAILED))
    await is_down(node, peer)
    for _ in range(3):
        await owe(node, peer)

    await until(partial(are, node, 3, DeliveryState.HELD))
    site = make_node_site(node, Access(accounts=ACCOUNTS)).site
    async with served(site) as url, chromium(tmp_path) as browser, browser.window() as window:
        await window.open(url)
        await window.fill("#name", "olga")
        await window.fill("#secret", PASSWORD)
        await window.press("Enter")
        await window.sees("What needs somebody")
        await count_now(window)
        await window.click("Overview")
        await window.sees("3 deliveries are held.")

        await window.click("Servers")
        await window.sees("Oldest owed")
        await window.click(peer.url)
        await window.sees("because of CONN_RESET")
        await window.sees("3 deliveries are held for it")
        await window.click("Probe now")
        await window.sees(f"federation servers probe {peer.url}")
        await window.click("Probe now")
        await window.sees("It is not well")

        peer.server.routes["/discover"], peer.server.default = well, answers
        await window.click("Probe now")
        await window.sees("Look now whether")
        await window.click("Probe now")
        await window.sees("It is well.")
        await until(partial(are, node, 1))  # the one that failed

        await window.click("Deliveries")
        await window.sees("HTTP_422")
        await window.click("css=td input")
        await window.click("Retry")
        await window.sees("Retry 1 delivery?")
        await window.click("Retry")
        await window.sees("1 delivery owed again.")
        await until(partial(are, node, 0))
        await count_now(window)
        await window.click("Overview")
        await window.sees("Nothing is owed. 4 delivered in the last hour")
        await window.click("Live")
        await window.sees("permanent")
        await window.click("Pause")
        await window.sees("paused")
        await window.click("Go on")
        await window.sees("live")
        await window.click("Actions")
        for told in ("servers probe", "deliveries retry", "scheduler run", "olga", "dashboard"):
            await window.sees(told)
        assert window.errors == []
