"""What the Bull storage writes is what Node's Bull 1.x reads: fields, keys, scores and messages."""

from __future__ import annotations

import json
import math
from datetime import timedelta

import pytest

from tests.workers.storage.bull.steps import ERROR, NodeBull, heard, key
from workers.errors import StorageError, Unsupported
from workers.jobs import Completed, Failed, JobState, ProgressReport, Released, Retried
from workers.storage.bull import BullStorage
from workers.testing.steps import HOUR, claim_one, job

CREATED = ["data", "opts", "progress", "delay", "timestamp", "attempts", "attemptsMade", "stacktrace", "returnvalue"]


async def test_a_job_has_bulls_fields_and_its_name(storage: BullStorage, node: NodeBull) -> None:
    """Every field that Bull writes, and one more; what else Bull has no word for is in `opts.workers`."""
    await storage.enqueue([job("mail-1", payload=b'{"a":1}', max_attempts=4, priority=7)])
    record = await node.record("mail-1")
    assert set(record) == {*CREATED, "name"}
    assert (record["data"], record["name"]) == ('{"a":1}', "work")
    assert [record[name] for name in ("progress", "delay", "attempts", "attemptsMade")] == ["0", "0", "4", "0"]
    assert (record["stacktrace"], record["returnvalue"]) == ("[]", "null")
    hour = 3_600_000
    assert json.loads(record["opts"]) == {
        "jobId": "mail-1",
        "attempts": 4,
        "workers": {"keepCompleted": hour, "keepFailed": hour, "priority": 7},
    }
    assert record["timestamp"].isdigit()


async def test_jobs_are_lined_up_numbered_and_told_of(storage: BullStorage, node: NodeBull) -> None:
    """Each job takes a number of the counter, stands behind the earlier ones, and is named on the channel of adds."""
    async with heard(node.client, key(storage, "jobs")) as message:
        await storage.enqueue([job("one"), job("two")])
        await storage.enqueue([job("three")])
        assert [(await message())[1] for _ in range(3)] == ["one", "two", "three"]
    assert await node.line("wait") == ["one", "two", "three"]
    assert await node.client.get(node.key("id")) == "3"


async def test_a_delayed_job_is_scored_and_told_of(storage: BullStorage, node: NodeBull) -> None:
    """The score is the time times 4096 and the low bits of the number; the message is the score without that factor."""
    await node.client.set(node.key("id"), 4_096 + 41)
    async with heard(node.client, key(storage, "delayed")) as message:
        await storage.enqueue([job("later", delay=HOUR)])
        published = float((await message())[1])
    [(raw, score)] = await node.client.zrange(node.key("delayed"), 0, -1, withscores=True)
    assert (raw, score % 4_096, published) == ("later", 42, score / 4_096)
    record = await node.record("later")
    assert record["delay"] == "3600000"
    assert 0 <= math.floor(score / 4_096) - int(record["timestamp"]) - 3_600_000 <= 1  # never early


async def test_a_claim_moves_locks_and_marks_in_one_step(storage: BullStorage, node: NodeBull) -> None:
    """The job is active and locked with the lease; Node counts it as one that had a lock."""
    await storage.enqueue([job("one"), job("two")])
    claim = await claim_one(storage, lease=timedelta(seconds=30))
    assert (await node.line("active"), await node.line("wait")) == (["one"], ["two"])
    assert await node.client.get(node.key("one:lock")) == claim.token
    assert 29_000 < await node.client.pttl(node.key("one:lock")) <= 30_000
    assert (await node.record("one"))["lockAcquired"] == "1"


@pytest.mark.parametrize(
    ("result", "stored"),
    [(b'{"n":1}', '{"n":1}'), (b"[]", "[]"), (b"true", "true"), (b"null", ""), (b"0", ""), (b"-0.0", ""), (b'""', "")],
)
async def test_a_result_is_json_or_empty(result: bytes, stored: str, storage: BullStorage, node: NodeBull) -> None:
    """Falsy results are the empty text, as Bull has them, and still read as they were."""
    await storage.enqueue([job("done")])
    await storage.settle([Completed(claim=await claim_one(storage), result=result)])
    assert (await node.record("done"))["returnvalue"] == stored
    assert await node.client.smembers(node.key("completed")) == {"done"}
    assert (await node.line("active"), await node.client.exists(node.key("done:lock"))) == ([], 0)
    outcome = await storage.result("done")
    assert outcome is not None
    assert outcome.result == result


async def test_failures_are_counted_and_stacked(storage: BullStorage, node: NodeBull) -> None:
    """Each failed run is one attempt made and one stack more; `failedReason` is the message, no JSON."""
    await storage.enqueue([job("bad")])
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(0), error=ERROR)])
    assert "lockAcquired" not in await node.record("bad")
    await storage.settle([Failed(claim=await claim_one(storage), error=ERROR)])
    record = await node.record("bad")
    assert (record["attemptsMade"], record["failedReason"]) == ("2", "no")
    assert json.loads(record["stacktrace"]) == ["ValueError: no", "ValueError: no"]
    assert await node.client.smembers(node.key("failed")) == {"bad"}


async def test_stacks_do_not_grow_for_ever(storage: BullStorage, node: NodeBull) -> None:
    """Of a job that fails again and again with long stacks the hash keeps a bounded part."""
    await storage.enqueue([job("bad", max_attempts=1_000)])
    await node.client.hset(node.key("bad"), "stacktrace", json.dumps(["x" * 70_000]))
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(0), error=ERROR)])
    assert json.loads((await node.record("bad"))["stacktrace"]) == ["ValueError: no"]


async def test_a_retry_waits_among_the_delayed(storage: BullStorage, node: NodeBull) -> None:
    """The score has the low bits of a numeric id, 0 of others; the field `delay` stays; Node's timers are told."""
    number = await node.add()
    async with heard(node.client, key(storage, "delayed")) as message:
        await storage.settle([Retried(claim=await claim_one(storage), delay=HOUR, error=ERROR)])
        assert float((await message())[1]) > 0
    assert await node.client.zscore(node.key("delayed"), number) % 4_096 == int(number) % 4_096
    assert (await node.record(number))["delay"] == "0"


async def test_progress_is_a_number_to_node(storage: BullStorage, node: NodeBull) -> None:
    """A number is Node's too, other reports are ours alone; what Node reports later counts."""
    await storage.enqueue([job("one")])
    held = await claim_one(storage)
    await storage.progress([ProgressReport(claim=held, value=b"42")])
    assert (await node.record("one"))["progress"] == "42"
    await storage.progress([ProgressReport(claim=held, value=b'{"of":7}')])
    assert (await node.record("one"))["progress"] == "0"
    [found] = await storage.status(["one"])
    assert found is not None
    assert found.encoded_progress == b'{"of":7}'
    await node.client.hset(node.key("one"), "progress", "99")
    [found] = await storage.status(["one"])
    assert found is not None
    assert found.encoded_progress == b"99"


async def test_far_delays_are_refused(storage: BullStorage, node: NodeBull) -> None:
    """Node's timers break on them; a retry that asks for more waits as long as there is."""
    with pytest.raises(Unsupported, match="24 days"):
        await storage.enqueue([job("near"), job("far", delay=timedelta(days=24, seconds=1))])
    assert await storage.status(["near"]) == [None]
    await storage.enqueue([job("near")])
    await storage.settle([Retried(claim=await claim_one(storage), delay=timedelta(days=365), error=ERROR)])
    [found] = await storage.status(["near"])
    assert found is not None
    assert found.next_run_at is not None
    assert timedelta(days=23) < found.next_run_at - found.created_at < timedelta(days=25)


async def test_a_released_group_keeps_its_order(storage: BullStorage, node: NodeBull) -> None:
    """Jobs given back together stand in front as they stood, without a lock, a mark or a stall."""
    await storage.enqueue([job(name) for name in ("a", "b", "c")])
    claims = await storage.claim("w", leases={"*": HOUR}, limit=2)
    await storage.settle([Released(claim=claim) for claim in claims])
    assert await node.line("wait") == ["a", "b", "c"]
    assert "lockAcquired" not in await node.record("a")
    assert await node.client.exists(node.key("a:lock")) == 0


async def test_what_node_finished_is_read(storage: BullStorage, node: NodeBull) -> None:
    """A result, a failure of Node's and one of its sweep; when they ended nobody knows."""
    for raw, line, fields in (
        ("done", "completed", {"returnvalue": '{"n":1}'}),
        ("falsy", "completed", {"returnvalue": ""}),
        ("bad", "failed", {"failedReason": "oh", "stacktrace": '["TypeError: oh\\n at x"]', "attemptsMade": 1}),
        ("lost", "failed", {"failedReason": "job stalled more than allowable limit"}),
    ):
        await node.add(raw, **fields)
        await node.take()
        await node.client.lrem(node.key("active"), 0, raw)
        await node.client.sadd(node.key(line), raw)
    outcomes = [await storage.result(raw) for raw in ("done", "falsy", "bad", "lost")]
    assert [outcome.result if outcome else None for outcome in outcomes] == [b'{"n":1}', b"null", None, None]
    errors = [outcome.error.type for outcome in outcomes if outcome and outcome.error]
    assert errors == ["TypeError", "StalledError"]
    [done, bad, lost] = await storage.status(["done", "bad", "lost"])
    assert done is not None
    assert (done.state, done.attempt, done.finished_at) == (JobState.COMPLETED, 1, None)
    shown = [one and one.last_error and one.last_error.exhausted for one in (done, bad, lost)]
    assert shown == [None, True, False]  # whether the attempts were used up: the lost one had made none
    assert await storage.clean(JobState.COMPLETED, older_than=HOUR) == 2


async def test_the_dialect_may_be_in_the_url(redis_url: str) -> None:
    """As an argument it wins, with neither it is C; another letter is refused."""
    url = f"bull+{redis_url}?queue=q"
    found = [
        repr(BullStorage(url)),
        repr(BullStorage(f"{url}&dialect=A")),
        repr(BullStorage(f"{url}&dialect=A", dialect="B")),
    ]
    assert found == [f"BullStorage(queue='q', dialect='{dialect}')" for dialect in "CAB"]
    for wrong in ("D", "a", ""):
        with pytest.raises(StorageError, match="one of A, B, C"):
            BullStorage(f"{url}&dialect={wrong}")
    with pytest.raises(ValueError, match="one of A, B, C"):
        BullStorage(url, dialect="D")  # type: ignore[arg-type]  # what is not checked by its caller


async def test_an_end_costs_the_same_with_any_backlog(storage: BullStorage, node: NodeBull) -> None:
    """A job is looked for among the active ones alone, as long as it is there."""
    await storage.enqueue([job(f"job-{number}") for number in range(5)])
    claims = await storage.claim("w", leases={"*": HOUR}, limit=3)
    before = await _removals(node)
    await storage.settle([Completed(claim=claim, result=b"1") for claim in claims])
    assert await _removals(node) - before == 3


async def _removals(node: NodeBull) -> int:
    """How often the server has looked through a list so far."""
    return int((await node.client.info("commandstats")).get("cmdstat_lrem", {"calls": 0})["calls"])
