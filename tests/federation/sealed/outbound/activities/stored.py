"""What producers have written."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from db import DeliveryJob, Follow, Post, Server
from federation.runtime.composition import Federation
from workers import JobState

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


async def all_of(node: Federation, model: type[object]) -> list[object]:
    async with node.database.read() as session:
        return list((await session.execute(select(model))).scalars())


async def jobs(node: Federation) -> dict[str, str]:
    """Name by id of the jobs in the delivery queue."""
    await node.delivery_queue.start()
    return {job.id: job.name for job in (await node.delivery_queue.storage.list(JobState.QUEUED)).jobs}


async def only_row(node: Federation) -> DeliveryJob:
    (row,) = await all_of(node, DeliveryJob)
    assert isinstance(row, DeliveryJob)
    return row


async def nothing_written(node: Federation) -> bool:
    models: tuple[type[object], ...] = (Follow, DeliveryJob, Server, Post)
    rows = [await all_of(node, model) for model in models]
    return not any(rows) and not await jobs(node)


everywhere = pytest.mark.parametrize("node", ["sqlite", "postgres"], indirect=True)
