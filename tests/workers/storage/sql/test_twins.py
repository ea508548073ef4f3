"""SQLite beside memory: whatever both are told, they answer the same."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest

from workers.clock import ManualClock
from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import DROP, Claim, Completed, ErrorInfo, Failed, NewJob, Released, Retried
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.storage.sql import SqlStorage
from workers.testing.steps import claim, job


class Twins:
    """A queue in memory and one in SQLite on one clock, which are told the same and have to answer the same."""

    def __init__(self, memory: Storage, sql: Storage, clock: ManualClock, seed: int) -> None:
        self._both = (memory, sql)
        self._clock = clock
        self._source = random.Random(seed)
        self._claims: list[tuple[Claim, Claim]] = []
        self._made = 0

    async def step(self) -> None:
        steps = (self._enqueue, self._enqueue, self._enqueue, self._claim, self._settle, self._manage, self._pass_time)
        await self._source.choice(steps)()
        self._clock.advance(timedelta(milliseconds=10))  # no two steps at once: between equal times either may be first
        ids = [str(number) for number in range(12)]
        statuses = [await storage.status(ids) for storage in self._both]
        assert statuses[0] == statuses[1]

    async def _enqueue(self) -> None:
        jobs = [self._new(timedelta(milliseconds=at)) for at in range(self._source.choice((1, 1, 2, 4)))]
        answers = [await storage.enqueue(jobs) for storage in self._both]
        assert answers[0] == answers[1], jobs

    def _new(self, more: timedelta) -> NewJob:
        self._made += 1
        source = self._source
        mode, ttl = source.choice(list(DeduplicationMode)), more + timedelta(seconds=source.choice((3, 10)))
        key = Deduplication(key=source.choice("klm"), mode=mode, ttl=None if mode == DeduplicationMode.SIMPLE else ttl)
        return job(
            str(source.randrange(12)),
            deduplication=source.choice((None, key, key)),
            payload=b"%d" % self._made,
            delay=more + timedelta(seconds=source.choice((0, 0, 5))),
            ordering_key=source.choice((None, None, "o")),
            keep_completed=source.choice((DROP, timedelta(seconds=4))),
            keep_failed=timedelta(seconds=6),
        )

    async def _claim(self) -> None:
        granted = [await claim(storage) for storage in self._both]
        assert _shown(granted[0]) == _shown(granted[1])
        self._claims += zip(*granted, strict=True)

    async def _settle(self) -> None:
        if not self._claims:
            return
        claims = self._claims.pop(self._source.randrange(len(self._claims)))
        kind = self._source.randrange(4)
        error = ErrorInfo(type="E", message="")
        outcomes = []
        for storage, held in zip(self._both, claims, strict=True):
            retried = Retried(claim=held, error=error, delay=timedelta(seconds=2))
            steps = (
                Completed(claim=held, result=b""),
                Failed(claim=held, error=error),
                Released(claim=held),
                retried,
            )
            outcomes.append(await storage.settle([steps[kind]]))
        assert outcomes[0] == outcomes[1]

    async def _manage(self) -> None:
        verb = self._source.choice(("cancel", "remove", "promote", "sweep", "complete"))
        ids = [str(self._source.randrange(12))]
        arguments = {"cancel": (ids[0],), "sweep": (100,), "complete": (ids[0], b"")}.get(verb, (ids,))
        told = [await getattr(storage, verb)(*arguments) for storage in self._both]
        assert told[0] == told[1] or verb == "sweep", verb

    async def _pass_time(self) -> None:
        self._clock.advance(timedelta(seconds=self._source.choice((1, 3))))


def _shown(claims: list[Claim]) -> list[tuple[str, bytes, int]]:
    return [(claim.job_id, claim.payload, claim.attempt) for claim in claims]


@pytest.mark.parametrize("seed", range(6))
async def test_sqlite_answers_as_memory_does(tmp_path: Path, seed: int) -> None:
    """Of any sequence of steps with keys, ids, delays and retentions, every answer is the same."""
    clock = ManualClock()
    url = f"sqlite:///{tmp_path}/twin.db"
    await SqlStorage(url).migrate()
    memory, sql = MemoryStorage(MemorySpace(clock)), SqlStorage(url, clock=clock)
    for storage in (memory, sql):
        await storage.connect()
    try:
        twins = Twins(memory, sql, clock, seed)
        for _ in range(150):
            await twins.step()
    finally:
        await memory.disconnect()
        await sql.disconnect()
