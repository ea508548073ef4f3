"""Input that no caller should give: refused at the call or answered with nothing, and the queue stays as it was."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from workers.checks import LONGEST_LEASE, MAX_DELAY, MAX_ID_BYTES
from workers.errors import StorageError
from workers.jobs import CancelResult, ErrorInfo, Failed, JobState, SettleStatus
from workers.storage.base import Storage
from workers.testing.case import RESULT_TTL_UPDATES, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    LEASE,
    apply,
    claim,
    claim_one,
    completed,
    crash,
    enqueue,
    failed,
    job,
    recover,
    released,
    retried,
    state,
    status,
)

IMPOSSIBLE_TEXTS: Final = ("", "x" * (MAX_ID_BYTES + 1), "é" * MAX_ID_BYTES, "a lone \ud800 surrogate")
"""Texts that no job, worker, name or queue can have."""

IMPOSSIBLE_DURATIONS: Final = (timedelta(0), timedelta(seconds=-1), timedelta.min, timedelta.max)
"""What no lease or retention lasts."""


async def _refused(call: Awaitable[object], *errors: type[Exception]) -> None:
    """Check that the call raises one of these errors, and no other."""
    try:
        answer = await call
    except errors:
        return
    raise AssertionError(f"it should have been refused, but the answer was {answer!r}")


async def _unknown(call: Awaitable[object], nothing: object) -> None:
    """Check that the call finds nothing, or refuses to look."""
    try:
        answer = await call
    except ValueError:
        return
    assert answer == nothing


@case(guarantees=(9, 24))
async def impossible_names_are_refused(harness: Harness, storage: Storage) -> None:
    """Queues, workers and jobs whose name is empty, over 512 bytes or no Unicode are a `ValueError` at the call."""
    await enqueue(storage, job("there"))
    for text in IMPOSSIBLE_TEXTS:
        await _refused(harness.make(text), ValueError)
        await _refused(claim(storage, worker_id=text), ValueError)
        await _refused(storage.claim("w", leases={text: LEASE}, limit=1), ValueError)
    assert (await claim_one(storage)).attempt == 1


@case(guarantees=(9, 24))
async def impossible_ids_are_unknown(storage: Storage) -> None:
    """Every verb that looks a job up finds none by an id that no job can have, or raises `ValueError`."""
    await enqueue(storage, job("there"))
    for text in IMPOSSIBLE_TEXTS:
        await _unknown(storage.status([text]), [None])
        await _unknown(storage.result(text), None)
        await _unknown(storage.cancel(text), CancelResult.NOT_FOUND)
        for verb in (storage.remove, storage.retry, storage.promote):
            await _unknown(verb([text]), 0)
    assert await state(storage, "there") is JobState.QUEUED


@case(guarantees=(4, 24))
async def impossible_leases_are_refused(storage: Storage) -> None:
    """A lease that ends as it begins, or never, is a `ValueError` and touches no job; the shortest lease works."""
    await enqueue(storage, job("there"))
    for lease in IMPOSSIBLE_DURATIONS:
        await _refused(claim(storage, lease=lease), ValueError)
    assert (await status(storage, "there")).attempt == 0
    held = await claim_one(storage, lease=timedelta(microseconds=1))
    assert held.attempt == 1
    await storage.renew([held])


@case(guarantees=(16, 18, 24))
async def the_farthest_times_are_kept(harness: Harness, storage: Storage) -> None:
    """The longest delay and lease, and retentions of 100 years, work; a retry may ask for any time at all."""
    await enqueue(storage, job("scheduled", delay=harness.capabilities.longest_delay), job("there", keep=MAX_DELAY))
    held = await claim_one(storage, lease=LONGEST_LEASE)
    assert held.job_id == "there"
    assert (await storage.renew([held])).lost == {}
    assert (await storage.recover(10)).requeued == ()
    await apply(storage, retried(held, timedelta.min))
    await apply(storage, retried(await claim_one(storage), timedelta.max))
    failing = await status(storage, "there")
    assert failing.state is JobState.FAILING
    assert failing.next_run_at is not None
    assert await storage.promote(["there"]) == 1
    await apply(storage, completed(await claim_one(storage), keep=MAX_DELAY))
    await storage.sweep(10)
    assert await state(storage, "there") is JobState.COMPLETED
    assert await state(storage, "scheduled") is JobState.SCHEDULED


@case(guarantees=(19, 24))
async def any_time_may_be_waited(storage: Storage) -> None:
    """A wait ends at once if there is a job to claim, whatever its timeout, and also if its timeout is below zero."""
    await storage.wait(["*"], timeout=timedelta.min)
    await enqueue(storage, job("there"))
    await storage.wait(["*"], timeout=timedelta.max)
    await claim_one(storage)


@case(guarantees=(22, 24))
async def any_age_may_be_cleaned(storage: Storage) -> None:
    """Cleaning by the longest age removes nothing; cleaning by a negative age removes everything."""
    await enqueue(storage, job("done"))
    await apply(storage, completed(await claim_one(storage)))
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta.max) == 0
    await _refused(storage.clean(JobState.QUEUED, older_than=timedelta(0)), ValueError)
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta.min) == 1


@case(guarantees=(24,), needs=(RESULT_TTL_UPDATES,))
async def impossible_retentions_are_refused(storage: Storage) -> None:
    """Setting a result's time to zero, to less, or to for ever raises `ValueError`, and the result lasts as before."""
    await enqueue(storage, job("done"))
    await apply(storage, completed(await claim_one(storage)))
    for ttl in IMPOSSIBLE_DURATIONS:
        await _refused(storage.update_result_ttl("done", ttl), ValueError)
    assert await state(storage, "done") is JobState.COMPLETED


@case(guarantees=(17, 24))
async def any_number_is_a_limit(harness: Harness, storage: Storage) -> None:
    """A limit of zero or less asks for nothing, and one beyond every number of the server asks for everything."""
    await enqueue(storage, *(job() for _ in range(4)))
    await apply(storage, completed(await claim_one(storage)))
    await crash(harness, storage)
    for limit in (0, -1, -(1 << 70)):
        assert await claim(storage, limit) == []
        assert (await storage.list(JobState.QUEUED, limit=limit)).jobs == ()
        assert await storage.clean(JobState.COMPLETED, older_than=timedelta.min, limit=limit) == 0
        assert await storage.sweep(limit) == 0
        if harness.capabilities.bounded_recovery:
            assert (await storage.recover(limit)).requeued == ()
    for limit in (1 << 31, 1 << 63, 1 << 70):
        claims = await claim(storage, limit)
        assert len(claims) == 2
        await apply(storage, *(released(held) for held in claims))
        assert len((await storage.list(JobState.QUEUED, limit=limit)).jobs) == 2
        await storage.sweep(limit)
    assert await storage.clean(JobState.COMPLETED, older_than=timedelta.min, limit=1 << 70) == 1
    assert len((await recover(harness, storage, 1, limit=1 << 70)).requeued) == 1


@case(guarantees=(21, 24))
async def a_foreign_cursor_is_refused(storage: Storage) -> None:
    """A cursor that no listing gave raises `StorageError`; it is not taken for the first page, nor for the last."""
    await enqueue(storage, job())
    for cursor in ("", "garbage", "-5", "\x00", "é", "٣", ":", "9" * 30):
        await _refused(storage.list(JobState.QUEUED, cursor=cursor), StorageError)


@case(guarantees=(23, 24))
async def nothing_may_be_asked_for(storage: Storage) -> None:
    """Empty batches, no names and no leases get an empty answer, at once or at the timeout."""
    await enqueue(storage, job("there"))
    assert await storage.enqueue([]) == []
    assert await storage.settle([]) == []
    assert (await storage.renew([])).lost == {}
    assert await storage.status([]) == []
    assert await storage.claim("w", leases={}, limit=1) == []
    await storage.wait([], timeout=timedelta(0))
    assert await state(storage, "there") is JobState.QUEUED


@case(guarantees=(21, 24))
async def any_text_is_an_error(storage: Storage) -> None:
    """The message of a handler's exception is read back unchanged: NUL, emoji, escapes, or nothing at all."""
    error = ErrorInfo(type="Ünï\x00Error", message="\x00 👩‍🚀 \x1b[0m \u2028 '\"\\ %s {}", stack="\r\n\x00\t")
    await enqueue(storage, job("strange"), job("silent"))
    strange, silent = await claim(storage, 2)
    await apply(storage, Failed(claim=strange, error=error))
    await apply(storage, Failed(claim=silent, error=ErrorInfo(type="E", message="")))
    assert (await status(storage, "strange")).last_error == error
    assert (await status(storage, "silent")).last_error == ErrorInfo(type="E", message="")


@case(guarantees=(3, 23, 24))
async def strangers_settle_nothing(storage: Storage) -> None:
    """A claim whose token or job no storage ever gave is lost, and its neighbours are settled."""
    await enqueue(storage, job("one"), job("other"))
    one, other = await claim(storage, 2)
    for text in ("", "garbage", "\x00", "é", "0" * 10_000, ":"):
        forged = replace(one, token=text)
        assert list((await storage.renew([forged])).lost) == [text]
        assert [outcome.status for outcome in await storage.settle([failed(forged)])] == [SettleStatus.LOST]
    await apply(storage, completed(one), completed(other))
