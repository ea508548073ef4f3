"""Disks that fill up, fail or vanish, places that cannot be, and locks that are not given back."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import LEASES, child, journal_of, killed_at_the_end, known
from workers.errors import StorageError, StorageUnavailable
from workers.jobs import Completed, SettleStatus
from workers.storage.file import FileStorage
from workers.storage.file import journal as file_journal
from workers.storage.file.directory import QueueDirectory, translate
from workers.testing.steps import job


async def test_a_full_disk_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """When files may not grow, each step works or fails whole; with room again, the same process works on."""
    process = child("fill", tmp_path)
    with killed_at_the_end(process):
        output = (await asyncio.to_thread(process.communicate))[0].splitlines()
    enqueued = [words.split()[1] for words in output if words.startswith("enqueued")]
    failures = [words for words in output if words.startswith("failed")]
    assert len(enqueued) + len(failures) == 30
    assert len(enqueued) >= 5
    assert failures
    assert all("StorageUnavailable" in words and "may not grow any more" in words for words in failures)
    assert output[-1] == f"waiting {3 * len(enqueued) + 1}"
    ids = [f"{number}-{part}" for number in range(30) for part in range(3)]
    expected = [job_id for job_id in ids if job_id.partition("-")[0] in enqueued]
    assert await known(tmp_path, *ids, "after") == [*expected, "after"]
    assert not (tmp_path / "default" / "quarantine").exists()


async def test_a_failed_write_leaves_the_storage_usable(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk refuses to make a step safe, nothing of it is seen; claims and settlements can be repeated."""
    await storage.enqueue([job("a"), job("b")])

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    size = journal_of(tmp_path).stat().st_size
    with monkeypatch.context() as broken:
        broken.setattr(file_journal, "_sync", refuse)
        with pytest.raises(StorageUnavailable) as raised:
            await storage.claim("w", leases=LEASES, limit=1)
        assert isinstance(raised.value.__cause__, OSError)
        assert journal_of(tmp_path).stat().st_size == size
    other = FileStorage(tmp_path, fsync=False)
    await other.connect()
    async with storage.events() as subscription:
        with monkeypatch.context() as broken:
            broken.setattr(file_journal, "_sync", refuse)
            with pytest.raises(StorageUnavailable):
                await storage.enqueue([job("never")])
            await other.cancel("b")
        (claim,) = await storage.claim("w", leases=LEASES, limit=1)
        assert (claim.job_id, claim.attempt) == ("a", 1)
        heard = [await subscription.get() for _ in range(2)]
        assert [(event.kind.value, event.job_id) for event in heard] == [("cancelled", "b"), ("active", "a")]
    await other.disconnect()
    with monkeypatch.context() as broken:
        broken.setattr(file_journal, "_sync", refuse)
        with pytest.raises(StorageUnavailable):
            await storage.settle([Completed(claim=claim, result=b"", then=job("c"))])
    assert await storage.status(["c"]) == [None]
    assert (await storage.settle([Completed(claim=claim, result=b"")]))[0].status is SettleStatus.APPLIED


async def test_a_deleted_queue_is_an_error(storage: FileStorage, tmp_path: Path) -> None:
    """Deleting the journal under a running process is reported, by calls and waits alike, and no new one is begun."""
    journal_of(tmp_path).unlink()
    with pytest.raises(StorageError, match="deleted while in use"):
        await storage.enqueue([job("a")])
    with pytest.raises(StorageError, match="deleted while in use"):
        await storage.wait(["*"], timeout=timedelta(hours=1))
    assert not journal_of(tmp_path).exists()


async def test_a_place_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    """A file where the directory should be says so at `connect`."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="a part of its path is a file"):
        await FileStorage(tmp_path / "file").connect()


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.ENOSPC, StorageUnavailable, "the disk is full"),
        (errno.EDQUOT, StorageUnavailable, "quota"),
        (errno.EFBIG, StorageUnavailable, "limit of file sizes"),
        (errno.EROFS, StorageError, "read-only"),
        (errno.EACCES, StorageError, "permission denied"),
        (errno.EPERM, StorageError, "permission denied"),
        (errno.EIO, StorageUnavailable, "Input/output error"),
        (errno.EMFILE, StorageUnavailable, "Too many open files"),
    ],
)
def test_errors_by_their_number(code: int, kind: type, advice: str) -> None:
    """Each refusal of the operating system says what is wrong, where, and whether waiting may help."""
    ours = translate(OSError(code, os.strerror(code)), "/some/queue")
    assert type(ours) is kind
    assert str(ours).startswith("/some/queue: ")
    assert advice in str(ours)


def test_a_lock_that_is_held_too_long(tmp_path: Path) -> None:
    """When another process keeps the lock, the caller hears so after the timeout; given back, it can be had."""
    directory = QueueDirectory(tmp_path, sync=True, busy_timeout=timedelta(milliseconds=30))
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(StorageUnavailable, match="another process held the lock"), directory.locked():
        pass
    os.close(other)
    with directory.locked():
        directory.synchronise()
    directory.close()
