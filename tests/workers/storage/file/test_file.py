"""What is special about `FileStorage`: its journal, other processes, and disks that tear, rot, fill up or vanish."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import random
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from workers.clock import ManualClock
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import StorageError, StorageUnavailable, Unsupported
from workers.jobs import (
    DROP,
    TERMINAL_EVENTS,
    Claim,
    Completed,
    ErrorInfo,
    Failed,
    JobEventKind,
    JobState,
    NewJob,
    OutcomeKind,
    ProgressReport,
    Released,
    Retried,
    SettleStatus,
)
from workers.retry import RetryPolicy
from workers.storage.base import Storage
from workers.storage.file import FileStorage
from workers.storage.file import frames as file_frames
from workers.storage.file import journal as file_journal
from workers.storage.file.codec import Change, WorkerSeen, decode
from workers.storage.file.directory import MOST_SET_ASIDE, QueueDirectory, directory_of, translate
from workers.storage.file.frames import Frame
from workers.storage.file.state import FileState
from workers.testing.steps import background, next_claim

MINUTE = timedelta(minutes=1)
LEASES = {"*": MINUTE}
ERROR = ErrorInfo(type="ValueError", message="no", stack="line 1\nline 2")


def job(job_id: str, payload: bytes = b"{}", **options: object) -> NewJob:
    return NewJob(id=job_id, name="work", payload=payload, **options)  # type: ignore[arg-type]  # as the tests say


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileStorage]:
    storage = FileStorage(tmp_path)
    await storage.connect()
    yield storage
    await storage.disconnect()


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
        return {
            f"{type(change).__name__} {getattr(change, 'id', getattr(change, 'key', ''))}": change for change in found
        }

    return await storage._read(describe)


def journal_of(directory: Path) -> Path:
    return directory / "default" / "journal"


def quarantined(directory: Path) -> list[str]:
    """What was set aside, and why."""
    files = sorted((directory / "default" / "quarantine").glob("*.reason.txt"))
    return [file.read_text().strip() for file in files]


def child(verb: str, directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.workers.storage.file.child", verb, str(directory), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def running(*children: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in children:
            process.kill()
            process.communicate()


async def line(process: subprocess.Popen[str]) -> str:
    """The next line the child prints."""
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


def go(process: subprocess.Popen[str]) -> None:
    """The child may go on."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


# The storage and its directory


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
    """Jobs in every state, results, errors, tombstones, workers, the pause: a fresh process has them as they were."""
    storage = await reopened(tmp_path)
    everything = {"backoff": RetryPolicy(jitter=0.5), "ordering_key": "k", "priority": 3, "keep_completed": DROP}
    await storage.enqueue([job(f"job-{number}") for number in range(7)])
    await storage.enqueue([job("rich", b"\0\xff", **everything), job("later", delay=timedelta(days=1))])
    claims = await storage.claim("worker \n", leases=LEASES, limit=6)
    await storage.settle(
        [
            Completed(claim=claims[0], result=b"\0result", then=job("continued", b"more")),
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


class RandomSteps:
    """Steps of any kind on any of a few jobs, the same for one seed."""

    def __init__(self, seed: int, clock: ManualClock) -> None:
        self._source = random.Random(seed)
        self._clock = clock
        self._ids = [f"job-{number}" for number in range(12)]
        self._claims: list[Claim] = []

    async def __call__(self, storage: FileStorage) -> None:
        steps = (self._enqueue, self._enqueue, self._claim, self._claim, self._settle, self._settle)
        await self._source.choice((*steps, self._lease, self._pass_time, self._manage))(storage)

    async def _enqueue(self, storage: FileStorage) -> None:
        delay, key = self._source.choice((0, 0, 20)), self._source.choice((None, "k", "l"))
        options: dict[str, object] = {
            "delay": timedelta(seconds=delay),
            "ordering_key": key,
            "priority": self._source.randrange(2),
        }
        mode = self._source.choice((None, *DeduplicationMode))
        if mode is not None:
            ttl = None if mode is DeduplicationMode.SIMPLE else timedelta(seconds=20)
            options["deduplication"] = Deduplication(key=self._source.choice("mn"), mode=mode, ttl=ttl)
        await storage.enqueue([job(self._source.choice(self._ids), **options)])

    async def _claim(self, storage: FileStorage) -> None:
        self._claims += await storage.claim(self._source.choice("vw"), leases=LEASES, limit=2)

    async def _settle(self, storage: FileStorage) -> None:
        if not self._claims:
            return
        claim = self._claims.pop(self._source.randrange(len(self._claims)))
        keep = self._source.choice((DROP, MINUTE, None))
        delay = timedelta(seconds=self._source.choice((0, 9)))
        options = (
            Completed(claim=claim, result=b"r", keep=keep, then=job(self._source.choice(self._ids))),
            Failed(claim=claim, error=ERROR, keep=keep),
            Retried(claim=claim, delay=delay, error=ERROR),
            Released(claim=claim),
        )
        await storage.settle([self._source.choice(options)])

    async def _lease(self, storage: FileStorage) -> None:
        await storage.renew(self._claims)
        await storage.progress([ProgressReport(claim=claim, value=claim.token.encode()) for claim in self._claims[::2]])
        await storage.recover(2)

    async def _pass_time(self, storage: FileStorage) -> None:
        self._clock.advance(timedelta(seconds=self._source.choice((1, 30, 90, 3_600))))
        await storage.status(self._ids)
        await storage.sweep(self._source.randrange(4))

    async def _manage(self, storage: FileStorage) -> None:
        job_id = self._source.choice(self._ids)
        await storage.cancel(job_id)
        await storage.retry([job_id])
        await storage.promote([self._source.choice(self._ids)])
        await storage.update_result_ttl(job_id, MINUTE)


async def test_two_copies_and_a_fresh_one_always_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever two processes do in turn, through compactions too, both know the same, and so does a third one."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 4_000)
    source, clock = random.Random(11), ManualClock()
    step = RandomSteps(12, clock)
    # With another `fsync` a storage shares nothing with the first but the directory, as another process would.
    pair = [FileStorage(tmp_path, clock=clock, fsync=fsync) for fsync in (True, False)]
    for storage in pair:
        await storage.connect()
    for turn in range(600):
        await step(source.choice(pair))
        if turn % 20 == 0:
            first, second = [await described(each) for each in pair]
            assert first == second
    assert len(os.listdir(tmp_path / "default")) == 1
    for each in pair:
        last = await described(each)
        await each.disconnect()
    fresh = FileStorage(tmp_path, clock=clock)
    await fresh.connect()
    assert await described(fresh) == last
    await fresh.disconnect()


# The journal


async def test_a_torn_end_loses_only_what_nobody_was_told_of(tmp_path: Path) -> None:
    """Cut at any byte of the last step, the journal opens with every step before it, whole, and works on."""
    storage = await reopened(tmp_path / "whole")
    await storage.enqueue([job("first"), job("second", b"p" * 30)])
    complete = journal_of(tmp_path / "whole").read_bytes()
    (claim,) = await storage.claim("w", leases=LEASES, limit=1)
    before = journal_of(tmp_path / "whole").read_bytes()
    assert before.startswith(complete)
    await storage.settle([Completed(claim=claim, result=b"r" * 40, then=job("third", b"p" * 20))])
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
    await storage.enqueue([job("carrier", journal_of(tmp_path / "other").read_bytes())])
    await storage.enqueue([job("honest")])
    await storage.disconnect()
    data = bytearray(journal_of(tmp_path).read_bytes())
    data[start + 12] ^= 0xFF
    journal_of(tmp_path).write_bytes(data)
    assert await known(tmp_path, "forged", "carrier", "honest") == ["honest"]


@pytest.mark.parametrize("garbage", [b"", b"not a journal", b"\0" * 5_000, b"workers-queue 1\n" + b"x" * 100])
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


async def test_journals_of_others_are_refused(tmp_path: Path) -> None:
    """A journal of a newer version, or of another queue, is left alone, with an error that says so."""
    await known(tmp_path)
    mine = journal_of(tmp_path).read_bytes()
    newer = mine.replace(b"workers-queue 1\n", b"workers-queue 2\n")
    journal_of(tmp_path).write_bytes(newer)
    with pytest.raises(StorageError, match="newer version"):
        await FileStorage(tmp_path).connect()
    assert journal_of(tmp_path).read_bytes() == newer
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


async def test_compaction_bounds_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs pass through, the journal stays small, and what waits is still there."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 50_000)
    storage = await reopened(tmp_path)
    await storage.enqueue([job(f"stays-{number}", b"s" * 100, delay=MINUTE) for number in range(100)])
    before, largest = await described(storage), 0
    for number in range(200):
        await storage.enqueue([job(f"passes-{number}", b"p" * 3_000)])
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


async def test_events_are_heard_through_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber in another process hears of every job while the journal is replaced again and again."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 2_000)
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    async with asyncio.timeout(20), there.events() as subscription:
        for number in range(40):
            await here.enqueue([job(f"job-{number}", b"p" * 1_000)])
            (claim,) = await here.claim("w", leases=LEASES, limit=1)
            await here.settle([Completed(claim=claim, result=b"", keep=DROP)])
            kinds = [(await subscription.get()).kind for _ in range(3)]
            assert kinds == [JobEventKind.QUEUED, JobEventKind.ACTIVE, JobEventKind.COMPLETED]
    await here.disconnect()
    await there.disconnect()


async def test_a_key_freed_elsewhere_is_free_here(tmp_path: Path) -> None:
    """A job that waits for its ordering key is claimed here, once another process settled the one that held the key."""
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    await here.enqueue(
        [job("first", ordering_key="k"), job("second", ordering_key="k"), job("third", ordering_key="k")]
    )
    (held,) = await there.claim("w", leases=LEASES, limit=3)
    assert await here.claim("v", leases=LEASES, limit=3) == []
    worker = asyncio.create_task(next_claim(here))
    async with background(worker):
        await there.settle([Completed(claim=held, result=b"", keep=DROP)])
        assert (await worker).job_id == "second"
    assert await there.claim("w", leases=LEASES, limit=3) == []
    await here.disconnect()
    await there.disconnect()


async def test_a_copy_left_behind_hears_of_the_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that missed several journals still learns which jobs ended meanwhile, and how."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 1_000)
    replaced = set()

    async def fill(storage: FileStorage, name: str) -> None:
        for number in range(20):
            await storage.enqueue([job(f"{name}-{number}", b"p" * 2_000)])
            replaced.add(journal_of(tmp_path).read_bytes()[16:24])

    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await here.enqueue([job("done"), job("failed"), job("cancelled"), job("waits")])
    await there.connect()
    await fill(here, "before")
    claims = await here.claim("w", leases=LEASES, limit=2)
    await here.settle([Completed(claim=claims[0], result=b""), Failed(claim=claims[1], error=ERROR)])
    await here.cancel("cancelled")
    await fill(here, "after")
    assert len(replaced) >= 4
    heard = {}
    async with asyncio.timeout(20), there.events() as subscription:
        while len(heard) < 3:
            event = await subscription.get()
            if event.kind in TERMINAL_EVENTS:
                heard[event.job_id] = event.kind
    assert heard == {
        "done": JobEventKind.COMPLETED,
        "failed": JobEventKind.FAILED,
        "cancelled": JobEventKind.CANCELLED,
    }
    await here.disconnect()
    await there.disconnect()


async def test_a_copy_left_behind_hears_of_cancel_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that missed several journals still learns which of its jobs are not wanted any more."""
    monkeypatch.setattr(file_journal, "SLACK_BYTES", 1_000)
    here, there = FileStorage(tmp_path), FileStorage(tmp_path, fsync=False)
    await here.connect()
    await there.connect()
    await here.enqueue([job("wanted"), job("cancelled"), job("removed"), job("completed")])
    await there.claim("w", leases=LEASES, limit=4)
    await here.cancel("cancelled")
    await here.remove(["removed"], running=True)
    await here.complete("completed", b"")
    for number in range(50):
        await here.enqueue([job(f"filler-{number}", b"p" * 2_000)])
    async with asyncio.timeout(20), there.cancel_requests() as requests:
        heard = {(await requests.get()).job_id for _ in range(3)}
    assert heard == {"cancelled", "removed", "completed"}
    await here.disconnect()
    await there.disconnect()


# Other processes


async def test_racing_processes_share_no_job(storage: FileStorage, tmp_path: Path) -> None:
    """Three processes claim at once: every job goes to exactly one of them."""
    await storage.enqueue([job(f"job-{number}") for number in range(300)])
    children = [child("race", tmp_path) for _ in range(2)]
    with running(*children):
        for process in children:
            assert await line(process) == "ready"
        for process in children:
            go(process)
        claimed: list[str] = []
        while claims := await storage.claim("parent", leases=LEASES, limit=7):
            claimed += [claim.job_id for claim in claims]
        for process in children:
            claimed += process.communicate()[0].split()
    assert sorted(claimed) == sorted(f"job-{number}" for number in range(300))


async def test_another_processs_enqueue_wakes(storage: FileStorage, tmp_path: Path) -> None:
    """A worker asleep gets a job that another process enqueues."""
    process = child("enqueue", tmp_path)
    with running(process):
        assert await line(process) == "ready"
        worker = asyncio.create_task(next_claim(storage))
        async with background(worker):
            await asyncio.sleep(0.03)  # let it fall asleep; it must work without, too
            go(process)
            claim = await worker
    assert claim.job_id == "from the child"


async def test_another_processs_completion_is_heard(storage: FileStorage, tmp_path: Path) -> None:
    """A subscriber hears what another process does with the job, and finds the result."""
    await storage.enqueue([job("a")])
    process = child("complete", tmp_path)
    with running(process):
        assert await line(process) == "ready"
        async with asyncio.timeout(20), storage.subscribe("a") as subscription:
            go(process)
            assert [(await subscription.get()).kind for _ in range(2)] == [JobEventKind.ACTIVE, JobEventKind.COMPLETED]
        outcome = await storage.result("a")
    assert outcome is not None
    assert outcome.result == b"from the child"


# Disks


async def test_a_full_disk_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """When files may not grow, each step works or fails whole; with room again, the same process works on."""
    process = child("fill", tmp_path)
    with running(process):
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
            await storage.enqueue([job(f"job-{number}", b"p" * 1_000)])
    assert os.listdir(tmp_path / "default") == ["journal"]
    assert "cannot be compacted" in caplog.text
    await storage.disconnect()
    assert len(await known(tmp_path, *(f"job-{number}" for number in range(5)))) == 5


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
    async with asyncio.timeout(10):
        while not (claims := await storage.claim("w", leases=LEASES, limit=1)):
            await storage.wait(["*"], timeout=MINUTE)
    assert claims[0].attempt == 1


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
