"""Jobs that other programs put into a BullMQ queue: what we do not know of them stays, what they ask for is done."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import Any

import bullmq
import pytest

from tests.workers.storage.bullmq.steps import ERROR
from workers.errors import ErrorInfo, StorageError
from workers.jobs import Completed, EnqueueStatus, Failed, JobState, LogLine
from workers.retry import AT_ONCE, NamedBackoff
from workers.storage.bullmq import BullMQStorage
from workers.storage.bullmq.codec import LOGS_KEPT, decode_options
from workers.storage.bullmq.record import BullMQClaim
from workers.storage.on_redis.node_values import STACKS_CHARACTERS, decode_error, error_fields
from workers.testing.steps import claim_one, continued, enqueue, job, released, retried, settle, state

UNKNOWN = {"attempts": 9, "ofVersionNine": {"a": [1]}, "fpof": True, "kl": 7, "backoff": {"type": "mine", "delay": 3}}


@pytest.fixture
async def stock(storage: BullMQStorage, redis_url: str) -> AsyncIterator[bullmq.Queue]:
    queue = bullmq.Queue(storage.queue, {"connection": redis_url})
    yield queue
    await queue.close()


async def options_of(client: Any, storage: BullMQStorage, raw: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(await client.hget(f"bull:{storage.queue}:{raw}", "opts"))
    return found


async def test_unknown_options_and_fields_stay(storage: BullMQStorage, stock: bullmq.Queue, client: Any) -> None:
    """Whatever we do with the job, its options are as they were written, and fields that nobody knows harm nobody."""
    added = await stock.add("n", {}, {**UNKNOWN, "jobId": "odd", "removeOnComplete": 100})
    key = f"bull:{storage.queue}:{added.id}"
    await client.hset(key, mapping={"zz": "of version nine", "opts.more": "[]"})
    written = await options_of(client, storage, "odd")
    assert written.items() >= UNKNOWN.items()
    await settle(storage, retried(await claim_one(storage), timedelta(hours=1)))
    assert await storage.promote(["odd"]) == 1
    await settle(storage, released(await claim_one(storage)))
    await settle(storage, Failed(claim=await claim_one(storage), error=ERROR))
    assert await storage.retry(["odd"]) == 1
    assert await options_of(client, storage, "odd") == written
    held = await claim_one(storage)
    await settle(storage, continued(held, keep=held.keep_completed))
    after = await options_of(client, storage, "odd")
    assert after | {"attempts": 9, "removeOnComplete": 100, "workers": 1} | UNKNOWN == {**after, "attempts": 9}
    assert await client.hget(key, "zz") == "of version nine"
    await settle(storage, Completed(claim=await claim_one(storage), result=b"1"))
    assert await state(storage, "odd") is JobState.COMPLETED


async def test_a_repaired_job_has_the_options_it_had(storage: BullMQStorage, stock: bullmq.Queue, client: Any) -> None:
    """What was set aside and is queued again is neither ours, nor without an option that we do not know."""
    await stock.add("n", {}, {**UNKNOWN, "jobId": "odd"})
    await client.hset(f"bull:{storage.queue}:odd", "atm", "no number")
    assert await storage.claim("w", leases={"*": timedelta(seconds=30)}, limit=1) == []
    await storage.repair()
    held = await claim_one(storage)
    assert isinstance(held, BullMQClaim)
    assert (await options_of(client, storage, held.raw)).items() >= UNKNOWN.items()
    assert (held.options.ours, held.named_backoff) == (
        False,
        NamedBackoff(type="mine", delay=timedelta(milliseconds=3)),
    )


@pytest.mark.parametrize(
    "backoff",
    [None, 0, {"type": "fixed"}, {"type": "exponential", "delay": 0}],
    ids=["none", "0", "fixed", "exponential"],
)
def test_no_back_off_is_at_once_for_jobs_of_others(backoff: object) -> None:
    """As in Node; a job of ours without one waits by the handler's or worker's policy."""
    options = {"attempts": 3} if backoff is None else {"attempts": 3, "backoff": backoff}
    assert decode_options(options).backoff == AT_ONCE
    assert decode_options({**options, "workers": 1}).backoff == (None if backoff is None else AT_ONCE)


async def test_a_job_of_ours_is_told_from_others(storage: BullMQStorage, stock: bullmq.Queue) -> None:
    """By an option of ours, which BullMQ keeps."""
    await enqueue(storage, job("ours"))
    ours = await claim_one(storage)
    await stock.add("n", {}, {"attempts": 3})
    theirs = await claim_one(storage)
    assert isinstance(ours, BullMQClaim)
    assert isinstance(theirs, BullMQClaim)
    assert (ours.options.ours, theirs.options.ours) == (True, False)
    assert (ours.backoff, theirs.backoff) == (None, AT_ONCE)


@pytest.mark.parametrize(
    ("written", "kept"),
    [({}, LOGS_KEPT), ({"kl": 3}, 3), ({"keepLogs": 4}, 4), ({"kl": 10**9}, LOGS_KEPT), ({"kl": "x"}, LOGS_KEPT)],
)
def test_a_jobs_log_is_bounded(written: Mapping[str, object], kept: int) -> None:
    """By the job's own option, under both of its names, and by ours."""
    assert decode_options(written).logs_kept == kept


async def test_a_log_goes_with_its_job(storage: BullMQStorage, client: Any) -> None:
    """Lines are kept in their order while the job is there; a line that comes later is nowhere."""
    await enqueue(storage, job("gone", keep_completed=None))
    held = await claim_one(storage)
    await storage.log([LogLine(claim=held, text=f"line {n}") for n in range(LOGS_KEPT + 2)])
    lines = await client.lrange(f"bull:{storage.queue}:gone:logs", 0, -1)
    assert lines == [f"line {n}" for n in range(2, LOGS_KEPT + 2)]
    await settle(storage, Completed(claim=held, result=b"1"))
    await storage.remove(["gone"])
    await storage.log([LogLine(claim=held, text="too late")])
    assert await client.keys(f"bull:{storage.queue}:gone*") == []


def test_stacks_are_bounded() -> None:
    """The last ones stay: as many as the job's option says, within a bound; what is no list of texts is forgotten."""
    error = ErrorInfo(type="ValueError", message="no", stack="ValueError: no")
    earlier = json.dumps(["a", "b", None, "c"])
    assert json.loads(str(error_fields(error, earlier)["stacktrace"])) == ["a", "b", "c", error.stack]
    assert json.loads(str(error_fields(error, earlier, 2)["stacktrace"])) == ["c", error.stack]
    assert json.loads(str(error_fields(error, earlier, 0)["stacktrace"])) == []
    long = json.dumps(["x" * STACKS_CHARACTERS, "kept"])
    assert json.loads(str(error_fields(error, long)["stacktrace"])) == ["kept", error.stack]
    for junk in ("{", "{}", "[[1]]", None):
        assert json.loads(str(error_fields(error, junk)["stacktrace"])) == [error.stack]


def test_an_error_without_a_stack_has_none_of_another() -> None:
    """Stacks of earlier failures stay in the record, but are not shown as those of the last."""
    fields = error_fields(ErrorInfo(type="Retry", message="busy"), json.dumps(["ValueError: no"]))
    assert json.loads(str(fields["stacktrace"])) == ["ValueError: no"]
    found = decode_error("busy", str(fields["stacktrace"]), str(fields["workers:error"]), exhausted=False)
    assert found == ErrorInfo(type="Retry", message="busy")


async def test_a_new_generation_heeds_what_bullmq_says(storage: BullMQStorage) -> None:
    """A failed id is not acknowledged as queued again when its parent is gone, or another job has its key."""
    await enqueue(storage, job("bad"), storage.with_node_options(job("first"), {"deduplication": {"id": "one"}}))
    held = await claim_one(storage)
    assert held.job_id == "bad"
    await settle(storage, Failed(claim=held, error=ERROR))
    orphan = storage.with_node_options(job("bad"), {"parent": {"id": "nobody", "queue": f"bull:{storage.queue}"}})
    with pytest.raises(StorageError, match="parent"):
        await storage.enqueue([orphan])
    await enqueue(storage, job("bad"))
    await storage.cancel("bad")
    [result] = await storage.enqueue([storage.with_node_options(job("bad"), {"deduplication": {"id": "one"}})])
    assert (result.id, result.status, result.existing_state) == ("first", EnqueueStatus.DUPLICATE, JobState.QUEUED)
    await storage.remove(["first"])
    [result] = await storage.enqueue([storage.with_node_options(job("bad"), {"deduplication": {"id": "one"}})])
    assert (result.id, result.status) == ("bad", EnqueueStatus.QUEUED)
