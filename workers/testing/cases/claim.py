"""The promises of `claim`."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

from workers.jobs import JobState
from workers.retry import RetryPolicy
from workers.storage.base import Storage
from workers.testing.case import NAME_FILTER, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    LEASE,
    apply,
    claim,
    claim_one,
    completed,
    enqueue,
    ids,
    job,
    state,
    status,
)


@case(guarantees=(17, 21))
async def a_claim_carries_the_job(storage: Storage) -> None:
    """A claim carries everything about the job that a worker needs, and the job reads as processing by that worker."""
    backoff = RetryPolicy(initial=timedelta(seconds=5), multiplier=3, maximum=timedelta(minutes=9), jitter=0.25)
    new = job(payload=b'{"to":"all"}', max_attempts=7, priority=4, backoff=backoff)
    await enqueue(storage, new)
    held = await claim_one(storage, worker_id="worker-1")
    assert (held.job_id, held.name, held.payload) == (new.id, new.name, new.payload)
    assert (held.attempt, held.max_attempts, held.priority, held.backoff) == (1, 7, 4, backoff)
    assert (held.worker_id, held.lease, held.stalled) == ("worker-1", LEASE, None)
    assert (held.keep_completed, held.keep_failed) == (new.keep_completed, new.keep_failed)
    running = await status(storage, new.id)
    assert (running.state, running.attempt, running.worker_id) == (JobState.PROCESSING, 1, "worker-1")
    assert running.created_at == held.created_at


@case(guarantees=(17,))
async def an_empty_queue_gives_nothing(storage: Storage) -> None:
    """A claim on an empty queue returns an empty list, at once."""
    assert await claim(storage, 10) == []


@case(guarantees=(17,))
async def a_claim_never_exceeds_its_limit(storage: Storage) -> None:
    """A claim returns as many jobs as there are, but no more than its limit."""
    await enqueue(storage, *(job() for _ in range(7)))
    assert [len(await claim(storage, 5)) for _ in range(3)] == [5, 2, 0]


@case(guarantees=(3,))
async def concurrent_claimers_never_share_a_job(harness: Harness) -> None:
    """Of 200 jobs that ten workers on two clients claim at once, each is claimed once, with a token of its own."""
    storages = [await harness.open()]
    storages.append(await harness.open(storages[0].queue))
    await enqueue(storages[0], *(job(f"job-{number}") for number in range(200)))

    async def worker(number: int) -> list[tuple[str, str]]:
        mine: list[tuple[str, str]] = []
        while held := await claim(storages[number % 2], 7, worker_id=f"worker-{number}"):
            mine += [(one.job_id, one.token) for one in held]
        return mine

    claimed = [pair for mine in await asyncio.gather(*(worker(number) for number in range(10))) for pair in mine]
    assert Counter(job_id for job_id, _ in claimed) == Counter(f"job-{number}" for number in range(200))
    assert len({token for _, token in claimed}) == 200


@case(guarantees=(3,))
async def a_claimed_job_is_not_claimed_again(storage: Storage) -> None:
    """While a job is processing nobody else gets it, not even the same worker."""
    await enqueue(storage, job("mine"))
    held = await claim_one(storage)
    assert await claim(storage, 10) == []
    assert await claim(storage, 10, worker_id="another") == []
    await apply(storage, completed(held))


@case(guarantees=(17,), needs=(NAME_FILTER,))
async def only_the_names_asked_for_are_claimed(storage: Storage) -> None:
    """A claim returns only jobs of the names in `leases`, each with its own lease; the others stay queued."""
    await enqueue(storage, job("a", name="alpha"), job("b", name="beta"), job("c", name="gamma"))
    held = await storage.claim("worker", leases={"alpha": LEASE, "gamma": 2 * LEASE}, limit=10)
    assert {one.job_id: one.lease for one in held} == {"a": LEASE, "c": 2 * LEASE}
    assert await state(storage, "b") is JobState.QUEUED


@case(guarantees=(17,))
async def the_catch_all_covers_every_other_name(storage: Storage) -> None:
    """Under `"*"` every name that is not listed is claimed with that lease; a listed name has its own."""
    await enqueue(storage, job("a", name="alpha"), job("b", name="beta"))
    held = await storage.claim("worker", leases={"alpha": 2 * LEASE, "*": LEASE}, limit=10)
    assert {one.job_id: one.lease for one in held} == {"a": 2 * LEASE, "b": LEASE}


@case(guarantees=(17,), needs=(NAME_FILTER,))
async def another_names_backlog_hides_nothing(storage: Storage) -> None:
    """A backlog of 300 jobs of other names does not keep the wanted job from being claimed."""
    await enqueue(storage, *(job(name="other") for _ in range(300)), job("wanted", name="mine"))
    assert ids(await storage.claim("worker", leases={"mine": LEASE}, limit=10)) == ["wanted"]


@case(guarantees=(22,))
async def a_paused_queue_gives_nothing(storage: Storage, other: Storage) -> None:
    """No client can claim from a paused queue; running jobs go on, and the rest can be claimed after `resume`."""
    await enqueue(storage, job("running"), job("waiting"))
    held = await claim_one(storage)
    await storage.pause()
    assert await claim(other, 10) == []
    await enqueue(storage, job("new"))
    assert await claim(storage, 10) == []
    await apply(storage, completed(held))
    await other.resume()
    assert sorted(ids(await claim(storage, 10))) == ["new", "waiting"]
