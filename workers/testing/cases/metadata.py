"""The promises of a job's metadata: it comes back as it was given, for as long as there is a record of the job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final

from workers.chains import Continuation
from workers.jobs import Completed, JobRecord, JobState
from workers.metadata import MAX_META, MAX_META_NAME_BYTES, MAX_META_VALUE_BYTES, TRACEPARENT, TRACESTATE
from workers.retry import RetryPolicy
from workers.serde import JsonSerde
from workers.storage.abilities import ContinuesFromOutside
from workers.storage.base import Storage
from workers.testing.case import OUTSIDE_CONTINUATIONS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    failed,
    job,
    recover,
    retried,
)

META: Final = {
    "tenant": "ünï 👩‍🚀",
    "empty": "",
    "control": "\x00\x01\n\x7f",
    'qu"ote\\': "a:b'c",
    TRACEPARENT: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    TRACESTATE: "vendor=1,other=2",
}
LARGEST: Final = {
    **{f"{number:0{MAX_META_NAME_BYTES}}": "\x01" * 64 for number in range(MAX_META)},
    TRACEPARENT: "\x02" * MAX_META_VALUE_BYTES,
    TRACESTATE: "\x03" * MAX_META_VALUE_BYTES,
}
"""As much as there may be, of characters that JSON takes six for."""
BACKOFF: Final = RetryPolicy(initial=timedelta(seconds=7), multiplier=1.5, jitter=0)


async def _record(storage: Storage, job_id: str) -> JobRecord:
    [found] = await storage.read([job_id])
    assert found is not None, f"{job_id!r} should be known"
    return found


@case(guarantees=(10, 26))
async def metadata_comes_back(storage: Storage) -> None:
    """Claims and records have it as it was given, beside a back-off and without, and other jobs have none."""
    jobs = (
        replace(job("both", payload=b"\x80\x00"), meta=META, backoff=BACKOFF),
        replace(job("meta", payload=b"\x80\x00"), meta=META),
        replace(job("backoff", payload=b"\x80\x00"), backoff=BACKOFF),
        replace(job("largest"), meta=LARGEST, payload=b""),
        job("neither"),
    )
    await enqueue(storage, *jobs)
    records = [await _record(storage, each.id) for each in jobs]
    assert [(each.meta, each.payload) for each in records] == [(each.meta, each.payload) for each in jobs]
    claims = {held.job_id: held for held in await claim(storage, len(jobs))}
    for each in jobs:
        held = claims[each.id]
        assert (held.meta, held.payload, held.backoff) == (each.meta, each.payload, each.backoff), each.id


@case(guarantees=(5, 26))
async def metadata_stays_with_the_job(harness: Harness, storage: Storage) -> None:
    """A retry, a crash, a failure and an operator's retry change nothing of it, and a completed job has it still."""
    await enqueue(storage, replace(job("job", max_attempts=3), meta=META))
    await apply(storage, retried(await claim_one(storage)))
    [held] = await crash(harness, storage)
    assert held.meta == META
    await recover(harness, storage, 1)
    held = await claim_one(storage)
    assert (held.attempt, held.meta) == (3, META)
    await apply(storage, failed(held))
    assert (await _record(storage, "job")).meta == META
    assert await storage.retry(["job"]) == 1
    held = await claim_one(storage)
    assert held.meta == META
    await apply(storage, completed(held))
    found = await _record(storage, "job")
    assert (found.status.state, found.meta) == (JobState.COMPLETED, META)


@case(guarantees=(15,))
async def what_is_made_of_a_job_has_its_metadata(storage: Storage) -> None:
    """The next link of its chain, and what it enqueues with its end; a job without metadata hands none on."""
    await enqueue(storage, replace(job("job"), meta=META))
    held = await claim_one(storage)
    link = Continuation(name="work", payload=2).settlement(held, JsonSerde(), storage.queue)
    await apply(storage, link)
    held = await claim_one(storage)
    assert (held.chain_index, held.meta) == (1, META)
    await apply(storage, Completed(claim=held, result=b"1", then=replace(job("then"), meta=held.meta)))
    held = await claim_one(storage)
    assert (held.job_id, held.meta) == ("then", META)
    await apply(storage, Completed(claim=held, result=b"1", then=job("last")))
    held = await claim_one(storage)
    assert (held.job_id, held.meta) == ("last", {})


@case(guarantees=(15,), needs=(OUTSIDE_CONTINUATIONS,))
async def a_link_from_outside_has_the_metadata_it_is_given(storage: Storage) -> None:
    """Whatever the link before had."""
    assert isinstance(storage, ContinuesFromOutside)
    await enqueue(storage, replace(job("with", delay=HOUR), meta={"is": "old"}), job("without", delay=HOUR))
    for job_id in ("with", "without"):
        await storage.continue_job(replace(job(job_id, chain_index=1), meta=META))
    assert [held.meta for held in await claim(storage, 2)] == [META, META]
