"""What the tests ask of a Bull queue from our side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, TypeVar

from tests.patience import PATIENCE_SECONDS, eventually
from workers import JobStatus
from workers.errors import JobLockedError
from workers.jobs import ErrorInfo, JobOutcome, NewJob
from workers.storage.bull import BullStorage
from workers.storage.bull.codec import Dialect

T = TypeVar("T")

DIALECTS: Final[dict[str, Dialect]] = {"1.0.0": "B", "1.1.3": "C"}
"""Of Bull's versions, as far as npm has them."""

ERROR = ErrorInfo(type="ValueError", message="no such server", stack="Traceback\nValueError: no such server")


def a_job(job_id: str, data: dict[str, Any], **details: Any) -> NewJob:
    """A job that wants what `data` says; see `bull_jobs.py`."""
    return NewJob(id=job_id, name="ours", payload=json.dumps(data).encode(), **details)


async def status(queue: BullStorage, job_id: str) -> JobStatus:
    """The job as it stands; it must exist."""
    [found] = await queue.status([job_id])
    assert found is not None
    return found


async def ended(queue: BullStorage, job_id: str) -> JobOutcome:
    """How the job ended, once it has."""
    found = await eventually(lambda: queue.result(job_id), lambda outcome: outcome)
    assert found is not None
    return found


async def unlocked(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a call that refuses locked jobs; Node unlocks a job only after it has told of its end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(JobLockedError):
                return await call()
            await asyncio.sleep(0.01)


class Ids:
    """Ids for jobs of ours: Bull 1.0 reads numbers only, 1.1 keeps those for its counter.

    They are far apart: the counter goes on from the last that was used.
    """

    def __init__(self, version: str) -> None:
        self._prefix = "" if version == "1.0.0" else "ours-"
        self._numbers = count(1_000, 1_000)

    def __call__(self) -> str:
        """One more."""
        return f"{self._prefix}{next(self._numbers)}"
