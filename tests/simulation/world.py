"""One world from its plan to its end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from db import DEFAULT_WIRE
from federation.activitypub.activities import WIRE
from federation.admin.why import explain
from federation.base.errors import Unreachable
from tests.peer import Sender
from tests.plain_wire import PlainWire
from tests.simulation.activities import actor_rows
from tests.simulation.arrivals import TABLE, Senders, Stored
from tests.simulation.asked import Promise, promise_of, questions, untrue
from tests.simulation.database import Space
from tests.simulation.incidents import Ban, Incidents, Pair, Wish
from tests.simulation.loop import START, LoopClock, VirtualLoop
from tests.simulation.needs import Needs, note_sweep
from tests.simulation.node import (
    Process,
    Surroundings,
    is_frozen,
    is_running,
    make_task,
    own_keys,
    own_settings,
)
from tests.simulation.owing import Application, Owed, Skip
from tests.simulation.own_actor import OWN_URL, OwnActor
from tests.simulation.plan import HOUR, MINUTE, Freeze, Kill, Outage, Plan
from tests.simulation.queue import Queues
from tests.simulation.records import Mishap, MishapKind, Request
from tests.simulation.servers import SimulatedServer
from tests.simulation.story import Story
from workers import WorkersError

SWEEPS_EACH = 50 * MINUTE
"""Less than the hour after which a sweep takes the clock for wrong."""
COLLECTS_EACH = 50
"""Virtual hours."""
GETS_OVER_IT = 120.0
"""Seconds that the node has for that after something of ours had failed."""
CRASH_SECONDS = 5.0
"""How long a crashed process takes to be started again, in virtual seconds."""


@dataclass(slots=True)
class World:
    """What there is to judge once it is over."""

    plan: Plan
    story: Story
    space: Space
    queues: Queues
    servers: dict[str, SimulatedServer] = field(default_factory=dict)
    owed: list[Owed] = field(default_factory=list)
    mishaps: list[Mishap] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    bans: list[Ban] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    own_looks: list[tuple[int, float]] = field(default_factory=list)
    """Those of a process at our own actor."""
    findings: list[str] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    """What actors of others have sent."""
    wanted: dict[Pair, list[Wish]] = field(default_factory=dict)
    """What users wanted of each pair, in this order."""

    @property
    def wires(self) -> dict[str, str]:
        """The name of the wire by which each server gets what is owed to it."""
        usual = PlainWire.name if self.plan.is_plain else DEFAULT_WIRE
        return {url: usual if each.inboxes is None else WIRE for url, each in self.servers.items()}

    def note(self, kind: MishapKind, start: float, end: float) -> None:
        """Something of ours fails, or did."""
        self.mishaps.append(Mishap(kind, start, end))

    def in_trouble(self, start: float, end: float, *kinds: MishapKind) -> bool:
        """Whether something of ours had failed then, of any kind or of these, with two minutes to get over it."""
        return any(
            each.start < end and start < each.end + GETS_OVER_IT
            for each in self.mishaps
            if not kinds or each.kind in kinds
        )


Judge = Callable[[World, float], Iterable[str]]


def run_world(plan: Plan, *, look: Judge, judge: Judge, on_engines: bool = False) -> World:
    """The world as it is at its end; `look` is asked each time that nobody is at work, `judge` at the end."""
    random.seed(plan.seed)  # jitter of the shipped code
    with _collections_by_the_clock():
        return _run(plan, look, judge, on_engines)


@contextmanager
def _collections_by_the_clock() -> Iterator[None]:
    """Garbage is collected before and where the world says: the end of an asynchronous generator is an event in it.

    What was there before is not looked through again: caches that the first worlds filled are ten times a world.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(plan: Plan, look: Judge, judge: Judge, on_engines: bool) -> World:
    needs = Needs()
    loop = VirtualLoop(needs.all())
    loop.set_task_factory(make_task)
    clock = LoopClock(loop)
    space = needs.space = Space.open(f"world-{id(plan)}", clock)
    try:
        queues = needs.queues = Queues(clock)
        world = World(plan=plan, story=Story(loop.time, is_heard=is_running), space=space, queues=queues)
        with world.story.logs():
            loop.run_until_complete(_Run(world, loop, look, judge, on_engines=on_engines).run())
        return world
    finally:
        loop.close()
        space.close()


class _Run:
    def __init__(self, world: World, loop: VirtualLoop, look: Judge, judge: Judge, *, on_engines: bool) -> None:
        self._world = world
        self._loop = loop
        self._look = look
        self._judge = judge
        self._poison: set[str] = set()
        own_actor = OwnActor(self._is_hidden)
        self._around = Surroundings(
            settings=own_settings(has_activities=world.plan.has_activities),
            clock=world.space.clock,
            space=world.space,
            queues=world.queues,
            own_actor=own_actor,
            on_engines=on_engines,
            has_clock=world.plan.own_machines,
        )
        self._app = Process(0, self._around, works=False, crashed=self._crashed)
        self._workers = [
            Process(number + 1, self._around, works=True, crashed=self._crashed)
            for number in range(world.plan.processes)
        ]
        self._around.processes = self._workers
        world.requests = self._around.requests
        world.own_looks = own_actor.looks
        self._senders = Senders(world, self._app)
        self._application = Application(world, self._app, self._poison, self._around.clock)

    def _is_hidden(self) -> bool:
        now = self._loop.time()
        return any(start <= now < end for start, end in self._world.plan.hidden)

    async def run(self) -> None:
        with self._senders.handled():
            await self._run()

    async def _run(self) -> None:
        self._make_servers()
        self._app.start()
        for process in self._workers:
            process.start()
        events = sorted(self._events(), key=lambda event: event[0])
        running: list[asyncio.Task[None]] = [
            asyncio.ensure_future(self._look_around()),
            asyncio.ensure_future(self._note_sweeps()),
        ]
        for at, call in events:
            await self._until(at)
            running.append(asyncio.ensure_future(call()))
            await asyncio.sleep(0)
        await asyncio.gather(*running)
        await self._until(self._world.plan.end)
        self._world.findings += self._judge(self._world, self._loop.time())
        for process in (*self._workers, self._app):
            await process.kill()

    async def _look_around(self) -> None:
        """Each hour or so, a while after the last event."""
        for hour in range(1, int(self._world.plan.end // HOUR), 5):
            await self._until(hour * HOUR)
            if hour % COLLECTS_EACH == 1:
                gc.collect()
            self._world.findings += self._look(self._world, self._loop.time())

    async def _note_sweeps(self) -> None:
        """Note that it was swept all the time."""
        while self._loop.time() < self._world.plan.end - SWEEPS_EACH:
            await asyncio.sleep(SWEEPS_EACH)
            if not self._around.database_away and any(process.alive for process in self._workers):
                note_sweep(self._world.space)

    async def _until(self, at: float) -> None:
        while (left := at - self._loop.time()) > 0:
            await asyncio.sleep(left)

    def _events(self) -> list[tuple[float, Callable[[], Awaitable[None]]]]:
        plan = self._world.plan
        events: list[tuple[float, Callable[[], Awaitable[None]]]] = []
        events += [(each.at, partial(self._application.owe, each)) for each in plan.deliveries]
        events += [(each.at, partial(self._senders.send, each)) for each in plan.arrivals]
        events += [(each.start, partial(self._cut, each)) for each in plan.outages]
        events += [(each.at, partial(self._kill, each)) for each in plan.kills]
        events += [(each.at, partial(self._freeze, each)) for each in plan.freezes]
        events += [(at, partial(self._lose, at)) for at in plan.losses]
        events += [(at, partial(self._ask, server)) for at, server in questions(plan)]
        incidents = Incidents(self._world, self._app, self._workers, until=self._until, interrupt=self._interrupt)
        events += incidents.events()
        return events

    def _make_servers(self) -> None:
        known = []
        for planned in self._world.plan.servers:
            server = SimulatedServer(planned, self._poison, self._loop.time, self._around.clock.now)
            server.last_requests = {
                each.number for each in self._world.plan.last_requests if each.server == planned.number
            }
            self._world.servers[server.url] = server
            self._around.servers[server.url.removeprefix("https://")] = server
            for phase in planned.phases:
                self._world.story.tell(
                    "* trouble",
                    server_url=server.url,
                    what=phase.trouble,
                    start=phase.start,
                    end=phase.end,
                    value=phase.value,
                )
            if planned.is_known and planned.receiver is None:
                keys = own_keys()
                server.senders[OWN_URL] = Sender(
                    public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text
                )
                known.append(server)
        senders = {
            url: Sender(
                public_key=server.keys.signing.public_text, encryption_public_key=server.keys.encryption.public_text
            )
            for url, server in self._world.servers.items()
        }
        for server in self._world.servers.values():
            server.reaches.update(self._world.servers)
            server.senders.update(senders)
        now = START.strftime("%Y-%m-%d %H:%M:%S.%f")
        self._world.space.keeper.executemany(
            "INSERT INTO server_registry (id, url, public_key, encryption_public_key, last_seen, created_at,"
            " updated_at, is_healthy, health_check_attempts) VALUES (?, ?, ?, ?, ?, ?, ?, 1, 0)",
            [(s.url, s.url, s.keys.signing.public_text, s.keys.encryption.public_text, now, now, now) for s in known],
        )
        self._world.space.keeper.execute(TABLE)
        for statement, values in actor_rows() if self._world.plan.has_activities else ():
            self._world.space.keeper.execute(statement, values)

    async def _cut(self, outage: Outage) -> None:
        name = "queue" if outage.of_queue else "database"
        self._world.story.tell(f"* {name} away")
        self._world.note(MishapKind.QUEUE if outage.of_queue else MishapKind.DATABASE, outage.start, outage.end)
        if outage.of_queue:
            self._around.queue_away += 1
            self._world.queues.interrupt()
        else:
            self._around.database_away += 1
        await self._until(outage.end)
        if outage.of_queue:
            self._around.queue_away -= 1
        else:
            self._around.database_away -= 1
        self._world.story.tell(f"* {name} back")

    def _interrupt(self) -> None:
        """Whoever sleeps looks at the clock."""
        self._world.queues.interrupt()
        self._loop.wake()

    async def _kill(self, kill: Kill) -> None:
        process = self._workers[kill.process % len(self._workers)]
        if process.alive:
            await self._kill_and_restart(process, kill.pause)

    async def _freeze(self, freeze: Freeze) -> None:
        process = self._workers[freeze.process % len(self._workers)]
        if not process.alive:
            return
        self._world.story.tell("* frozen", process=process.number, until=freeze.end)
        self._world.note(MishapKind.FROZEN, freeze.at, freeze.end)
        process.frozen = True
        self._loop.freeze(is_frozen)
        await self._until(freeze.end)
        self._thaw(process)

    def _thaw(self, process: Process) -> None:
        if not process.frozen:
            return
        self._world.story.tell("* thawed", process=process.number)
        process.frozen = False
        self._loop.thaw()
        if any(each.frozen for each in self._workers):
            self._loop.freeze(is_frozen)

    async def _ask(self, server: str) -> None:
        """Somebody asks why a server gets its deliveries, or not."""
        assert self._app.federation is not None
        now = self._loop.time()
        try:
            told = await explain(self._app.federation, server)
        except (SQLAlchemyError, WorkersError, Unreachable) as error:
            self._world.story.tell("* not told", server_url=server, error=repr(error)[:100])
            return
        if now == self._loop.time():  # nobody did anything meanwhile
            self._world.findings += untrue(self._world, now, told)
        if (promise := promise_of(self._world, now, told)) is not None:
            self._world.promises.append(promise)

    async def _lose(self, at: float) -> None:
        self._world.story.tell("* queue lost its data")
        self._world.note(MishapKind.LOSS, at, at)
        self._world.queues.lose()

    async def _kill_and_restart(self, process: Process, pause: float) -> None:
        self._world.story.tell("* killed", process=process.number)
        self._world.note(MishapKind.PROCESS, self._loop.time() - 1, self._loop.time() + pause)
        self._thaw(process)
        await process.kill()
        await asyncio.sleep(pause)
        self._world.story.tell("* started", process=process.number)
        process.start()

    def _crashed(self, process: Process, why: str) -> None:
        self._world.story.tell("* crash", process=process.number, activity=why)
        process.alive = False
        restart = self._kill_and_restart(process, CRASH_SECONDS)
        # In a context of nobody's: as a task of the process it would die with it.
        self._restarting = contextvars.Context().run(self._loop.create_task, restart)
