"""How many jobs start in a time and run at once, and whose turn it is."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from workers.errors import Unsupported
from workers.jobs import Claim, JobState, NewJob
from workers.limits import HeldBack, Limit, LimitKey
from workers.storage.abilities import KeepsLimits
from workers.storage.base import Storage
from workers.testing.case import LIMIT_KEYS, MEASURES, MOVES_TIME, NAME_FILTER, case
from workers.testing.harness import Harness
from workers.testing.steps import (
    HOUR,
    LEASE,
    apply,
    claim,
    claim_one,
    completed,
    continued,
    crash,
    declare,
    enqueue,
    failed,
    held_back,
    ids,
    job,
    next_claim,
    recover,
    released,
    retried,
    state,
)

A: Final = LimitKey("api", "a")
B: Final = LimitKey("api", "b")
DAY: Final = timedelta(days=1)
BACKLOG: Final = 300


def many(count: int, prefix: str, limit_key: LimitKey | None = None, fair_key: str | None = None) -> list[NewJob]:
    """Make jobs that are numbered from 1."""
    return [job(f"{prefix}{at}", limit_key=limit_key, fair_key=fair_key) for at in range(1, count + 1)]


async def claimed(storage: Storage, limit: int = 10) -> list[str]:
    """Claim until nothing more comes, at least twice: a claim may end at many jobs that it parks."""
    found: list[str] = []
    empty = 0
    while empty < 2:
        some = await claim(storage, limit)
        found += ids(some)
        empty = 0 if some else empty + 1
    return found


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def a_rate_is_kept(storage: Storage) -> None:
    """As many jobs of a key start as its bucket has tokens, in their order; other keys, and other jobs, go on."""
    await declare(storage, api=Limit("1/d", burst=2))
    await enqueue(storage, *many(4, "a", A), *many(3, "b", B), job("free"))
    assert await claimed(storage) == ["a1", "a2", "b1", "b2", "free"]
    await enqueue(storage, job("later"))
    assert await claimed(storage) == ["later"]


@case(guarantees=(27,), needs=(LIMIT_KEYS, MOVES_TIME))
async def a_bucket_fills_at_its_rate(harness: Harness, storage: Storage) -> None:
    """One job starts whenever the bucket gets a token; after a pause as many as it holds."""
    await declare(storage, api=Limit("4/d", burst=2))
    await enqueue(storage, *many(8, "a", A))
    assert await claimed(storage) == ["a1", "a2"]
    for expected in ("a3", "a4"):
        await harness.advance(DAY / 4 - harness.moment)
        assert await claimed(storage) == []
        await harness.advance(harness.moment)
        assert await claimed(storage) == [expected]
    await harness.advance(10 * DAY)
    assert await claimed(storage) == ["a5", "a6"]


@case(guarantees=(19, 27), needs=(LIMIT_KEYS,))
async def a_token_wakes_a_worker(harness: Harness, storage: Storage) -> None:
    """A worker asleep gets a job that waited for a token when there is one."""
    await declare(storage, api=Limit(f"1/{harness.moment // timedelta(milliseconds=1)}ms"))
    await enqueue(storage, *many(3, "a", A))
    assert (await claim_one(storage)).job_id == "a1"
    for expected in ("a2", "a3"):
        waiting = asyncio.create_task(next_claim(storage))
        await asyncio.sleep(0)
        await harness.advance(harness.moment)
        while not waiting.done() and harness.moves_time:
            await harness.advance(harness.moment)
            await asyncio.sleep(0.01)
        assert (await waiting).job_id == expected


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def a_concurrency_is_kept(storage: Storage) -> None:
    """So many jobs of a key run at once; whatever ends an attempt makes room for the next."""
    await declare(storage, api=Limit(concurrency=2))
    await enqueue(storage, *many(8, "a", A), job("b1", limit_key=B))
    first, second, other = await claim(storage, 10)
    assert ids([first, second, other]) == ["a1", "a2", "b1"]
    assert await claimed(storage) == []
    await apply(storage, completed(first))
    third = await claim_one(storage)
    await apply(storage, failed(second), retried(third, HOUR))
    fourth, fifth = await claim(storage, 10)
    assert ids([fourth, fifth]) == ["a4", "a5"]
    assert await claimed(storage) == []
    await apply(storage, released(fourth))
    assert await claimed(storage) == ["a4"]
    await storage.remove(["a5"], running=True)
    assert await claimed(storage) == ["a6"]


@case(guarantees=(19, 27), needs=(LIMIT_KEYS,))
async def an_end_wakes_a_worker(storage: Storage, other: Storage) -> None:
    """A worker asleep gets a job that waited for another of its key, or of the queue, as soon as that ends."""
    for limits in ({"api": Limit(concurrency=1)}, {"api": Limit(), "whole_queue": Limit(concurrency=1)}):
        await declare(storage, **limits)
        await enqueue(storage, job(limit_key=A), job(limit_key=A))
        held = await claim_one(storage)
        assert await claimed(storage) == []
        waiting = asyncio.create_task(next_claim(other))
        await asyncio.sleep(0.05)
        await apply(storage, completed(held))
        await apply(other, completed(await waiting))


@case(guarantees=(5, 27), needs=(LIMIT_KEYS,))
async def a_crashed_worker_frees_its_place(harness: Harness, storage: Storage) -> None:
    """When a job of a limited key is recovered, the next may start in its place, and only one."""
    await declare(storage, api=Limit(concurrency=1))
    await enqueue(storage, *many(3, "a", A))
    await crash(harness, storage)
    assert await claimed(storage) == []
    await recover(harness, storage, 1)
    assert await claimed(storage) == ["a1"]


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def every_start_takes_a_token(storage: Storage) -> None:
    """A retry waits for a token like the first attempt, and a released job gives none back."""
    await declare(storage, api=Limit("1/d", burst=3))
    await enqueue(storage, *many(2, "a", A))
    await apply(storage, retried(await claim_one(storage)))
    await apply(storage, released(await claim_one(storage)))
    assert ids(await claim(storage, 1)) != []
    assert await claimed(storage) == []


@case(guarantees=(17, 27), needs=(LIMIT_KEYS, NAME_FILTER))
async def a_key_may_have_several_names(storage: Storage) -> None:
    """A job that no worker takes holds up no job of its key with another name."""
    await declare(storage, api=Limit(concurrency=1))
    await enqueue(storage, job("a1", limit_key=A), job("a2", name="other", limit_key=A), job("a3", limit_key=A))
    first = await claim_one(storage)
    assert await claimed(storage) == []
    await apply(storage, completed(first))
    assert ids(await storage.claim("worker", leases={"work": LEASE}, limit=10)) == ["a3"]


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def the_whole_queue_may_be_limited(storage: Storage) -> None:
    """The limit of the whole queue counts all jobs, whatever their key."""
    await declare(storage, whole_queue=Limit("1/d", concurrency=2, burst=3))
    await enqueue(storage, job("a", limit_key=A), job("b"), job("c", ordering_key="c"), job("d", fair_key="d"))
    first, second = await claim(storage, 10)
    assert ids([first, second]) == ["a", "b"]
    assert await claimed(storage) == []
    assert await held_back(storage, "c") == HeldBack("*", "", None)
    await apply(storage, completed(first), completed(second))
    assert await claimed(storage) == ["c"]
    back = await held_back(storage, "d")
    assert back is not None
    assert back.until is not None
    await storage.wait(["*"], timeout=timedelta(milliseconds=50))


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def both_limits_count(storage: Storage) -> None:
    """A job passes the limits of its key and of the queue; what one keeps back takes no token of the other."""
    await declare(storage, api=Limit("1/d"), whole_queue=Limit("1/d", burst=3))
    await enqueue(storage, *many(3, "a", A), *many(3, "b", B))
    assert await claimed(storage) == ["a1", "b1"]
    await enqueue(storage, job("free"), job("too many"))
    assert await claimed(storage) == ["free"]


@case(guarantees=(21, 27), needs=(LIMIT_KEYS,))
async def a_held_back_job_says_why(harness: Harness, storage: Storage) -> None:
    """A job that a limit keeps back is queued, and one can read which limit it is, and until when."""
    await declare(storage, api=Limit("1/h"), slow=Limit(concurrency=1))
    await enqueue(storage, *many(2, "a", A), *many(2, "s", LimitKey("slow")), job("free"))
    assert await held_back(storage, "a1") is None
    assert sorted(await claimed(storage)) == ["a1", "free", "s1"]
    back = await held_back(storage, "a2")
    assert back is not None
    assert back.until is not None
    assert (back.limit, back.key) == ("api", "a")
    assert harness.now() < back.until <= harness.now() + HOUR + timedelta(seconds=2)
    assert await held_back(storage, "s2") == HeldBack("slow", "", None)
    assert await state(storage, "a2") is await state(storage, "s2") is JobState.QUEUED
    for other in ("a1", "free", "unknown"):
        assert await held_back(storage, other) is None


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def limits_are_the_queues(storage: Storage, other: Storage) -> None:
    """A limit is stored with the queue. Of two the higher version counts, of equal ones the last; it can be removed."""
    assert isinstance(other, KeepsLimits)
    assert await other.declared_limits() == {}
    await declare(storage, api=Limit("1/d", version=2), slow=Limit("9/h", concurrency=7, burst=3))
    await declare(other, api=Limit(version=1), slow=Limit(concurrency=8))
    assert await other.declared_limits() == {"api": Limit("1/d", version=2), "slow": Limit(concurrency=8)}
    await enqueue(other, *many(3, "a", A))
    assert await claimed(other) == ["a1"]
    assert await other.remove_limit("api")
    assert not await other.remove_limit("api")
    assert await claimed(storage) == ["a2", "a3"]
    assert isinstance(storage, KeepsLimits)
    assert await storage.declared_limits() == {"slow": Limit(concurrency=8)}


@case(guarantees=(19, 27), needs=(LIMIT_KEYS,))
async def a_changed_limit_counts_at_once(storage: Storage) -> None:
    """A limit that is raised, or given up, lets the jobs that it kept back start; workers asleep are woken."""
    await declare(storage, api=Limit("1/d", concurrency=1), whole_queue=Limit("1/d", burst=2))
    await enqueue(storage, *many(5, "a", A))
    assert await claimed(storage) == ["a1"]
    waiting = asyncio.create_task(next_claim(storage))
    await asyncio.sleep(0.05)
    await declare(storage, api=Limit("1/d", concurrency=1, burst=2))
    await declare(storage, api=Limit("1/d", concurrency=3, burst=3))
    assert (await waiting).job_id == "a2"
    assert await claimed(storage) == []
    await declare(storage, whole_queue=Limit())
    assert await claimed(storage) == ["a3"]
    await declare(storage, api=Limit())
    assert await claimed(storage) == ["a4", "a5"]


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def an_unknown_limit_keeps_nothing_back(storage: Storage) -> None:
    """Jobs whose limit nobody has declared run; from its declaration on they are limited."""
    await enqueue(storage, *many(4, "a", A))
    assert ids(await claim(storage, 2)) == ["a1", "a2"]
    await declare(storage, api=Limit(concurrency=3))
    assert await claimed(storage) == ["a3"]


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def many_throttled_jobs_are_passed(storage: Storage) -> None:
    """However many jobs a limit keeps back, those behind them are claimed, and then at once."""
    await declare(storage, api=Limit("1/d"))
    await enqueue(storage, *many(BACKLOG, "a", A), job("behind"))
    assert await claimed(storage) == ["a1", "behind"]
    await enqueue(storage, job("next"))
    assert ids(await claim(storage, 10)) == ["next"]
    await storage.cancel("a2")
    assert await storage.remove(["a3"]) == 1
    assert await claimed(storage) == []
    await declare(storage, api=Limit("1/d", burst=3))
    assert await claimed(storage) == ["a4", "a5"]


@case(guarantees=(22, 27), needs=(LIMIT_KEYS,))
async def parked_jobs_can_be_drained(storage: Storage) -> None:
    """Draining takes the jobs that a limit or a fair key keeps back, and those that come later run."""
    await declare(storage, api=Limit(concurrency=1))
    await enqueue(storage, *many(5, "a", A), *many(5, "f", fair_key="f"))
    first = {one.job_id: one for one in await claim(storage, 2)}
    assert await claimed(storage, 1) != []
    await storage.drain()
    await apply(storage, *(completed(one) for one in first.values()))
    await enqueue(storage, job("again", limit_key=A), job("fair again", fair_key="f"))
    assert await claimed(storage) == ["again", "fair again"]


@case(guarantees=(27,), needs=(LIMIT_KEYS,))
async def a_chain_changes_its_key(storage: Storage) -> None:
    """The next link of a chain is limited by its own key, and frees that of the link before."""
    await declare(storage, api=Limit(concurrency=1))
    await enqueue(storage, job("a1", limit_key=A), job("a2", limit_key=A))
    await apply(storage, continued(await claim_one(storage), limit_key=B))
    assert await claimed(storage) == ["a2", "a1"]


@case(guarantees=(27,), needs=(LIMIT_KEYS, MOVES_TIME))
async def a_clock_that_goes_back_gives_no_tokens(harness: Harness, storage: Storage) -> None:
    """When the clock is set back an hour, no more jobs start than without, and none waits for that hour."""
    await declare(storage, api=Limit("1/m"))
    await enqueue(storage, *many(4, "a", A))
    assert await claimed(storage) == ["a1"]
    await harness.advance(-HOUR)
    assert await claimed(storage) == []
    await harness.advance(timedelta(minutes=1))
    assert await claimed(storage) == ["a2"]
    await harness.advance(HOUR)
    assert await claimed(storage) == ["a3"]


@case(guarantees=(12, 27), needs=(LIMIT_KEYS, MOVES_TIME, MEASURES))
async def keys_that_came_and_went_leave_nothing(harness: Harness, storage: Storage) -> None:
    """What is kept of a key goes with its jobs, once its bucket is full."""
    await declare(storage, api=Limit("1/h", concurrency=1))
    await apply(storage, *[completed(one) for one in await _two_of_each(storage, 1)])
    await harness.advance(2 * DAY)
    await _sweep(storage)
    before = await harness.entries(storage)
    for _ in range(3):
        await apply(storage, *[completed(one) for one in await _two_of_each(storage, 5)])
        await harness.advance(2 * DAY)
        await apply(storage, *[completed(one) for one in await claim(storage, 100)])
        await harness.advance(2 * DAY)
    await _sweep(storage)
    assert await harness.entries(storage) <= before


async def _two_of_each(storage: Storage, keys: int) -> list[Claim]:
    """Enqueue two jobs of each key, and claim what can be claimed."""
    for at in range(keys):
        await enqueue(storage, job(limit_key=LimitKey("api", str(at))), job(limit_key=LimitKey("api", str(at))))
        await enqueue(storage, job(fair_key=str(at)), job(fair_key=str(at)))
    found: list[Claim] = []
    while some := await claim(storage, 10):
        found += some
    return found


async def _sweep(storage: Storage) -> None:
    while await storage.sweep(1_000):
        pass


@case(guarantees=(15, 27), needs=(LIMIT_KEYS,))
async def fair_keys_take_turns(storage: Storage) -> None:
    """Many jobs of one fair key do not keep back those of another, which were enqueued later."""
    await enqueue(storage, *many(BACKLOG, "a", fair_key="a"))
    assert (await claim_one(storage)).job_id == "a1"
    await enqueue(storage, *many(5, "b", fair_key="b"))
    found = await first_claims(storage, 12)
    assert [one for one in found if one.startswith("b")] == ["b1", "b2", "b3", "b4", "b5"]
    assert [one for one in found if one.startswith("a")] == [f"a{at}" for at in range(2, 9)]


async def first_claims(storage: Storage, count: int) -> list[str]:
    """Claim one job after the other; a claim may bring none while it parks others."""
    found: list[str] = []
    while len(found) < count:
        found += ids(await claim(storage, 1))
    return found


@case(guarantees=(15, 27), needs=(LIMIT_KEYS,))
async def a_batch_is_fair_too(storage: Storage) -> None:
    """A claim of many jobs takes those of each fair key in turn."""
    await enqueue(storage, *many(50, "a", fair_key="a"), *many(50, "b", fair_key="b"), *many(2, "c", fair_key="c"))
    found: list[str] = []
    while len(found) < 12:
        found += ids(await claim(storage, 12 - len(found)))
    counts = {key: sum(one.startswith(key) for one in found) for key in "abc"}
    assert counts == {"a": 5, "b": 5, "c": 2}


@case(guarantees=(15, 27), needs=(LIMIT_KEYS,))
async def turns_are_within_a_priority(storage: Storage) -> None:
    """A job of a lower priority goes first, whatever its fair key; jobs without a key keep their place."""
    await enqueue(
        storage, job("a1", fair_key="a", priority=5), job("a2", fair_key="a", priority=5), job("x", priority=5)
    )
    await enqueue(storage, job("b1", fair_key="b", priority=1), job("b2", fair_key="b", priority=1))
    found = await first_claims(storage, 5)
    assert found[:2] == ["b1", "b2"]
    assert found.index("a1") < found.index("x") < found.index("a2")


@case(guarantees=(15, 27), needs=(LIMIT_KEYS,))
async def an_urgent_job_waits_for_no_turn(storage: Storage) -> None:
    """A job of a lower priority goes first, also where another job of its fair key has come before."""
    await enqueue(storage, *(job(name, fair_key="a", priority=5) for name in ("a1", "a2")))
    assert (await claim_one(storage)).job_id == "a1"
    await enqueue(storage, job("x", priority=1), job("a3", fair_key="a"), job("a4", fair_key="a", priority=5))
    assert await first_claims(storage, 4) == ["a3", "x", "a2", "a4"]
    assert await claimed(storage) == []


@case(guarantees=(15, 27), needs=(LIMIT_KEYS,))
async def a_turn_is_never_forgotten(storage: Storage) -> None:
    """When the next job of a fair key is cancelled, removed, put off or retried, the one after it has its turn."""
    await enqueue(storage, *many(8, "a", fair_key="a"), job("b1", fair_key="b"))
    first = await claim_one(storage)
    assert await first_claims(storage, 1) == ["b1"]
    await storage.cancel("a2")
    assert await storage.remove(["a3"]) == 1
    await apply(storage, retried(first))
    found = await first_claims(storage, 6)
    assert sorted(found) == ["a1", "a4", "a5", "a6", "a7", "a8"]
    assert await claimed(storage) == []


@case(guarantees=(24,))
async def a_storage_without_limits_says_so(harness: Harness, storage: Storage) -> None:
    """Without `capabilities.limit_keys` such keys are refused with `Unsupported`, and nothing is inserted."""
    for keyed in (job("keyed", limit_key=A), job("fair", fair_key="a")):
        try:
            await enqueue(storage, job("plain"), keyed)
        except Unsupported:
            assert not harness.capabilities.limit_keys
            assert await storage.status(["plain", keyed.id]) == [None, None]
        else:
            assert harness.capabilities.limit_keys
            assert await storage.remove(["plain", keyed.id]) == 2
    assert isinstance(storage, KeepsLimits) or not harness.capabilities.limit_keys
