"""What a job's data asks its run to do: here what `bull_peer.mjs` does in Node."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tests.chaos.ledger import Ledger
from workers.worker.handlers import Job


class FailedOnPurpose(Exception):
    """The job's data wants this run to fail."""


@dataclass(slots=True)
class Run:
    """One run of a job, in seconds of the monotonic clock, which is the same in every process of the machine."""

    id: str
    attempt: int
    at: float
    ended: float | None = None


class Obedient:
    """A handler that does what the job's data says, and writes its runs down if it has a ledger."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.runs: list[Run] = []
        self._ledger = ledger
        self._held: dict[str, asyncio.Event] = {}

    async def __call__(self, job: Job) -> object:
        data = job.payload
        assert isinstance(data, dict)
        run = Run(job.id, job.attempt, time.monotonic())
        self.runs.append(run)
        self._note("began", run, run.at)
        for value in data.get("progress", ()):
            job.progress(value)
        await asyncio.sleep(data.get("ms", 0) / 1000)
        if data.get("hold"):
            await self._hold(job.id).wait()
        run.ended = time.monotonic()
        failed = job.attempt <= data.get("failures", 0)
        self._note("failed" if failed else "completed", run, run.ended)
        if failed:
            raise FailedOnPurpose(data.get("message", "failed on purpose"))
        return data.get("result")

    def release(self, job_id: str) -> None:
        """A held run of the job ends, also one that has not begun yet."""
        self._hold(job_id).set()

    def of(self, job_id: str) -> list[Run]:
        """The runs of this job so far."""
        return [run for run in self.runs if run.id == job_id]

    def _hold(self, job_id: str) -> asyncio.Event:
        return self._held.setdefault(job_id, asyncio.Event())

    def _note(self, what: str, run: Run, at: float) -> None:
        if self._ledger is not None:
            self._ledger.write(what, id=run.id, at=at, made=run.attempt - 1)
