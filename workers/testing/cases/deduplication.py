"""The promises of `enqueue` about deduplication keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from workers.checks import MAX_ID_BYTES
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import Unsupported
from workers.jobs import EnqueueResult, EnqueueStatus, JobState
from workers.storage.base import Storage
from workers.testing.case import DEDUPLICATION, MEASURES, OUTSIDE_ENDINGS, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    apply,
    claim,
    claim_one,
    completed,
    continued,
    crash,
    dropped,
    enqueue,
    failed,
    ids,
    job,
    next_claim,
    recover,
    released,
    retried,
    state,
    status,
)

PRODUCERS: Final = 100


def _simple(key: str = "key") -> Deduplication:
    return Deduplication(key=key)


def _throttle(ttl: timedelta = HOUR, key: str = "key") -> Deduplication:
    return Deduplication(key=key, mode=DeduplicationMode.THROTTLE, ttl=ttl)


def _debounce(ttl: timedelta = HOUR, key: str = "key") -> Deduplication:
    return Deduplication(key=key, mode=DeduplicationMode.DEBOUNCE, ttl=ttl)


MODES: Final = (_simple(), _throttle(), _debounce())


def _duplicate(job_id: str, existing_state: JobState | None) -> EnqueueResult:
    return EnqueueResult(id=job_id, status=EnqueueStatus.DUPLICATE, existing_state=existing_state)


async def _try(storage: Storage, deduplication: Deduplication, payload: bytes = b"{}") -> EnqueueResult:
    """Enqueue one more new job with the key, and return what happened."""
    return (await storage.enqueue([job(payload=payload, deduplication=deduplication)]))[0]


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_key_is_taken_while_its_job_has_not_finished(storage: Storage) -> None:
    """By `simple` another enqueue is told the job that has the key: scheduled, queued, running or failing."""
    await enqueue(storage, job("first", delay=HOUR, deduplication=_simple()))
    assert await _try(storage, _simple()) == _duplicate("first", JobState.SCHEDULED)
    await storage.promote(["first"])
    assert await _try(storage, _simple()) == _duplicate("first", JobState.QUEUED)
    held = await claim_one(storage)
    assert await _try(storage, _simple()) == _duplicate("first", JobState.PROCESSING)
    await apply(storage, retried(held, HOUR))
    assert await _try(storage, _simple()) == _duplicate("first", JobState.FAILING)
    await storage.promote(["first"])
    await apply(storage, completed(await claim_one(storage)))
    assert (await _try(storage, _simple())).status is EnqueueStatus.QUEUED


async def _is_free_after(harness: Harness, ending: Callable[[Storage], Awaitable[object]]) -> None:
    storage = await harness.open()
    await enqueue(storage, job("first", deduplication=_simple()))
    assert (await _try(storage, _simple())).status is EnqueueStatus.DUPLICATE
    await ending(storage)
    await enqueue(storage, job("second", deduplication=_simple()))
    assert await _try(storage, _simple()) == _duplicate("second", JobState.QUEUED)


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def every_end_frees_a_key(harness: Harness) -> None:
    """By `simple` the key is free once its job completed, failed or vanished, or was cancelled, removed or drained."""

    async def complete(storage: Storage) -> None:
        await apply(storage, completed(await claim_one(storage)))

    async def fail(storage: Storage) -> None:
        await apply(storage, failed(await claim_one(storage)))

    async def drop(storage: Storage) -> None:
        await apply(storage, dropped(await claim_one(storage)))

    async def stall(storage: Storage) -> None:
        await crash(harness, storage)
        recovery = await recover(harness, storage, 1, max_stalls=0)
        assert recovery.failed == ("first",)

    async def fail_while_failing(storage: Storage) -> None:
        await apply(storage, retried(await claim_one(storage), HOUR))
        await storage.cancel("first")

    for ending in (complete, fail, drop, stall, fail_while_failing):
        await _is_free_after(harness, ending)
    await _is_free_after(harness, lambda storage: storage.cancel("first"))
    await _is_free_after(harness, lambda storage: storage.remove(["first"]))
    await _is_free_after(harness, lambda storage: storage.drain())


@case(guarantees=(2,), needs=(DEDUPLICATION, OUTSIDE_ENDINGS))
async def ends_from_outside_free_a_key(harness: Harness) -> None:
    """By `simple` the key is free once its job was completed from outside, or removed while it ran."""

    async def remove_running(storage: Storage) -> None:
        await claim_one(storage)
        assert await storage.remove(["first"], running=True) == 1

    await _is_free_after(harness, lambda storage: storage.complete("first", b"1"))
    await _is_free_after(harness, remove_running)


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_chain_keeps_its_key(storage: Storage) -> None:
    """The key is taken until the last link has completed."""
    await enqueue(storage, job("chain", deduplication=_simple()))
    await apply(storage, continued(await claim_one(storage)))
    assert await _try(storage, _simple()) == _duplicate("chain", JobState.QUEUED)
    await apply(storage, continued(await claim_one(storage), delay=HOUR))
    assert await _try(storage, _simple()) == _duplicate("chain", JobState.SCHEDULED)
    await storage.promote(["chain"])
    await apply(storage, completed(await claim_one(storage)))
    assert (await _try(storage, _simple())).status is EnqueueStatus.QUEUED


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def release_recovery_and_retry_leave_keys_alone(harness: Harness, storage: Storage) -> None:
    """A released or recovered job keeps its key; a failed job that is retried does not get it back."""
    await enqueue(storage, job("first", deduplication=_simple()))
    await apply(storage, released(await claim_one(storage)))
    assert await _try(storage, _simple()) == _duplicate("first", JobState.QUEUED)
    await crash(harness, storage)
    await recover(harness, storage, 1)
    assert await _try(storage, _simple()) == _duplicate("first", JobState.QUEUED)
    await apply(storage, failed(await claim_one(storage)))
    assert await storage.retry(["first"]) == 1
    assert (await _try(storage, _simple())).status is EnqueueStatus.QUEUED


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_hundred_producers_of_a_key_insert_one_job(harness: Harness) -> None:
    """Of 100 concurrent producers of one key on four clients, exactly one inserts its job; the others learn its id."""
    first = await harness.open()
    storages = [first, *[await harness.open(first.queue) for _ in range(3)]]
    for number, mode in enumerate(MODES):
        deduplication = Deduplication(key=f"key-{number}", mode=mode.mode, ttl=mode.ttl)
        answers = await asyncio.gather(*(_try(storages[at % 4], deduplication) for at in range(PRODUCERS)))
        winners = [answer.id for answer in answers if answer.status is EnqueueStatus.QUEUED]
        assert len(winners) == 1, mode
        assert {answer.id for answer in answers} == set(winners)
    assert sum((await first.counts()).values()) == len(MODES)


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_throttled_key_is_taken_for_its_time(harness: Harness, storage: Storage) -> None:
    """By `throttle` the key is taken for a time from when its job is due, whatever becomes of the job."""
    await enqueue(storage, job("first", deduplication=_throttle(4 * harness.moment), keep=HOUR))
    await apply(storage, dropped(await claim_one(storage)))
    assert await _try(storage, _throttle()) == _duplicate("first", None)
    await harness.advance(4 * harness.moment)
    await enqueue(storage, job("second", delay=HOUR, deduplication=_throttle(harness.moment)))
    await harness.advance(2 * harness.moment)
    assert await _try(storage, _throttle()) == _duplicate("second", JobState.SCHEDULED)
    await storage.cancel("second")
    assert await _try(storage, _throttle()) == _duplicate("second", JobState.CANCELLED)


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_debounced_job_runs_with_the_last_payload(harness: Harness, storage: Storage) -> None:
    """By `debounce` each enqueue replaces the waiting job's payload; once that is claimed, the next is a new job."""
    await enqueue(storage, job("first", payload=b"1", priority=3, deduplication=_debounce()))
    assert await state(storage, "first") is JobState.SCHEDULED
    assert await _try(storage, _debounce(), b"2") == _duplicate("first", JobState.SCHEDULED)
    assert await _try(storage, _debounce(harness.moment), b"") == _duplicate("first", JobState.SCHEDULED)
    await harness.advance(harness.moment)
    held = await next_claim(storage)
    assert (held.job_id, held.payload, held.priority, held.attempt) == ("first", b"", 3, 1)
    await enqueue(storage, job("second", payload=b"3", deduplication=_debounce()))
    await apply(storage, released(held))
    assert await _try(storage, _debounce(), b"4") == _duplicate("second", JobState.SCHEDULED)
    assert (await claim_one(storage)).payload == b""


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_debounce_starts_the_wait_anew(harness: Harness, storage: Storage) -> None:
    """A debounced job that is due, or was promoted, waits again for the time of the last enqueue, and runs once."""
    await enqueue(storage, job("first", ordering_key="o", deduplication=_debounce(harness.moment)))
    await harness.advance(harness.moment)
    assert await _try(storage, _debounce()) == _duplicate("first", JobState.SCHEDULED)
    assert await claim(storage) == []
    await storage.promote(["first"])
    assert await state(storage, "first") is JobState.QUEUED
    assert await _try(storage, _debounce(2 * HOUR)) == _duplicate("first", JobState.SCHEDULED)
    found = await status(storage, "first")
    assert found.next_run_at is not None
    assert found.next_run_at - harness.now() > timedelta(minutes=110)
    await storage.promote(["first"])
    assert (await claim_one(storage)).job_id == "first"
    assert await claim(storage) == []


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_failed_debounced_job_is_retried_at_once(storage: Storage) -> None:
    """When an operator retries a failed job that was debounced, it does not wait again, and takes no key."""
    await enqueue(storage, job("first", deduplication=_debounce()))
    await storage.promote(["first"])
    await apply(storage, failed(await claim_one(storage)))
    assert await storage.retry(["first"]) == 1
    assert await state(storage, "first") is JobState.QUEUED
    await enqueue(storage, job("second", deduplication=_debounce()))
    assert (await claim_one(storage)).job_id == "first"


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_debounced_key_is_free_when_its_job_is_gone(storage: Storage) -> None:
    """A debounced job that was cancelled, removed or drained no longer has its key."""
    await enqueue(storage, job("first", deduplication=_debounce()))
    await storage.cancel("first")
    await enqueue(storage, job("second", deduplication=_debounce()))
    await storage.remove(["second"])
    await enqueue(storage, job("third", deduplication=_debounce()))
    await storage.drain()
    await enqueue(storage, job("fourth", deduplication=_debounce()))


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def the_mode_of_the_one_that_has_the_key_decides(storage: Storage) -> None:
    """A duplicate by another mode changes neither how long the key is taken nor the payload."""
    await enqueue(storage, job("first", payload=b"1", deduplication=_simple()))
    assert await _try(storage, _debounce(), b"2") == _duplicate("first", JobState.QUEUED)
    held = await claim_one(storage)
    assert held.payload == b"1"
    await apply(storage, completed(held))
    await enqueue(storage, job("second", deduplication=_throttle()))


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def jobs_of_one_call_with_one_key_are_a_group(harness: Harness, storage: Storage) -> None:
    """A group is inserted as a whole, or told which job has its key; other jobs of the call are independent of it."""
    for mode in MODES:
        await enqueue(
            storage,
            job("a", deduplication=mode),
            job("b", deduplication=mode),
            job("c", deduplication=mode),
            job("d", deduplication=_simple("other")),
            job("e"),
        )
        waits = JobState.SCHEDULED if mode.mode is DeduplicationMode.DEBOUNCE else JobState.QUEUED
        answers = await storage.enqueue(
            [
                job(deduplication=mode),
                job("f", deduplication=_simple("free")),
                job("g", deduplication=mode),
                job(deduplication=_simple("other")),
            ]
        )
        assert answers == [
            _duplicate("a", waits),
            EnqueueResult(id="f", status=EnqueueStatus.QUEUED),
            _duplicate("a", waits),
            _duplicate("d", JobState.QUEUED),
        ]
        assert sum((await storage.counts()).values()) == 6
        storage = await harness.open()


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def a_large_group_is_one(storage: Storage) -> None:
    """A group of 1 100 jobs is inserted as a whole, and answered as a whole."""
    names = [f"job-{number:04}" for number in range(1_100)]
    await enqueue(storage, *(job(name, deduplication=_simple()) for name in names))
    again = await storage.enqueue([job(deduplication=_simple()) for _ in names])
    assert {(answer.id, answer.status) for answer in again} == {(names[0], EnqueueStatus.DUPLICATE)}
    assert sorted(ids(await claim(storage, 2_000))) == names


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def the_first_of_a_group_has_the_key(storage: Storage) -> None:
    """By `simple` the key is free once the first job of the group has finished, whatever the others do."""
    await enqueue(storage, job("a", deduplication=_simple()), job("b", deduplication=_simple()))
    await storage.remove(["b"])
    assert await _try(storage, _simple()) == _duplicate("a", JobState.QUEUED)
    await storage.remove(["a"])
    assert (await _try(storage, _simple())).status is EnqueueStatus.QUEUED


@case(guarantees=(2,), needs=(DEDUPLICATION,))
async def an_id_that_exists_takes_no_key(storage: Storage) -> None:
    """An id is checked before the key: one that exists is answered as without a key, and the key stays free."""
    await enqueue(storage, job("there"), job("done"))
    await apply(storage, completed(await claim_one(storage), b"1"), completed(await claim_one(storage), b"2"))
    await enqueue(storage, job("waits"))
    again = await storage.enqueue([job("done", deduplication=_simple()), job("waits", deduplication=_simple())])
    assert [answer.status for answer in again] == [EnqueueStatus.COMPLETED, EnqueueStatus.DUPLICATE]
    await enqueue(storage, job("new", deduplication=_simple()))
    assert (await storage.enqueue([job("waits", deduplication=_simple())]))[0] == _duplicate("waits", JobState.QUEUED)


@case(guarantees=(9,), needs=(DEDUPLICATION,))
async def a_key_is_any_text(harness: Harness) -> None:
    """Keys of any text up to 512 bytes are distinct, and each queue has its own."""
    storage, other = await harness.open(), await harness.open()
    keys = ["x" * MAX_ID_BYTES, "x", "a:b", "../a", "a/b", "line\nbreak", "nul\0", "\0", "😀", "ключ", "*", "{k}", " "]
    for number, key in enumerate(keys):
        await enqueue(storage, job(f"{number}", deduplication=_simple(key)))
    await enqueue(other, job("1", deduplication=_simple("x")))
    for number, key in enumerate(keys):
        assert (await _try(storage, _simple(key))).id == f"{number}"


@case(guarantees=(12,), needs=(DEDUPLICATION, MEASURES))
async def keys_are_swept(harness: Harness, storage: Storage) -> None:
    """After a sweep nothing is left of a key whose time is over, nor of one whose job has gone."""
    many = 200
    before = await harness.entries(storage)
    for key in map(str, range(many)):
        kinds = (_simple(f"s{key}"), _throttle(harness.moment, f"t{key}"), _debounce(key=f"d{key}"))
        await enqueue(storage, *(job(deduplication=one) for one in kinds))
    await storage.drain()
    await harness.advance(harness.moment)
    swept = 0
    while found := await storage.sweep(50):
        swept += found
    assert swept == many
    assert await harness.entries(storage) < before + many  # a heap may keep some slack: that is no growth


@case(guarantees=(1, 2), needs=(DEDUPLICATION,))
async def keys_are_seen_by_later_clients(harness: Harness) -> None:
    """A client that connects after the first has gone finds the keys as they were."""
    first = await harness.open()
    await enqueue(first, job("a", deduplication=_simple("a")), job("b", deduplication=_throttle(key="b")))
    await enqueue(first, job("c", payload=b"1", deduplication=_debounce(key="c")))
    later = await harness.open(first.queue)
    assert (await _try(first, _debounce(key="c"), b"2")).id == "c"
    await harness.shut(first)
    assert [(await _try(later, one)).id for one in (_simple("a"), _throttle(key="b"), _debounce(key="c"))] == [*"abc"]


@case(guarantees=(24,))
async def a_storage_without_keys_says_so(harness: Harness, storage: Storage) -> None:
    """Without `capabilities.deduplication` a key is refused with `Unsupported`, and nothing is inserted."""
    jobs = [job("plain"), job("keyed", deduplication=_simple())]
    try:
        answers = await storage.enqueue(jobs)
    except Unsupported:
        assert not harness.capabilities.deduplication
        assert await storage.status(["plain", "keyed"]) == [None, None]
    else:
        assert harness.capabilities.deduplication
        assert [answer.status for answer in answers] == [EnqueueStatus.QUEUED] * 2
