"""The processes of the node under test: the shipped workers, as they are, and their deaths.

Theory of operation. A process is a `Federation` and its `FederationWorkers`, built as a real process builds them, but
for what it is handed: the loop's clock, a database and queues that outlive it, and the transport of the world. To kill
it, its lines to everything are cut first, so that nothing it still does has an effect; then all tasks that it ever
began are cancelled. Of a frozen process no task takes a step until it thaws. Recurring jobs run as shipped, under the
leases in the database by which processes take turns; only their timers are the loop's own, and lazy.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from federation.base.database_clock import DatabaseClock
from federation.base.settings.settings import Settings
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.protocol.keys import OwnKeys
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from federation.scheduler.runner import FIRST_RUN, JITTER, JobRunner, RecurringJob
from tests.plain_wire import PlainWire
from tests.simulation.database import Line, Space, lent_engines
from tests.simulation.loop import LoopClock, MachineClock
from tests.simulation.own_actor import OWN_URL, OwnActor
from tests.simulation.queue import Queues
from tests.simulation.records import Request
from tests.simulation.servers import SimulatedServer, SimulatedTransport, server_keys
from workers.clock import Clock

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_OWN_NUMBER: Final = 999_999
_GUARD: Final = AddressGuard()
_LAZY_NAMES: Final = {"outbox-sweep": "sweep", "long-range-probes": "range", "received-sweep": "received"}
"""Kinds of timers, by recurring job; those of all others are of the kind `purge`."""
_LEFT_OUT: Final = {"rollups"}
"""It decides nothing about deliveries, and counts them every half minute of weeks in which nobody looks."""


class Surroundings:
    """What processes of one world share, and what is away for now."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: LoopClock,
        space: Space,
        queues: Queues,
        own_actor: OwnActor,
        on_engines: bool = False,
        has_clock: bool = False,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.space = space
        self.queues = queues
        self.on_engines = on_engines
        self.has_clock = has_clock
        self.servers: dict[str, SimulatedServer] = {}
        self.requests: list[Request] = []
        self.own_actor = own_actor
        self.database_away = 0
        self.queue_away = 0
        self.processes: list[Process] = []
        self._serial = 0

    def new_id(self) -> str:
        """Ids in the order of their making, so that a world replays."""
        self._serial += 1
        return f"delivery-{self._serial:06}"


class Process:
    """One process; with `works` it delivers."""

    def __init__(
        self, number: int, around: Surroundings, *, works: bool, crashed: Callable[[Process, str], None]
    ) -> None:
        self.number = number
        self.alive = False
        self.frozen = False
        self.clock = MachineClock(around.clock)
        self._around = around
        self._works = works
        self._crashed = crashed
        self._tasks: list[asyncio.Task[Any]] = []  # in the order in which they began; some are done
        self._looked_through = 0
        self.federation: Federation | None = None

    def start(self) -> None:
        """It runs."""
        self.alive = True
        around = self._around
        database_line = Line(lambda: not self.alive or around.database_away > 0)
        queue_line = Line(lambda: not self.alive or around.queue_away > 0)
        database = lent_engines(self.number).database(
            around.space, database_line, on_engines=around.on_engines, has_clock=around.has_clock
        )
        clock = DatabaseClock(database, self.clock) if around.has_clock else self.clock
        self.federation = Federation(
            around.settings,
            client=self._client(clock),
            clock=clock,
            database=database,
            storage=lambda name: around.queues.storage(name, queue_line),
            new_id=around.new_id,
            wires=lambda node: [PlainWire(node.fetch)],
        )
        if self._works:
            workers = FederationWorkers(self.federation, schedule=LoopSchedule)
            self._within(workers.start)

    def _client(self, clock: Clock) -> FederationClient:
        transport = SimulatedTransport(
            self._around.servers,
            self._around.requests,
            self._around.own_actor,
            crash=self.dies,
            process=self.number,
            clock=clock,
        )
        return FederationClient(_GUARD, transport)

    def _within(self, call: Callable[[], object]) -> None:
        """What it starts belongs to this process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        context.run(call)

    def dies(self, why: str) -> None:
        """It crashes by what it does, and is started again."""
        if self.alive:
            self._crashed(self, why)

    async def kill(self) -> None:
        """It is gone, and did nothing more."""
        self.alive = False
        self._around.queues.interrupt()
        while tasks := _undone(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)
        if self.federation is not None:
            await self.federation.database.close()
            self.federation = None

    def owns(self, task: asyncio.Task[Any]) -> None:
        """The task dies with the process."""
        self._tasks.append(task)
        # Each task's own callback would be a sixth of all that the loop runs.
        if len(self._tasks) > 2 * self._looked_through + 100:
            self._tasks = _undone(self._tasks)
            self._looked_through = len(self._tasks)


def _undone(tasks: Sequence[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    return [task for task in tasks if not task.done()]


class LoopSchedule:
    """Tries recurring jobs at their times, by the loop's own timers."""

    def __init__(self, jobs: Sequence[RecurringJob], run: JobRunner) -> None:
        self._jobs = [job for job in jobs if job.name not in _LEFT_OUT]
        self._run = run
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for job in self._jobs:
            name = f"{_LAZY_NAMES.get(job.name, 'purge')}-{job.name}"
            self._tasks.append(asyncio.create_task(self._repeat(job), name=name))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, job: RecurringJob) -> None:
        pause = min(FIRST_RUN, job.interval)
        while True:
            await asyncio.sleep(pause.total_seconds() * random.uniform(1 - JITTER, 1 + JITTER))
            pause = job.interval
            with contextlib.suppress(SQLAlchemyError):  # the next try finds what this one missed
                await self._run(job)


def is_frozen(context: contextvars.Context) -> bool:
    """Whether what runs in this context belongs to a process that stands still."""
    process = context.get(_process)
    return process is not None and process.frozen


def this_process() -> Process:
    """The process to which whoever runs belongs."""
    process = _process.get()
    assert process is not None
    return process


def is_running() -> bool:
    """Whether whoever runs belongs to no process, or to one that is alive."""
    process = _process.get()
    return process is None or process.alive


def make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    """As the loop does by itself, and the process that asked has the task."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.owns(task)
    return task


@cache
def own_keys() -> OwnKeys:
    return server_keys(_OWN_NUMBER)


@cache
def own_settings(*, has_activities: bool = False) -> Settings:
    """Those of every process of every world, which has room for ten attempts at once."""
    return Settings.from_values(
        {
            "better_auth_url": OWN_URL,
            **own_keys().to_env(),
            "database_url": lent_engines(0).url,
            "federation_activitypub": has_activities,
            "federation_delivery_concurrency": 10,
        }
    )
