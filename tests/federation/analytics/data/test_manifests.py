"""Commits to a store: one manifest names all that a run wrote, so it is visible whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from federation.analytics.data import snapshots
from federation.analytics.data.snapshots import DATA, KEPT, Snapshot, latest_manifest
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.data.stored_files import DataFile
from federation.analytics.data.stores import Store
from federation.analytics.errors import StoreChanged, StoreUnusable
from tests.federation.analytics.killing import MOST_STEPS, arm, is_killed, read_meanwhile, run_apart, watch

PARTITIONS = ("a/day=1", "a/day=2", "b/as_of=2")


def prepare(url: StoreUrl, generation: int) -> Snapshot:
    """All that a run does before it commits."""
    snapshot = Snapshot(url)
    for partition in PARTITIONS:
        name = f"{DATA}/{uuid.uuid4().hex}"
        Store(url).write(name, str(generation).encode())
        snapshot._written.append(name)
        snapshot.place({partition: [DataFile(name=name, rows=generation, size=1)]})
    snapshot.write_text("report.html", str(generation))
    return snapshot


def write(url: StoreUrl, generation: int) -> Snapshot:
    snapshot = prepare(url, generation)
    snapshot.commit()
    return snapshot


def generation_of(snapshot: Snapshot) -> int:
    """What a reader finds, who opens everything; it fails where that is of several runs."""
    if not snapshot.partitions():
        return 0
    found = {snapshot.read_text("report.html")}
    for partition in PARTITIONS:
        [file] = snapshot.files(partition)
        found |= {str(file.rows), Store(snapshot.url).read(file.name).decode()}
    [generation] = found
    return int(generation)


def age(folder: Path, by: timedelta) -> None:
    """Make everything older, by the clock of the store."""
    for path in folder.rglob("*"):
        if path.is_file():
            moment = path.stat().st_mtime - by.total_seconds()
            os.utime(path, (moment, moment))


def objects(url: StoreUrl) -> set[str]:
    return {each.name for each in Store(url).list("")}


def test_of_two_writers_one_loses(folder: StoreUrl) -> None:
    """It says so, leaves nothing behind, and the winner's results stay; run again, it goes on from these."""
    write(folder, 1)
    first, second = prepare(folder, 2), prepare(folder, 3)
    second.commit()
    kept = objects(folder)
    with pytest.raises(StoreChanged, match=rf"another run committed to {folder} .*nothing of this one is visible"):
        first.commit()
    assert generation_of(Snapshot(folder)) == 3
    assert objects(folder) < kept | {"report.html"}
    assert latest_manifest(Store(folder)).number == 2
    write(folder, 4)
    assert (generation_of(Snapshot(folder)), latest_manifest(Store(folder)).number) == (4, 3)


def test_a_commit_whose_answer_was_lost_counts(folder: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again the store says that the name is taken: by this very manifest."""
    put = Store.put_if_absent
    monkeypatch.setattr(Store, "put_if_absent", lambda *arguments: (put(*arguments), put(*arguments))[1])
    write(folder, 1)
    assert generation_of(Snapshot(folder)) == 1
    Snapshot(folder).require_writable()


def test_a_reader_in_the_middle_goes_by_one_manifest(folder: StoreUrl) -> None:
    """What is committed while it reads, it does not see; what a run has not committed, nobody does."""
    write(folder, 1)
    reader, under_way = Snapshot(folder), prepare(folder, 2)
    assert generation_of(reader) == generation_of(Snapshot(folder)) == 1
    assert generation_of(under_way) == 2
    under_way.commit()
    assert (generation_of(reader), generation_of(Snapshot(folder))) == (1, 2)
    assert Store(folder).read("report.html") == b"2"


def test_what_is_replaced_is_removed_after_a_day(tmp_path: Path) -> None:
    """With what a killed run left. What the latest manifest names stays for ever, what others use stays for a day."""
    url = parse_store_url(f"file://{tmp_path}/store")
    write(url, 1)
    killed = prepare(url, 99)
    (tmp_path / "store" / "of others.txt").write_text("")
    age(tmp_path / "store", KEPT)
    second, under_way = write(url, 2), prepare(url, 3)
    assert generation_of(second) == 2
    reader = Snapshot(url)
    age(tmp_path / "store", KEPT - timedelta(minutes=1))
    third = write(url, 3)
    assert generation_of(reader) == 2
    assert not any(killed.files(name)[0].name in objects(url) for name in PARTITIONS)
    assert under_way.files(PARTITIONS[0])[0].name in objects(url)
    named = latest_manifest(Store(url)).named
    age(tmp_path / "store", 2 * KEPT)
    write(url, 4)
    age(tmp_path / "store", 2 * KEPT)
    last = write(url, 5)
    assert not named & objects(url)
    assert generation_of(last) == 5
    age(tmp_path / "store", 2 * KEPT)
    previous = latest_manifest(Store(url))
    last = write(url, 6)
    expected = latest_manifest(Store(url))
    before = {*previous.named, previous.name}
    assert objects(url) == {*before, *expected.named, expected.name, "report.html", "of others.txt"}
    assert (generation_of(last), third.number) == (6, 3)


def test_a_run_that_took_too_long_is_refused(folder: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote first might be removed already."""
    write(folder, 1)
    late = prepare(folder, 2)
    monkeypatch.setattr(snapshots, "LONGEST", timedelta(0))
    with pytest.raises(StoreUnusable, match="took longer"):
        late.commit()
    assert generation_of(Snapshot(folder)) == 1


def test_manifests_of_others_are_told(folder: StoreUrl) -> None:
    """By their name."""
    write(folder, 1)
    name = replace(latest_manifest(Store(folder)), number=2).name
    for text, problem in ((b'{"version":2}', "a later version"), (b"[", "is no manifest of ours"), (b"{}", "is no")):
        Store(folder).write(name, text)
        with pytest.raises(StoreUnusable, match=f"{name} .*{problem}|{name} {problem}"):
            Snapshot(folder)


def commit(snapshot: Snapshot, step: int) -> None:
    arm(step)
    snapshot.commit()


def current_generation(url: StoreUrl) -> int:
    while True:
        with contextlib.suppress(StoreUnusable):  # it took more than the day that has passed meanwhile
            return generation_of(Snapshot(url))


def kill_commits(folder: Path) -> int:
    url = parse_store_url(f"file://{folder}")
    watch()
    write(url, 1)
    seen = 1

    def look() -> int:
        nonlocal seen
        before, seen = seen, current_generation(url)
        assert seen >= before
        return seen

    with read_meanwhile(look):
        for step in range(1, MOST_STEPS):
            old, fresh, healed = 10 * step, 10 * step + 1, 10 * step + 2
            write(url, old)
            prepared = prepare(url, fresh)
            age(folder, KEPT)  # so that there is something to remove
            killed = is_killed(commit, prepared, step)
            assert generation_of(Snapshot(url)) in (old, fresh), step
            write(url, healed)
            assert generation_of(Snapshot(url)) == healed, step
            if not killed:
                return step
    raise AssertionError("it does not end")


def test_a_commit_that_is_killed_is_visible_whole_or_not_at_all(tmp_path: Path) -> None:
    """Killed before and after each operation on a file, with a reader meanwhile: all find one run, the next goes on."""
    assert run_apart(kill_commits, tmp_path / "store") > 20
