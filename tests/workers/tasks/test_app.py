"""One object is enough: declared, enqueued and run by `Tasks` on a URL, with tables that are made when needed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from tests.patience import PATIENCE_SECONDS, until
from tests.workers.manual import ROOT
from workers import JobState, JobTimeoutError, Queue, StorageError, Tasks, Unsupported
from workers.command import main
from workers.storage import open_storage
from workers.storage.sql import SqlStorage

PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
PROGRAM: Final = """
import asyncio
from pathlib import Path

from workers import Tasks

app = Tasks("sqlite:///jobs.db")


@app.task
async def touch(name: str) -> None:
    Path(name).touch()


@app.task
async def hang() -> None:
    Path("hangs").touch()
    try:
        await asyncio.sleep(3600)
    finally:
        Path("ended").touch()


if __name__ == "__main__":
    app.run(grace=0.1)
"""


@pytest.mark.parametrize("url", ["sqlite:///{folder}/jobs.db?queue=mail", "file://{folder}/jobs", "memory://"])
async def test_a_url_is_enough(url: str, tmp_path: Path) -> None:
    """For a worker beside the program, several times; the first enqueue makes what is missing."""
    app = Tasks(url.format(folder=tmp_path))

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    first = await double.enqueue(1)
    for _ in range(2):
        async with app:
            assert await (await double.enqueue(2)).result(PATIENCE) == 4
    assert await first.result(PATIENCE) == 2


async def test_tasks_declared_between_two_blocks_are_run_by_the_second() -> None:
    """The queue has the tasks that there are when a worker begins."""
    app = Tasks("memory://")

    @app.task
    async def one() -> int:
        return 1

    async with app:
        assert await (await one.enqueue()).result(PATIENCE) == 1

    @app.task
    async def two() -> int:
        return 2

    async with app:
        assert await (await two.enqueue()).result(PATIENCE) == 2


async def test_a_block_in_another_leaves_its_worker() -> None:
    """As of a test's fixture, and of the program that it tests."""
    app = Tasks("memory://")

    @app.task
    async def one() -> int:
        return 1

    async with app:
        async with app:
            pass
        assert await (await one.enqueue()).result(PATIENCE) == 1


async def test_a_storage_and_a_queue_are_taken_too(tmp_path: Path) -> None:
    """A storage alone gets its tables; a queue is left as it was made."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    with pytest.raises(StorageError, match="python -m workers migrate module:app"):
        await Tasks(Queue(SqlStorage(url))).queue.counts()
    assert not (tmp_path / "jobs.db").exists()
    assert (await Tasks(SqlStorage(url)).queue.counts())[JobState.QUEUED] == 0
    assert Tasks(queue := Queue("memory://")).working_queue() is queue
    with pytest.raises(TypeError, match="tasks go to a URL, a storage or a queue, not to 5"):
        Tasks(5)  # type: ignore[arg-type]  # what is refused


async def test_a_database_of_a_server_is_left_alone(postgres_url: str) -> None:
    """Its tables are made by the command, which the message names."""
    app = Tasks(postgres_url.replace("+psycopg", ""))

    @app.task
    async def touch() -> None: ...

    with pytest.raises(StorageError, match="`python -m workers migrate module:app`"):
        await touch.enqueue()
    await app.queue.migrate()
    await touch.enqueue()
    await app.queue.stop()


def test_several_queues_are_migrated_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("a", "b")]
    assert main(["migrate", *urls]) == 0
    assert capsys.readouterr().out.splitlines() == ["the tables are ready"] * 2
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["a.db", "b.db"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [["shop.py"], ["-m", "workers", "run", "shop:app", "--grace", "100ms"]])
async def test_a_program_works_until_a_signal_ends_it(
    number: signal.Signals, arguments: list[str], tmp_path: Path
) -> None:
    """Gracefully: what does not end within the grace goes back, uncounted, and the program ends without an error."""
    (tmp_path / "shop.py").write_text(PROGRAM)
    app = Tasks(f"sqlite:///{tmp_path}/jobs.db")
    queue = app.queue
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *arguments], cwd=tmp_path, env=environment, stderr=log)
    try:
        await queue.enqueue({"name": "touched"}, name="touch")
        await until((tmp_path / "touched").exists)
        hanging = await queue.enqueue({}, name="hang")
        await until((tmp_path / "hangs").exists)
        process.send_signal(number)
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0
        assert (tmp_path / "ended").exists()
        status = await queue.get_status(hanging.id)
        assert status is not None
        assert (status.state, status.attempt) == (JobState.QUEUED, 0)
        assert "(touch) attempt 1 of 3: completed after" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        await queue.stop()


async def test_a_run_outside_the_main_thread_is_refused(tmp_path: Path) -> None:
    """Where no signal would come."""
    with pytest.raises(RuntimeError, match="async with app"):
        await asyncio.to_thread(Tasks(f"sqlite:///{tmp_path}/jobs.db").run)


def test_a_run_without_tasks_says_how_to_declare_one(tmp_path: Path) -> None:
    code = "from workers import Tasks; Tasks('sqlite:///jobs.db').run()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "declare one, `@app.task`" in done.stderr


async def test_a_run_in_a_coroutine_says_what_to_do(tmp_path: Path) -> None:
    """There is an event loop already."""
    app = Tasks(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def hello() -> None: ...

    with pytest.raises(RuntimeError, match="async with app"):
        app.run()


async def test_plain_code_does_not_wait_where_the_worker_runs(tmp_path: Path) -> None:
    """In the worker's event loop it would wait for itself; in a thread it may."""
    app = Tasks(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with app:
        with pytest.raises(RuntimeError, match="would block the event loop that runs these tasks"):
            double.sync.enqueue(1).result()
        assert await asyncio.to_thread(lambda: double.sync.enqueue(2).result(PATIENCE)) == 4
    with pytest.raises(JobTimeoutError):  # nobody works here any more: another process may
        double.sync.enqueue(3).result(timedelta(milliseconds=1))


async def test_tasks_of_another_queue_are_run_by_it(tmp_path: Path) -> None:
    from tests.workers.tasks.task_queues import ListQueue

    app = Tasks(ListQueue())
    for call in (lambda: app.queue, app.working_queue, lambda: app.sync):
        with pytest.raises(Unsupported, match="its own consumers run them"):
            call()


def test_open_storage_and_its_tables_are_for_those_who_want_them(tmp_path: Path) -> None:
    """A queue that was given its storage makes no file."""
    queue = Queue(open_storage(f"sqlite:///{tmp_path}/jobs.db"))
    assert not queue.makes_tables
    assert Queue(f"sqlite:///{tmp_path}/jobs.db").makes_tables
