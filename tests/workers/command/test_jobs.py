"""Commands about jobs, by a storage's URL and by the name of a queue."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.patience import until
from tests.workers.command.conftest import Command, Shop
from workers import JobState, Queue, UnrecoverableError
from workers.clock import ManualClock
from workers.command import main
from workers.command.durations import parse_duration
from workers.crons import Cron
from workers.storage import open_storage
from workers.storage.file import FileStorage
from workers.storage.sql import SqlStorage
from workers.testing import steps
from workers.worker.handlers import Job


async def _settled(url: str) -> None:
    """A queue with one completed job and one that failed."""

    async def handle(job: Job) -> object:
        if job.name == "refuse":
            raise UnrecoverableError("no \x1b[31msuch recipient")
        return {"sent": job.payload}

    queue = Queue(open_storage(url))
    queue.execute({"*": handle})
    async with queue:
        await queue.enqueue("bob", name="send", id="sent")
        await queue.enqueue(None, name="refuse", id="refused")
        await until(lambda: _is_over(queue))


async def _is_over(queue: Queue) -> bool:
    counts = await queue.counts()
    return counts[JobState.COMPLETED] == counts[JobState.FAILED] == 1


@pytest.fixture(params=["file", "sqlite"])
async def url(request: pytest.FixtureRequest, tmp_path: Path, command: Command) -> str:
    url = {"file": f"file://{tmp_path}/jobs", "sqlite": f"sqlite:///{tmp_path}/jobs.db"}[request.param]
    if request.param == "sqlite":
        assert await command("migrate", url) == (0, "the tables are ready\n", "")
    return url


@pytest.mark.spread("url")
async def test_a_job_is_enqueued_listed_and_cancelled(url: str, command: Command) -> None:
    """A second one of its id is a duplicate, as everywhere."""
    assert await command("enqueue", url, '{"to": "bob"}', "--name", "send", "--id", "mail", "--delay", "1h") == (
        0, "queued: mail\n", "")  # fmt: skip
    assert (await command("enqueue", url, "--id", "mail"))[:2] == (0, "duplicate: mail\n")
    status, listed, _ = await command("list", url, "--state", "scheduled")
    assert status == 0
    assert [line.split()[:4] for line in listed.splitlines()] == [
        ["id", "name", "state", "attempt"],
        ["mail", "send", "scheduled", "0/3"],
    ]
    assert await command("list", url, "--name", "other") == (1, "", "no such jobs\n")
    assert await command("cancel", url, "mail", "none") == (0, "mail  cancelled\nnone  not found\n", "")
    assert (await command("cancel", url, "none"))[0] == 1


@pytest.mark.spread("url")
async def test_what_became_of_jobs_is_shown_and_failed_ones_are_retried(url: str, command: Command) -> None:
    """With result, or error and stack; what an error says cannot control the terminal."""
    await _settled(url)
    _, shown, _ = await command("show", url, "sent", "--json")
    sent = json.loads(shown)
    assert (sent["state"], sent["result"], sent["attempt"]) == ("completed", {"sent": "bob"}, 1)
    status, shown, _ = await command("show", url, "refused")
    assert status == 0
    assert "UnrecoverableError: no \\x1b[31msuch recipient" in shown
    assert "  Traceback" in shown or "  File" in shown
    assert "\x1b" not in shown + (await command("list", url))[1]
    assert (await command("show", url, "none"))[0] == 1
    assert (await command("retry", url, "--all", "--error", "ValueError"))[:2] == (1, "queued again: 0\n")
    assert (await command("retry", url, "--all", "--name", "refuse"))[:2] == (0, "queued again: 1\n")
    assert (await command("retry", url, "sent"))[0] == 1
    async with Queue(open_storage(url)) as queue:
        await queue.enqueue(None, id="marked", meta={"tenant": "x\x1b"})
    assert json.loads((await command("show", url, "marked", "--json"))[1])["meta"] == {"tenant": "x\x1b"}
    assert '{"tenant": "x\\u001b"}' in (await command("show", url, "marked"))[1]
    await command("cancel", url, "marked")
    _, counted, _ = await command("stats", url, "--json")
    stats = json.loads(counted)
    assert (stats["counts"]["queued"], stats["counts"]["completed"], stats["paused"]) == (1, 1, False)
    _, counted, _ = await command("stats", url)
    assert counted.splitlines()[0].split() == ["queued", "1"]


async def test_a_result_is_waited_for(
    shop: Shop, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The queue may be named as in the code; a payload may come from stdin; a failure has status 1."""
    monkeypatch.syspath_prepend(str(tmp_path))
    process = shop.start("run", "shop:queue")
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2]"))
    status, result, _ = await command("enqueue", "shop:queue", "-", "--name", "who", "--wait", "2m")
    assert (status, json.loads(result)) == (0, [process.pid, 1])
    status, _, error = await command("enqueue", shop.url, "--name", "refuse", "--wait", "2m")
    assert status == 1
    assert "no such recipient" in error


async def test_top_shows_what_goes_on(shop: Shop, command: Command) -> None:
    """Counts, rates, workers and running jobs; elsewhere than in a terminal, one look after the other."""
    shop.start("run", "shop:queue")
    await shop.queue.enqueue(None, name="hang", id="hangs")
    await until(lambda: [*shop.folder.glob("hangs-*")])
    status, shown, _ = await command("top", shop.url, "--interval", "100ms", "--times", "2")
    assert status == 0
    assert shown.count("per second: queued ") == 2
    assert "\x1b" not in shown
    (running,) = {line.split()[0] for line in shown.splitlines() if "hang " in line}
    assert running == "hangs"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["stats", "nosql://host/0"], "a storage's URL begins with one of"),
        (["stats", "memory://"], "keeps its jobs in the process that works"),
        (["stats", "sqlite:///{folder}/none.db"], "by `python -m workers migrate URL`"),
        (["stats", "redis://user:secret@127.0.0.1:1/0"], "StorageUnavailable"),
        (["migrate", "file://{folder}/jobs"], "has no tables, and needs none"),
        (["enqueue", "file://{folder}/jobs", "bob"], "the payload is no JSON"),
        (["enqueue", "file://{folder}/jobs", "--priority", "-5000000"], "priority"),
        (["retry", "file://{folder}/jobs"], "name the ids of the jobs to retry, or --all"),
        (["retry", "file://{folder}/jobs", "one", "--all"], "and not both"),
    ],
)
async def test_what_cannot_be_done_is_said(arguments: list[str], told: str, command: Command, tmp_path: Path) -> None:
    """With status 2, and without a password."""
    status, _, error = await command(*(each.format(folder=tmp_path) for each in arguments))
    assert status == 2
    assert told in error
    assert "Traceback" not in error
    assert "secret" not in error


async def test_tasks_check_a_payload_and_know_their_names(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit is not stored; a name that none of them has is stored, and warned of."""
    lines = [
        "from workers import Queue, Tasks",
        f"tasks = Tasks(Queue('file://{tmp_path}/jobs'))",
        "@tasks.task",
        "async def mail(user_id: int) -> None: ...",
    ]
    (tmp_path / "post_office.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    status, _, error = await command("enqueue", "post_office:tasks", '{"user_id": "secret"}', "--name", "mail")
    assert (status, "task 'mail': user_id: " in error, "secret" in error) == (2, True, False)
    assert (await command("enqueue", "post_office:tasks", '{"user_id": 3}', "--name", "mail"))[0] == 0
    assert "handlers here are for" not in caplog.text
    assert (await command("enqueue", "post_office:tasks", "--name", "post"))[0] == 0
    assert "a job named 'post' is enqueued in queue 'default', whose handlers here are for ['mail']" in caplog.text
    _, counted, _ = await command("stats", "post_office:tasks", "--json")
    assert json.loads(counted)["counts"]["queued"] == 2


async def test_a_worker_that_is_not_heard_of_is_told_apart(command: Command, tmp_path: Path) -> None:
    """It may have died; those that stopped are not there."""
    clock = ManualClock(datetime.now(UTC) - timedelta(minutes=5))
    storage = FileStorage(tmp_path / "jobs", clock=clock)
    await storage.connect()
    await steps.claim(storage, worker_id="died")
    clock.advance(timedelta(minutes=5))
    await steps.claim(storage, worker_id="lives")
    await storage.disconnect()
    url = f"file://{tmp_path}/jobs"
    _, told, _ = await command("stats", url)
    assert re.search(r"died +0 running +not heard of for 5m", told)
    assert re.search(r"lives +0 running +seen \ds ago", told)
    _, told, _ = await command("stats", url, "--json")
    assert {each["id"]: each["silent"] for each in json.loads(told)["workers"]} == {"died": True, "lives": False}


async def test_a_missing_package_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what installs it."""
    for loaded in [name for name in sys.modules if name.startswith("workers.storage.redis")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "msgpack", None)
    status, _, error = await command("stats", "redis://127.0.0.1/0")
    assert status == 2
    assert "pip install 'federation-delivery[redis]'" in error


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for name in ("run", "enqueue", "list", "show", "retry", "cancel", "stats", "top", "migrate", "crons", "limits"):
        assert f"\n    {name} " in told


def test_only_the_standard_library_is_needed() -> None:
    """With a queue in files, as everywhere in this package."""
    program = (
        "import sys; from workers.command import main\n"
        "try:\n    main(['stats', 'file:///tmp/none-such'])\nfinally:\n"
        "    known = sys.stdlib_module_names | {'workers', '__main__'}\n"
        "    found = {n.partition('.')[0] for n in sys.modules} - known\n"
        "    print(*sorted(n for n in found if not n.startswith('_sysconfigdata')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True, text=True, env={"PYTHONPATH": str(Path(__file__).parents[3])}, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "", done.stdout + done.stderr


def test_durations() -> None:
    assert [parse_duration(text).total_seconds() for text in ("250ms", "30s", "10m", "2h", "1d")] == [
        0.25, 30, 600, 7200, 86400]  # fmt: skip


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1.5h", "1w", "9999999999s", "²s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)


async def test_what_recurs_is_listed_paused_resumed_run_and_removed(command: Command, tmp_path: Path) -> None:
    """With a status of 1 where there is nothing of that name."""
    url = f"sqlite:///{tmp_path}/jobs.db?queue=mail"
    storage = open_storage(url)
    assert isinstance(storage, SqlStorage)
    await storage.migrate()
    assert (await command("crons", "list", url))[0] == 1
    queue = Queue(storage)
    queue.crons.add(Cron(name="night\x1b[31m", job="clean", pattern="0 3 * * *", timezone="Europe/Berlin"))
    await queue.crons.declare()
    await queue.stop()

    status, out, _ = await command("crons", "list", url)
    assert (status, "\x1b" in out) == (0, False)
    assert "0 3 * * * Europe/Berlin" in out
    name = "night\x1b[31m"
    assert (await command("crons", "pause", url, name))[0] == 0
    told = json.loads((await command("crons", "list", url, "--json"))[1])
    assert [(one["name"], one["paused"], one["due"], one["version"]) for one in told] == [(name, True, None, 1)]
    assert (await command("crons", "resume", url, name))[0] == 0
    assert (await command("crons", "run", url, name))[1].startswith("queued: cron:night")
    assert "clean" in (await command("list", url, "--state", "queued"))[1]
    assert (await command("crons", "remove", url, name))[0] == 0
    for verb in ("pause", "resume", "run", "remove"):
        assert (await command("crons", verb, url, name))[0] == 1


async def test_what_recurs_on_bullmq_is_listed_run_and_removed(command: Command, redis_url: str) -> None:
    """Its job schedulers cannot be paused, which is told with a status of 2."""
    name = f"crons-{uuid.uuid4().hex}"
    url = f"bullmq+{redis_url}?queue={name}"
    queue = Queue(open_storage(url))
    queue.crons.add(Cron(name="night", job="clean", pattern="0 3 * * *", timezone="Europe/Berlin", version=3))
    await queue.crons.declare()
    await queue.stop()

    told = json.loads((await command("crons", "list", url, "--json"))[1])
    assert [(one["name"], one["paused"], one["version"], one["missed"]) for one in told] == [
        ("night", False, 3, "once")
    ]
    assert "0 3 * * * Europe/Berlin" in (await command("crons", "list", url))[1]
    for verb in ("pause", "resume"):
        status, _, err = await command("crons", verb, url, "night")
        assert (status, "cannot pause what recurs" in err) == (2, True)
    assert (await command("crons", "run", url, "night"))[1].startswith("queued: cron:night:now:")
    assert (await command("crons", "remove", url, "night"))[0] == 0
    assert (await command("crons", "list", url))[0] == 1
