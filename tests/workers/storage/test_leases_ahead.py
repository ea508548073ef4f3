"""Leases that were given before a clock was set back, on every storage that keeps their time itself."""

from __future__ import annotations

from datetime import timedelta

import pytest

from workers.checks import LONGEST_LEASE
from workers.jobs import JobState
from workers.testing import Harness
from workers.testing.steps import claim, enqueue, job, state
from workers.worker.handlers import Handler


@pytest.mark.parametrize("harness", ["memory", "file", "sqlite", "postgres", "redis"], indirect=True)
async def test_a_lease_that_ends_later_than_any_may_is_over(harness: Harness) -> None:
    """Its worker may be dead, and the time at which it ends decades away."""
    storage = await harness.open()
    await enqueue(storage, job("ahead"), job("live"))
    await claim(storage, 1, lease=LONGEST_LEASE + timedelta(days=1))
    await claim(storage, 1, lease=LONGEST_LEASE)
    assert (await storage.recover(100)).requeued == ("ahead",)
    assert await state(storage, "live") is JobState.PROCESSING


def test_no_handler_has_a_longer_one() -> None:
    """It would be taken for one by a clock that was ahead."""
    with pytest.raises(ValueError, match="a handler's lease must be at most 1 day"):
        Handler(print, lease=LONGEST_LEASE + timedelta(seconds=1))
