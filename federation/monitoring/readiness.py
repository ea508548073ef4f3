"""Whether a node can do its work. Load balancers ask, and whoever finds the port, so asking is cheap."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Final, TypeAlias

import structlog
from sqlalchemy import text

from db import Database
from federation.base.cache import SingleFlight
from federation.base.settings.reach import HOST_ADVICE, host_lacks, missing_host_tables, schema_of, write_problem
from federation.servers.blacklist import Blacklist
from workers import Queue

log = structlog.get_logger(__name__)

TIMEOUT: Final = timedelta(seconds=2)
"""For all checks together."""
REUSE: Final = timedelta(seconds=1)
"""How long a verdict is reused for everybody who asks."""

Check: TypeAlias = Callable[[], Awaitable[object]]
"""Raises if something is wrong."""


class NotReady(Exception):
    """Raised by a check that knows what is wrong.

    Its message is shown to everybody, so it names no host and no secret.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessVerdict:
    """Which checks passed, and the problems that failed checks could name; the other ones only fail."""

    checks: Mapping[str, bool]
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return all(self.checks.values())


class Readiness:
    """Callable that returns a verdict, which is a second old at most.

    Checks run side by side, and never twice at once: one that has not ended since the last time counts as failed, so
    what hangs is not asked again and again.
    """

    def __init__(self, checks: Mapping[str, Check], *, timeout: timedelta = TIMEOUT, reuse: timedelta = REUSE) -> None:
        self._checks = checks
        self._timeout = timeout.total_seconds()
        self._reuse = reuse.total_seconds()
        self._running: dict[str, asyncio.Task[object]] = {}
        self._looking: SingleFlight[ReadinessVerdict] = SingleFlight()
        self._last: ReadinessVerdict | None = None
        self._fresh_until = 0.0

    async def __call__(self) -> ReadinessVerdict:
        if self._last is not None and monotonic() < self._fresh_until:
            return self._last
        return await self._looking.run("", self._look)

    async def close(self) -> None:
        """Cancel all checks, and wait for their end."""
        await self._looking.close()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look(self) -> ReadinessVerdict:
        begun = {name: self._begin(name, check) for name, check in self._checks.items() if name not in self._running}
        if begun:
            await asyncio.wait(begun.values(), timeout=self._timeout)
        problems = {name: _problem(begun.get(name)) for name in self._checks}
        told = {name: text for name, task in begun.items() if (text := _told(task)) is not None}
        for task in begun.values():
            task.cancel()
        verdict = ReadinessVerdict(checks={name: problem is None for name, problem in problems.items()}, problems=told)
        self._note_change(verdict, problems)
        self._last, self._fresh_until = verdict, monotonic() + self._reuse
        return verdict

    def _begin(self, name: str, check: Check) -> asyncio.Task[object]:
        task = self._running[name] = asyncio.ensure_future(_run(check))
        task.add_done_callback(lambda done: self._end(name, done))
        return task

    def _end(self, name: str, task: asyncio.Task[object]) -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not complain if it came too late for a verdict

    def _note_change(self, verdict: ReadinessVerdict, problems: Mapping[str, str | None]) -> None:
        was_ready = self._last is None or self._last.ready
        if not verdict.ready and (self._last is None or self._last.checks != verdict.checks):
            log.warning("not_ready", **{name: problem for name, problem in problems.items() if problem is not None})
        elif verdict.ready and not was_ready:
            log.info("ready_again")


async def _run(check: Check) -> None:
    await check()


def _problem(task: asyncio.Task[object] | None) -> str | None:
    """Return the problem in the check's own words, or else the error's type: its message may name hosts."""
    if task is None or not task.done():
        return "did not answer in time"
    if task.cancelled():
        return "was cut off"
    error = task.exception()
    return _told(task) or (type(error).__name__ if error is not None else None)


def _told(task: asyncio.Task[object]) -> str | None:
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return str(error) if isinstance(error, NotReady) else None


def node_checks(
    *, database: Database, writes: Check, queues: Sequence[Queue], blacklist: Blacklist
) -> Mapping[str, Check]:
    """Return a check of each thing that a node needs in order to deliver; `writes` is that of the database's writes."""

    async def answers() -> None:
        async with database.read() as session:
            await session.execute(text("SELECT 1"))

    async def has_tables() -> None:
        problem = (await schema_of(database)).problem
        if problem is not None:
            raise NotReady(problem)

    async def queues_answer() -> None:
        for queue in queues:
            await queue.get_status("readiness")

    async def blacklist_is_loaded() -> None:
        await blacklist.covering("https://readiness.invalid")

    return {
        "database": answers,
        "writes": writes,
        "tables": has_tables,
        "queue": queues_answer,
        "blacklist": blacklist_is_loaded,
    }


def serving_checks(checks: Mapping[str, Check], database: Database) -> Mapping[str, Check]:
    """Return these, and a check of what only the inbound side needs: a node that only delivers may have no host."""

    async def has_host_tables() -> None:
        names = await missing_host_tables(database)
        if names:
            raise NotReady(f"{host_lacks(names)}: {HOST_ADVICE}")

    return {**checks, "host": has_host_tables}


INTERVAL: Final = timedelta(seconds=10)
JITTER: Final = 0.1
PATIENCE: Final = timedelta(seconds=5)
"""How long a write may take. Longer than transactions of this or another process keep SQLite's lock."""


class WriteTrials:
    """Callable as a check: raises unless the last write was done. The first one is waited for.

    From the first call until `close`, a write is tried every ten seconds, however many ask meanwhile. One that takes
    longer than `patience` is given up and has failed.
    """

    def __init__(self, database: Database, *, interval: timedelta = INTERVAL, patience: timedelta = PATIENCE) -> None:
        self._database = database
        self._interval = interval.total_seconds()
        self._patience = patience.total_seconds()
        self._trying: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._problem: str | None = None  # written by the trials alone

    async def __call__(self) -> None:
        if self._trying is None:
            self._trying = asyncio.create_task(self._keep_trying(), name="write-trials")
        await self._tried.wait()
        if self._problem is not None:
            raise NotReady(f"the database takes no writes: {self._problem}")

    async def close(self) -> None:
        """Try no more, and wait until nothing is under way."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.wait([self._trying])

    async def _keep_trying(self) -> None:
        while True:
            self._problem = await self._try()
            self._tried.set()
            await asyncio.sleep(self._interval * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - spreads load, guards nothing

    async def _try(self) -> str | None:
        """Return why the write failed, or None if it was done."""
        try:
            async with asyncio.timeout(self._patience):
                return await write_problem(self._database)
        except TimeoutError:
            return f"one was not done within {self._patience:g} s"
        except Exception as error:  # otherwise the last result would stand for ever
            return type(error).__name__
