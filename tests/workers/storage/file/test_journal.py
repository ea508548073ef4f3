"""The journal: torn, rotten or long, it loses only what nobody was told of."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import LEASES, MINUTE, described, journal_of, known, quarantined, reopened
from workers.jobs import DROP, Completed, JobState, SettleStatus
from workers.storage.file import FileStorage
from workers.storage.file import frames as file_frames
from workers.storage.file import journal as file_journal
from workers.storage.file.directory import QueueDirectory
from workers.testing.steps import job


async def test_a_torn_end_loses_only_what_nobody_was_told_of(tmp_path: Path) -> None:
    """Cut at any byte of the last step, the journal opens with every step before it, whole, and works on."""
    storage = await reopened(tmp_path / "whole")
    await storage.enqueue([job("first"), job("second", payload=b"p" * 30)])
    complete = journal_of(tmp_path / "whole").read_bytes()
    (claim,) = await storage.claim("w", leases=LEASES, limit=1)
    before = journal_of(tmp_path / "whole").read_bytes()
    assert before.startswith(complete)
    await storage.settle([Completed(claim=claim, result=b"r" * 40, then=job("third", payload=b"p" * 20))])
    whole = journal_of(tmp_path / "whole").read_bytes()
    await storage.disconnect()
    for cut in range(len(before), len(whole)):
        torn = tmp_path / f"cut-{cut}"
        journal_of(torn).parent.mkdir(parents=True)
        journal_of(torn).write_bytes(whole[:cut])
        storage = await reopened(torn)
        first, second, third = await storage.status(["first", "second", "third"])
        assert first is not None
        assert first.state is JobState.PROCESSING
        assert second is not None
        assert third is None
        assert await storage.result("first") is None
        assert (await storage.settle([Completed(claim=claim, result=b"again")]))[0].status is SettleStatus.APPLIED
        await storage.disconnect()
        assert [bool(re.match("torn", reason)) for reason in quarantined(torn)] == [True] * (cut > len(before))
        storage = await reopened(torn)
        assert (await storage.status(["first"]))[0].state is JobState.COMPLETED  # type: ignore[union-attr]  # there
        await storage.disconnect()


async def test_a_torn_end_is_noticed_by_those_who_are_there(storage: FileStorage, tmp_path: Path) -> None:
    """What a process that died left half-written is cut off by the next step of one that lives."""
    await storage.enqueue([job("before")])
    with journal_of(tmp_path).open("ab") as file:
        file.write(b"half a frame")
    await storage.enqueue([job("after")])
    assert [found is not None for found in await storage.status(["before", "after"])] == [True, True]
    assert len(quarantined(tmp_path)) == 1
    assert b"half a frame" not in journal_of(tmp_path).read_bytes()


async def test_damage_costs_only_the_steps_it_hit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rotten byte in the middle: the step is set aside and reported, its neighbours live, and only once."""
    storage = await reopened(tmp_path)
    ends = []
    for job_id in ("first", "second", "third"):
        await storage.enqueue([job(job_id)])
        ends.append(journal_of(tmp_path).stat().st_size)
    await storage.disconnect()
    data = bytearray(journal_of(tmp_path).read_bytes())
    data[(ends[0] + ends[1]) // 2] ^= 1
    journal_of(tmp_path).write_bytes(data)
    assert await known(tmp_path, "first", "second", "third") == ["first", "third"]
    assert "are void: damaged" in caplog.text
    assert quarantined(tmp_path) == ["damaged: what follows is whole"]
    (copy,) = (tmp_path / "default" / "quarantine").glob("*-journal-*[0-9]")
    assert copy.read_bytes() == bytes(data[ends[0] : ends[1]])
    caplog.clear()
    assert await known(tmp_path, "first", "second", "third") == ["first", "third"]
    assert caplog.text == ""


async def test_a_payload_never_passes_for_a_step(tmp_path: Path) -> None:
    """After damage, the bytes of another journal inside a payload are not read as this journal's."""
    await known(tmp_path / "other")
    storage = await reopened(tmp_path / "other")
    await storage.enqueue([job("forged")])
    await storage.disconnect()
    storage = await reopened(tmp_path)
    start = journal_of(tmp_path).stat().st_size
    await storage.enqueue([job("carrier", payload=journal_of(tmp_path / "other").read_bytes())])
    await storage.enqueue([job("honest")])
    await storage.disconnect()
    data = bytearray(journal_of(tmp_path).read_bytes())
    data[start + 12] ^= 0xFF
    journal_of(tmp_path).write_bytes(data)
    assert await known(tmp_path, "forged", "carrier", "honest") == ["honest"]


async def test_compaction_bounds_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs pass through, the journal stays small, and what waits is still there."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 50_000)
    storage = await reopened(tmp_path)
    await storage.enqueue([job(f"stays-{number}", payload=b"s" * 100, delay=MINUTE) for number in range(100)])
    before, largest = await described(storage), 0
    for number in range(200):
        await storage.enqueue([job(f"passes-{number}", payload=b"p" * 3_000)])
        (claim,) = await storage.claim("w", leases=LEASES, limit=1)
        await storage.settle([Completed(claim=claim, result=b"", keep=DROP)])
        largest = max(largest, journal_of(tmp_path).stat().st_size)
    assert 50_000 < largest < 200_000
    after = await described(storage)
    assert {key: after[key] for key in after if "stays" in key} == {
        key: before[key] for key in before if "stays" in key
    }
    await storage.disconnect()
    assert len(await known(tmp_path, *(f"stays-{number}" for number in range(100)))) == 100
    assert os.listdir(tmp_path / "default") == ["journal"]


def test_a_journal_is_long_beyond_twice_its_snapshot_and_some_slack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: each replacement writes all that there is."""
    assert file_journal.SLACK_BYTES > 1 << 20
    directory = QueueDirectory(tmp_path, sync=False, busy_timeout=MINUTE)
    journal = file_journal.Journal(directory, sync=False)
    journal.replace([([("p", True)] * 100, ())], continues=False)
    snapshot = journal.position
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 2 * snapshot)
    lengths = []
    while not journal.is_long:
        lengths.append(journal.position)
        journal.append([journal.encode([("p", True)], ())])
    assert lengths[-1] <= 4 * snapshot < journal.position
    journal.close()
    directory.close()


async def test_a_failed_compaction_is_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With no room for a snapshot the storage goes on with the long journal, and leaves no half of one behind."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 1_000)
    storage = await reopened(tmp_path)

    def full(preamble: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(file_frames.Preamble, "encode", full)
        for number in range(5):
            await storage.enqueue([job(f"job-{number}", payload=b"p" * 1_000)])
    assert os.listdir(tmp_path / "default") == ["journal"]
    assert "cannot be compacted" in caplog.text
    await storage.disconnect()
    assert len(await known(tmp_path, *(f"job-{number}" for number in range(5)))) == 5
