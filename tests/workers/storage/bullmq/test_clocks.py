"""Clients whose clocks differ from the server's: that is told, and no record goes too early."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers import JobState
from workers.jobs import Cancelled, Completed, Failed, SettleStatus
from workers.storage.bullmq import BullMQStorage
from workers.storage.on_redis import examination
from workers.testing.steps import job

MINUTE = timedelta(minutes=1)
STATES = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Move this machine's clock by so much from the right time."""
    right, right_ns = time.time, time.time_ns

    def move(by: timedelta) -> None:
        seconds = round(by.total_seconds())
        monkeypatch.setattr(time, "time", lambda: right() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: right_ns() + seconds * 1_000_000_000)

    return move


async def finish_one_each(storage: BullMQStorage, prefix: str) -> None:
    names = [f"{prefix}-{state.value}" for state in STATES]
    await storage.enqueue([job(name, keep=MINUTE) for name in names])
    done, bad, stopped = await storage.claim("w", leases=LEASES, limit=len(names))
    ends = [Completed(claim=done, result=b"1"), Failed(claim=bad, error=ERROR), Cancelled(claim=stopped)]
    assert {one.status for one in await storage.settle(ends)} == {SettleStatus.APPLIED}


async def states(storage: BullMQStorage) -> list[JobState | None]:
    ids = [f"{prefix}-{state.value}" for prefix in ("right", "wrong", "last") for state in STATES]
    return [found and found.state for found in await storage.status(ids)]


@pytest.mark.parametrize("off", [timedelta(hours=1), timedelta(hours=-1)], ids=["fast", "slow"])
async def test_no_clients_clock_shortens_a_retention(
    redis_url: str, set_clock: Callable[[timedelta], None], off: timedelta
) -> None:
    """Records of a minute are all there, and read as such, although a client beside is an hour off."""
    queue = f"test-{uuid.uuid4().hex}"
    right = BullMQStorage(redis_url, queue)
    wrong = BullMQStorage(f"{redis_url}?client_name=wrong", queue)  # on connections of its own
    await right.connect()
    await finish_one_each(right, "right")
    set_clock(off)
    await wrong.connect()
    await finish_one_each(wrong, "wrong")
    await wrong.sweep(100)
    assert (await states(wrong))[:6] == [*STATES, *STATES]
    await wrong.disconnect()
    set_clock(timedelta(0))
    await finish_one_each(right, "last")
    await right.sweep(100)
    assert await states(right) == [*STATES, *STATES, *STATES]
    [found] = await right.status(["wrong-completed"])
    assert found is not None
    assert found.finished_at is not None
    assert abs(found.finished_at - datetime.now(UTC)) < MINUTE
    await right.disconnect()


async def test_a_clock_that_differs_is_told_once_per_change(
    redis_url: str,
    set_clock: Callable[[timedelta], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the amount and what to do: at the connect, and later when the reaper comes round; then that it is right."""
    monkeypatch.setattr(examination, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(examination.TELLER, "_offsets", {})
    caplog.set_level(logging.WARNING, logger=examination.__name__)
    storage = BullMQStorage(redis_url, f"test-{uuid.uuid4().hex}")
    told = []
    for by in (timedelta(0), timedelta(hours=1), timedelta(hours=1), timedelta(minutes=-1), timedelta(0)):
        set_clock(by)
        caplog.clear()
        await (storage.recover(10) if told else storage.connect())
        told.append([TOLD.sub(_rounded, record.getMessage()) for record in caplog.records])
    await storage.disconnect()
    ahead = f"this machine's clock is 1 h ahead of the Redis server's; {examination.CLOCK_ADVICE}"
    behind = f"this machine's clock is 0 h behind the Redis server's; {examination.CLOCK_ADVICE}"
    again = "this machine's clock agrees with the Redis server's again"
    assert told == [[], [ahead], [], [behind], [again]]


TOLD = re.compile(r"([0-9.]+) s ")


def _rounded(found: re.Match[str]) -> str:
    """A slow machine knows less well by how much it is off."""
    return f"{round(float(found[1]) / 3600)} h "


def test_a_slow_answer_is_no_difference() -> None:
    """The server read its clock at some moment of the call: only what no moment explains is an offset."""

    def offset(asked: float, answered: float) -> float:
        replies = [(1_000, 500_000), *[b""] * 3, [b"save", b""]]
        return examination.read(replies, asked=asked, answered=answered).clock_offset

    assert offset(998.0, 1_005.0) == 0.0
    assert offset(990.0, 997.5) == 3.0
    assert offset(1_002.5, 1_010.0) == -2.0
