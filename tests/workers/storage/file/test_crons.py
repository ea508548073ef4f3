"""What recurs, in a journal: a tick and its jobs are there together, whatever becomes of the process and the file."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import LEASES, child, journal_of, killed_at_the_end, line, reopened
from workers import Queue
from workers.clock import ManualClock
from workers.crons import Cron
from workers.errors import UnknownDependency
from workers.jobs import DROP, Completed, CronRow, JobState
from workers.storage.file import FileStorage
from workers.storage.file import journal as file_journal
from workers.testing.steps import job

NIGHT = Cron(name="night", job="work", pattern="0 3 * * *")


def row(revision: int, name: str = "cron", body: str = "{}") -> CronRow:
    """A row that is never due."""
    return CronRow(name=name, revision=revision, due=None, body=body)


async def ticks(storage: FileStorage) -> list[str]:
    """The ids of all jobs that wait."""
    return sorted(found.id for found in (await storage.list(JobState.QUEUED, limit=10_000)).jobs)


async def test_what_recurs_survives_a_restart_and_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as they were, when they are due, what was paused, and that one was removed, which no declaration undoes."""
    clock = ManualClock()
    queue = Queue(FileStorage(tmp_path, clock=clock))
    for name in ("night", "paused", "removed"):
        queue.crons.add(replace(NIGHT, name=name))
    await queue.crons.declare()
    await queue.crons.pause("paused")
    await queue.crons.remove("removed")
    before = await queue.crons.list()
    assert [(one.cron.name, one.paused, one.due is None) for one in before] == [
        ("night", False, False),
        ("paused", True, True),
    ]
    marker = journal_of(tmp_path).read_bytes()[16:24]
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 0)
    await queue.enqueue({"much": "x" * 10_000}, name="work")
    await queue.storage.pause()
    assert journal_of(tmp_path).read_bytes()[16:24] != marker
    await queue.stop()

    again = Queue(FileStorage(tmp_path, clock=clock))
    again.crons.add(replace(NIGHT, name="removed"))
    await again.crons.declare()
    assert await again.crons.list() == before
    await again.stop()


async def test_a_torn_tick_has_not_happened(tmp_path: Path) -> None:
    """Cut at any byte of a tick, the journal has neither the new row nor its jobs; once more, it has both."""
    storage = await reopened(tmp_path / "whole")
    await storage.replace_cron(row(1))
    before = journal_of(tmp_path / "whole").stat().st_size
    await storage.replace_cron(row(2), jobs=[job("first"), job("second")])
    await storage.disconnect()
    whole = journal_of(tmp_path / "whole").read_bytes()
    for cut in range(before, len(whole) + 1):
        journal_of(tmp_path / f"cut-{cut}").parent.mkdir(parents=True)
        journal_of(tmp_path / f"cut-{cut}").write_bytes(whole[:cut])
        storage = await reopened(tmp_path / f"cut-{cut}")
        there = cut == len(whole)
        assert (await storage.crons()).rows == [row(2 if there else 1)]
        assert await ticks(storage) == (["first", "second"] if there else [])
        assert await storage.replace_cron(row(2), jobs=[job("first"), job("second")]) is not there
        assert await ticks(storage) == ["first", "second"]
        await storage.disconnect()


async def test_a_killed_process_leaves_whole_ticks(tmp_path: Path) -> None:
    """After each kill, all that was acknowledged is there, and each tick that is there has its job."""
    source = random.Random(7)
    acknowledged = 0
    for _ in range(5):
        process = child("tick", tmp_path)
        with killed_at_the_end(process):
            for _ in range(source.randrange(1, 60)):
                acknowledged = int(await line(process))
        storage = await reopened(tmp_path)
        [found] = (await storage.crons()).rows
        assert found == row(found.revision, body=f"body {found.revision}")
        assert found.revision >= acknowledged
        assert await ticks(storage) == sorted(f"tick-{number}" for number in range(1, found.revision + 1))
        await storage.disconnect()


async def test_two_processes_replace_a_row_once(tmp_path: Path) -> None:
    """Each hears what the other wrote, also where that one replaced the journal; what is late changes nothing."""
    here, there = FileStorage(tmp_path, fsync=False), await reopened(tmp_path)
    await here.connect()
    assert await here.replace_cron(row(1))
    for revision in range(2, 6):
        replaced = [
            await one.replace_cron(row(revision), jobs=[job(f"{revision}-{number}")])
            for number, one in enumerate((here, there) if revision % 2 else (there, here))
        ]
        assert replaced == [True, False]
    assert await ticks(there) == ["2-0", "3-0", "4-0", "5-0"]
    assert (await here.crons()).rows == (await there.crons()).rows == [row(5)]
    await here.disconnect()
    await there.disconnect()


async def test_a_tick_whose_job_is_refused_has_not_happened(tmp_path: Path) -> None:
    """The row stays as it was, here and on the disk, and the next tick works."""
    storage = await reopened(tmp_path)
    with pytest.raises(UnknownDependency):
        await storage.replace_cron(row(1), jobs=[job("first"), replace(job("second"), after=("unknown",))])
    assert (await storage.crons()).rows == []
    assert await storage.replace_cron(row(1), jobs=[job("third")])
    await storage.disconnect()
    storage = await reopened(tmp_path)
    assert (await storage.crons()).rows == [row(1)]
    assert await ticks(storage) == ["third"]
    await storage.disconnect()


async def test_a_row_outlives_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cron whose jobs all came and went is bounded by one row, which the compactions keep."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 5_000)
    storage = await reopened(tmp_path)
    for revision in range(1, 200):
        assert await storage.replace_cron(row(revision), jobs=[job(f"tick-{revision}")])
        (claim,) = await storage.claim("w", leases=LEASES, limit=1)
        await storage.settle([Completed(claim=claim, result=b"", keep=DROP)])
    assert journal_of(tmp_path).stat().st_size < 15_000
    await storage.disconnect()
    storage = await reopened(tmp_path)
    assert (await storage.crons()).rows == [row(199)]
    assert not await storage.replace_cron(row(199), jobs=[job("again")])
    await storage.disconnect()


async def test_times_are_kept_to_the_microsecond(tmp_path: Path) -> None:
    """What is due is due at that time after a restart as well."""
    clock = ManualClock()
    storage = FileStorage(tmp_path, clock=clock)
    await storage.connect()
    due = clock.now() + timedelta(hours=1, microseconds=1_001)
    await storage.replace_cron(replace(row(1), due=due))
    await storage.disconnect()
    await storage.connect()
    assert (await storage.crons()).next_due == due
    assert (await storage.crons(due=True)).rows == []
    clock.advance(timedelta(hours=2))
    assert (await storage.crons(due=True)).rows == [replace(row(1), due=due)]
    await storage.disconnect()
