"""Lost leases on BullMQ: attempts of our jobs, and for the jobs of others what BullMQ makes of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.workers.running import done, running
from tests.workers.storage.bullmq.steps import ERROR, LEASES
from workers import JobState, StorageError, Worker
from workers.errors import LossReason
from workers.jobs import Claim, Completed, Retried, SettleStatus
from workers.storage.bullmq import BullMQStorage
from workers.testing.steps import claim_one, job, status, until

REASON = "job stalled more than allowable limit"


async def _add_foreign(storage: BullMQStorage, client: Any, job_id: str = "theirs", **fields: str) -> None:
    key = f"bull:{storage.queue}"
    defaults = {"name": "n", "data": "{}", "opts": '{"attempts":0}', "timestamp": "1"}
    await client.hset(f"{key}:{job_id}", mapping=defaults | fields)
    await client.lpush(f"{key}:wait", job_id)


async def _lose(storage: BullMQStorage, client: Any, held: Claim) -> None:
    await client.delete(f"bull:{storage.queue}:{held.job_id}:lock")
    for _ in range(storage.capabilities.recovery_passes):
        await storage.recover(10)


async def _stalls(storage: BullMQStorage, client: Any) -> int:
    """How often the next job was lost before it is given up."""
    lost = 0
    while (held := await claim_one(storage)).stalled is None:
        await _lose(storage, client, held)
        lost += 1
    return lost - 1


@pytest.mark.parametrize(("parameter", "argument", "expected"), [("0", None, 0), ("2", None, 2), ("0", 3, 3)])
async def test_how_often_a_foreign_job_may_stall(
    redis_url: str, storage: BullMQStorage, client: Any, parameter: str, argument: int | None, expected: int
) -> None:
    """The URL says it, or the argument, which has precedence; a job of ours may as often as the reaper says."""
    url = f"{redis_url}?max_foreign_stalls={parameter}&queue={storage.queue}"
    other = BullMQStorage(url, max_foreign_stalls=argument)
    await other.connect()
    await _add_foreign(storage, client)
    assert await _stalls(other, client) == expected
    await storage.enqueue([job("ours", max_attempts=50)])
    assert await _stalls(other, client) == 3
    await other.disconnect()


@pytest.mark.parametrize("value", ["-1", "1.5", "", "many"])
def test_an_impossible_number_of_stalls_is_refused(redis_url: str, value: str) -> None:
    """A URL with such a number is no storage's, and such an argument is an error of the caller."""
    with pytest.raises(StorageError, match="max_foreign_stalls"):
        BullMQStorage(f"{redis_url}?max_foreign_stalls={value}")
    with pytest.raises(ValueError, match="max_foreign_stalls"):
        BullMQStorage(redis_url, max_foreign_stalls=-1)


@pytest.mark.parametrize("options", ["{{", "[]", "7", '{"workers"', "[" * 5_000])
async def test_options_that_are_none_are_another_producers(storage: BullMQStorage, client: Any, options: str) -> None:
    """Whatever another program wrote there, its job stalls like any of others, and its neighbours too."""
    await _add_foreign(storage, client, "odd", opts=options)
    assert await _stalls(storage, client) == 1


async def test_a_foreign_job_that_failed_before_runs_again_after_a_crash(storage: BullMQStorage, client: Any) -> None:
    """Only what failed counts: not the lease that was lost in its last attempt."""
    await _add_foreign(storage, client, opts='{"attempts":2}')
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(0), error=ERROR)])
    await _lose(storage, client, await claim_one(storage))
    again = await claim_one(storage)
    assert (again.attempt, again.max_attempts, again.stalled) == (2, 2, None)


@pytest.mark.parametrize("entry", ["hash", "score", None])
async def test_runs_of_a_scheduler_are_never_given_up(storage: BullMQStorage, client: Any, entry: str | None) -> None:
    """BullMQ spares them while their scheduler exists, however often they stall."""
    key = f"bull:{storage.queue}:repeat"
    if entry == "hash":
        await client.hset(f"{key}:hourly", "name", "n")
    elif entry == "score":
        await client.zadd(key, {"hourly": 1})
    await _add_foreign(storage, client, rjk="hourly")
    for _ in range(2):
        await _lose(storage, client, await claim_one(storage))
    held = await claim_one(storage)
    assert (held.stalled is None) is (entry is not None)


async def test_a_lost_claim_of_a_foreign_job_is_no_claim(storage: BullMQStorage, client: Any) -> None:
    """Although the attempt has the same number, and a worker that writes no name leaves our token in the record."""
    await _add_foreign(storage, client)
    lost = await claim_one(storage)
    await _lose(storage, client, lost)
    again = await claim_one(storage)
    assert again.attempt == lost.attempt
    key = f"bull:{storage.queue}:theirs"
    await client.hset(key, "pb", lost.token)
    await client.delete(f"{key}:lock")
    [outcome] = await storage.settle([Completed(claim=lost, result=b"1")])
    assert (outcome.status, outcome.reason) == (SettleStatus.LOST, LossReason.TAKEN)


async def test_nodes_own_checks_do_not_keep_ours_back(storage: BullMQStorage, client: Any) -> None:
    """BullMQ lets one worker check in an interval, by a key; a Node worker's is much longer than ours."""
    await storage.enqueue([job("a", max_attempts=2)])
    held = await claim_one(storage)
    await client.set(f"bull:{storage.queue}:stalled-check", 1, px=3_600_000)
    await _lose(storage, client, held)
    assert (await claim_one(storage)).attempt == 2


async def test_a_crashed_workers_job_is_back_within_its_lease_and_five_seconds(storage: BullMQStorage) -> None:
    """A reaper comes often enough for that, although the leases of its own worker are much longer."""
    assert storage.capabilities.recovery_interval is not None
    assert storage.capabilities.recovery_interval < timedelta(seconds=5)
    await storage.enqueue([job("a", max_attempts=2)])
    await storage.claim("vanished", leases={"*": timedelta(seconds=1)}, limit=1)
    async with running(Worker(storage, {"*": done}, lease=timedelta(minutes=10))):
        await until(lambda: _is_completed(storage))


async def _is_completed(storage: BullMQStorage) -> bool:
    return (await status(storage, "a")).state is JobState.COMPLETED


async def test_an_error_of_others_stays_theirs(storage: BullMQStorage, client: Any) -> None:
    """A foreign job that is given up has BullMQ's reason; ours says what happened."""
    await _add_foreign(storage, client, stc="1")
    await _lose(storage, client, await claim_one(storage))
    [theirs] = await storage.claim("w", leases=LEASES, limit=1)
    assert theirs.stalled is not None
    assert (theirs.stalled.type, theirs.stalled.message) == ("StalledError", REASON)
