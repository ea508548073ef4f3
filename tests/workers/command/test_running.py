"""`python -m workers run`, as somebody types it in the folder of an application."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port
from tests.workers.command.conftest import SHOP, Shop
from tests.workers.manual import ROOT, examples
from workers import JobState
from workers.command import main
from workers.storage.sql import SqlStorage

COMMANDS = ROOT / "docs" / "queue" / "commands.md"
PATIENCE = timedelta(seconds=PATIENCE_SECONDS)


async def test_it_works_until_told_to_stop(shop: Shop) -> None:
    """The log has a line for each attempt; a second signal skips the grace, and the job that ran goes back."""
    process = shop.start("run", "shop:queue", "--concurrency", "2")
    assert await shop.queue.enqueue_and_wait(None, name="who", timeout=PATIENCE) == [process.pid, 1]
    await shop.queue.enqueue(None, name="hang", id="hangs")
    await until(lambda: (shop.folder / f"hangs-{process.pid}").exists())
    process.send_signal(signal.SIGTERM)
    await shop.until_logged("stopping; send the signal again")
    process.send_signal(signal.SIGINT)
    assert await shop.ended(process) == 0
    assert "(who) attempt 1 of 3: completed after" in shop.log
    status = await shop.queue.get_status("hangs")
    assert status is not None
    assert (status.state, status.attempt) == (JobState.QUEUED, 0)


async def test_several_processes_share_the_work_and_one_port(shop: Shop) -> None:
    """The jobs of one that is killed run elsewhere when their lease is over."""
    port = free_port()
    process = shop.start("run", "shop:queue", "--processes", "2", "--metrics-port", str(port))
    await shop.until_ready(2)
    await shop.queue.enqueue(None, name="hang", id="hangs")
    await until(lambda: [*shop.folder.glob("hangs-*")])
    (first,) = (int(path.name.partition("-")[2]) for path in shop.folder.glob("hangs-*"))
    pid, _ = await _who(shop)
    assert pid not in (first, process.pid)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        ready = await client.get(f"http://127.0.0.1:{port}/readyz")
    assert 'workers_attempt_seconds_count{process="' in metrics
    assert [each["checks"] for each in ready.json()["processes"].values()] == [{"default": "ok"}] * 2
    os.kill(first, signal.SIGKILL)
    await until(lambda: len([*shop.folder.glob("hangs-*")]) == 2)
    process.send_signal(signal.SIGTERM)
    await shop.until_logged("supervisor: stopping")
    process.send_signal(signal.SIGTERM)
    assert await shop.ended(process) == 0


async def test_a_change_of_the_source_is_run(shop: Shop) -> None:
    """One that does not start changes nothing, and says so."""
    shop.start("run", "shop:queue", "--watch")
    assert (await _version(shop)) == 1
    (shop.folder / "shop.py").write_text("not Python")
    await shop.until_logged("restart given up")
    assert (await _version(shop)) == 1
    (shop.folder / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 2"))
    await shop.until_logged("restarted")
    assert (await _version(shop)) == 2


async def _who(shop: Shop) -> tuple[int, int]:
    """The process id and the version of whatever runs a job."""
    answer = await shop.queue.enqueue_and_wait(None, name="who", timeout=PATIENCE)
    assert isinstance(answer, list)
    return int(answer[0]), int(answer[1])


async def _version(shop: Shop) -> int:
    return (await _who(shop))[1]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stall.py").write_text(
        "from workers import Queue\n"
        "from workers.storage import open_storage\n"
        "queue = Queue(open_storage('memory://'))\n"
        "app = object()\n"
    )
    (tmp_path / "hollow.py").write_text("import surely_not_installed\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "idle.py").write_text(f"from workers import Tasks\napp = Tasks('file://{tmp_path}/jobs')\n")
    (tmp_path / "working.py").write_text(
        "from workers import Tasks\napp = Tasks('memory://')\n@app.task\nasync def hello() -> None: ...\napp.run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere:queue"], "no module 'nowhere'; run this in the folder that has it, or add that to PYTHONPATH"),
        (["nowhere.inside:queue"], "no module 'nowhere'"),
        (["hollow:queue"], "needs 'surely_not_installed', which is not installed"),
        (["broken:queue"], "RuntimeError: at import"),
        (["stall:shop"], "has no 'shop'; it has queue"),
        (["stall:app"], "stall:app is an instance of object, not a workers.Queue or workers.Tasks; it has queue"),
        (["stall:queue"], "has no handlers; call its execute()"),
        (["idle:app"], "idle:app has no task: declare one, `@app.task`, in that module"),
        (["working:app"], 'calls run() when it is imported; put that under `if __name__ == "__main__":`'),
        (["./stall.py:app"], "'./stall.py:app' names a file; name its module, as stall:app"),
        (["stall"], "'stall' is neither module:queue, as shop.jobs:queue, nor a storage's URL"),
        (["redis://user:secret@host/0"], "redis://host/0 is a storage, and has no handlers"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence, with status 2, and without a password."""
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "secret" not in error
    assert "Traceback" not in error or "broken" in arguments[0]


@pytest.mark.usefixtures("modules")
def test_tasks_that_others_declare_need_none_of_their_own_to_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Only who runs them needs some."""
    assert main(["stats", "idle:app"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--processes=none", "'none' is neither auto nor a number from 1 to 1000"),
        ("--memory-limit=1", "'1' is less than 16M"),
        ("--concurrency=0", "'0' is no whole number above 0"),
    ],
)
def test_wrong_options_are_refused(option: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "stall:queue", option])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


async def test_a_queue_that_no_process_can_run_ends_the_supervisor(shop: Shop) -> None:
    """The first one says why, once, and no other is started."""
    process = shop.start("run", "shop:nothing", "--processes", "3")
    assert await shop.ended(process) == 2
    assert shop.log.count("has no 'nothing'; it has queue") == 1


async def test_more_processes_than_the_server_admits_are_refused(shop: Shop, postgres_url: str) -> None:
    """With the arithmetic, before any of them works."""
    storage = SqlStorage(postgres_url)
    await storage.migrate()
    (shop.folder / "shop.py").write_text(SHOP.replace('f"file://{here}/jobs"', repr(postgres_url)))
    process = shop.start("run", "shop:queue", "--processes", "400")
    assert await shop.ended(process) == 2
    assert "open up to 6 connections each. That is 2406, and the server admits" in shop.log


async def test_the_program_of_the_manual_is_run(shop: Shop) -> None:
    """Its commands make the tables, and run a job that another command enqueues."""
    (shop.folder / "shop.py").write_text(examples(COMMANDS)["Run workers"])
    assert await shop.ended(shop.start("migrate", "shop:app")) == 0
    worker = shop.start("run", "shop:app", "--grace", "30s")
    await shop.until_ready(1)
    enqueue = ("enqueue", "shop:app", '{"to": "bob"}', "--name", "send")
    assert await shop.ended(shop.start(*enqueue, "--wait", "2m")) == 0
    assert worker.poll() is None
    assert "(send) attempt 1 of 3: completed after" in shop.log
