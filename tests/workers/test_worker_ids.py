"""What the id of a worker tells: where it runs, and since when."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta

import pytest

from tests.patience import eventually
from tests.workers.running import running
from workers.jobs import WorkerInfo, new_worker_id
from workers.queue import Queue
from workers.testing import Harness
from workers.worker.worker import Worker

NOW = datetime.now(UTC)
TIMED = "0198c5a0-0000-7000-8000-000000000000"


def seen(worker_id: str) -> WorkerInfo:
    return WorkerInfo(id=worker_id, seen_at=NOW, claims=0)


async def test_each_storage_tells_where_its_workers_run(harness: Harness) -> None:
    """By the ids that they take for themselves."""
    storage = await harness.open()
    began = datetime.now(UTC)
    worker = Worker(storage, {"*": lambda job: None})
    async with running(worker):
        [found] = await eventually(Queue(storage).manage.workers, bool)
    assert found.id == worker.worker_id
    assert found.origin is not None
    assert (found.origin.host, found.origin.pid) == (socket.gethostname(), os.getpid())
    assert abs(found.origin.since - began) < timedelta(seconds=5)


@pytest.mark.parametrize(
    "other",
    [
        *("", "w", "mail-1", "1:2:3"),
        TIMED,
        f"web-1:x:{TIMED}",
        f"web-1:-4:{TIMED}",
        f"web-1: 4:{TIMED}",
        f"web-1:4:{{{TIMED}}}",
        "web-1:4:0b9d6a3e-4f0e-4b8e-9d0e-2f1e6c1f7a11",
        "web-1:4:ffffffff-ffff-7fff-bfff-ffffffffffff",
    ],
)
def test_other_ids_tell_nothing(other: str) -> None:
    """Those that an application has chosen, or a worker of Node's, or a time that no calendar has."""
    assert seen(other).origin is None


def test_an_id_names_its_host_its_process_and_its_time() -> None:
    """As logs and lists show them."""
    origin = seen(f"web-1:4711:{TIMED}").origin
    assert origin is not None
    assert (origin.host, origin.pid, origin.since.year) == ("web-1", 4711, 2025)


def test_any_host_has_a_name_that_an_id_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With colons, without end, or in other letters."""
    for host, told in (("fe80::1", "fe80::1"), ("h" * 400, "h" * 63), ("b\u00fcro\x1b", "b?ro?")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        origin = seen(new_worker_id()).origin
        assert origin is not None
        assert origin.host == told
