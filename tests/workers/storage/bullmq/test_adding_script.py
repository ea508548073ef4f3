"""What adds many jobs by one call, against BullMQ's own script, called for one job after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from bullmq.redis_connection import loadScript

from tests.workers.storage.bullmq.test_exchange_script import NOW, Side
from workers.storage.bullmq.scripts import BullMQScripts

LINES = ("wait", "paused", "meta", "id", "completed", "delayed", "active", "events", "marker")
JOBS: list[tuple[str, str, str, Mapping[str, object]]] = [
    ("a", "n", "{}", {"attempts": 3, "jobId": "a", "removeOnComplete": {"age": 3600}}),
    ("there", "n", '"another"', {}),
    ("b", "other", '"é"', {"lifo": True, "backoff": {"type": "exponential", "delay": 0.5}}),
    ("a", "n", '"again"', {}),
    ("~c", "n", "null", {"kl": 3}),
]


def stock_adding(lua: BullMQScripts, raw: str, name: str, data: str, options: Mapping[str, object]) -> tuple[Any, ...]:
    """The call of BullMQ's own script that adds a job."""
    arguments = msgpack.packb([lua.base, raw, name, NOW, None, None, None, None, None])
    keys = [lua[line] for line in LINES]
    return ("EVAL", loadScript("addStandardJob-9.lua"), 9, *keys, arguments, data, msgpack.packb(options))


async def prepare(side: Side, meta: dict[str, int]) -> None:
    await side.run(side.lua.add("there", "n", "{}", {}, NOW))
    await side.client.delete(side.lua["marker"])
    if meta:
        await side.client.hset(side.lua["meta"], mapping=meta)


@pytest.mark.usefixtures("storage")  # whose scripts are loaded
@pytest.mark.parametrize("meta", [{}, {"opts.maxLenEvents": 4}, {"concurrency": 0}, {"concurrency": 1}])
async def test_many_jobs_leave_a_queue_as_bullmqs_own_script_does(client: Any, meta: dict[str, int]) -> None:
    """Every key, field, event and marker is the same; the answers tell which ids were there before."""
    ours, theirs = Side(client, "ours"), Side(client, "theirs")
    for side in (ours, theirs):
        await prepare(side, meta)
    [added] = await ours.run(ours.lua.add_many(JOBS, NOW))
    stock = await theirs.run(*(stock_adding(theirs.lua, *job) for job in JOBS))
    assert added[1::2] == stock == ["a", "there", "b", "a", "~c"]
    assert added[::2] == [0, 1, 0, 1, 0]
    assert await ours.contents() == await theirs.contents()


@pytest.mark.usefixtures("storage")
async def test_a_key_in_the_way_is_told_for_each_job(client: Any) -> None:
    """An error of the script for one job is no error of the call."""
    side = Side(client, "ours")
    await client.set(side.lua["wait"], "foreign")
    answers = [str(answer) for answer in (await side.run(side.lua.add_many(JOBS[:1], NOW)))[0]]
    assert answers[0] == "0"
    assert "WRONGTYPE" in answers[1]
