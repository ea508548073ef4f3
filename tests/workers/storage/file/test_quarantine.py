"""What does not belong in a queue's directory: it is set aside, or refused and left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.workers.storage.file.steps import journal_of, known, quarantined, reopened
from workers.errors import StorageError
from workers.storage.file import FileStorage
from workers.storage.file.directory import MOST_SET_ASIDE, directory_of
from workers.storage.file.frames import VERSION
from workers.testing.steps import job

MAGIC = b"workers-queue %d\n" % VERSION


@pytest.mark.parametrize("garbage", [b"", b"not a journal", b"\0" * 5_000, MAGIC + b"x" * 100])
async def test_a_foreign_journal_is_set_aside(tmp_path: Path, garbage: bytes) -> None:
    """What is called `journal` and is none goes to quarantine with a reason, and the queue works."""
    journal_of(tmp_path).parent.mkdir()
    journal_of(tmp_path).write_bytes(garbage)
    storage = await reopened(tmp_path)
    await storage.enqueue([job("a")])
    await storage.disconnect()
    assert await known(tmp_path, "a") == ["a"]
    assert quarantined(tmp_path) == ["it does not begin as a journal does"]
    (kept,) = (tmp_path / "default" / "quarantine").glob("*-journal")
    assert kept.read_bytes() == garbage


async def test_foreign_files_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Strange files, directories, links and pipes in the queue's directory are moved away and reported; jobs stay."""
    storage = await reopened(tmp_path)
    await storage.enqueue([job("a")])
    await storage.disconnect()
    place = tmp_path / "default"
    (place / "notes.txt").write_text("mine")
    (place / "folder").mkdir()
    (place / "folder" / "inner").write_text("mine too")
    (place / "link").symlink_to("/etc/passwd")
    os.mkfifo(place / "pipe")
    (place / "quarantine").write_text("in the way")
    (place / "journal.new").write_text("half a compaction")
    assert await known(tmp_path, "a") == ["a"]
    assert await known(tmp_path, "a") == ["a"]
    assert sorted(path.name for path in place.iterdir()) == ["journal", "quarantine"]
    names = {path.name.partition("-")[2] for path in (place / "quarantine").iterdir()}
    assert {"notes.txt", "folder", "link", "pipe", "no-quarantine"} <= names
    assert caplog.text.count("set aside") == 5


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
async def test_no_file_in_the_journals_place(tmp_path: Path, kind: str) -> None:
    """A directory, a link or a pipe called `journal` is set aside; nothing is read or written through it."""
    journal_of(tmp_path).parent.mkdir()
    if kind == "folder":
        journal_of(tmp_path).mkdir()
    elif kind == "link":
        (tmp_path / "target").write_bytes(b"keep me")
        journal_of(tmp_path).symlink_to(tmp_path / "target")
    else:
        os.mkfifo(journal_of(tmp_path))
    storage = await reopened(tmp_path)
    await storage.enqueue([job("a")])
    await storage.disconnect()
    assert quarantined(tmp_path) == ["not a regular file"]
    if kind == "link":
        assert (tmp_path / "target").read_bytes() == b"keep me"


@pytest.mark.parametrize("version", [1, VERSION - 1, VERSION + 1])
async def test_journals_of_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    """They are left alone, with an error that says which version it is and what to do."""
    await known(tmp_path)
    mine = journal_of(tmp_path).read_bytes()
    another = mine.replace(MAGIC, b"workers-queue %d\n" % version)
    assert another != mine
    journal_of(tmp_path).write_bytes(another)
    with pytest.raises(StorageError, match=rf"of version {version}, and this one reads {VERSION}\); use that version"):
        await FileStorage(tmp_path).connect()
    assert journal_of(tmp_path).read_bytes() == another


async def test_journals_of_other_queues_are_refused(tmp_path: Path) -> None:
    """They are left alone, with an error that says so."""
    await known(tmp_path)
    mine = journal_of(tmp_path).read_bytes()
    other = directory_of(tmp_path, "other")
    other.mkdir()
    (other / "journal").write_bytes(mine)
    with pytest.raises(StorageError, match="journal of queue 'default'"):
        await FileStorage(tmp_path, "other").connect()
    assert (other / "journal").read_bytes() == mine


async def test_copies_in_quarantine_are_bounded(tmp_path: Path) -> None:
    """However often a write is torn, quarantine holds a bounded number of files."""
    await known(tmp_path)
    (tmp_path / "default" / "quarantine").mkdir()
    for number in range(MOST_SET_ASIDE):
        (tmp_path / "default" / "quarantine" / str(number)).touch()
    with journal_of(tmp_path).open("ab") as file:
        file.write(b"torn")
    assert await known(tmp_path) == []
    assert len(os.listdir(tmp_path / "default" / "quarantine")) == MOST_SET_ASIDE
