"""Exports: each day whole, once, and again when it is exported again."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy
from pyspark.sql import SparkSession

from db import DeliveryAttempt
from federation.analytics.data import directories
from federation.analytics.data.database import check_database
from federation.analytics.data.directories import STAGING, staging_in
from federation.analytics.data.export import SNAPSHOTS, Export, export, exported_days
from federation.analytics.data.inputs import read_exports
from federation.analytics.data.source import SourceTables
from federation.analytics.errors import AnalyticsError, DatabaseUnavailable, DirectoryUnusable
from federation.analytics.figures.checks import check_attempts
from federation.analytics.figures.tally import bad, tally
from federation.analytics.frames import Window
from tests.federation.analytics.history import DAY, SERVERS, add, attempt, attempts, execute, fill, moment
from tests.servers import free_port

NOW = moment(2, 15)


def days(*numbers: int) -> list[date]:
    return [DAY + timedelta(days=number) for number in numbers]


def run(spark: SparkSession, url: str, directory: Path, *, now: datetime = NOW, **bounds: date) -> Export:
    return export(SourceTables(spark=spark, url=url), directory, now=now, **bounds)


def read_ids(spark: SparkSession, directory: Path, first: int = 0, count: int = 10) -> list[int]:
    since, until = days(first, first + count)
    rows = read_exports(spark, directory, Window(since=since, until=until)).attempts.select("id").collect()
    return sorted(row.id for row in rows)


def test_all_tables_are_exported_by_day(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    """The first export begins with the first attempt and ends with today; what is read back is what was there."""
    fill(database_url, attempts(10, 3))
    told = run(spark, database_url, tmp_path)
    assert told.window == Window(since=DAY, until=days(3)[0])
    assert told.attempts == dict.fromkeys(days(0, 1, 2), 10)
    assert (told.snapshots, told.kept, told.undated) == (
        {**dict.fromkeys(SNAPSHOTS, 0), "servers": 3, "blacklist": 1, "health_events": 2},
        (),
        0,
    )
    inputs = read_exports(spark, tmp_path, Window(since=days(1)[0], until=days(2)[0]))
    rows = inputs.attempts.orderBy("id").collect()
    assert [row.id for row in rows] == list(range(11, 21))
    assert {row.started_at.date() for row in rows} == set(days(1))
    assert inputs.earlier_servers is None
    assert sorted(row.url for row in inputs.servers.collect()) == SERVERS
    assert not (tmp_path / STAGING).exists()


@pytest.mark.usefixtures("few_tables")
def test_going_on_reads_the_last_two_days_again(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    """What came late for older days waits for `since`, which recomputes that day and no other."""
    fill(database_url, attempts(10, 3))
    run(spark, database_url, tmp_path)
    late = [attempt(100 + number, moment(number, 3)) for number in range(4)]
    add(database_url, DeliveryAttempt, late)
    told = run(spark, database_url, tmp_path, now=moment(3))
    assert told.attempts == dict(zip(days(1, 2, 3), [11, 11, 1], strict=True))
    assert read_ids(spark, tmp_path) == [*range(1, 31), 101, 102, 103]
    assert run(spark, database_url, tmp_path, since=DAY, until=days(1)[0]).attempts == {DAY: 11}
    assert read_ids(spark, tmp_path) == [*range(1, 31), 100, 101, 102, 103]


@pytest.mark.usefixtures("few_tables")
def test_repeating_an_export_changes_nothing(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """The same rows, the same registry, and no other earlier registry."""
    fill(sqlite_only, attempts(10, 2))
    first = run(spark, sqlite_only, tmp_path)
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_dir()}
    assert run(spark, sqlite_only, tmp_path, since=DAY) == first
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_dir()} == before
    assert read_ids(spark, tmp_path) == list(range(1, 21))


@pytest.mark.usefixtures("few_tables")
def test_what_the_database_has_purged_stays_exported(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """A day of which it holds less is kept and named; one of which it holds nothing too."""
    fill(sqlite_only, attempts(10, 3))
    run(spark, sqlite_only, tmp_path)
    execute(sqlite_only, sqlalchemy.text("DELETE FROM delivery_attempts WHERE id <= 15"))
    told = run(spark, sqlite_only, tmp_path, since=DAY)
    assert told.kept == tuple(days(0, 1))
    assert read_ids(spark, tmp_path) == list(range(1, 31))


@pytest.mark.usefixtures("few_tables")
def test_what_came_late_joins_what_is_purged(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """A day that lost attempts and gained more than it lost has all of them, once, however often it is exported."""
    fill(sqlite_only, attempts(10, 2))
    run(spark, sqlite_only, tmp_path)
    execute(sqlite_only, sqlalchemy.text("DELETE FROM delivery_attempts WHERE id <= 4"))
    add(sqlite_only, DeliveryAttempt, [attempt(number, moment(0, 5)) for number in range(100, 107)])
    for _ in range(2):
        told = run(spark, sqlite_only, tmp_path, since=DAY)
        assert (told.kept, told.attempts[DAY]) == ((DAY,), 17)
        assert read_ids(spark, tmp_path) == [*range(1, 21), *range(100, 107)]


@pytest.mark.usefixtures("few_tables")
def test_days_that_were_left_out_are_found(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """An export of a few days leaves a gap; the next goes back to it, and says so. Idle days are no gaps."""
    fill(sqlite_only, [row for row in attempts(10, 8) if row["started_at"] < moment(3, 0) or row["id"] > 40])
    run(spark, sqlite_only, tmp_path, now=moment(1, 15))
    run(spark, sqlite_only, tmp_path, now=moment(6, 15), since=days(6)[0])
    assert exported_days(tmp_path) == days(0, 1, 6)
    told = run(spark, sqlite_only, tmp_path, now=moment(6, 15))
    assert (told.window.since, told.filled) == (days(2)[0], tuple(days(2, 3, 4, 5)))
    assert told.attempts == dict.fromkeys(days(2, 4, 5, 6), 10)
    assert exported_days(tmp_path) == days(0, 1, 2, 3, 4, 5, 6)
    again = run(spark, sqlite_only, tmp_path, now=moment(6, 16))
    assert (again.window.since, again.filled) == (days(5)[0], ())


@pytest.mark.usefixtures("few_tables")
def test_exports_that_are_too_old_go(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """By the days that are asked for; and, unasked, those of days to come."""
    fill(sqlite_only, attempts(10, 3))
    run(spark, sqlite_only, tmp_path)
    far = tmp_path / "attempts" / "day=2999-01-01"
    far.mkdir()
    told = export(SourceTables(spark=spark, url=sqlite_only), tmp_path, now=NOW, keep_days=1)
    assert told.removed == (DAY, date(2999, 1, 1))
    assert exported_days(tmp_path) == days(1, 2)


@pytest.mark.usefixtures("few_tables")
def test_the_registry_of_an_earlier_day_is_kept(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """A second export on the same day leaves it; the next day's replaces it."""
    fill(sqlite_only)

    def keys() -> tuple[str, str | None]:
        inputs = read_exports(spark, tmp_path, Window(since=DAY, until=days(1)[0]))
        earlier = inputs.earlier_servers
        frames = [inputs.servers, earlier] if earlier is not None else [inputs.servers]
        found = [frame.where(frame.id == "server-0").collect()[0].public_key for frame in frames]
        return found[0], found[1] if earlier is not None else None

    def change(key: str) -> None:
        execute(sqlite_only, sqlalchemy.text(f"UPDATE server_registry SET public_key = '{key}' WHERE id = 'server-0'"))

    run(spark, sqlite_only, tmp_path, now=moment(0, 1))
    change("second")
    run(spark, sqlite_only, tmp_path, now=moment(1, 1))
    assert keys() == ("second", "signing-0")
    change("third")
    run(spark, sqlite_only, tmp_path, now=moment(1, 2))
    assert keys() == ("third", "signing-0")
    run(spark, sqlite_only, tmp_path, now=moment(2, 1))
    assert keys() == ("third", "third")


@pytest.mark.usefixtures("few_tables")
def test_times_of_nobody_are_exported_apart(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """Attempts of the far future or of no time are in no day, and in every window's input; nothing is dropped."""
    odd = [attempt(50, moment(400)), attempt(51, datetime(1970, 1, 1, tzinfo=UTC))]
    fill(sqlite_only, [*attempts(5, 1), *odd])
    execute(sqlite_only, sqlalchemy.text("UPDATE delivery_attempts SET started_at = 'noon' WHERE id = 5"))
    told = run(spark, sqlite_only, tmp_path, now=moment(0, 20))
    assert (told.attempts, told.undated) == ({DAY: 4}, 3)
    assert read_ids(spark, tmp_path, count=1) == [1, 2, 3, 4, 5, 50, 51]
    assert exported_days(tmp_path) == [DAY]


@pytest.mark.usefixtures("few_tables")
@pytest.mark.parametrize("value", ["1732100000", "1732100000.5", "x'00ff'", "'2026-02-30 12:00:00'", "'2025'"])
def test_an_odd_time_spoils_no_export(spark: SparkSession, sqlite_only: str, tmp_path: Path, value: str) -> None:
    """SQLite keeps any value in any column: that row is set aside, with what it holds, and all others are exported."""
    fill(sqlite_only, attempts(10, 2))
    execute(sqlite_only, sqlalchemy.text(f"UPDATE delivery_attempts SET started_at = {value} WHERE id = 5"))
    told = run(spark, sqlite_only, tmp_path)
    inside = dict.fromkeys(days(0, 1), 10) | {DAY: 9}
    assert ({day: count for day, count in told.attempts.items() if day in inside}, told.undated) in (
        (inside, 1),
        (inside, 0),  # where its text lies between those of two days
    )
    [row] = [row for row in read_exports(spark, tmp_path, told.window).attempts.collect() if row.id == 5] or [None]
    if told.undated:
        assert row is not None
        assert (row.started_at, list(json.loads(row.unreadable))) == (None, ["started_at"])


@pytest.mark.usefixtures("few_tables")
def test_the_first_time_may_be_no_date(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """The export begins early enough for all others, not today."""
    fill(sqlite_only, attempts(10, 2))
    first = f"{DAY:%Y-%m}-00 12:00:00"
    execute(sqlite_only, sqlalchemy.text(f"UPDATE delivery_attempts SET started_at = '{first}' WHERE id = 1"))
    told = run(spark, sqlite_only, tmp_path)
    assert told.window.since == DAY.replace(day=1)
    assert read_ids(spark, tmp_path, count=2)[-19:] == list(range(2, 21))


@pytest.mark.usefixtures("few_tables")
def test_a_number_out_of_range_is_set_aside(spark: SparkSession, sqlite_only: str, tmp_path: Path) -> None:
    """In a column that may be null, it would count as nothing."""
    fill(sqlite_only, attempts(10, 1))
    execute(sqlite_only, sqlalchemy.text("UPDATE delivery_attempts SET request_bytes = 1099511627776 WHERE id = 3"))
    run(spark, sqlite_only, tmp_path)
    window = Window(since=DAY, until=days(1)[0])
    judged = check_attempts(read_exports(spark, tmp_path, window).attempts, window=window, now=NOW)
    assert {row.id: row.reason for row in judged.collect()} == {
        number: "a value that cannot be read" if number == 3 else None for number in range(1, 11)
    }
    [row] = bad(tally(judged)).collect()
    assert json.loads(json.loads(row.row)["unreadable"]) == {"request_bytes": "1099511627776"}


def test_an_empty_database_exports_nothing_and_says_so(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    """Empty inputs of the right columns."""
    told = run(spark, database_url, tmp_path)
    assert sum(told.attempts.values()) == 0
    assert set(told.snapshots.values()) == {0}
    inputs = read_exports(spark, tmp_path, told.window)
    assert [frame.count() for frame in (inputs.attempts, inputs.servers, inputs.health_events)] == [0, 0, 0]


def test_a_database_that_dies_leaves_the_exports_alone(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    """One line, without the password, and every day as it was."""
    fill(database_url, attempts(10, 2))
    run(spark, database_url, tmp_path)
    execute(database_url, sqlalchemy.text("ALTER TABLE server_health_events RENAME TO gone"))
    add(database_url, DeliveryAttempt, [attempt(100, moment(1, 1))])
    with pytest.raises(AnalyticsError, match="all exports stay as they were") as error:
        run(spark, database_url, tmp_path)
    assert "server_health_events" in str(error.value)
    assert "\n" not in str(error.value)
    assert read_ids(spark, tmp_path) == list(range(1, 21))
    assert not (tmp_path / STAGING).exists()


def test_two_exports_do_not_meet(tmp_path: Path) -> None:
    """The second is refused before it reads anything."""
    with staging_in(tmp_path), pytest.raises(DirectoryUnusable, match="another run is writing"), staging_in(tmp_path):
        pass


def test_a_place_that_is_no_directory_is_told(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match=r"cannot write to .*file"), staging_in(tmp_path / "file" / "out"):
        pass


@pytest.mark.parametrize("exchanging", [True, False], ids=["exchange", "two-renames"])
def test_a_directory_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool) -> None:
    """What lay there before is gone, not mixed in; what a dead run had put aside comes back."""
    if not exchanging:
        monkeypatch.setattr(directories, "_exchange", lambda _one, _other: False)
    for generation in ("first", "second"):
        with staging_in(tmp_path) as staging:
            (staging / "a").mkdir()
            (staging / "a" / generation).write_text(generation)
            directories.replace_directory(staging / "a", tmp_path / "a")
        assert [path.name for path in (tmp_path / "a").iterdir()] == [generation]
    (tmp_path / STAGING).mkdir()
    (tmp_path / "a").rename(tmp_path / STAGING / "a.old")
    with staging_in(tmp_path):
        assert (tmp_path / "a" / "second").exists()


def test_an_unreachable_database_is_told_at_once(tmp_path: Path) -> None:
    """Before Spark is started: refused connections, missing files, databases without our tables; never a password."""
    wrong = {
        f"postgresql://u:s3cret@127.0.0.1:{free_port()}/app": r"postgresql://127.0.0.1:\d+/app cannot be read",
        f"sqlite:///{tmp_path}/none.db": "there is no database .*none.db",
    }
    for url, problem in wrong.items():
        with pytest.raises(DatabaseUnavailable, match=problem) as error:
            check_database(url)
        assert "s3cret" not in str(error.value)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_database_without_our_tables_is_told(tmp_path: Path, postgres_url: str) -> None:
    """With what makes them."""
    empty = tmp_path / "empty.db"
    empty.touch()
    for url in (f"sqlite:///{empty}", postgres_url):
        with pytest.raises(DatabaseUnavailable, match="lacks tables of ours; `federation upgrade`"):
            check_database(url)
