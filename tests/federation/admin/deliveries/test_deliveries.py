"""Deliveries in every state as an administrator sees them, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from db import Database, DeliveryJob, DeliveryState, HoldReason
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import OPEN, Age, AnyState, Selection
from tests.federation.admin.conftest import OTHER, PEER

NOW = datetime.now(UTC)


@pytest.fixture
async def filled(database: Database) -> Database:
    """One ready, two held, two failed, and one expired."""

    def delivery(name: str, hours: int, **columns: object) -> DeliveryJob:
        values = {"server_url": PEER, "created_at": NOW - timedelta(hours=hours), **columns}
        return DeliveryJob(id=name, target_url=f"{PEER}/posts", payload="{}", job_name="n", **values)

    held = {"state": DeliveryState.HELD, "held_at": NOW, "error_code": "TIMEOUT"}
    over = {"settled_at": NOW, "error_code": "HTTP_403"}
    async with database.transaction() as session:
        session.add_all(
            [
                delivery("ready", 1, next_attempt_at=NOW),
                delivery("held", 30, held_reason=HoldReason.SERVER, **held),
                delivery("rests", 2, held_reason=HoldReason.REST, server_url=OTHER, next_attempt_at=NOW, **held),
                delivery("failed", 3, state=DeliveryState.FAILED, **over),
                delivery("expired", 4, state=DeliveryState.EXPIRED, **over),
                delivery("earlier", 5, state=DeliveryState.FAILED, **over),
            ]
        )
    return database


async def test_deliveries_are_counted_by_state_reason_age_and_server(filled: Database) -> None:
    """What is owed is ready or held."""
    found = await deliveries.stats(filled, Selection())
    assert (found.open, found.ready, found.held, found.failed, found.expired) == (3, 1, 2, 2, 1)
    assert (found.held_by_reason, found.held_servers) == ({HoldReason.SERVER: 1, HoldReason.REST: 1}, 2)
    assert found.ages == {Age.MINUTE: 0, Age.HOUR: 0, Age.DAY: 2, Age.OLDER: 1}
    assert found.codes == {"HTTP_403": 2}
    assert found.oldest_open == found.oldest_held == NOW - timedelta(hours=30)
    assert found.oldest_ready == NOW - timedelta(hours=1)
    assert [(each.server_url, each.ready, each.held, each.failed, each.expired) for each in found.servers] == [
        (PEER, 1, 1, 2, 1),
        (OTHER, 0, 1, 0, 0),
    ]


@pytest.mark.parametrize(
    ("state", "ids"),
    [
        (OPEN, {"ready", "held", "rests"}),
        (DeliveryState.READY, {"ready"}),
        (DeliveryState.HELD, {"held", "rests"}),
        (DeliveryState.FAILED, {"failed", "earlier"}),
        (DeliveryState.EXPIRED, {"expired"}),
    ],
)
async def test_deliveries_are_listed_by_state(filled: Database, state: AnyState, ids: set[str]) -> None:
    """Until when it is held is told of held ones alone."""
    page = await deliveries.list_deliveries(filled, Selection(state=state))
    assert {each.id for each in page.deliveries} == ids
    assert all(state in (OPEN, each.state) for each in page.deliveries)
    assert {each.id for each in page.deliveries if each.held_until is not None} == ids & {"rests"}
