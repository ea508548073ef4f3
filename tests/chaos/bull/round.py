"""One round: jobs come in waves, with kills and pauses between them, and in the end all are to be completed."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from tests.chaos import ledger
from tests.chaos.bull.crew import Crew, Place, at_work, bull_crew
from tests.chaos.bull.verdict import Verdict, judge, runs_of
from tests.interop.bull_queue import DIALECTS, Ids
from tests.interop.peer import BullPeer, bull_peer
from tests.patience import LONG_PATIENCE_SECONDS
from tests.servers import valkey
from workers import RetryPolicy
from workers.jobs import NewJob
from workers.storage.bull import BullStorage

QUEUE: Final = "chaos"
ATTEMPTS: Final = 1_000
PAUSE_EVERY: Final = 3
"""Kills from one pause to the next."""
PEACE_SECONDS: Final = LONG_PATIENCE_SECONDS
"""How long the last crew may take for what is left: a killed one's lock, some sweeps, and some room."""
LISTS: Final = ("wait", "paused", "active", "delayed", "failed", "completed")


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a round did, and what came of it."""

    version: str
    seed: str
    jobs: int
    planned_failures: int
    kills: dict[str, int]
    pauses: int
    seconds: float
    verdict: Verdict = field(default_factory=Verdict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job that was added: how often it shall fail, and the result it shall have."""

    failures: int
    result: int


class Round:
    """The jobs of a round, half of them added in Node."""

    def __init__(self, place: Place, chance: random.Random, producer: BullPeer, storage: BullStorage) -> None:
        self._chance = chance
        self._producer = producer
        self._storage = storage
        self._ids = Ids(place.version)
        self._longest = int(place.lock_seconds * 1_300)
        self.wanted: dict[str, Wanted] = {}
        self.pauses = 0

    async def add(self, count: int) -> None:
        """So many more jobs are in the queue."""
        for _ in range(count):
            wanted = Wanted(self._chance.choice([0, 0, 1, 2]), len(self.wanted) + 1)
            data = {"failures": wanted.failures, "result": wanted.result, "ms": self._milliseconds()}
            job_id = await (self._add_in_node(data) if wanted.result % 2 else self._add_here(data))
            self.wanted[job_id] = wanted

    async def pause(self) -> None:
        """The queue is paused from here: Node promotes and retries into it all the same, and would lose that itself."""
        await self._storage.pause()
        self.pauses += 1

    async def resume(self) -> None:
        await self._storage.resume()

    def _milliseconds(self) -> int:
        # Some run longer than any lock, and live by its renewals; the first one does, however few there are.
        chosen = self._chance.choices([self._chance.randint(5, 300), self._longest], [99, 1])[0]
        return chosen if self.wanted else self._longest

    async def _add_in_node(self, data: dict[str, Any]) -> str:
        backoffs = [None, 50, {"type": "fixed", "delay": 50}, {"type": "exponential", "delay": 30}]
        chosen = {"delay": self._chance.choice([0, 0, 200]), "backoff": self._chance.choice(backoffs)}
        return await self._producer.add(
            data, attempts=ATTEMPTS, **{key: value for key, value in chosen.items() if value}
        )

    async def _add_here(self, data: dict[str, Any]) -> str:
        first = timedelta(milliseconds=self._chance.choice([0, 50]))
        job = NewJob(
            id=self._ids(),
            name="ours",
            payload=json.dumps(data).encode(),
            max_attempts=ATTEMPTS,
            backoff=RetryPolicy(initial=first, multiplier=2, jitter=0),
            delay=timedelta(milliseconds=self._chance.choice([0, 0, 200])),
        )
        await self._storage.enqueue([job])
        return job.id


async def run_round(version: str, *, jobs: int, kills: int, seed: str, lock_seconds: float = 5.0) -> Findings:
    """So many jobs and kills; what came of it."""
    chance = random.Random(seed)
    started = time.monotonic()
    with valkey() as server, tempfile.TemporaryDirectory(prefix="fd-bull-chaos-") as directory:
        place = Place(
            url=server.url,
            queue=QUEUE,
            version=version,
            dialect=DIALECTS[version],
            lock_seconds=lock_seconds,
            directory=Path(directory),
        )
        storage = BullStorage(place.url, QUEUE, dialect=place.dialect)
        await storage.connect()
        try:
            async with bull_peer(version, place.url, QUEUE) as producer, at_work(bull_crew(place, chance)) as crew:
                waves = Round(place, chance, producer, storage)
                await _wreak_havoc(waves, crew, chance, jobs, kills)
                found = await _peace(place.url, waves.wanted)
        finally:
            await storage.disconnect()
        runs = [run for one in crew.members for run in runs_of(one.kind, ledger.lines(one.ledger), one.killed)]
    failures = {job_id: wanted.failures for job_id, wanted in waves.wanted.items()}
    return Findings(
        version=version,
        seed=seed,
        jobs=len(failures),
        planned_failures=sum(failures.values()),
        kills=dict(crew.kills),
        pauses=waves.pauses,
        seconds=round(time.monotonic() - started, 1),
        verdict=judge(runs, failures, found),
    )


async def _wreak_havoc(waves: Round, crew: Crew, chance: random.Random, jobs: int, kills: int) -> None:
    for number in range(kills):
        await waves.add(jobs // kills + (number < jobs % kills))
        await asyncio.sleep(chance.uniform(0.05, 0.6))
        await crew.kill_any()
        if number % PAUSE_EVERY == 0:
            await waves.pause()
        await crew.fill()
        await waves.resume()


async def _peace(url: str, wanted: dict[str, Wanted]) -> dict[str, dict[str, str | None]]:
    """Where each job is, once all are completed and nothing is anywhere else, or when that took too long."""
    deadline = time.monotonic() + PEACE_SECONDS
    async with Redis.from_url(url, decode_responses=True) as client:
        while True:
            found = await _look(client, wanted)
            done = all(one["where"] == "completed" for one in found.values())
            if done or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)


async def _look(client: Redis, wanted: dict[str, Wanted]) -> dict[str, dict[str, str | None]]:
    """One moment's view of all lists and sets: an id in `completed` and in another list is not completed yet."""
    prefix = f"bull:{QUEUE}:"
    async with client.pipeline(transaction=True) as view:
        for name in ("wait", "paused", "active"):
            view.lrange(prefix + name, 0, -1)
        view.zrange(prefix + "delayed", 0, -1)
        view.smembers(prefix + "failed")
        view.smembers(prefix + "completed")
        for job_id in wanted:
            view.hget(prefix + job_id, "returnvalue")
        answers = await view.execute()
    where = dict(zip(LISTS, map(set, answers), strict=False))
    return {
        job_id: {
            "where": next((name for name in LISTS if job_id in where[name]), None),
            "result": result,
            "wanted": str(one.result),
        }
        for (job_id, one), result in zip(wanted.items(), answers[len(LISTS) :], strict=True)
    }
