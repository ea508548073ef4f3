"""The programs of docs/examples that are about queues do what they show."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_SECONDS, eventually, until
from tests.servers import free_port
from tests.workers.manual import ROOT
from workers import JobState, Queue
from workers.jobs import JobEventKind
from workers.storage.file import FileStorage

EXAMPLES = ROOT / "docs" / "examples"
TEN = {
    *("recurring", "rate_limited", "prioritised", "bulk", "progress"),
    *("plain_code", "unit_test", "dashboard", "retry_failed", "dead_letters"),
}
PRINTED = {
    "first_job": "hello, alice\nqueued duplicate\n",
    "in_your_transaction": "the card was declined: neither the order nor the job was ever there\norders: 1 jobs: 1\n",
}

Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What an example prints as a script, whose files lie in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@asynccontextmanager
async def process(directory: Path, *arguments: str, **variables: str) -> AsyncIterator[Callable[[], list[str]]]:
    """Python runs with these arguments in the directory until the end of the block; what it has printed."""
    printed = directory / "printed"
    with printed.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}", "PYTHONWARNINGS": "error", **variables},
            stdout=out,
        )
    try:
        yield lambda: printed.read_text().splitlines()
    finally:
        child.terminate()
        try:
            await asyncio.to_thread(child.wait, PATIENCE_SECONDS)
        finally:
            child.kill()


def at_work(directory: Path, target: str) -> AbstractAsyncContextManager[Callable[[], list[str]]]:
    """The command runs the workers of an example, as its docstring says."""
    assert f"python -m workers run {target}`" in (EXAMPLES / f"{target.partition(':')[0]}.py").read_text()
    return process(directory, "-m", "workers", "run", target)


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    """The queue of an example, for whoever looks on."""
    async with Queue(FileStorage(tmp_path / "jobs")) as queue:
        yield queue


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_shows(name: str, run: Run) -> None:
    assert run(name) == PRINTED[name]


def test_a_task_runs_once_per_key_and_once_a_day(run: Run) -> None:
    lines = run("once_per_key").splitlines()
    assert sorted(line for line in lines if "report" not in line) == [
        *("duplicate", "duplicate", "queued", "reindexing posts")
    ]
    one, other = (line for line in lines if "report" in line)
    assert one == other


def test_a_servers_jobs_are_in_one_of_four_queues_in_order(run: Run) -> None:
    """However its queue's neighbours do."""
    lines = run("sharded").splitlines()
    for server in ("a.example", "b.example", "c.example"):
        mine = [line for line in lines if line.startswith(server)]
        assert mine == [f"{server} {text}" for text in ("first", "second", "last")]
    assert len(lines) == 9


def test_a_rate_is_kept_for_each_customer(run: Run) -> None:
    """The bucket has two tokens, so the third mail of each waits for half a second."""
    began = time.monotonic()
    lines = run("rate_limited").splitlines()
    assert time.monotonic() - began > 0.49
    assert sorted(lines) == [*["ann"] * 3, *["bob"] * 3]


async def test_a_task_recurs(tmp_path: Path) -> None:
    """The first time comes after a second."""
    async with at_work(tmp_path, "recurring:tasks") as printed:
        await until(lambda: printed()[:2] == ["tick", "tick"])


async def test_what_is_urgent_runs_first(tmp_path: Path, run: Run) -> None:
    await asyncio.to_thread(run, "prioritised")
    async with at_work(tmp_path, "prioritised:queue") as printed:
        await until(lambda: printed() == ["a new password", "a newsletter"])


async def test_many_jobs_are_enqueued_with_one_call(tmp_path: Path, run: Run) -> None:
    assert await asyncio.to_thread(run, "bulk") == "enqueued: 1000\n"
    async with at_work(tmp_path, "bulk:queue") as printed:
        await until(lambda: len(printed()) == 1000)
        assert sorted(map(int, printed())) == list(range(1000))


async def test_a_job_tells_how_far_it_is(tmp_path: Path, queue: Queue) -> None:
    """While it runs, and afterwards."""
    async with at_work(tmp_path, "progress:tasks"), queue.storage.subscribe("film") as events:
        await queue.enqueue({"film": "a.mkv"}, name="convert", id="film")
        kinds = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while JobEventKind.COMPLETED not in kinds:
                kinds.append((await events.get()).kind)
    assert JobEventKind.PROGRESS in kinds
    status = await queue.get_status("film")
    assert status is not None
    assert status.progress == "a.mkv: 100 %"


async def test_plain_code_waits_for_a_result(tmp_path: Path, run: Run) -> None:
    async with at_work(tmp_path, "plain_code:queue"):
        assert await asyncio.to_thread(run, "plain_code") == "hello, alice\n"


def test_a_task_is_tested(tmp_path: Path) -> None:
    """As its docstring says."""
    for name in ("recurring.py", "unit_test.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "unit_test.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


async def test_a_dashboard_is_served(tmp_path: Path, queue: Queue) -> None:
    """Its first page has the queue, and how many jobs wait in it."""
    await queue.enqueue("bob", id="one")
    port = free_port()

    async def page() -> str:
        try:
            return (await client.get("/")).text
        except httpx.ConnectError:
            return ""

    async with (
        process(tmp_path, str(EXAMPLES / "dashboard.py"), PORT=str(port)),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True) as client,
    ):
        await eventually(page, lambda text: "default" in text)


async def test_what_failed_runs_again(tmp_path: Path, queue: Queue, run: Run) -> None:
    """When what it needed is there."""
    async with at_work(tmp_path, "retry_failed:queue") as printed:
        await queue.enqueue("letter.txt", id="one", max_attempts=1)
        await until(lambda: _is(queue, "one", JobState.FAILED))
        (tmp_path / "letter.txt").write_text("dear bob")
        assert await asyncio.to_thread(run, "retry_failed") == "queued again: 1\n"
        await until(lambda: printed() == ["dear bob"])


async def test_what_fails_for_good_moves_to_another_queue(tmp_path: Path, queue: Queue) -> None:
    """And is told of."""
    async with (
        at_work(tmp_path, "dead_letters:queue") as printed,
        Queue(FileStorage(tmp_path / "jobs", "dead")) as dead,
    ):
        await queue.enqueue(0, id="one", max_attempts=1)
        await until(lambda: _is(dead, "one", JobState.QUEUED))
        await until(lambda: _is(queue, "one", None))
        assert printed() == ["one 0 division by zero"]


async def _is(queue: Queue, job_id: str, state: JobState | None) -> bool:
    status = await queue.get_status(job_id)
    return (None if status is None else status.state) is state


def test_every_example_is_run_and_small() -> None:
    """By a test here, in `tests/test_readme.py`, `tests/federation` (`sync` and `testing`) or `tests/acceptance`."""
    applications = {"django_app", "fastapi_app", "flask_app"}
    actors = {"activitypub_django", "activitypub_fastapi"}
    small = {*PRINTED, "once_per_key", "owe_delivery", "script", "sharded"}
    tests = {"activitypub_test", "flask_test"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TEN | small | applications | actors | tests
    assert [name for name in sorted(small) if _lines(name) >= 40] == []
    assert [name for name in sorted(actors) if _lines(name) > 25] == []
    assert [name for name in sorted(TEN) if _lines(name) >= 15] == []


def _lines(name: str) -> int:
    """How many lines a newcomer reads below the docstring, blank ones in between included."""
    found = re.fullmatch(r'""".*?"""\n+(.+\n)', (EXAMPLES / f"{name}.py").read_text(), re.DOTALL)
    assert found is not None
    return found[1].count("\n")


def test_every_example_is_listed() -> None:
    """Once, in the page beside them: in a row, or at the beginning of a line or after a comma."""
    listed = re.findall(r"(?:^\| |^|and )\[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
