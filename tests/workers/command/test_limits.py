"""Commands that tell of limits: how many jobs they keep back, by which one, and how one is removed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.command.conftest import Command
from workers import JobSpec, Limit, Queue
from workers.storage.sql import SqlStorage

SHOP = """
from workers import Limit, Queue, QueueOptions

queue = Queue("{url}", options=QueueOptions(limits={{"send": Limit("5/h")}}))
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'limits.db'}"


@pytest.fixture
async def queue(url: str) -> AsyncIterator[Queue]:
    storage = SqlStorage(url)
    await storage.migrate()
    queue = Queue(storage)
    yield queue
    await queue.stop()


@pytest.fixture
async def busy(queue: Queue) -> Queue:
    """A queue in which a mail to Ann runs, and a second one waits; a report waits for nothing."""
    queue.declare_limits({"send": Limit("1/d", concurrency=1), "*": Limit(concurrency=50)})
    await queue.enqueue(1, name="send", id="one", limit_key="ann")
    assert len(await queue.storage.claim("worker", leases={"*": queue.lease}, limit=9)) == 1
    await queue.enqueue(2, name="send", id="two", limit_key="ann")
    await queue.enqueue(3, name="report", id="three")
    return queue


async def test_a_job_that_a_limit_keeps_back_says_so(url: str, busy: Queue, command: Command) -> None:
    """With the limit, its key, and what it waits for; beside others that wait for nothing."""
    waits = "for limit 'send' of key 'ann', until another one ends"
    _, shown, _ = await command("show", url, "two", "--json")
    assert json.loads(shown)["waits"] == waits
    assert "waits" not in json.loads((await command("show", url, "one", "--json"))[1])
    told = {job["id"]: job.get("waits") for job in json.loads((await command("list", url, "--json"))[1])}
    assert told == {"one": None, "two": waits, "three": None}
    lines = {line.split()[0]: line for line in (await command("list", url))[1].splitlines()}
    assert lines["two"].endswith(f"waits {waits}")
    assert "waits" not in lines["one"] + lines["three"]


async def test_what_limits_keep_back_is_counted(url: str, busy: Queue, command: Command) -> None:
    """By `stats`, `top` and `limits list` alike; each limit with its numbers."""
    stats = json.loads((await command("stats", url, "--json"))[1])
    listed = json.loads((await command("limits", "list", url, "--json"))[1])
    assert stats["limits"] == listed
    assert listed == [
        {"name": "*", "rate": None, "burst": None, "concurrency": 50, "version": 0, "held_back": 0, "looked_at": 2},
        {"name": "send", "rate": "1/d", "burst": None, "concurrency": 1, "version": 0, "held_back": 1, "looked_at": 2},
    ]
    table = "limit  rate  burst  at once  keeps back\n*                   50       0\nsend   1/d          1        1\n"
    assert (await command("limits", "list", url))[:2] == (0, table)
    assert table in (await command("stats", url))[1]
    assert table in (await command("top", url, "--interval", "100ms", "--times", "1"))[1]


async def test_no_more_than_some_jobs_are_looked_at(queue: Queue) -> None:
    """And whoever asks is told that there are more."""
    queue.declare_limits({"send": Limit(concurrency=1), "*": Limit(concurrency=1)})
    await queue.enqueue_many(JobSpec(payload=at, name="send", limit_key="ann", priority=at) for at in range(5))
    assert len(await queue.storage.claim("worker", leases={"*": queue.lease}, limit=9)) == 1
    some, everything = await queue.manage.throttled(most=2), await queue.manage.throttled()
    assert (some.by_limit, some.looked_at, some.is_all) == ({"send": 2}, 2, False)
    assert (everything.by_limit, everything.looked_at, everything.is_all) == ({"send": 4}, 4, True)


async def test_a_limit_is_removed(url: str, busy: Queue, command: Command) -> None:
    """With a status of 1 where there is none of that name."""
    assert (await command("limits", "remove", url, "send")) == (0, "removed: send\n", "")
    assert "waits" not in json.loads((await command("show", url, "two", "--json"))[1])
    assert (await command("limits", "remove", url, "se\x1bnd")) == (1, "", "there is no limit called se\\x1bnd\n")
    assert (await command("limits", "remove", url, "*", "--json"))[0] == 0
    assert (await command("limits", "list", url)) == (1, "", "there are no limits here\n")


async def test_what_is_removed_stays_so_for_whoever_looks(
    url: str, queue: Queue, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code that the command imports declares the limit, and this alone does not store it again."""
    (tmp_path / "limited_shop.py").write_text(SHOP.format(url=url))
    monkeypatch.syspath_prepend(str(tmp_path))
    queue.declare_limits({"send": Limit("9/h")})
    assert set(await queue.manage.limits()) == {"send"}
    assert "9/h" in (await command("limits", "list", "limited_shop:queue"))[1]
    assert (await command("limits", "remove", "limited_shop:queue", "send"))[0] == 0
    assert (await command("limits", "list", "limited_shop:queue"))[0] == 1


async def test_a_queue_without_limits_is_not_asked(tmp_path: Path, command: Command) -> None:
    """Nor is one whose storage has none."""
    url = f"file://{tmp_path}/jobs"
    assert (await command("enqueue", url, "--id", "one"))[0] == 0
    assert json.loads((await command("stats", url, "--json"))[1])["limits"] == []
    assert "keeps back" not in (await command("stats", url))[1]
    assert (await command("limits", "list", url)) == (1, "", "there are no limits here\n")
    assert (await command("limits", "remove", url, "send"))[0] == 1
