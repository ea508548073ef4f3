"""One round: plain jobs and flows come in waves, with kills between them, beside a job scheduler that goes on."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from tests.chaos import ledger
from tests.chaos.bull.crew import Crew, Member, at_work
from tests.chaos.bull.round import Wanted
from tests.chaos.bull.verdict import Run, Verdict, judge, runs_of
from tests.chaos.bullmq.child import CONCURRENCY, Order, bullmq_child
from tests.interop.peer import BULLMQ, NodeProcess, bullmq_crew
from tests.patience import LONG_PATIENCE_SECONDS
from tests.servers import valkey
from workers import RetryPolicy
from workers.jobs import NewJob
from workers.storage.bullmq import BullMQStorage

MIXED: Final = ("node", "node", "python", "python")
QUEUE: Final = "chaos"
ATTEMPTS: Final = 1_000
CHILDREN: Final = 3
SCHEDULE: Final = "tick"
EVERY_MS: Final = 250
SIGNS_OF_LIFE: Final = 3
"""So many more runs of the schedule show that it outlived the last kill."""
OVER: Final = ("completed", "failed", "waiting-children")
"""Where jobs end. A parent waits for ever for a child that failed and says nothing of its parent."""
LISTS: Final = ("wait", "active")
FAILURES: Final = (0, 0, 1, 2)
"""How often a job is to fail, one of these."""
SETS: Final = ("delayed", "prioritized", "waiting-children", "failed", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a round is made of. `attempts` and `stalls` are those of Node's jobs and of all workers."""

    version: str
    jobs: int
    kills: int
    seed: str
    kinds: Sequence[str] = MIXED
    attempts: int = ATTEMPTS
    stalls: int = 100
    lock_seconds: float = 5.0

    @property
    def may_fail(self) -> bool:
        """Whether a job may end as failed because its workers were killed."""
        return self.stalls < self.kills


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a round did, and what came of it."""

    terms: Terms
    jobs: int
    planned_failures: int
    iterations: int
    failed: int
    """Jobs that failed, and parents that wait for such a child for ever."""
    kills: dict[str, int]
    seconds: float
    verdict: Verdict = field(default_factory=Verdict)


class Jobs:
    """The jobs of a round, half of them added in Node; `children` are those of each parent."""

    def __init__(self, terms: Terms, chance: random.Random, producer: NodeProcess, storage: BullMQStorage) -> None:
        self._terms = terms
        self._chance = chance
        self._producer = producer
        self._storage = storage
        self._planned = 0
        self.wanted: dict[str, Wanted] = {}
        self.children: dict[str, list[str]] = {}

    async def add(self, count: int) -> None:
        """At least so many more jobs are in the queue."""
        goal = len(self.wanted) + count
        while len(self.wanted) < goal:
            add = self._chance.choices([self._add_here, self._add_in_node, self._add_flow], [5, 4, 1])[0]
            await add()

    async def schedule(self) -> None:
        """A job begins every quarter of a second, as long as workers make the next one of each."""
        data = {"failures": 0, "result": 0, "ms": 5}
        await self._producer.call("schedule", {"id": SCHEDULE, "every": EVERY_MS, "data": data})

    async def unschedule(self) -> None:
        await self._producer.call("unschedule", SCHEDULE)

    async def _add_here(self) -> None:
        wanted, data = self._plan()
        job = NewJob(
            id=f"ours-{wanted.result}",
            name="ours",
            payload=json.dumps(data).encode(),
            max_attempts=ATTEMPTS,
            backoff=RetryPolicy(initial=timedelta(milliseconds=50), multiplier=2, jitter=0),
            delay=timedelta(milliseconds=self._chance.choice([0, 0, 200])),
        )
        await self._storage.enqueue([job])
        self.wanted[job.id] = wanted

    async def _add_in_node(self) -> None:
        wanted, job = self._plan_in_node()
        [job_id] = await self._producer.call("add", [job])
        self.wanted[job_id] = wanted

    async def _add_flow(self) -> None:
        planned = [self._plan_in_node() for _ in range(1 + CHILDREN)]
        parent, *children = [{**job, "queueName": QUEUE} for _, job in planned]
        ids = await self._producer.call("flow", {**parent, "children": children})
        self.wanted |= zip(ids, (wanted for wanted, _ in planned), strict=True)
        self.children[ids[0]] = ids[1:]

    def _plan_in_node(self) -> tuple[Wanted, dict[str, Any]]:
        wanted, data = self._plan()
        backoffs = [None, 50, {"type": "fixed", "delay": 50}, {"type": "exponential", "delay": 30}]
        chosen = {"delay": self._chance.choice([0, 0, 200]), "backoff": self._chance.choice(backoffs)}
        opts = {"attempts": self._terms.attempts, **{key: value for key, value in chosen.items() if value}}
        return wanted, {"name": "theirs", "data": data, "opts": opts}

    def _plan(self) -> tuple[Wanted, dict[str, Any]]:
        self._planned += 1
        failures = self._chance.choice(FAILURES) if self._terms.attempts > max(FAILURES) else 0
        longest = int(self._terms.lock_seconds * 1_300)  # such jobs live by the renewals of their lock
        milliseconds = self._chance.choices([self._chance.randint(5, 300), longest], [99, 1])[0]
        return Wanted(failures, self._planned), {"failures": failures, "result": self._planned, "ms": milliseconds}


async def run_round(terms: Terms) -> Findings:
    """What came of a round on these terms."""
    chance = random.Random(terms.seed)
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(valkey())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fd-bullmq-chaos-")))
        storage = BullMQStorage(server.url, QUEUE)
        await storage.connect()
        stack.push_async_callback(storage.disconnect)
        producer = await stack.enter_async_context(bullmq_crew(BULLMQ[terms.version], server.url, QUEUE))
        jobs = Jobs(terms, chance, producer, storage)
        crew = await stack.enter_async_context(at_work(_crew(terms, server.url, directory, chance)))
        await jobs.schedule()
        await _wreak_havoc(terms, jobs, crew, chance)
        outlived = await _outlives(crew)
        await jobs.unschedule()
        iterations = _iterations(crew)
        wanted = jobs.wanted | dict.fromkeys(iterations, Wanted(0, 0))
        over = OVER if terms.may_fail else OVER[:1]
        found = await _peace(server.url, wanted, over)
        runs = list(_runs(crew))
        kills = dict(crew.kills)
    failed = {job_id for job_id, one in found.items() if one["where"] in OVER[1:]}
    judged = wanted.keys() - failed if terms.may_fail else wanted.keys()
    failures = {job_id: wanted[job_id].failures for job_id in judged}
    verdict = judge(runs, failures, found)
    verdict.violations += early_parents(runs, jobs.children)
    if not outlived:
        verdict.violations.append(f"the schedule ended after {len(iterations)} runs")
    return Findings(
        terms=terms,
        jobs=len(jobs.wanted),
        planned_failures=sum(failures.values()),
        iterations=len(iterations),
        failed=len(failed),
        kills=kills,
        seconds=round(time.monotonic() - started, 1),
        verdict=verdict,
    )


def _crew(terms: Terms, url: str, directory: Path, chance: random.Random) -> Crew:
    async def in_node(member: Member) -> None:
        process = await member.stack.enter_async_context(bullmq_crew(BULLMQ[terms.version], url, QUEUE))
        await process.call("ledger", {"path": str(member.ledger), "late": terms.lock_seconds / 2})
        lock = int(terms.lock_seconds * 1000)
        settings = {"concurrency": CONCURRENCY, "lock": lock, "sweep": lock, "stalls": terms.stalls}
        await process.call("process", settings)

    async def here(member: Member) -> None:
        ledger = str(member.ledger)
        order = Order(url=url, queue=QUEUE, ledger=ledger, lease_seconds=terms.lock_seconds, stalls=terms.stalls)
        await member.stack.enter_async_context(bullmq_child(order))

    return Crew({"node": in_node, "python": here}, terms.kinds, directory, chance)


async def _wreak_havoc(terms: Terms, jobs: Jobs, crew: Crew, chance: random.Random) -> None:
    for number in range(terms.kills):
        await jobs.add(terms.jobs // terms.kills + (number < terms.jobs % terms.kills))
        await asyncio.sleep(chance.uniform(0.05, 0.6))
        await crew.kill_any()
        await crew.fill()


async def _outlives(crew: Crew) -> bool:
    """Whether the schedule goes on, now that nobody is killed any more."""
    goal = len(_iterations(crew)) + SIGNS_OF_LIFE
    deadline = time.monotonic() + LONG_PATIENCE_SECONDS
    while len(_iterations(crew)) < goal and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return len(_iterations(crew)) >= goal


def _iterations(crew: Crew) -> set[str]:
    """The runs of the schedule that have begun, as jobs."""
    return {run.job_id for run in _runs(crew) if run.job_id.startswith("repeat:")}


def _runs(crew: Crew) -> Iterator[Run]:
    for member in crew.members:
        yield from runs_of(member.kind, ledger.lines(member.ledger), member.killed)


def early_parents(runs: Sequence[Run], children: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Parents that began before each of their children had ended well."""
    ended = {run.job_id: run.until for run in runs if run.ended is not None and not run.failed}
    for run in runs:
        for child in children.get(run.job_id, ()):
            if run.began < ended.get(child, float("inf")):
                yield f"{run.job_id}: began at {run.began:.3f}, before its child {child} had ended"


async def _peace(url: str, wanted: dict[str, Wanted], over: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """Where each job is, once all are in one of these and nowhere else, or when that took too long."""
    deadline = time.monotonic() + LONG_PATIENCE_SECONDS
    async with Redis.from_url(url, decode_responses=True) as client:
        while True:
            found = await _look(client, wanted)
            if all(one["where"] in over for one in found.values()) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)


async def _look(client: Redis, wanted: dict[str, Wanted]) -> dict[str, dict[str, str | None]]:
    """One moment's view of all lists and sets: an id in `completed` and in another list is not completed yet."""
    prefix = f"bull:{QUEUE}:"
    async with client.pipeline(transaction=True) as view:
        for name in LISTS:
            view.lrange(prefix + name, 0, -1)
        for name in SETS:
            view.zrange(prefix + name, 0, -1)
        for job_id in wanted:
            view.hget(prefix + job_id, "returnvalue")
        answers = await view.execute()
    where = dict(zip((*LISTS, *SETS), map(set, answers), strict=False))
    results = answers[len(where) :]
    return {
        job_id: {
            "where": next((name for name, ids in where.items() if job_id in ids), None),
            "result": result,
            "wanted": str(one.result),
        }
        for (job_id, one), result in zip(wanted.items(), results, strict=True)
    }
