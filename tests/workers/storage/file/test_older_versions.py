"""Journals that a version wrote which kept no record of a cancelled job, and what it makes of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.workers.storage.file.steps import LEASES, journal_of, reopened
from workers.clock import ManualClock
from workers.jobs import DROP, Cancelled, Completed, JobOutcome, JobState, OutcomeKind, Released, Retried
from workers.storage.file import FileStorage
from workers.storage.file.codec import JobChanged, JobGone, decode
from workers.storage.file.frames import PREAMBLE_BYTES, Frame, Preamble, encode, scan
from workers.testing.steps import ERROR, continued, enqueue, job, status

CANCELLED = JobOutcome(kind=OutcomeKind.CANCELLED)
HOUR = timedelta(hours=1)


def frames_of(directory: Path) -> list[Frame]:
    """What the journal holds."""
    journal = journal_of(directory)
    preamble = Preamble.decode(journal.read_bytes()[:PREAMBLE_BYTES])
    assert preamble is not None
    with journal.open("rb") as content:
        return [one for one in scan(content.fileno(), preamble.marker, PREAMBLE_BYTES) if isinstance(one, Frame)]


async def test_a_tombstone_is_a_cancelled_job(tmp_path: Path) -> None:
    """Of a job that the journal tells of it makes a cancelled one, of another it says as much; both go in time."""
    clock = ManualClock()
    storage = FileStorage(tmp_path, clock=clock)
    await storage.connect()
    await enqueue(storage, job("known", payload=b"kept"))
    await storage.disconnect()
    until = clock.now() + HOUR
    number = (until - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    journal = journal_of(tmp_path)
    preamble = Preamble.decode(journal.read_bytes()[:PREAMBLE_BYTES])
    assert preamble is not None
    with journal.open("ab") as end:
        end.write(encode(preamble.marker, [("t", "5", name, number) for name in ("known", "unknown")], []))

    await storage.connect()
    found = await status(storage, "known")
    assert (found.state, found.finished_at) == (JobState.CANCELLED, clock.now())
    assert [await storage.result(name) for name in ("known", "unknown")] == [CANCELLED] * 2
    assert (await storage.counts())[JobState.CANCELLED] == 1
    assert await storage.retry(["known", "unknown"]) == 1
    (held,) = await storage.claim("w", leases=LEASES, limit=5)
    assert held.payload == b"kept"
    clock.advance(HOUR)
    assert await storage.result("unknown") is None
    assert await storage.sweep(10) == 1
    await storage.disconnect()


async def test_older_versions_read_ours_as_tombstones(tmp_path: Path) -> None:
    """Whether a job waited or ran, it ends with lines that they know: a failed job of which a tombstone is left."""
    storage = await reopened(tmp_path)
    await enqueue(storage, job("ran"))
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await enqueue(storage, job("waited"))
    await storage.cancel("waited")
    await storage.settle([Cancelled(claim=held)])
    await storage.disconnect()
    frames = frames_of(tmp_path)
    changes = [change for frame in frames for change in decode(frame) if isinstance(change, JobChanged | JobGone)]
    for name in ("ran", "waited"):
        *_, record, tombstone = (change for change in changes if change.id == name)
        assert isinstance(record, JobChanged)
        assert (record.state, record.events) == (JobState.FAILED, [])
        assert isinstance(tombstone, JobGone)
        assert tombstone.until == record.kept_until
        assert tombstone.until is not None


async def test_a_queue_with_waiting_jobs_is_of_a_newer_version(tmp_path: Path) -> None:
    """Older versions leave such a journal alone, and their processes that have it open are told; ours go on in it."""
    one, other = await reopened(tmp_path), FileStorage(tmp_path, fsync=False)
    await other.connect()
    await enqueue(one, job("first"))
    assert journal_of(tmp_path).read_bytes().startswith(b"workers-queue 1\n")
    await enqueue(other, replace(job("second"), after=("first",)))
    assert journal_of(tmp_path).read_bytes().startswith(b"workers-queue 2\n")
    (held,) = await one.claim("w", leases=LEASES, limit=5)
    assert (await status(one, "second")).waits_for == 1
    await one.settle([Completed(claim=held, result=b"")])
    assert [found.job_id for found in await other.claim("w", leases=LEASES, limit=5)] == ["second"]
    await one.disconnect()
    await other.disconnect()


async def test_a_queue_with_urgent_jobs_is_of_a_newer_version(tmp_path: Path) -> None:
    """Older versions would take such a priority for damage; also one that comes by an attempt's end."""
    for number in range(3):
        folder = tmp_path / str(number)
        storage = await reopened(folder)
        await enqueue(storage, job("first"))
        (held,) = await storage.claim("w", leases=LEASES, limit=1)
        assert journal_of(folder).read_bytes().startswith(b"workers-queue 1\n")
        if number == 0:
            await enqueue(storage, job("urgent", priority=-1))
        elif number == 1:
            await storage.settle([Completed(claim=held, result=b"", then=job("urgent", priority=-1))])
        else:
            await storage.settle([continued(held, priority=-1)])
        assert journal_of(folder).read_bytes().startswith(b"workers-queue 2\n")
        await storage.disconnect()
        again = await reopened(folder)
        assert [held.priority for held in await again.claim("w", leases=LEASES, limit=5)] == [-1]
        await again.disconnect()


async def test_older_versions_read_past_results(tmp_path: Path) -> None:
    """The result of a job that is gone comes last in its entry, and belongs to no blob."""
    storage = await reopened(tmp_path)
    await enqueue(storage, job("gone", keep=DROP))
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await storage.settle([Completed(claim=held, result=b"\xff")])
    await storage.disconnect()
    last = frames_of(tmp_path)[-1]
    assert (json.loads(last.entries), last.blobs) == ([["g", "2", "gone", "/w=="]], b"")


async def test_older_versions_read_past_failures(tmp_path: Path) -> None:
    """They take no notice of what comes last in an entry: in front of it there is no progress, as they read it."""
    storage = await reopened(tmp_path)
    await enqueue(storage, job("failed"), job("without"))
    held, other = await storage.claim("w", leases=LEASES, limit=2)
    await storage.settle([Retried(claim=held, delay=HOUR, error=ERROR), Released(claim=other)])
    await storage.disconnect()
    frames = frames_of(tmp_path)
    entries = {entry[2]: entry for frame in frames for entry in json.loads(frame.entries) if entry[0] in ("j", "s")}
    assert len(entries["failed"]) == len(entries["without"]) + 2
    assert entries["failed"][-2] is None
    again = await reopened(tmp_path)
    failed, without = await again.read(["failed", "without"])
    assert failed is not None
    assert without is not None
    assert ([one.attempt for one in failed.failures], without.failures) == ([1], ())
    await again.disconnect()
