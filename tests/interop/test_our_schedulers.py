"""Crons that we declare on a BullMQ queue, as job schedulers that Node sees, turns, changes and removes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from tests.interop.claims import next_claim
from tests.interop.peer import NodeProcess, scheduler_peer
from workers import JobState
from workers.crons import Cron
from workers.jobs import Completed, Declared
from workers.storage.bullmq import BullMQStorage

HOUR_MS = 3_600_000
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
OPTIONS = {"attempts": 3, "priority": 2, "removeOnComplete": {"age": 60}, "removeOnFail": {"age": 90}}
TIMES = ("timestamp", "delay", "jobId", "prevMillis", "repeatJobKey")

pytestmark = pytest.mark.spread("package")


@pytest.fixture
async def storage(redis_url: str) -> AsyncIterator[BullMQStorage]:
    storage = BullMQStorage(redis_url, f"crons-{uuid.uuid4().hex}")
    await storage.connect()
    yield storage
    await storage.disconnect()


@pytest.fixture
async def node(package: str, redis_url: str, storage: BullMQStorage) -> AsyncIterator[NodeProcess]:
    async with scheduler_peer(package, redis_url, storage.queue) as peer:
        yield peer


def cron(name: str = "night", **settings: object) -> Cron:
    kept = {"keep_completed": timedelta(seconds=60), "keep_failed": timedelta(seconds=90)}
    plain = {"job": "tick", "payload": b'{"n":1}', "priority": 2, **kept}
    return Cron(**{"name": name, **plain, **settings})  # type: ignore[arg-type]  # as given


def nightly(**settings: object) -> Cron:
    return cron(**{"pattern": "0 3 * * *", "timezone": "Europe/Berlin", **settings})


async def run(storage: BullMQStorage, count: int) -> list[str]:
    """We ran so many jobs, one after the other; their ids."""
    ran = []
    for _ in range(count):
        claim = await next_claim(storage)
        await storage.settle([Completed(claim=claim, result=b"null")])
        ran.append(claim.job_id)
    return ran


async def waiting(storage: BullMQStorage) -> list[str]:
    """The ids of the jobs that wait, due or not."""
    pages = [await storage.list(state) for state in (JobState.SCHEDULED, JobState.QUEUED)]
    return [job.id for page in pages for job in page.jobs]


async def test_node_sees_and_turns_our_crons(redis_url: str, storage: BullMQStorage, node: NodeProcess) -> None:
    """In turn with us, each time once, with the declared data and options; a declaration in between changes nothing."""
    crons = [cron("period:a", every=SECOND), cron("pattern", pattern="* * * * * *", timezone="Asia/Kolkata")]
    for one in crons:
        await storage.declare_cron(one)
    theirs = await node.call("work", 4)
    ran = [job["id"] for job in theirs] + await run(storage, 4)
    again = BullMQStorage(redis_url, storage.queue)
    await again.connect()
    assert [await again.declare_cron(one) for one in crons] == [Declared.KEPT] * 2
    await again.disconnect()
    ran += [job["id"] for job in await node.call("work", 4)]
    assert {(job["name"], job["data"]["n"]) for job in theirs} == {("tick", 1)}
    assert len(set(ran)) == len(ran) == 12
    left = await waiting(storage)
    assert len(left) == 2
    for name in ("period:a", "pattern"):
        [following] = [one for one in left if one.startswith(f"repeat:{name}:")]
        due = [int(one.rpartition(":")[2]) for one in [*ran, following] if one.startswith(f"repeat:{name}:")]
        assert due == sorted(due)
        assert {(later - due[0]) % 1_000 for later in due} == {0}
        options = await node.call("options", following)
        assert options.items() >= {**OPTIONS, "workers": 1, "cron": {"version": 1}}.items()


async def test_node_lists_what_we_declare(storage: BullMQStorage, node: NodeProcess) -> None:
    """With all that it tells of a scheduler of its own."""
    await storage.declare_cron(nightly())
    await storage.declare_cron(cron("hourly", every=HOUR))
    found = {one["key"]: one for one in await node.call("schedulers")}
    for one in await storage.scheduled():
        theirs = found[one.cron.name]
        assert (theirs["name"], theirs["iterationCount"]) == ("tick", 1)
        assert theirs["next"] == int(one.due.timestamp() * 1_000)
        assert theirs["template"]["data"] == {"n": 1}
        assert theirs["template"]["opts"].items() >= OPTIONS.items()
    assert (found["night"]["pattern"], found["night"]["tz"]) == ("0 3 * * *", "Europe/Berlin")
    assert found["hourly"]["every"] == HOUR_MS


async def test_what_we_declare_is_what_node_upserts(storage: BullMQStorage, node: NodeProcess) -> None:
    """The schedulers, and the options of their first jobs, but for the times and what is ours."""
    await storage.declare_cron(nightly())
    await storage.declare_cron(cron("hourly", every=HOUR))
    template = {"name": "tick", "data": {"n": 1}, "opts": OPTIONS}
    for name in ("night", "hourly"):
        ours = await node.call("scheduler", name)
        repeat = {key: ours[key] for key in ("pattern", "tz", "every", "offset") if key in ours}
        theirs_id = await node.call("upsert", ["theirs", repeat, template])
        theirs = await node.call("scheduler", "theirs")
        for mine in (ours["template"]["opts"], options := await node.call("options", _job(ours))):
            assert (mine.pop("workers"), mine.pop("cron")) == (1, {"version": 1})
        assert ours | {"key": "theirs", "next": theirs["next"]} == theirs
        assert _timeless(options) == _timeless(await node.call("options", theirs_id))


def _job(scheduler: dict[str, Any]) -> str:
    return f"repeat:{scheduler['key']}:{scheduler['next']}"


def _timeless(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in TIMES}


async def test_a_scheduler_of_node_in_our_hands(storage: BullMQStorage, node: NodeProcess) -> None:
    """It is listed, run now, left alone by a declaration, and removed, which Node sees."""
    template = {"name": "tick", "data": {"n": 1}, "opts": {"attempts": 4}}
    first = await node.call("upsert", ["night", {"pattern": "0 0 1 1 *", "tz": "UTC"}, template])
    before = await node.call("scheduler", "night")
    [found] = await storage.scheduled()
    assert (found.cron.name, found.cron.job, found.cron.pattern, found.cron.version) == (
        "night",
        "tick",
        "0 0 1 1 *",
        0,
    )
    assert int(found.due.timestamp() * 1_000) == before["next"]
    assert await storage.declare_cron(nightly(version=2)) is Declared.FOREIGN
    job = await storage.cron_job("night", "now:1")
    assert job is not None
    await storage.enqueue([job])
    claim = await next_claim(storage)
    assert (claim.job_id, claim.name, claim.payload, claim.max_attempts) == (job.id, "tick", b'{"n":1}', 4)
    assert await node.call("scheduler", "night") == before
    assert await waiting(storage) == [first]
    assert await storage.remove_cron("night")
    assert (await node.call("schedulers"), await waiting(storage)) == ([], [])
    assert await storage.declare_cron(nightly()) is Declared.STORED
    assert [one["key"] for one in await node.call("schedulers")] == ["night"]


async def test_what_node_changes_of_our_cron(storage: BullMQStorage, node: NodeProcess) -> None:
    """With the options that it read it stays ours, of its version. Without, it is Node's. Removed, it comes back."""
    await storage.declare_cron(nightly())
    found = await node.call("scheduler", "night")
    template = {"name": "tick", **found["template"]}
    await node.call("upsert", ["night", {"pattern": "0 4 * * *", "tz": "Europe/Berlin"}, template])
    assert await storage.declare_cron(nightly()) is Declared.DIFFERENT
    assert (await node.call("scheduler", "night"))["pattern"] == "0 4 * * *"
    assert await storage.declare_cron(nightly(version=2)) is Declared.STORED
    assert (await node.call("scheduler", "night"))["pattern"] == "0 3 * * *"
    await node.call("upsert", ["night", {"pattern": "0 4 * * *"}, {"name": "tick", "data": {}}])
    assert await storage.declare_cron(nightly(version=3)) is Declared.FOREIGN
    assert await node.call("remove", "night")
    assert await storage.declare_cron(nightly(version=2)) is Declared.STORED
    assert len(await waiting(storage)) == 1
