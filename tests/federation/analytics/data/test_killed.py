"""Exports and results in a directory: killed before each operation of their last phase, and read meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from federation.analytics.data import directories, export, results, sinks
from federation.analytics.data.computed import Computed, computed_days, note_computed
from federation.analytics.data.directories import STAGING, staging_in
from federation.analytics.data.export import ATTEMPTS, EARLIER_SERVERS, SNAPSHOTS
from federation.analytics.data.results import DAILY, DATED, QUARANTINE, write_text
from federation.analytics.days import DAY
from federation.analytics.frames import Window
from tests.federation.analytics.killing import MOST_STEPS, arm, is_killed, read_meanwhile, run_apart, watch

FIRST = date(2026, 3, 1)
WINDOW = Window(since=FIRST, until=FIRST + timedelta(days=2))
READ_AT = "2026-03-03T00:20:00+00:00"
FAR = "2999-01-01"
ROWS = 3


def write_generation(file: Path, generation: int) -> None:
    """All rows say by which run they were written; ids are the same each time, as those of attempts are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {"id": list(range(ROWS)), "generation": [generation] * ROWS}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def generation_of(*files: Path) -> int:
    """What a reader finds, who reads the files to their ends; it fails where they are of several runs."""
    if not files:
        raise FileNotFoundError
    found = [pyarrow.parquet.ParquetFile(file).read().to_pydict() for file in files]
    assert all(each["id"] == list(range(ROWS)) for each in found)
    [generation] = {generation for each in found for generation in each["generation"]}
    return int(generation)


def again_while_replaced(look: Callable[[], int]) -> int:
    """A reader who has listed a directory that is replaced then opens what is gone, and says so; it looks again."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return look()


def read_each(names: list[str], look: Callable[[str], int]) -> Callable[[], tuple[int, ...]]:
    """A look at each of these, one after the other, none of which is older than at the look before."""
    before = [0] * len(names)

    def read() -> tuple[int, ...]:
        nonlocal before
        found = [again_while_replaced(functools.partial(look, name)) for name in names]
        assert all(now >= then for now, then in zip(found, before, strict=True)), (before, found)
        before = found
        return tuple(found)

    return read


DAYS = [f"{ATTEMPTS}/day={day}" for day in WINDOW.days]
UNDATED = f"{ATTEMPTS}/{results.UNDATED}"
TABLES = ("servers", "blacklist")
"""All others are as the second."""
EXPORTED = [*TABLES, *DAYS, UNDATED]
"""In the order in which they are put in place."""


@contextlib.contextmanager
def prepared_exports(root: Path, generation: int) -> Iterator[Path]:
    """All that an export does before its last phase."""
    with staging_in(root) as staging:
        for name in TABLES:
            write_generation(staging / name / "part-0.parquet", generation)
        for name in (*DAYS, UNDATED):
            for number in range(2):
                write_generation(staging / name / f"part-{number}-{generation}.parquet", generation)
        yield staging


def put_exports(root: Path, generation: int, today: date, step: int = 0) -> None:
    with prepared_exports(root, generation) as staging:
        arm(step)
        export.put_in_place(staging, root, WINDOW, today, keep_days=None)


def exported_generation(root: Path, name: str) -> int:
    return generation_of(*sorted((root / name).glob("*.parquet")))


def kill_exports(root: Path, *, most_missing: int = 0, each: int = 1) -> int:
    watch()
    export.SNAPSHOTS = {name: SNAPSHOTS[name] for name in TABLES}
    today, old = WINDOW.until, 1
    put_exports(root, old, today)
    with read_meanwhile(read_each(EXPORTED, functools.partial(exported_generation, root))):
        for step in range(1, MOST_STEPS, each):
            fresh, healed = 10 * step, 10 * step + 1
            today += DAY
            (root / ATTEMPTS / f"day={FAR}").mkdir(exist_ok=True)
            killed = is_killed(put_exports, root, fresh, today, step)
            there = [name for name in EXPORTED if (root / name).exists()]
            found = [exported_generation(root, name) for name in there]
            assert found == sorted(found, reverse=True), (step, found)  # what comes first is in place first
            assert set(found) <= {old, fresh}, (step, found)
            assert len(EXPORTED) - len(there) <= most_missing, (step, there)
            is_killed(tidy, root, 1 + step % 20)
            tidy(root)
            assert {exported_generation(root, name) for name in EXPORTED} <= {old, fresh}, step
            put_exports(root, healed, today)
            assert [exported_generation(root, name) for name in EXPORTED] == [healed] * len(EXPORTED), step
            assert exported_generation(root, EARLIER_SERVERS) == old, step
            assert not (root / STAGING).exists()
            assert not (root / ATTEMPTS / f"day={FAR}").exists()
            if not killed:
                return step
            old = healed
    raise AssertionError("it does not end")


def tidy(root: Path, step: int = 0) -> None:
    """The first thing that the next run does, which may be killed, too."""
    arm(step)
    with staging_in(root):
        pass


def kill_exports_at_each_third(root: Path) -> int:
    return kill_exports(root, each=3)


def kill_exports_without_exchange(root: Path) -> int:
    """As where the system cannot exchange two directories: a dead run may leave one aside; the next puts it back."""
    directories._exchange = lambda _one, _other: False
    return kill_exports(root, most_missing=1)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(kill_exports_at_each_third, id="each-third"),
        pytest.param(kill_exports, id="exchange", marks=pytest.mark.full),
        pytest.param(kill_exports_without_exchange, id="two-renames", marks=pytest.mark.full),
    ],
)
def test_an_export_that_is_killed_leaves_every_day_whole(scenario: Callable[[Path], int], tmp_path: Path) -> None:
    """The old one or the fresh one, oldest first; the next run completes it, and nothing is left of the dead one."""
    assert run_apart(scenario, tmp_path) > 80


RESULTS = [
    result.file(Path(), day) for result in DAILY for day in (*WINDOW.days, *([None] if result is QUARANTINE else []))
] + [result.file(Path(), WINDOW.as_of) for result in DATED]
WRITTEN = [*map(str, RESULTS), "report.html", "summary.json", "computed.json"]
"""In the order in which they are put in place."""


def put_results(out: Path, generation: int, step: int = 0) -> None:
    with staging_in(out) as staging:
        for file in RESULTS:
            write_generation(staging / file, generation)
        (out / "server_daily" / f"day={FAR}").mkdir(parents=True, exist_ok=True)
        arm(step)
        sinks.put_in_place([(staging / file, out / file) for file in RESULTS], out, WINDOW)
    for name in ("report.html", "summary.json"):
        write_text(f"{generation:09d}", name, out)
    note_computed(out, Computed(read_at={f"{generation:09d}": READ_AT}, purged=frozenset()))


def result_generation(out: Path, name: str) -> int:
    if name.endswith(".parquet"):
        return generation_of(out / name)
    text = (out / name).read_text()
    if name == "computed.json":
        [text] = computed_days(out).read_at
    assert len(text) == 9, text
    return int(text)


def kill_results(out: Path, each: int = 1) -> int:
    watch()
    old = 1
    put_results(out, old)
    with read_meanwhile(read_each(WRITTEN, functools.partial(result_generation, out))):
        for step in range(1, MOST_STEPS, each):
            fresh, healed = 10 * step, 10 * step + 1
            killed = is_killed(put_results, out, fresh, step)
            found = [result_generation(out, name) for name in WRITTEN]
            assert found == sorted(found, reverse=True), (step, found)
            assert set(found) <= {old, fresh}, (step, found)
            put_results(out, healed)
            assert [result_generation(out, name) for name in WRITTEN] == [healed] * len(WRITTEN), step
            assert not (out / STAGING).exists()
            assert not (out / "server_daily" / f"day={FAR}").exists()
            if not killed:
                return step
            old = healed
    raise AssertionError("it does not end")


def kill_results_at_each_third(out: Path) -> int:
    return kill_results(out, each=3)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(kill_results_at_each_third, id="each-third"),
        pytest.param(kill_results, id="each", marks=pytest.mark.full),
    ],
)
def test_results_that_are_killed_are_whole_files(scenario: Callable[[Path], int], tmp_path: Path) -> None:
    """Each is the old or the fresh one, and no report tells of results that are not there; the next run is whole."""
    assert run_apart(scenario, tmp_path) > 50
