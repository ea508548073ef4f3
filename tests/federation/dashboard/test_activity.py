"""The page of an activity: what became of its deliveries, and the way there from one of them."""

from __future__ import annotations

import re
from html import unescape

from sqlalchemy import delete, update
from sqlmodel import col

from db import AttemptOutcome, DeliveryAttempt, DeliveryJob, DeliveryState
from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from tests.federation.dashboard.node_data import HOSTILE, NOT_SHOWN, owe_activity
from tests.workers.dashboard.browsing import Person

ACTIVITY = "https://a.example/notes/1#create"


async def test_an_activity_is_reached_from_each_of_its_deliveries(federation: Federation, acting: NodeSite) -> None:
    """From one that has a row, and from one that arrived; it tells how many are in which state."""
    person = Person(acting.site.app)
    await owe_activity(federation, "held", "failed", "arrived", activity=ACTIVITY)
    async with federation.database.transaction() as session:
        failed = update(DeliveryJob).where(col(DeliveryJob.id) == "failed")
        await session.execute(failed.values(state=DeliveryState.FAILED, held_reason=None))
        await session.execute(delete(DeliveryJob).where(col(DeliveryJob.id) == "arrived"))
        arrived = update(DeliveryAttempt).where(col(DeliveryAttempt.delivery_id) == "arrived")
        await session.execute(arrived.values(outcome=AttemptOutcome.DELIVERED))

    for delivery in ("held", "arrived"):
        page = await person.sees(f"/delivery?id={delivery}")
        leads = re.search(r'<a href="(/activity\?[^"]+)">', page)
        assert leads is not None
        page = await person.sees(unescape(leads[1]))
        assert "to 3 inboxes: 1 delivered, 1 held, 1 failed." in page
        left = re.search("What is left of it.*?</table>", page, flags=re.DOTALL)
        assert left is not None
        assert [each in left[0] for each in ("id=held", "id=failed", "id=arrived")] == [True, True, False]
        assert f"federation why &#39;{ACTIVITY}&#39;" in page or f"federation why '{ACTIVITY}'" in unescape(page)
        assert NOT_SHOWN not in page
    assert "https://a.example/a" in await person.sees("/delivery?id=held")


async def test_the_deliveries_of_an_activity_go_on(federation: Federation, acting: NodeSite) -> None:
    """A page at a time, each once."""
    ids = [f"d{number:03}" for number in range(120)]
    await owe_activity(federation, *ids, activity=ACTIVITY)
    person, seen = Person(acting.site.app), list[str]()
    page = await person.sees("/activity?id=https://a.example/notes/1%23create")
    while True:
        [left] = re.findall("What is left of it.*?</table>", page, flags=re.DOTALL)
        seen += re.findall(r'href="/delivery\?id=(\w+)"', left)
        further = re.search(r'<a href="([^"]+)">Further</a>', page)
        if further is None:
            break
        page = await person.sees(unescape(further[1]))
    assert seen == ids


async def test_an_activity_shows_nothing_that_a_stranger_wrote_as_markup(
    federation: Federation, acting: NodeSite
) -> None:
    """Its id is the application's, but may be anything; and of what nobody knows that is said."""
    person = Person(acting.site.app)
    await owe_activity(federation, "held", activity=HOSTILE[:200], actor=HOSTILE)
    page = await person.sees("/delivery?id=held")
    leads = re.search(r'<a href="(/activity\?[^"]+)">', page)
    assert leads is not None
    page = await person.sees(unescape(leads[1]))
    assert "<script>alert(1)" not in page
    assert "\u202e" not in page
    assert "Nothing here knows" in await person.sees("/activity?id=none", status=404)
