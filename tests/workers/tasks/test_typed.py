"""Typed tasks: enqueued like a call, checked before anything is stored, with results of their type."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.workers.running import outcome
from tests.workers.tasks.task_queues import ListQueue
from workers import (
    DeduplicationMode,
    EnqueueStatus,
    Job,
    JobFailedError,
    JobState,
    Queue,
    Task,
    Tasks,
    Unsupported,
    continue_with,
)
from workers.errors import CorruptPayloadError
from workers.jobs import OutcomeKind
from workers.storage.base import Storage
from workers.storage.memory import MemorySpace, MemoryStorage
from workers.tasks import codecs

PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
LIBRARIES = ["pydantic", "msgspec", "none"]


@dataclass
class Address:
    street: str
    number: int


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which library is installed to check arguments."""
    chosen: str = request.param

    def find_spec(name: str) -> object:
        return importlib.util.find_spec(name) if name == chosen else None

    monkeypatch.setattr(codecs, "find_spec", find_spec)
    return chosen


@pytest.fixture
def queue(storage: Storage) -> Queue:
    return Queue(storage)


@pytest.fixture
def tasks(queue: Queue) -> Tasks:
    return Tasks(queue)


async def test_arguments_and_results_keep_their_types(queue: Queue, tasks: Tasks) -> None:
    """Through JSON, for a coroutine and for a plain function; defaults are the function's."""

    @tasks.task
    async def later(moment: datetime, by: timedelta = timedelta(hours=1)) -> datetime:
        assert isinstance(moment, datetime)
        return moment + by

    @tasks.task
    def move(address: Address, *, to: str) -> Address:
        assert isinstance(address, Address)
        return Address(to, address.number)

    queue.execute(tasks.handlers())
    async with queue:
        enqueued = await later.enqueue(MOMENT)
        assert enqueued.status is EnqueueStatus.QUEUED
        assert await enqueued.result(PATIENCE) == MOMENT + timedelta(hours=1)
        moved = await move.enqueue(Address("Old", 7), to="New")
        assert await moved.result(PATIENCE) == Address("New", 7)
    assert (later.name, move.name) == ("later", "move")
    assert await later.run(MOMENT, by=timedelta(0)) == MOMENT


@pytest.mark.parametrize("library", ["pydantic", "msgspec"], indirect=True)
async def test_keys_come_back_or_are_refused(library: str, queue: Queue, tasks: Tasks) -> None:
    """Keys that are no text come back where an annotation says their type; else the message names the argument."""

    @tasks.task
    async def inverted(names: dict[int, str]) -> dict[str, int]:
        return {name: number for number, name in names.items()}

    @tasks.task
    async def count(names: dict[Any, Any]) -> int:
        return len(names)

    queue.execute(tasks.handlers())
    async with queue:
        assert await (await inverted.enqueue({1: "a", 2: "b"})).result(PATIENCE) == {"a": 1, "b": 2}
        assert await (await count.enqueue({"a": {"b": 1}})).result(PATIENCE) == 1
        with pytest.raises(TypeError, match=r"^task 'count': names: keys .* this one is int: \[1\]$"):
            await count.enqueue({1: "a", "1": "b"})
        with pytest.raises(TypeError, match=r"names: keys .* this one is int: \['b'\]\[2\]$"):
            await count.enqueue({"b": {2: 1}})


@pytest.mark.parametrize("library", ["pydantic", "msgspec"], indirect=True)
@pytest.mark.parametrize("hint", [object, Any, dict, dict[str, object], list])
async def test_a_number_that_json_has_not_is_refused_and_not_made_null(
    library: str, hint: object, queue: Queue, tasks: Tasks
) -> None:
    """Where no annotation says that it is a number, either; the message says where it is."""

    async def measure(given: object) -> None: ...

    measure.__annotations__["given"] = hint
    task: Any = tasks.task(measure)
    value, where = ([[math.inf]], r"\[0\]\[0\]") if hint is list else ({"a": [1.5, math.nan]}, r"\['a'\]\[1\]")
    refused = f"given: NaN and infinity .*; this is one: {where}$" if library == "pydantic" else "Out of range"
    with pytest.raises(ValueError, match=refused):
        await task.enqueue(value)
    assert not any((await queue.counts()).values())


@pytest.mark.parametrize("library", ["pydantic"], indirect=True)
async def test_bytes_that_are_no_text_are_refused_by_name(library: str, tasks: Tasks) -> None:
    """As pydantic makes a text of them; its error cannot be made of one text."""

    @tasks.task
    async def keep(data: bytes) -> None: ...

    with pytest.raises(ValueError, match=r"^task 'keep': data: .*utf-8"):
        await keep.enqueue(b"\x00\xff")


async def test_a_result_that_cannot_be_encoded_is_not_tried_again(queue: Queue, tasks: Tasks) -> None:
    """It is no failure of the function, whose effects would be there several times."""
    runs: list[str] = []

    @tasks.task(max_attempts=3)
    async def annotated() -> object:
        runs.append("annotated")
        return object()

    @tasks.task(max_attempts=3)
    async def binary() -> bytes:
        runs.append("binary")
        return b"\xff"

    queue.execute(tasks.handlers())
    async with queue:
        for task in (annotated, binary):
            with pytest.raises(JobFailedError, match="cannot be encoded"):
                await (await task.enqueue()).result(PATIENCE)
    assert runs == ["annotated", "binary"]


async def test_a_result_that_its_annotation_does_not_allow_is_an_error_of_who_waits(
    queue: Queue, tasks: Tasks, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """The function has run, so its job has completed; neither the error nor the log quotes the result."""

    @tasks.task
    async def count() -> int:
        return "secret"  # type: ignore[return-value] # what a type checker would have found

    queue.execute(tasks.handlers())
    async with queue:
        enqueued = await count.enqueue()
        with pytest.raises(ValueError, match=f"^job '{enqueued.id}' has completed with a result that its annotation"):
            await enqueued.result(PATIENCE)
    assert "count returned a str: its annotation does not allow it" in caplog.text
    assert "secret" not in caplog.text
    assert not recwarn.list


def test_what_other_queues_call_it_is_told(tasks: Tasks) -> None:
    @tasks.task
    async def hello(name: str) -> None: ...

    task: Any = hello
    with pytest.raises(AttributeError, match=r"task 'hello' has no 'delay': here it is enqueue"):
        task.delay("bob")
    with pytest.raises(AttributeError, match=r"task 'hello' has no 'colour'$"):
        _ = task.colour
    assert copy.copy(hello).name == "hello"


async def test_a_run_may_be_due_at_a_time(queue: Queue, tasks: Tasks) -> None:
    @tasks.task
    async def hello() -> None: ...

    await hello.options(at=datetime.now(UTC) + timedelta(hours=1)).enqueue()
    assert (await queue.counts())[JobState.SCHEDULED] == 1
    with pytest.raises(ValueError, match="at must be an aware datetime"):
        await hello.options(at=datetime(2027, 1, 1)).enqueue()  # noqa: DTZ001 - that is the mistake
    with pytest.raises(ValueError, match="delay or at, not both"):
        await hello.options(at=MOMENT, delay=1).enqueue()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda task: task.enqueue(), "task 'mail': missing a required argument: 'user_id'"),
        (lambda task: task.enqueue(1, 2, 3), "task 'mail': too many positional arguments"),
        (
            lambda task: task.enqueue(user_id=1, colour="red"),
            "task 'mail': got an unexpected keyword argument 'colour'",
        ),
        (lambda task: task.enqueue(user_id="secret"), "task 'mail': user_id: "),
        (lambda task: task.enqueue(user_id=None), "task 'mail': user_id: "),
        (lambda task: task.enqueue(user_id=1, names=["a", {"secret": 1}]), "task 'mail': names"),
        (lambda task: task.options(delay=timedelta(days=-1)).enqueue(user_id=1), "delay is a timedelta from 0"),
        (lambda task: task.options(priority=-(2**31)).enqueue(user_id=1), "priority"),
    ],
)
@pytest.mark.parametrize("library", ["pydantic", "msgspec"], indirect=True)
async def test_what_does_not_fit_is_refused_before_anything_is_stored(
    library: str, call: Callable[[Any], Any], told: str
) -> None:
    """Whichever library checks; the message names the argument, and does not quote it."""
    queue = Queue(MemoryStorage(MemorySpace()))
    tasks = Tasks(queue)

    @tasks.task
    async def mail(user_id: int, names: list[str] | None = None) -> None: ...

    with pytest.raises((TypeError, ValueError)) as refused:
        await call(mail)
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert not any((await queue.counts()).values())


async def test_plain_types_are_checked_without_a_library(library: str) -> None:
    """An int is a float, a bool is no int; other types are taken as they are."""
    tasks = Tasks(Queue(MemoryStorage(MemorySpace())))

    @tasks.task
    async def mail(number: int, ratio: float = 1, text: str | None = None, anything: Any = None) -> None: ...

    await mail.run(1, ratio=2, text=None, anything=[1])
    wrong: dict[str, Any]
    for wrong in ({"number": []}, {"number": 1, "ratio": "x"}, {"number": 1, "text": 3}):
        with pytest.raises(ValueError, match=r"number|ratio|text"):
            await mail.enqueue(**wrong)
    if library == "none":
        with pytest.raises(ValueError, match=r"number: should be <class 'int'>, not bool"):
            await mail.enqueue(True)


async def test_a_task_may_know_its_job(queue: Queue, tasks: Tasks) -> None:
    """It is no argument of the enqueue."""

    @tasks.task("told", max_attempts=7)
    async def told(job: Job, greeting: str) -> list[object]:
        return [greeting, job.id, job.max_attempts]

    queue.execute(tasks.handlers())
    async with queue:
        enqueued = await told.enqueue("hello")
        assert await enqueued.result(PATIENCE) == ["hello", enqueued.id, 7]


async def test_options_are_those_of_any_enqueue(queue: Queue, tasks: Tasks) -> None:
    """Delay, priority and deduplication; a spec goes with others into one call."""
    ran: list[str] = []

    @tasks.task
    async def note(word: str) -> None:
        ran.append(word)

    last = await note.options(priority=9).enqueue("last")
    await note.options(priority=1).enqueue("first")
    await note.options(delay=timedelta(hours=1)).enqueue("never")
    once = note.options(deduplication_key="one", deduplication_mode=DeduplicationMode.SIMPLE)
    kept, skipped = await once.enqueue("second"), await once.enqueue("skipped")
    assert (skipped.status, skipped.id) == (EnqueueStatus.DUPLICATE, kept.id)
    await queue.enqueue_many([note.options(priority=5).spec("third")])
    queue.execute(tasks.handlers())
    async with queue:
        await last.result(PATIENCE)
    assert ran == ["second", "first", "third", "last"]


async def test_a_payload_of_an_older_version_that_does_not_fit_fails_its_job(queue: Queue, tasks: Tasks) -> None:
    """It would fail each time."""

    @tasks.task
    async def mail(user_id: int) -> None: ...

    queue.execute(tasks.handlers())
    async with queue:
        for payload in ({"user": 1}, {"user_id": "nobody"}, [1], "text"):
            job = await queue.enqueue(payload, name="mail")
            ended = await outcome(queue.storage, job.id)
            assert ended.kind is OutcomeKind.FAILED
            assert ended.error is not None
            assert ended.error.type == CorruptPayloadError.__name__


async def test_a_typed_task_continues_and_fails_like_any(queue: Queue, tasks: Tasks) -> None:
    """Its failure is raised where the result is awaited."""

    @tasks.task
    async def second(word: str) -> str:
        return word.upper()

    @tasks.task
    async def first(word: str) -> str:
        return continue_with("second", {"word": word})  # type: ignore[return-value]  # the chain's result is

    @tasks.task(max_attempts=1)
    async def fails() -> None:
        raise RuntimeError("no")

    queue.execute(tasks.handlers())
    async with queue:
        assert await (await first.enqueue("bob")).result(PATIENCE) == "BOB"
        with pytest.raises(JobFailedError):
            await (await fails.enqueue()).result(PATIENCE)


def test_a_function_that_cannot_be_a_task_is_refused(tasks: Tasks) -> None:
    """Where it is declared."""
    with pytest.raises(TypeError, match=r"task 'bare': parameter 'user' needs an annotation"):

        @tasks.task
        async def bare(user) -> None: ...  # type: ignore[no-untyped-def]  # that is the point

    with pytest.raises(TypeError, match=r"task 'many': parameter .*users.*: a job has its arguments by name"):

        @tasks.task
        async def many(*users: int) -> None: ...

    with pytest.raises(TypeError, match=r"leave `validate` out"):

        @tasks.task("checked", validate=lambda data: data)
        async def checked(user: int) -> None: ...

    with pytest.raises(TypeError, match=r"task 'lines': a task returns what it gives, and does not `yield` it"):

        @tasks.task
        def lines(text: str) -> Iterator[str]:
            yield from text.splitlines()

    @tasks.task
    async def twice() -> None: ...

    with pytest.raises(ValueError, match="'twice' is declared already"):
        tasks.task(twice.fn)
    assert isinstance(twice, Task)


async def test_another_queue_takes_typed_tasks_without_priorities_and_results() -> None:
    """What it cannot do is refused."""
    foreign = ListQueue()
    tasks = Tasks(foreign)

    @tasks.task
    async def mail(user_id: int) -> None: ...

    enqueued = await mail.enqueue(3)
    assert foreign.ids == [enqueued.id]
    await tasks.process(foreign.take())
    with pytest.raises(Unsupported, match="no priorities"):
        await mail.options(priority=1).enqueue(3)
    with pytest.raises(Unsupported, match="it has no results"):
        await enqueued.result()
