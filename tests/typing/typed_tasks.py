"""What a type checker knows of typed tasks. mypy reads this with our packages; nobody runs it.

`warn_unused_ignores` makes each `type: ignore` here a promise: that call is an error.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_type

from workers import EnqueuedTask, Job, JobSpec, Queue, Task, Tasks, TypedTask
from workers.storage import open_storage
from workers.storage.file import FileStorage
from workers.storage.memory import MemoryStorage
from workers.tasks import SyncEnqueuedTask

tasks = Tasks("memory://")
queues = [Tasks(MemoryStorage()), Tasks(Queue(FileStorage("jobs"))), Tasks(open_storage("memory://"))]
session = object()


@tasks.task
async def digest(user_id: int, since: datetime | None = None) -> list[str]:
    return [f"{user_id} {since}"]


@tasks.task
def plain(name: str) -> int:
    return len(name)


@tasks.task
async def with_job(job: Job, user_id: int) -> str:
    return f"{job.id} {user_id}"


@tasks.task(max_attempts=5)
async def with_options(user_id: int) -> str:
    return str(user_id)


@tasks.task("named", max_attempts=5)
async def named(user_id: int) -> bytes:
    return bytes(user_id)


@tasks.task("named.with.job")
async def named_with_job(job: Job, user_id: int) -> bytes:
    return bytes(user_id)


@tasks.task("handler")
async def handler(job: Job) -> None: ...


async def calls() -> None:
    assert_type(handler, Task)
    assert_type(await digest.enqueue(user_id=3), EnqueuedTask[list[str]])
    assert_type(await digest.enqueue(3, since=datetime.now()), EnqueuedTask[list[str]])  # noqa: DTZ005 - is not run
    assert_type(await (await digest.enqueue(3)).result(), list[str])
    assert_type(await digest.run(3), list[str])
    assert_type(await digest.options(delay=timedelta(hours=1), priority=5).enqueue(3), EnqueuedTask[list[str]])
    assert_type(digest.options().spec(3), JobSpec)
    assert_type(await plain.run("bob"), int)
    assert_type(await with_job.run(user_id=3), str)
    assert_type(await with_options.run(3), str)
    assert_type(await named.run(3), bytes)
    assert_type(await named_with_job.run(3), bytes)
    assert_type(await digest.enqueue(3, connection=session), EnqueuedTask[list[str]])
    assert_type(digest.sync.enqueue(3).result(), list[str])
    assert_type(digest.sync.enqueue(3, connection=session), SyncEnqueuedTask[list[str]])
    assert_type(digest.options(unique=3600).sync.enqueue(3).result(), list[str])
    assert_type(tasks.working_queue(), Queue)
    assert_type(tasks.queue, Queue)
    typed: TypedTask[[int], bytes] = named_with_job
    await typed.enqueue(1)

    await digest.enqueue(user_id="3")  # type: ignore[call-overload]
    await digest.enqueue()  # type: ignore[call-overload]
    await digest.enqueue(3, nobody=1)  # type: ignore[call-overload]
    await with_job.enqueue(user_id="3")  # type: ignore[call-overload]
    await named.enqueue(user_id="3")  # type: ignore[call-overload]
    await digest.options(connection=session).enqueue("3")  # type: ignore[arg-type]
    digest.sync.enqueue("3")  # type: ignore[call-overload]
    digest.options(delay="3")  # type: ignore[arg-type]
    digest.options(colour="red")  # type: ignore[call-arg]
