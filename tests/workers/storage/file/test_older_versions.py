"""Journals that older versions wrote, and what they make of ours.

`journals/version-N` is what the last version wrote whose journals were of version N at most.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import LEASES, described, journal_of, quarantined, reopened
from workers.clock import ManualClock
from workers.errors import StorageError
from workers.gates import HeldBack, Limit, LimitKey
from workers.jobs import (
    DROP,
    Cancelled,
    Completed,
    Continued,
    CronRow,
    JobOutcome,
    JobState,
    OutcomeKind,
    Released,
    Retried,
)
from workers.storage.file import FileStorage
from workers.storage.file import frames as file_frames
from workers.storage.file.codec import JobChanged, JobGone, decode
from workers.storage.file.frames import PREAMBLE_BYTES, Frame, Preamble, encode, scan
from workers.storage.file.limits import LimitDeclared
from workers.testing.steps import ERROR, continued, enqueue, job, status

CANCELLED = JobOutcome(kind=OutcomeKind.CANCELLED)
HOUR = timedelta(hours=1)
JOURNALS = Path(__file__).parent / "journals"


def frames_of(directory: Path) -> list[Frame]:
    """What the journal holds."""
    journal = journal_of(directory)
    preamble = Preamble.decode(journal.read_bytes()[:PREAMBLE_BYTES])
    assert preamble is not None
    with journal.open("rb") as content:
        return [one for one in scan(content.fileno(), preamble.marker, PREAMBLE_BYTES) if isinstance(one, Frame)]


@pytest.mark.parametrize("version", [1, 2])
async def test_journals_of_older_versions_are_read(version: int, tmp_path: Path) -> None:
    """All that is in them is there, and stays there when the first limit makes the journal one of a newer version."""
    journal_of(tmp_path).parent.mkdir()
    written = (JOURNALS / f"version-{version}").read_bytes()
    journal_of(tmp_path).write_bytes(written)
    storage = FileStorage(tmp_path, clock=ManualClock())
    await storage.connect()
    assert journal_of(tmp_path).read_bytes() == written
    states = {
        "done": JobState.COMPLETED,
        "failed": JobState.FAILED,
        "running": JobState.PROCESSING,
        "keyed": JobState.QUEUED,
        "later": JobState.SCHEDULED,
        "single": JobState.QUEUED,
        "cancelled": JobState.CANCELLED,
    } | ({"follows": JobState.WAITING} if version == 2 else {})
    assert {name: (await status(storage, name)).state for name in states} == states
    before = await described(storage)
    assert not await storage.remove_limit("none")
    assert journal_of(tmp_path).read_bytes() == written
    await storage.declare_limits({"api": Limit("1/s")})
    assert journal_of(tmp_path).read_bytes().startswith(b"workers-queue 3\n")
    await storage.disconnect()

    await storage.connect()
    assert await described(storage) == before | {
        "LimitDeclared api": LimitDeclared(name="api", limit=Limit("1/s")),
    }
    done, running = await storage.read(["done", "running"])
    assert done is not None
    assert done.result == b"\0result"
    assert running is not None
    assert running.status.encoded_progress == b"half"
    await storage.resume()
    assert [one.job_id for one in await storage.claim("w", leases=LEASES, limit=9)] == ["single"]
    await storage.complete("running", b"")
    following = [one.job_id for one in await storage.claim("w", leases=LEASES, limit=9)]
    assert following == ["keyed"] + ["follows"] * (version == 2)
    await storage.disconnect()
    assert quarantined(tmp_path) == []


async def test_a_journal_with_limits_and_crons_is_read(tmp_path: Path) -> None:
    """The limits, a bucket, a place, a turn and the rows of crons are as the first version wrote them that had any."""
    journal_of(tmp_path).parent.mkdir()
    journal_of(tmp_path).write_bytes((JOURNALS / "version-3").read_bytes())
    clock = ManualClock()
    storage = FileStorage(tmp_path, clock=clock)
    await storage.connect()
    assert await storage.declared_limits() == {"api": Limit("1/h", version=2), "slow": Limit(concurrency=1)}
    assert (await storage.crons()).rows == [
        CronRow(name="night", revision=2, due=clock.now() + 3 * HOUR, body='{"a": 2}'),
        CronRow(name="removed", revision=1, due=None, body='{"removed": true}'),
    ]
    claims = await storage.claim("w", leases=LEASES, limit=9)
    assert [one.job_id for one in claims] == ["fair-2", "plain", "tick", "fair-3"]
    assert await storage.held_back(["api-2", "slow-2"]) == [
        HeldBack("api", "key", clock.now() + HOUR),
        HeldBack("slow", "key", None),
    ]
    await storage.complete("slow-1", b"")
    clock.advance(HOUR)
    assert {one.job_id for one in await storage.claim("w", leases=LEASES, limit=9)} == {"api-2", "slow-2"}
    await storage.disconnect()
    assert quarantined(tmp_path) == []


async def limits(storage: FileStorage) -> None:
    await storage.declare_limits({"api": Limit("1/s")})


async def limit_keys(storage: FileStorage) -> None:
    await enqueue(storage, job("limited", limit_key=LimitKey("api")))


async def fair_keys(storage: FileStorage) -> None:
    await enqueue(storage, job("fair", fair_key="tenant"))


async def crons(storage: FileStorage) -> None:
    assert await storage.turn_cron(CronRow(name="cron", revision=1, due=None, body="{}"))


async def continuations(storage: FileStorage) -> None:
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await storage.settle([Continued(claim=held, then=job("first", limit_key=LimitKey("api")))])


async def next_jobs(storage: FileStorage) -> None:
    (held,) = await storage.claim("w", leases=LEASES, limit=1)
    await storage.settle([Completed(claim=held, result=b"", then=job("next", fair_key="tenant"))])


@pytest.mark.parametrize("step", [limits, limit_keys, fair_keys, crons, continuations, next_jobs])
async def test_limits_and_crons_make_a_journal_of_a_newer_version(
    step: Callable[[FileStorage], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that know neither refuse such a journal and leave it alone; our processes that have it open go on."""
    one, other = await reopened(tmp_path), FileStorage(tmp_path, fsync=False)
    await other.connect()
    await enqueue(one, job("first"))
    assert journal_of(tmp_path).read_bytes().startswith(b"workers-queue 1\n")
    await step(other)
    written = journal_of(tmp_path).read_bytes()
    assert written.startswith(b"workers-queue 3\n")
    assert await described(one) == await described(other)
    await one.disconnect()
    await other.disconnect()
    monkeypatch.delitem(file_frames._MAGICS, 3)
    with pytest.raises(StorageError, match="newer version"):
        await reopened(tmp_path)
    assert journal_of(tmp_path).read_bytes() == written
    assert quarantined(tmp_path) == []


async def test_what_is_refused_makes_no_newer_journal(tmp_path: Path) -> None:
    """A limit that no queue can have, and no limit at all, leave the journal as it was."""
    storage = await reopened(tmp_path)
    written = journal_of(tmp_path).read_bytes()
    with pytest.raises(ValueError, match="control characters"):
        await storage.declare_limits({"a\x1e": Limit("1/s")})
    await storage.declare_limits({})
    assert journal_of(tmp_path).read_bytes() == written
    await storage.disconnect()


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
        assert journal_of(folder).read_bytes().startswith(b"workers-queue 3\n")
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
