"""What is done under which name, on every storage: counted exactly, or with a plus."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator

import pytest

from tests.patience import eventually
from tests.workers.conftest import harness as each_storage
from tests.workers.dashboard.browsing import Person
from workers.dashboard import task_pages
from workers.dashboard.access import Access
from workers.dashboard.application import queue_site
from workers.dashboard.catalog import QueueCatalog
from workers.dashboard.task_pages import look_at_tasks
from workers.errors import UnrecoverableError
from workers.jobs import JobState
from workers.queue import Queue
from workers.specs import JobSpec
from workers.storage import open_storage
from workers.testing import Harness

harness = each_storage
HOSTILE = "<b>\u202e"


async def send(_job: object) -> None:
    pass


async def fail(_job: object) -> None:
    raise UnrecoverableError("never")


@pytest.fixture
async def worked(harness: Harness) -> AsyncIterator[Queue]:
    """A queue whose worker has done some, and that keeps what completed."""
    storage = await harness.open()
    queue = Queue(await harness.open(storage.queue))
    queue.execute({"send": send, "fail": fail})
    await queue.start()
    await queue.enqueue_many([JobSpec(payload=1, name=name) for name in ("send", "fail", "send", "fail", "send")])

    async def ended() -> int:
        counts = await queue.counts()
        return counts[JobState.COMPLETED] + counts[JobState.FAILED]

    await eventually(ended, lambda number: number == 5)
    yield queue
    await queue.stop()


async def test_names_are_counted_on_every_storage(worked: Queue) -> None:
    """With how long they took; those that failed come first."""
    look = await look_at_tasks(QueueCatalog([worked]))
    assert [(line.name, line.failed, line.counts[JobState.COMPLETED]) for line in look.lines] == [
        ("fail", 2, 0),
        ("send", 0, 3),
    ]
    failing, sending = look.lines
    assert failing.is_exact
    assert (failing.p50_ms, failing.ended_last_hour) == (None, 0)
    assert sending.p50_ms is not None
    assert sending.p95_ms is not None
    assert 0 <= sending.p50_ms <= sending.p95_ms


async def test_a_queue_that_has_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are read, whatever there is; what is not known is not told."""
    monkeypatch.setattr(task_pages, "MOST_READ", 70)
    async with Queue(open_storage(f"memory://{uuid.uuid4().hex}", queue="mail")) as queue:
        await queue.enqueue_many([JobSpec(payload=1, name=HOSTILE) for _ in range(25)])
        [line] = (await look_at_tasks(QueueCatalog([queue]))).lines
        assert (line.counts[JobState.QUEUED], line.is_exact) == (10, False)
        site, _ = queue_site([queue], access=Access())
        page = await Person(site.app).sees("/tasks")
        await site.close()
    assert re.search(r'<td class="number">10\+</td>', page)
    assert "&lt;b&gt;\\u202e" in page


async def test_a_queue_that_is_away_says_so() -> None:
    """The others are shown."""
    away = Queue(open_storage("redis://127.0.0.1:1/0", queue="away"))
    async with Queue(open_storage(f"memory://{uuid.uuid4().hex}", queue="mail")) as queue:
        await queue.enqueue(1)
        look = await look_at_tasks(QueueCatalog([away, queue]))
    assert [line.queue for line in look.lines] == ["mail"]
    assert list(look.problems) == ["away"]
    await away.stop()
