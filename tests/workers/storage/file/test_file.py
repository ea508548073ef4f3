"""What is special about `FileStorage`: one directory for a queue, which every process reads and writes."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.workers.storage.file.steps import LEASES, MINUTE, described, reopened
from workers.errors import StorageUnavailable, Unsupported
from workers.jobs import DROP, Completed, Failed, JobState, OutcomeKind, Released, Retried, SettleStatus
from workers.retry import RetryPolicy
from workers.storage.base import Storage
from workers.storage.file import FileStorage
from workers.testing.steps import ERROR, job, next_claim


async def test_it_is_a_storage(tmp_path: Path) -> None:
    """`FileStorage` satisfies the protocol, says where it is, and makes a directory for its user alone."""
    storage: Storage = FileStorage(tmp_path / "a" / "b", "letters")
    assert storage.queue == "letters"
    assert repr(storage) == f"FileStorage('{tmp_path}/a/b', queue='letters')"
    await storage.connect()
    assert await storage.counts() == dict.fromkeys(JobState, 0)
    await storage.disconnect()
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "letters"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "letters" / "journal").stat().st_mode) == 0o600


async def test_wrong_use_is_refused(storage: FileStorage, tmp_path: Path) -> None:
    """A transaction, an empty queue name, a call before `connect` and one after `disconnect` say what is wrong."""
    with pytest.raises(Unsupported, match="leave `connection` out"):
        await storage.enqueue([job("a")], connection=object())
    with pytest.raises(ValueError, match="queue name"):
        FileStorage(tmp_path, "")
    unconnected = FileStorage(tmp_path)
    with pytest.raises(StorageUnavailable, match="not connected"):
        await unconnected.counts()
    await unconnected.connect()
    await unconnected.disconnect()
    await unconnected.disconnect()
    with pytest.raises(StorageUnavailable, match="not connected"):
        await unconnected.claim("w", leases=LEASES, limit=1)


async def test_a_disconnect_closes_every_file(tmp_path: Path) -> None:
    """A program may open any number of queues, one after the other."""
    storage = await reopened(tmp_path)
    await storage.disconnect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        await storage.connect()
        await storage.enqueue([job(f"job-{number}")])
        await storage.disconnect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("queue", ["a/../../b", ".", "..", "journal\n", "\0", "Ä", "UPPER", "x" * 500, "🦊" * 100])
async def test_queue_names_are_no_paths(tmp_path: Path, queue: str) -> None:
    """Whatever a queue is called, it lives in one directory below the storage's, apart from all others."""
    storage = FileStorage(tmp_path / "root", queue)
    await storage.connect()
    await storage.enqueue([job("a")])
    await storage.disconnect()
    (made,) = os.listdir(tmp_path / "root")
    assert re.fullmatch("~[0-9a-f]{64}", made)
    assert os.listdir(tmp_path) == ["root"]


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Jobs in every state, results, errors, workers, the pause: a fresh process has them as they were."""
    storage = await reopened(tmp_path)
    everything: dict[str, Any] = {
        "backoff": RetryPolicy(jitter=0.5),
        "ordering_key": "k",
        "priority": 3,
        "keep_completed": DROP,
    }
    await storage.enqueue([job(f"job-{number}") for number in range(7)])
    await storage.enqueue([job("rich", payload=b"\0\xff", **everything), job("later", delay=timedelta(days=1))])
    claims = await storage.claim("worker \n", leases=LEASES, limit=6)
    await storage.settle(
        [
            Completed(claim=claims[0], result=b"\0result", then=job("continued", payload=b"more")),
            Completed(claim=claims[1], result=b"", keep=DROP),
            Failed(claim=claims[2], error=ERROR),
            Retried(claim=claims[3], delay=MINUTE, error=ERROR, counted=False),
            Released(claim=claims[4]),
        ]
    )
    await storage.cancel("job-6")
    await storage.cancel("job-5")
    await storage.pause()
    before = await described(storage)
    await storage.disconnect()
    storage = await reopened(tmp_path)
    assert await described(storage) == before
    assert len(before) >= 12
    await storage.resume()
    (renewed,) = (await storage.renew([claims[5]])).cancel_requested
    assert renewed == claims[5].token
    assert (await storage.settle([Completed(claim=claims[0], result=b"")]))[0].status is SettleStatus.ALREADY_APPLIED
    cancelled = await storage.result("job-6")
    assert cancelled is not None
    assert cancelled.kind is OutcomeKind.CANCELLED
    left = await storage.claim("w", leases=LEASES, limit=10)
    assert {claim.job_id: claim.payload for claim in left} == {
        "job-4": b"{}",
        "rich": b"\0\xff",
        "continued": b"more",
    }
    await storage.disconnect()


async def test_a_step_that_raises_spoils_nothing(storage: FileStorage) -> None:
    """A wrong argument is the caller's error alone, with others' steps in the same group written as ever."""
    results = await asyncio.gather(
        storage.enqueue([job("a")]),
        storage.clean(JobState.QUEUED, older_than=timedelta(0)),
        storage.claim("", leases=LEASES, limit=1),
        storage.enqueue([job("c")]),
        return_exceptions=True,
    )
    assert [isinstance(result, Exception) for result in results] == [False, True, True, False]
    assert [found is not None for found in await storage.status(["a", "c"])] == [True, True]


async def test_a_cancelled_claim_is_given_back(storage: FileStorage) -> None:
    """A claim whose caller was cancelled holds no job."""
    await storage.enqueue([job("a")])
    claiming = asyncio.create_task(storage.claim("w", leases=LEASES, limit=1))
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert (await next_claim(storage)).attempt == 1


def test_event_loops_of_one_process_share_the_queue(tmp_path: Path) -> None:
    """A storage used by one event loop after another works in each, and leaves no thread behind."""

    async def use(number: int) -> int:
        storage = await reopened(tmp_path)
        await storage.enqueue([job(f"job-{number}")])
        count = (await storage.counts())[JobState.QUEUED]
        await storage.disconnect()
        return count

    assert [asyncio.run(use(number)) for number in range(3)] == [1, 2, 3]


async def test_an_idle_wait_reads_nothing_again(storage: FileStorage) -> None:
    """While nothing is written, a sleeping wait looks at the journal's size and not into it."""
    await storage.enqueue([job("far", payload=bytes(1 << 20), delay=MINUTE)])
    before = bytes_read()
    await storage.wait(["work"], timeout=timedelta(milliseconds=500))
    assert bytes_read() - before < 100_000


def bytes_read() -> int:
    """How much this process has read so far, from anywhere."""
    return int(Path("/proc/self/io").read_text().split()[1])
