"""The short steps that tests of the file storage are made of."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from tests import warm
from workers.storage.file import FileStorage
from workers.storage.file.codec import Change, WorkerSeen, decode
from workers.storage.file.declared import BucketChanged, CronReplaced, LimitDeclared
from workers.storage.file.frames import Frame
from workers.storage.file.state import FileState
from workers.storage.file.waits import OutcomeLearned
from workers.testing.steps import PATIENCE

MINUTE = timedelta(minutes=1)
LEASES = {"*": MINUTE}


async def reopened(directory: Path) -> FileStorage:
    storage = FileStorage(directory)
    await storage.connect()
    return storage


async def known(directory: Path, *ids: str) -> list[str]:
    """Which of the ids a fresh process would know."""
    storage = await reopened(directory)
    try:
        return [found.id for found in await storage.status(ids) if found is not None]
    finally:
        await storage.disconnect()


async def described(storage: FileStorage) -> dict[str, object]:
    """All that the storage has in memory, by id."""

    def describe(state: FileState, now: object) -> dict[str, object]:
        state.counts(storage._clock.now())
        changes: list[Change] = []
        for entries, blobs in state.snapshot():
            text = json.dumps(entries).encode()
            changes += decode(Frame(entries=text, blobs=b"".join(blobs), start=0, end=0))
        # When a worker was seen is written every 30 s only.
        found = [replace(change, at=None) if isinstance(change, WorkerSeen) else change for change in changes]
        # Lines are not written: they have to follow from what is.
        lines = {"fronts": dict(state.table._fronts), "running": dict(state.table.limits._running)}
        return {f"{type(change).__name__} {_subject(change)}": change for change in found} | lines

    return await storage._read(describe)


def _subject(change: Change) -> str:
    """What the change is about."""
    match change:
        case CronReplaced():
            return change.row.name
        case LimitDeclared():
            return change.name
        case BucketChanged():
            return change.key
        case OutcomeLearned():
            return f"{change.id} {change.dependency}"
        case _:
            return str(getattr(change, "id", getattr(change, "key", "")))


def journal_of(directory: Path) -> Path:
    return directory / "default" / "journal"


def quarantined(directory: Path) -> list[str]:
    """What was set aside, and why."""
    files = sorted((directory / "default" / "quarantine").glob("*.reason.txt"))
    return [file.read_text().strip() for file in files]


def child(verb: str, directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [warm.PYTHON, "-m", "tests.workers.storage.file.child", verb, str(directory), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def killed_at_the_end(*children: subprocess.Popen[str]) -> Iterator[None]:
    """None of the children outlives the block."""
    try:
        yield
    finally:
        for process in children:
            process.kill()
            process.communicate()


async def line(process: subprocess.Popen[str]) -> str:
    """The next line the child prints."""
    assert process.stdout is not None
    async with asyncio.timeout(3 * PATIENCE):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


def go(process: subprocess.Popen[str]) -> None:
    """The child may go on."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
