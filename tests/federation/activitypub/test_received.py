"""What others sent is stored once and handled once, of one actor in the order of arrival; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, select, text
from sqlalchemy.exc import DataError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlmodel import col
from structlog.testing import capture_logs

from db import ActivityInbox, Database, ReceivedActivity, ReceivedState
from db.engines import async_engines
from db.session import Greenlets, Query, Rows, Steps
from db.url import parse_url
from federation.activitypub.handlers import Handlers, IncomingActivity, NotTried
from federation.activitypub.received import ATTEMPTS, HANDLE, PATIENCE, ReceivedJobs, store
from federation.activitypub.received_runner import AT_MOST, AWAY, LIMIT, OF_OTHERS, ReceivedRunner
from federation.activitypub.remote_actors import ActorUnavailable
from federation.admin.doctor.activitypub_checks import LATE
from federation.http.errors import NetworkError
from federation.monitoring.prometheus import ProcessMetrics
from tests.federation.monitoring.test_prometheus import samples
from tests.patience import until
from tests.servers import free_port
from workers import Job, JobState, Queue, RetryPolicy, Snooze
from workers.clock import ManualClock
from workers.errors import UnknownJobError
from workers.jobs import Claim, ErrorInfo, Failed, Retried
from workers.storage.memory import MemoryStorage

T = TypeVar("T")
NOW = datetime(2026, 5, 1, tzinfo=UTC)
BOB, CAROL = "https://b.example/users/bob", "https://c.example/users/carol"


def hash_of(name: str, actor: str = BOB) -> str:
    return sha256(f"{actor} {name}".encode()).hexdigest()


class NothingOfOurOwn:
    """Own handlers of a node that has none. `both`: two activities are about to be handled, or were."""

    def __init__(self) -> None:
        self.both, self._begun = asyncio.Event(), 0
        self.refuses: Exception | None = None
        self.counts = True

    async def prepare(self, activity: IncomingActivity) -> None:
        if self.refuses is not None:
            raise self.refuses
        self._begun += 1
        if self._begun == 2:
            self.both.set()

    def is_for(self, activity: IncomingActivity) -> bool:
        return "Follow" in activity.types

    async def handle(self, session: AsyncSession, activity: IncomingActivity, prepared: object) -> bool:
        return self.counts


@dataclass(slots=True)
class Arriving:
    """A node's received activities, without the rest of it, and with a queue elsewhere."""

    database: Database
    handlers: Handlers = field(default_factory=Handlers)
    own: NothingOfOurOwn = field(default_factory=NothingOfOurOwn)
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW))
    queue: Queue = field(default_factory=lambda: Queue(MemoryStorage()))
    metrics: ProcessMetrics = field(default_factory=ProcessMetrics)

    @property
    def jobs(self) -> ReceivedJobs:
        return ReceivedJobs(self.queue, database=self.database, joins=False, clock=self.clock)

    def runner(self, *, limit: timedelta = LIMIT, writes: Database | None = None) -> ReceivedRunner:
        return ReceivedRunner(
            database=self.database,
            begin=(writes or self.database).transaction,
            jobs=self.jobs,
            own=self.own,
            handlers=self.handlers,
            clock=self.clock,
            retry=RetryPolicy(initial=timedelta(seconds=10), jitter=0),
            of_others=replace(OF_OTHERS, jitter=0),
            limit=limit,
            meter=self.metrics,
        )

    async def arrives(self, name: str, actor: str = BOB) -> bool:
        text = json.dumps({"id": f"{actor}/{name}", "type": "Create", "actor": actor, "object": {"content": name}})
        return await self.jobs.keep(
            activity_hash=hash_of(name, actor), activity_id=f"{actor}/{name}", type="Create", actor=actor, text=text
        )

    async def run(
        self, name: str, actor: str = BOB, *, runner: ReceivedRunner | None = None, attempt: int = 1
    ) -> timedelta | None:
        """Run the job of an activity, as a worker does; how long it puts itself off."""
        payload = {"activity": hash_of(name, actor), "actor": actor}
        job = Job(id="1", name="any", payload=payload, attempt=attempt, max_attempts=3, created_at=NOW)
        try:
            await (runner or self.runner())(job)
        except Snooze as snooze:
            return snooze.delay
        return None

    async def claims(self) -> list[Claim]:
        """What a worker would get now."""
        return list(await self.queue.storage.claim("worker", leases={HANDLE: timedelta(1)}, limit=9))

    async def rows(self) -> dict[str, ReceivedActivity]:
        async with self.database.read() as session:
            found = (await session.execute(select(ReceivedActivity).order_by(col(ReceivedActivity.number)))).scalars()
            return {str(row.activity_id).rpartition("/")[2]: row for row in found}

    async def states(self) -> dict[str, ReceivedState]:
        return {name: row.state for name, row in (await self.rows()).items()}

    async def written(self) -> list[str]:
        """What handlers have written, each a row."""
        async with self.database.read() as session:
            return sorted((await session.execute(select(ActivityInbox.url))).scalars())


@pytest.fixture
async def arriving(database: Database) -> AsyncIterator[Arriving]:
    made = Arriving(database)
    await made.queue.start()
    yield made
    await made.queue.stop()


def effect(activity: IncomingActivity) -> ActivityInbox:
    """A row that stands for what an application writes."""
    return ActivityInbox(url=activity.object["content"], server_url="https://b.example")


async def write(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
    session.add(effect(activity))


def write_plainly(session: Session, activity: IncomingActivity, actor: str) -> None:
    assert isinstance(session, Session)
    session.add(effect(activity))
    session.flush()


async def test_what_is_known_changes_nothing(arriving: Arriving) -> None:
    """Neither a row nor a job, whatever has become of the first; of another actor it is another one."""
    assert [await arriving.arrives("a"), await arriving.arrives("a")] == [True, False]
    assert await arriving.arrives("a", CAROL)
    await arriving.run("a")
    assert not await arriving.arrives("a")
    assert (await arriving.queue.counts())[JobState.QUEUED] == 2
    async with arriving.database.read() as session:
        assert len((await session.execute(select(ReceivedActivity))).all()) == 2


@pytest.mark.parametrize("function", [write, write_plainly])
async def test_a_handler_writes_with_the_end_of_the_activity(arriving: Arriving, function: object) -> None:
    """A coroutine function and a plain one, with the session that each is used to. The text is not kept."""
    arriving.handlers.on("Create")(function)  # type: ignore[type-var] # either of them
    await arriving.arrives("a")
    assert await arriving.run("a") is None
    assert await arriving.run("a") is None
    row = (await arriving.rows())["a"]
    assert (row.state, row.text, row.attempts) == (ReceivedState.DONE, "", 0)
    assert await arriving.written() == ["a"]


async def test_what_no_function_is_for_keeps_its_text(arriving: Arriving) -> None:
    """It is done; the worker may have imported none of the application's modules."""
    arriving.handlers.on("Like")(write)
    await arriving.arrives("a")
    assert await arriving.run("a") is None
    row = (await arriving.rows())["a"]
    assert (row.state, "content" in row.text) == (ReceivedState.DONE, True)


async def test_what_this_node_handles_alone_keeps_none(arriving: Arriving) -> None:
    """Nobody needs the text of a Follow that was answered."""
    text = json.dumps({"id": f"{BOB}/f", "type": "Follow", "actor": BOB, "object": "https://a.example/alice"})
    await arriving.jobs.keep(activity_hash=hash_of("f"), activity_id=f"{BOB}/f", type="Follow", actor=BOB, text=text)
    assert await arriving.run("f") is None
    assert ((await arriving.rows())["f"].state, (await arriving.rows())["f"].text) == (ReceivedState.DONE, "")


async def test_the_application_is_not_told_of_what_does_not_count(arriving: Arriving) -> None:
    """It is done."""
    arriving.handlers.on("Create")(write)
    arriving.own.counts = False
    await arriving.arrives("a")
    await arriving.run("a")
    assert (await arriving.states(), await arriving.written()) == ({"a": ReceivedState.DONE}, [])


async def test_one_that_raises_is_tried_five_times_and_holds_what_came_after_it(arriving: Arriving) -> None:
    """It writes nothing, and waits longer each time. Then it has failed, and the same run goes on with the next."""
    tried: list[str] = []
    message = "secret\x00 of\nthe application"

    @arriving.handlers.on("Create")
    async def fail(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        session.add(effect(activity))
        await session.flush()
        tried.append(activity.object["content"])
        if activity.object["content"] == "a":
            raise ValueError(message)

    await arriving.arrives("a")
    await arriving.arrives("b")
    with capture_logs() as logs:
        pauses = [await arriving.run("a") for _ in range(ATTEMPTS - 1)]
        assert [pause.total_seconds() for pause in pauses if pause is not None] == [10, 20, 40, 80]
        assert await arriving.run("b") is None
        assert await arriving.states() == {"a": ReceivedState.NEW, "b": ReceivedState.NEW}
        assert await arriving.run("a") is None
    assert tried == ["a"] * ATTEMPTS + ["b"]
    assert await arriving.states() == {"a": ReceivedState.FAILED, "b": ReceivedState.DONE}
    assert await arriving.written() == ["b"]
    row = (await arriving.rows())["a"]
    assert (row.attempts, row.last_error, "content" in row.text) == (ATTEMPTS, "ValueError: secret  of", True)
    assert [entry["event"] for entry in logs] == ["received_not_handled"] * (ATTEMPTS - 1) + ["received_failed"]
    handled = samples(arriving.metrics, "federation_activities_handled_total")
    assert handled == {("retried",): ATTEMPTS - 1, ("failed",): 1, ("done",): 1}
    assert all("in fail\n" in entry["stack"] for entry in logs)
    assert "secret" not in repr(logs)


async def commit(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
    session.add(ActivityInbox(url="more", server_url=actor))
    await session.commit()


async def commit_all(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
    await session.begin_nested()
    await commit(session, activity, actor)


def commit_plainly(session: Session, activity: IncomingActivity, actor: str) -> None:
    session.add(ActivityInbox(url="more", server_url=actor))
    session.commit()


async def roll_back(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
    session.add(ActivityInbox(url="more", server_url=actor))
    await session.rollback()


@pytest.mark.parametrize("function", [commit, commit_all, commit_plainly, roll_back])
async def test_one_that_ends_the_transaction_has_failed(arriving: Arriving, function: object) -> None:
    """Nothing is written, by it or by the one before it, and it is not called again at once."""
    arriving.handlers.on("Create")(write)
    arriving.handlers.on("Create")(function)  # type: ignore[type-var] # any of them
    await arriving.arrives("a")
    assert await asyncio.wait_for(arriving.run("a"), 60) == timedelta(seconds=10)
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts, await arriving.written()) == (ReceivedState.NEW, 1, [])
    assert str(row.last_error).startswith("TransactionError: ")


async def test_savepoints_of_its_own_are_its_to_end(arriving: Arriving) -> None:
    """One that is rolled back and one that is committed."""

    @arriving.handlers.on("Create")
    async def try_twice(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        undone = await session.begin_nested()
        session.add(effect(activity))
        await undone.rollback()
        async with session.begin_nested():
            session.add(effect(activity))

    await arriving.arrives("a")
    assert await arriving.run("a") is None
    assert (await arriving.states(), await arriving.written()) == ({"a": ReceivedState.DONE}, ["a"])


async def test_one_that_fails_in_the_run_of_another_gets_its_own_job(arriving: Arriving) -> None:
    """Although that was there, and found nothing to do."""

    @arriving.handlers.on("Create")
    async def fail(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        if activity.object["content"] == "b":
            raise ValueError

    await store_without_job(arriving, "b")
    await arriving.arrives("c")
    assert await arriving.run("c") is None
    assert (await arriving.states()) == {"b": ReceivedState.NEW, "c": ReceivedState.NEW}
    status = await arriving.queue.get_status(f"received-{hash_of('b')}.0")
    assert status is not None
    assert status.state is JobState.SCHEDULED
    assert [claim.job_id for claim in await arriving.claims()] == [f"received-{hash_of('c')}.0"]  # the other is later


async def test_an_actors_activities_are_handled_in_the_order_of_arrival(arriving: Arriving) -> None:
    """Whichever of their jobs runs first, in whatever order; those of others are not touched."""
    seen: list[str] = []

    @arriving.handlers.on("*")
    async def note(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        seen.append(f"{actor} {activity.object['content']}")

    for name in "abc":
        await arriving.arrives(name)
        await arriving.arrives(name, CAROL)
    assert await arriving.run("c") is None
    assert seen == [f"{BOB} {name}" for name in "abc"]
    for name in "ba":
        assert await arriving.run(name, CAROL) is None
    assert seen[3:] == [f"{CAROL} {name}" for name in "abc"]


async def test_a_job_of_an_actor_who_is_being_worked_on_makes_it_look_again(arriving: Arriving) -> None:
    """It ends at once, so that nobody who sends much takes every slot; what it was for is handled by the other."""
    entered, leave = asyncio.Event(), asyncio.Event()

    @arriving.handlers.on("Create")
    async def slow(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        entered.set()
        await leave.wait()

    runner = arriving.runner()
    await arriving.arrives("a")
    first = asyncio.create_task(arriving.run("a", runner=runner))
    await entered.wait()
    if not arriving.database.is_sqlite:  # there nobody else could store it meanwhile
        await arriving.arrives("b")
    assert await arriving.run("b", runner=runner) is None
    leave.set()
    assert await first is None
    assert set((await arriving.states()).values()) == {ReceivedState.DONE}


class Pausing:
    """Stops what has just seen that nothing is there, the first time."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.seen, self.go_on = asyncio.Event(), asyncio.Event()

    async def transact(self, work: Callable[[Connection], T]) -> T:
        return await self._steps.transact(work)

    async def rows(self, query: Query, values: Mapping[str, object] | None) -> Rows:
        found = await self._steps.rows(query, values)
        if not found and not self.seen.is_set():
            self.seen.set()
            await self.go_on.wait()
        return found

    async def close(self) -> None: ...


async def test_what_comes_while_it_looks_for_the_last_time_is_not_left(arriving: Arriving, database_url: str) -> None:
    """The job of that finds the actor worked on, and would be the only one to know."""
    engines = async_engines(parse_url(database_url))
    pausing = Pausing(Greenlets(*engines))
    database = Database(database_url, engines=engines, steps=pausing)
    runner = replace(arriving, database=database).runner()
    await arriving.arrives("a")
    first = asyncio.create_task(arriving.run("a", runner=runner))
    await pausing.seen.wait()
    await arriving.arrives("b")
    assert await arriving.run("b", runner=runner) is None
    pausing.go_on.set()
    assert await first is None
    assert await arriving.states() == {"a": ReceivedState.DONE, "b": ReceivedState.DONE}
    await database.close()


async def test_of_two_processes_one_handles_it(arriving: Arriving) -> None:
    """The other waits for the end of its transaction, and then has nothing to do."""
    seen: list[str] = []

    @arriving.handlers.on("Create")
    async def note(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        await arriving.own.both.wait()
        seen.append(activity.object["content"])

    await arriving.arrives("a")
    runs = [arriving.run("a", runner=arriving.runner()) for _ in range(2)]
    assert await asyncio.gather(*runs) == [None] * 2
    assert (seen, await arriving.states()) == (["a"], {"a": ReceivedState.DONE})


async def test_a_handler_that_is_cancelled_has_not_been_tried(arriving: Arriving) -> None:
    """As by a stop whose grace is over: nothing is written, nothing counted."""
    entered = asyncio.Event()

    @arriving.handlers.on("Create")
    async def hang(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        await write(session, activity, actor)
        entered.set()
        await asyncio.Event().wait()

    await arriving.arrives("a")
    running = asyncio.create_task(arriving.run("a"))
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts, await arriving.written()) == (ReceivedState.NEW, 0, [])


async def test_a_handler_whose_statement_fails_has_failed(arriving: Arriving) -> None:
    """It is no outage: the transaction had begun."""

    @arriving.handlers.on("Create")
    async def fail(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        await session.execute(text("SELECT nothing_of_the_kind"))

    await arriving.arrives("a")
    assert await arriving.run("a") == timedelta(seconds=10)
    assert (await arriving.rows())["a"].attempts == 1


@pytest.mark.timeout(60)
async def test_handlers_that_take_too_long_have_failed(arriving: Arriving) -> None:
    """So one that waits for ever keeps neither a slot nor, on SQLite, everybody who writes."""

    @arriving.handlers.on("Create")
    async def hang(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        await write(session, activity, actor)
        await asyncio.Event().wait()

    await arriving.arrives("a")
    assert await arriving.run("a", runner=arriving.runner(limit=timedelta(milliseconds=1))) == timedelta(seconds=10)
    row = (await arriving.rows())["a"]
    assert (row.attempts, row.last_error, await arriving.written()) == (1, "TimeoutError: ", [])


def compute() -> None:
    while True:
        pass


def try_for_ever() -> None:
    while True:
        try:
            time.sleep(3600)
        except Exception:
            continue


def forget() -> None:
    with suppress(BaseException):
        time.sleep(3600)
    time.sleep(3600)


def ask() -> None:
    asked, silent = socket.socketpair()
    with asked, silent:
        asked.recv(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("block", "is_plain"), [(compute, True), (try_for_ever, True), (forget, False), (ask, False)])
async def test_handlers_that_never_wait_have_failed_too(
    arriving: Arriving, block: Callable[[], None], *, is_plain: bool
) -> None:
    """The event loop is others' again, the transaction is undone, and the log shows where it was."""

    async def hang(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        session.add(effect(activity))
        block()

    def hang_plainly(session: Session, activity: IncomingActivity, actor: str) -> None:
        session.add(effect(activity))
        block()

    arriving.handlers.on("Create")(hang_plainly if is_plain else hang)
    await arriving.arrives("a")
    with capture_logs() as logs:
        paused = await arriving.run("a", runner=arriving.runner(limit=timedelta(milliseconds=1)))
    assert paused == timedelta(seconds=10)
    row = (await arriving.rows())["a"]
    assert (row.attempts, await arriving.written()) == (1, [])
    assert str(row.last_error).startswith("Blocked: it kept the event loop to itself")
    assert block.__name__ in logs[-1]["stack"]
    assert await arriving.arrives("b")  # on SQLite nobody could write


@pytest.mark.timeout(60)
async def test_what_an_actor_sent_after_one_that_never_ends_is_handled(arriving: Arriving) -> None:
    """Once that has failed, by its time."""

    @arriving.handlers.on("Create")
    async def hang(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        if activity.object["content"] == "a":
            await asyncio.Event().wait()
        await write(session, activity, actor)

    await arriving.arrives("a")
    await arriving.arrives("b")
    runner = arriving.runner(limit=timedelta(seconds=2))
    for _ in range(ATTEMPTS - 1):
        assert await arriving.run("a", runner=runner) is not None
        assert await arriving.run("b", runner=runner) is None
    assert await arriving.run("a", runner=runner) is None
    assert await arriving.states() == {"a": ReceivedState.FAILED, "b": ReceivedState.DONE}


async def test_what_others_cannot_be_asked_about_now_is_nobodys_failure(arriving: Arriving) -> None:
    """The job waits; what came before the activity of another job keeps that waiting, too."""
    arriving.own.refuses = NotTried(7)
    await store_without_job(arriving, "a")
    await arriving.arrives("b")
    assert await arriving.run("b") == timedelta(seconds=7)
    assert [row.attempts for row in (await arriving.rows()).values()] == [0, 0]
    arriving.own.refuses = None
    assert await arriving.run("b") is None
    assert set((await arriving.states()).values()) == {ReceivedState.DONE}


@pytest.mark.parametrize("error", [ActorUnavailable("503"), NetworkError("TIMEOUT", "https://b.example", "no answer")])
async def test_others_who_do_not_answer_are_waited_for_longer(arriving: Arriving, error: Exception) -> None:
    """A server that restarts, or has too much to do, is asked again for ten minutes: its users' Follows wait for us."""
    arriving.own.refuses = error
    await arriving.arrives("a")
    pauses = [await arriving.run("a") for _ in range(ATTEMPTS)]
    assert [None if pause is None else pause.total_seconds() for pause in pauses] == [15, 45, 135, 405, None]
    assert sum(pause.total_seconds() for pause in pauses if pause) * (1 + OF_OTHERS.jitter) < LATE.total_seconds()
    assert await arriving.states() == {"a": ReceivedState.FAILED}


async def test_what_the_database_does_not_hold_fails_as_any_other(arriving: Arriving) -> None:
    """It would never pass, however long it waited: so a stranger would keep a job for ever."""
    arriving.own.refuses = DataError("SELECT", {}, ValueError("a text with a NUL"))
    await arriving.arrives("a")
    pauses = [await arriving.run("a") for _ in range(ATTEMPTS)]
    assert pauses[-1] is None
    assert await arriving.states() == {"a": ReceivedState.FAILED}


async def store_without_job(arriving: Arriving, name: str) -> None:
    """A process was killed between the commit and the job."""
    values = {"activity_hash": hash_of(name), "activity_id": f"{BOB}/{name}", "type": "Create", "actor": BOB}
    text = json.dumps({"type": "Create", "object": {"content": name}})
    assert await arriving.database.transact(
        lambda connection: store(connection, **values, text=text, now=arriving.clock.now())
    )


async def test_what_a_crash_left_without_a_job_gets_one(arriving: Arriving) -> None:
    """After a minute, once, and only the oldest of an actor: its job handles the others."""
    for name in "ab":
        await store_without_job(arriving, name)
    assert await arriving.jobs.sweep() == swept()
    arriving.clock.advance(PATIENCE + timedelta(seconds=1))
    assert await arriving.jobs.sweep() == swept(added=1)
    assert await arriving.jobs.sweep() == swept()
    [claim] = await arriving.claims()
    assert claim.job_id == f"received-{hash_of('a')}.0"
    assert await arriving.run("a") is None
    assert set((await arriving.states()).values()) == {ReceivedState.DONE}


def swept(*, added: int = 0, given_up: int = 0) -> Mapping[str, int]:
    return {"received_added": added, "received_given_up": given_up}


async def test_one_whose_job_has_ended_is_given_up_and_can_be_retried(arriving: Arriving) -> None:
    """It is not brought back by a sweep to kill the next worker. An operator's retry gives it five times more."""
    await arriving.arrives("a")
    arriving.clock.advance(PATIENCE + timedelta(seconds=1))
    assert await arriving.jobs.sweep() == swept()
    await arriving.queue.cancel(f"received-{hash_of('a')}.0")
    assert await arriving.jobs.sweep() == swept(given_up=1)
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts) == (ReceivedState.FAILED, ATTEMPTS)
    assert await arriving.jobs.retry([99]) == 0
    assert row.number is not None
    assert await arriving.jobs.retry([row.number]) == 1
    [claim] = await arriving.claims()
    assert claim.job_id == f"received-{hash_of('a')}.1"
    assert await arriving.jobs.sweep() == swept()
    assert await arriving.run("a") is None
    assert await arriving.states() == {"a": ReceivedState.DONE}
    assert await arriving.jobs.retry() == 0


async def test_one_that_waits_for_its_next_attempt_can_be_hurried(arriving: Arriving) -> None:
    """What it holds is not, nor what is due already, nor another's unless all are."""

    @arriving.handlers.on("Create")
    async def fail(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        raise ValueError

    for name, actor in (("a", BOB), ("b", BOB), ("c", CAROL)):
        await arriving.arrives(name, actor)
    assert await arriving.jobs.hurry() == 0
    for claim in await arriving.claims():
        await put_off(arriving, claim)
    rows = await arriving.rows()
    numbers = {name: row.number for name, row in rows.items() if row.number is not None}
    assert await arriving.jobs.hurry([numbers["b"], 99]) == 0
    assert await arriving.jobs.hurry([numbers["a"]]) == 1
    assert [claim.job_id for claim in await arriving.claims()] == [f"received-{hash_of('a')}.0"]
    assert await arriving.jobs.hurry() == 1
    assert [claim.job_id for claim in await arriving.claims()] == [f"received-{hash_of('c', CAROL)}.0"]


async def put_off(arriving: Arriving, claim: Claim) -> None:
    """A worker runs the claimed job, which puts itself off if its own activity fails."""
    [name] = [name for name, row in (await arriving.rows()).items() if row.activity_hash in claim.job_id]
    delay = await arriving.run(name, (await arriving.rows())[name].actor)
    if delay is not None:
        error = ErrorInfo.of(Snooze(delay))
        await arriving.queue.storage.settle([Retried(claim=claim, delay=delay, error=error, snoozed=True)])


async def fails(arriving: Arriving) -> None:
    """The only job fails at a worker that knows none of its kind."""
    [claim] = await arriving.claims()
    await arriving.queue.storage.settle([Failed(claim=claim, error=ErrorInfo.of(UnknownJobError(HANDLE)))])


async def test_one_that_was_never_begun_is_not_given_up(arriving: Arriving) -> None:
    """A worker that does not know its job, or a crash at another one, is not its fault."""
    await arriving.arrives("a")
    await fails(arriving)
    arriving.clock.advance(PATIENCE + timedelta(seconds=1))
    assert await arriving.jobs.sweep() == swept(added=1)
    assert await arriving.jobs.sweep() == swept()
    [claim] = await arriving.claims()
    assert claim.job_id == f"received-{hash_of('a')}.0"
    assert await arriving.run("a") is None
    assert await arriving.states() == {"a": ReceivedState.DONE}


class Killed(BaseException):
    """As if the process were killed: nobody takes it for an error, and the transaction is undone."""


async def test_one_with_which_workers_disappear_is_given_up(arriving: Arriving) -> None:
    """The first time may be another's fault; then it is alone, and each counts, whatever becomes of its job."""

    @arriving.handlers.on("Create")
    async def crash(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
        raise Killed

    await arriving.arrives("a")
    with pytest.raises(Killed):
        await arriving.run("a")
    assert (await arriving.rows())["a"].attempts == 0
    await fails(arriving)
    arriving.clock.advance(PATIENCE + timedelta(seconds=1))
    assert await arriving.jobs.sweep() == swept(added=1)
    pauses = []
    for _ in range(ATTEMPTS):
        with pytest.raises(Killed):
            await arriving.run("a", attempt=1 if pauses else 2)
        assert await arriving.run("a", attempt=3) == AWAY, "whoever is at it may still be there"
        arriving.clock.advance(AT_MOST)
        pauses.append(await arriving.run("a", attempt=3))
    assert pauses == [timedelta(seconds=each) for each in (10, 20, 40, 80)] + [None]
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts) == (ReceivedState.FAILED, ATTEMPTS)
    assert str(row.last_error).startswith("WorkerDisappeared: its process")


async def test_what_a_worker_may_have_disappeared_over_is_handled_alone(arriving: Arriving) -> None:
    """So that one that crashes workers takes no other with it twice."""
    here: set[str] = set()
    may_go = {name: asyncio.Event() for name in "abcd"}

    class Meeting(NothingOfOurOwn):
        async def prepare(self, activity: IncomingActivity) -> object:
            name = str(activity.id).rpartition("/")[2]
            here.add(name)
            await may_go[name].wait()
            here.discard(name)
            return None

    arriving.own = Meeting()
    runner = arriving.runner()

    async def begun(name: str, attempt: int = 1) -> asyncio.Task[timedelta | None]:
        """Run its job, and give it the time that it needs to be handled if it may."""
        await arriving.arrives(name, f"https://b.example/users/{name}")
        run = arriving.run(name, f"https://b.example/users/{name}", runner=runner, attempt=attempt)
        task = asyncio.create_task(run)
        for _ in range(3):
            await arriving.rows()
        return task

    together = [await begun("a"), await begun("b")]
    await until(lambda: here == {"a", "b"})
    suspect = await begun("c", attempt=2)
    assert here == {"a", "b"}
    may_go["a"].set()
    may_go["b"].set()
    await until(lambda: here == {"c"})
    later = await begun("d")
    assert here == {"c"}
    may_go["c"].set()
    may_go["d"].set()
    assert await asyncio.gather(*together, suspect, later) == [None] * 4
    assert set((await arriving.states()).values()) == {ReceivedState.DONE}


async def test_a_stop_amid_one_that_is_handled_alone_is_no_death(arriving: Arriving) -> None:
    entered = asyncio.Event()

    class Waiting(NothingOfOurOwn):
        async def prepare(self, activity: IncomingActivity) -> object:
            entered.set()
            await asyncio.Event().wait()
            return None

    await arriving.arrives("a")
    own, arriving.own = arriving.own, Waiting()
    stopped = asyncio.create_task(arriving.run("a", attempt=2))
    await entered.wait()
    stopped.cancel()
    await asyncio.wait([stopped])
    arriving.own = own
    assert await arriving.run("a", attempt=3) is None
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts) == (ReceivedState.DONE, 0)


async def test_a_queue_that_is_away_costs_no_activity(arriving: Arriving) -> None:
    """It is stored, and taken; the job is the sweep's."""
    away = replace(arriving, queue=Queue(f"redis://127.0.0.1:{free_port()}"))
    with capture_logs() as logs:
        assert await away.arrives("a")
    assert [entry["event"] for entry in logs] == ["received_jobs_not_added"]
    arriving.clock.advance(PATIENCE + timedelta(seconds=1))
    assert await arriving.jobs.sweep() == swept(added=1)


async def test_a_database_that_is_away_is_nobodys_failure(arriving: Arriving, tmp_path: Path) -> None:
    """The job waits for it, as often as need be; also where it is away once the activity was read."""
    await arriving.arrives("a")
    empty = Database(f"sqlite:///{tmp_path}/empty.sqlite3")
    for runner in (replace(arriving, database=empty).runner(), arriving.runner(writes=empty)):
        assert await arriving.run("a", runner=runner) == AWAY
    await empty.close()
    row = (await arriving.rows())["a"]
    assert (row.state, row.attempts) == (ReceivedState.NEW, 0)
