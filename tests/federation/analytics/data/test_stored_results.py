"""Exports and results in a store: as those in a directory, but a run is visible whole or not at all."""

from __future__ import annotations

import json
import re
from datetime import date, timedelta
from pathlib import Path
from uuid import uuid4

import obstore
import pyarrow
import pyarrow.parquet
import pytest
import sqlalchemy
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from db import DeliveryAttempt
from federation.analytics import frames, pipeline
from federation.analytics.data.export import Export, export
from federation.analytics.data.forget import FORGOTTEN, Forgotten, forget
from federation.analytics.data.inputs import read_exports
from federation.analytics.data.results import (
    DAILY,
    DATED,
    QUARANTINE,
    SERVER_DAILY,
    read_dated,
    read_days,
    read_undated,
)
from federation.analytics.data.sinks import write_outputs
from federation.analytics.data.snapshots import Snapshot
from federation.analytics.data.source import SourceTables
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.data.stored_exports import export_to_store
from federation.analytics.data.stored_files import GROUP_ROWS, DataFile, FilesReader, Piece, share
from federation.analytics.data.stores import Store
from federation.analytics.errors import AnalyticsError, DirectoryUnusable, StoreChanged, first_cause
from federation.analytics.figures.checks import check_attempts
from federation.analytics.frames import Inputs, Outputs, Window
from tests.federation.analytics.history import DAY, SERVERS, add, attempt, attempts, execute, fill, moment
from tests.federation.analytics.story import AS_OF, SICK, make_outputs

LAST_DAYS = Window(since=AS_OF - timedelta(days=1), until=AS_OF + timedelta(days=1))
THREE_DAYS = Window(since=AS_OF - timedelta(days=2), until=LAST_DAYS.until)
NOW = moment(2, 15)
EXPORTED = Window(since=DAY, until=DAY + timedelta(days=5))


def rows(frame: DataFrame) -> list[str]:
    return sorted(map(repr, frame.collect()))


def daily_row(url: str, day: date) -> tuple[object, ...]:
    return (url, day, 10, 9, 1, 0, 0, {"TIMEOUT": 1}, 0.0, 1, 1, 0.9, 1, 2, 3, 0)


def urls(spark: SparkSession, out: Snapshot) -> list[str]:
    read = read_days(spark, out, SERVER_DAILY, THREE_DAYS.days).orderBy("day", "server_url")
    return [row.server_url for row in read.collect()]


def test_a_run_is_visible_whole_or_not_at_all(spark: SparkSession, s3_folder: StoreUrl) -> None:
    """All six frames are read back as they were computed; days that are replaced, with their readers in the middle.

    A run that fails, and one that another overtakes, change nothing.
    """
    outputs, out = make_outputs(spark, SICK), Snapshot(s3_folder)
    write_outputs(outputs, out, THREE_DAYS)
    assert not Snapshot(s3_folder).partitions()
    with pytest.raises(FileNotFoundError, match=r"^s3://.*server_scorecard/as_of=.*federation analytics run"):
        read_dated(spark, Snapshot(s3_folder), DATED[0], AS_OF)
    out.commit()
    out = Snapshot(s3_folder)
    for result in DAILY:
        computed = getattr(outputs, result.name).where(sf.col("day").isNull() | (sf.col("day") >= THREE_DAYS.since))
        read = read_days(spark, out, result, THREE_DAYS.days).unionByName(read_undated(spark, out, result))
        assert rows(read) == rows(computed), result.name
        assert read.schema == result.schema
    for result in DATED:
        assert rows(read_dated(spark, out, result, AS_OF)) == rows(getattr(outputs, result.name)), result.name
    before = urls(spark, out)
    kept = out.files(SERVER_DAILY.place(THREE_DAYS.since))

    failing, overtaken, late = (Snapshot(s3_folder) for _ in range(3))
    broken = outputs.quarantine.withColumn("reason", sf.raise_error(sf.lit("a broken disk")).cast("string"))
    wrong = Outputs(**{name: getattr(outputs, name) for name in outputs.__slots__} | {"quarantine": broken})
    with pytest.raises(PySparkException, match="a broken disk"):
        write_outputs(wrong, failing, LAST_DAYS)
    write_outputs(make_outputs(spark, SICK[:1], server_daily=[], quarantine=[]), overtaken, LAST_DAYS)
    fresh = make_outputs(spark, SICK[:1], server_daily=[daily_row("https://late.example", AS_OF)], quarantine=[])
    write_outputs(fresh, late, LAST_DAYS)
    late.commit()
    with pytest.raises(StoreChanged):
        overtaken.commit()
    assert urls(spark, out) == before
    out = Snapshot(s3_folder)
    assert urls(spark, out) == [*before[: sum(file.rows for file in kept)], "https://late.example"]
    assert out.files(SERVER_DAILY.place(THREE_DAYS.since)) == kept
    assert (out.has(QUARANTINE.place(AS_OF)), out.files(QUARANTINE.place(AS_OF))) == (True, ())


@pytest.mark.parametrize("kind", ["file", "gs", "abfs", "viewfs"])
def test_tasks_read_and_write_stores_of_each_kind(
    spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """With the credentials of their own processes; what is committed is read back as it was, also without a day."""
    folder = (
        parse_store_url(f"file://{tmp_path}/p[1] a") if kind == "file" else request.getfixturevalue(f"{kind}_folder")
    )
    out, day = Snapshot(folder), sf.date_add(sf.lit(DAY), (sf.col("id") % 3).cast("int"))
    numbers = spark.range(3000, numPartitions=2).withColumn("day", sf.when(sf.col("id") % 3 < 2, day))
    out.place(out.write(numbers, "numbers", "day"))
    out.place(out.write(numbers.where("id < 0"), "none", "day"))
    out.commit()
    stored = Snapshot(folder)
    assert stored.partitions("numbers")[2:] == ["day=unknown"]
    names = [f"numbers/{name}" for name in stored.partitions("numbers")]
    assert [stored.rows(name) for name in names] == [1000] * 3
    assert [min(file.first_id or 0 for file in stored.files(name)) for name in names] == [0, 1, 2]
    assert stored.size(names[0]) == sum(len(Store(folder).read(file.name)) for file in stored.files(names[0]))
    assert rows(stored.read(spark, numbers.schema, *names)) == rows(numbers)


class Counted:
    """A file of obstore's that counts what it is asked for."""

    read_bytes = 0

    def __init__(self, file: obstore.ReadableFile) -> None:
        self.seek, self.tell, self.size, self._file = file.seek, file.tell, file.size, file

    def read(self, size: int) -> obstore.Bytes:
        Counted.read_bytes += size
        return self._file.read(size)


def test_only_named_columns_are_read(s3_folder: StoreUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark does not tell the reader which ones a query needs; the ids of attempts are a tenth of their bytes."""
    count = 20_000
    texts = {name: [uuid4().hex for _ in range(count)] for name in ("delivery_id", "server_url", "job_name")}
    pyarrow.parquet.write_table(pyarrow.table({"id": range(count), **texts}), tmp_path / "1")
    Store(s3_folder).send(tmp_path / "1", "1")
    opened = obstore.open_reader
    monkeypatch.setattr(obstore, "open_reader", lambda *given, **named: Counted(opened(*given, **named)))

    def read(*names: str) -> tuple[list[str], int]:
        """The columns that are there, and how many bytes were asked for."""
        files = json.dumps([("1", 1, (tmp_path / "1").stat().st_size)])
        schema = StructType([frames.ATTEMPTS[name] for name in names])
        reader = FilesReader({"url": s3_folder.text, "files": files, "tasks": "1"}, schema)
        before = Counted.read_bytes
        batches = list(reader.read(reader.partitions()[0]))
        assert sum(batch.num_rows for batch in batches) == count
        return batches[0].schema.names, Counted.read_bytes - before

    all_names, all_bytes = read("id", *texts)
    names, few_bytes = read("id")
    assert (all_names, names) == (["id", *texts], ["id"])
    assert few_bytes < all_bytes / 8


@pytest.mark.parametrize("kind", ["s3", "viewfs"])
def test_ids_of_attempts_are_read_apart(
    spark: SparkSession, sqlite_only: str, request: pytest.FixtureRequest, kind: str
) -> None:
    """To find those that are there twice: nothing else of the attempts is read for that, by whom ever."""
    fill(sqlite_only, attempts(10, 3))
    store = request.getfixturevalue(f"{kind}_folder")
    export_to_store(SourceTables(spark=spark, url=sqlite_only), spark, Snapshot(store), now=NOW)
    inputs = read_exports(spark, Snapshot(store), EXPORTED)
    judged = check_attempts(inputs.attempts, window=EXPORTED, now=NOW, ids=inputs.attempt_ids)
    plan = judged._jdf.queryExecution().executedPlan().toString()
    scans = re.findall(r"(?:BatchScan federation-files|FileScan parquet )\[(.*?)\]", plan)
    others = len(frames.ATTEMPTS.names) - 1
    found = {re.sub(r"#\d+L?", "", columns).replace(", ...", ",...") for columns in scans}
    assert found == {"id", f"id,... {others} more fields"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gs", "abfs", "viewfs"])
def test_a_night_in_a_store_of_each_kind(
    spark: SparkSession, sqlite_only: str, request: pytest.FixtureRequest, kind: str
) -> None:
    """From a database to the report, and a server is forgotten: all in one place."""
    folder: StoreUrl = request.getfixturevalue(f"{kind}_folder")
    fill(sqlite_only, attempts(10, 3))
    tables, window = SourceTables(spark=spark, url=sqlite_only), Window(since=DAY, until=DAY + timedelta(days=3))
    export_to_store(tables, spark, Snapshot(folder / "exports"), now=NOW)
    summary = pipeline.run(spark, Snapshot(folder / "exports"), Snapshot(folder), window, now=moment(3, 1))
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"  # of little, though Spark does not know its size
    totals, stored = summary["totals"], Snapshot(folder)
    assert isinstance(totals, dict)
    assert (totals["attempts"], totals["servers"]) == (30, 3)
    assert json.loads(Store(folder).read("summary.json")) == summary
    assert Store(folder).read("report.html").decode() == stored.read_text("report.html")
    assert {row.server_url for row in read_dated(spark, stored, DATED[0], window.as_of).collect()} == set(SERVERS)
    forget(stored, SERVERS[0])
    left = read_dated(spark, Snapshot(folder), DATED[0], window.as_of).collect()
    assert {row.server_url for row in left} == set(SERVERS[1:])


def test_an_export_to_a_store_is_that_to_a_directory(
    spark: SparkSession, sqlite_only: str, s3_folder: StoreUrl, tmp_path: Path
) -> None:
    """Through all that can happen between two: late and purged attempts, odd times, days left out, another registry."""
    fill(sqlite_only, [*attempts(10, 3), attempt(90, moment(-20_000)), attempt(91, moment(900))])
    tables = SourceTables(spark=spark, url=sqlite_only)

    def both(**asked: date) -> Export:
        in_directory = export(tables, tmp_path, now=NOW, **asked)
        in_store = export_to_store(tables, spark, Snapshot(s3_folder), now=NOW, **asked)
        assert in_store == in_directory
        return in_store

    def compare() -> None:
        stored, local = (read_exports(spark, place, EXPORTED) for place in (Snapshot(s3_folder), tmp_path))
        for name in Inputs.__slots__:
            frame, expected = getattr(stored, name), getattr(local, name)
            assert (frame and rows(frame)) == (expected and rows(expected)), name

    with pytest.raises(DirectoryUnusable, match=r"there are no exports in s3://analytics/.*`federation analytics exp"):
        read_exports(spark, Snapshot(s3_folder), EXPORTED)
    both(until=DAY + timedelta(days=1))
    both(since=DAY + timedelta(days=2))
    told = both(since=DAY)
    assert (sum(told.attempts.values()), told.undated, told.snapshots["servers"]) == (30, 2, 3)
    assert told.filled == (DAY + timedelta(days=1),)
    compare()
    execute(sqlite_only, sqlalchemy.text("DELETE FROM delivery_attempts WHERE id <= 4 OR id > 80"))
    execute(sqlite_only, sqlalchemy.text("UPDATE server_registry SET public_key = 'other' || id"))
    add(sqlite_only, DeliveryAttempt, [attempt(number, moment(0, 5)) for number in range(100, 107)])
    add(sqlite_only, DeliveryAttempt, [attempt(200, moment(4))])
    told = both(since=DAY)
    assert (told.kept, told.attempts[DAY], told.undated) == ((DAY,), 17, 1)
    compare()


def test_the_registry_of_an_earlier_day_stays(spark: SparkSession, sqlite_only: str, s3_folder: StoreUrl) -> None:
    """As the last export of that day found it; a second export on one day does not change it."""
    fill(sqlite_only, attempts(2, 1))
    tables = SourceTables(spark=spark, url=sqlite_only)

    def keys(key: str, day: int) -> tuple[set[str], set[str]]:
        execute(sqlite_only, sqlalchemy.text(f"UPDATE server_registry SET public_key = '{key}' || id"))
        export_to_store(tables, spark, Snapshot(s3_folder), now=moment(day, 12))
        inputs = read_exports(spark, Snapshot(s3_folder), EXPORTED)
        found = [inputs.earlier_servers, inputs.servers]
        return tuple({row.public_key[0] for row in frame.collect()} if frame else set() for frame in found)

    assert [keys("a", 1), keys("b", 2), keys("c", 2)] == [(set(), {"a"}), ({"a"}, {"b"}), ({"a"}, {"c"})]


def test_a_server_is_removed_from_a_store(spark: SparkSession, s3_folder: StoreUrl, tmp_path: Path) -> None:
    """From what the next manifest names; files that do not name it stay the same."""
    gone, stays = "https://gone.example", "https://gone.example.org"
    data = [attempt(1, moment(), server_url=gone), attempt(2, moment(), server_url=stays, relayed_by=gone)]
    out, file = Snapshot(s3_folder), tmp_path / "file"
    place(out, file, "attempts/day=1", frames.ATTEMPTS, *data)
    place(out, file, "attempts/day=2", frames.ATTEMPTS, attempt(3, moment(), server_url=gone))
    place(out, file, "attempts/day=3", frames.ATTEMPTS, attempt(4, moment(), server_url=stays))
    place(out, file, "quarantine/day=1", frames.QUARANTINE, {"row": json.dumps({"server_url": gone})})
    out.commit()
    assert forget(Snapshot(s3_folder), gone) == Forgotten(files=3, rows=3)
    after = Snapshot(s3_folder)
    read = after.read(spark, frames.ATTEMPTS, *(f"attempts/day={day}" for day in (1, 2, 3)))
    assert sorted((row.id, row.relayed_by) for row in read.collect()) == [(2, FORGOTTEN), (4, None)]
    assert [file.first_id for file in after.files("attempts/day=1")] == [2]
    assert (after.files("attempts/day=2"), after.has("attempts/day=2")) == ((), True)
    assert after.files("attempts/day=3") == out.files("attempts/day=3")
    assert forget(Snapshot(s3_folder), gone) == Forgotten(files=0, rows=0)
    assert Snapshot(s3_folder).number == 2


def place(out: Snapshot, file: Path, partition: str, schema: frames.StructType, *data: object) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(data), to_arrow_schema(schema)), file)
    out.place({partition: [out.send(file, partition)]})


def test_a_damaged_file_is_told_by_its_name(spark: SparkSession, s3_folder: StoreUrl) -> None:
    """In a line."""
    out, name = Snapshot(s3_folder), "data/torn.parquet"
    Store(s3_folder).write(name, b"PAR1 and so on")
    out.place({"servers": [DataFile(name=name, rows=1, size=14, groups=1)]})
    out.commit()
    with pytest.raises(PySparkException) as error:
        read_exports(spark, out, EXPORTED).servers.collect()
    assert first_cause(error.value).startswith(f"ValueError: {s3_folder}/{name} cannot be read: ")


def test_a_store_that_goes_away_leaves_everything(spark: SparkSession, sqlite_only: str, s3_folder: StoreUrl) -> None:
    """The export says so in a line, and what was exported is still read."""
    fill(sqlite_only, attempts(2, 1))
    tables = SourceTables(spark=spark, url=sqlite_only)
    export_to_store(tables, spark, Snapshot(s3_folder), now=NOW)
    execute(sqlite_only, sqlalchemy.text("ALTER TABLE accepted_keys RENAME TO gone"))
    with pytest.raises(AnalyticsError, match="all exports stay as they were") as error:
        export_to_store(tables, spark, Snapshot(s3_folder), now=NOW)
    assert "\n" not in str(error.value)
    assert read_exports(spark, Snapshot(s3_folder), EXPORTED).attempts.count() == 2


MEBIBYTE = 2**20


@pytest.mark.parametrize(
    ("files", "tasks", "expected"),
    [
        ([], 4, []),
        ([("a", 1, 100)], 4, [[("a", 0, 1)]]),
        ([("a", 0, 100), ("b", 1, 1)], 1, [[("a", 0, 0)], [("b", 0, 1)]]),
        ([("a", 1, 100), ("b", 1, 100)], 1, [[("a", 0, 1), ("b", 0, 1)]]),
        ([("a", 1, 100), ("b", 1, 100)], 2, [[("a", 0, 1)], [("b", 0, 1)]]),
        ([("a", 4, 40 * MEBIBYTE)], 1, [[("a", 0, 1)], [("a", 1, 2)], [("a", 2, 3)], [("a", 3, 4)]]),
        ([("a", 4, 24 * MEBIBYTE)], 1, [[("a", 0, 2)], [("a", 2, 4)]]),
    ],
)
def test_files_are_shared_among_tasks(
    files: list[tuple[str, int, int]], tasks: int, expected: list[list[Piece]]
) -> None:
    """Each row group is one task's; a large file is that of several, and small ones are read together."""
    assert list(share(files, tasks)) == expected


def test_a_task_holds_a_row_group_at_a_time(spark: SparkSession, s3_folder: StoreUrl) -> None:
    """Of days that come mixed it writes a few files at a time, each of them whole; no row is lost."""
    out = Snapshot(s3_folder)
    numbers = spark.range(3 * GROUP_ROWS, numPartitions=1)
    day = sf.date_add(sf.lit(DAY), (sf.col("id") % 7).cast("int"))
    written = out.write(numbers.where("id < 5000").withColumn("day", day), "mixed", "day")
    assert {name: sum(file.rows for file in files) for name, files in written.items()} == {
        f"mixed/day={DAY + timedelta(days=number)}": 715 if number < 2 else 714 for number in range(7)
    }
    [file] = out.write(numbers, "whole")["whole"]
    assert (file.rows, file.groups, file.first_id) == (3 * GROUP_ROWS, 3, 0)
    counted = out.read_files(spark, numbers.schema, [file]).agg(sf.count("id"), sf.sum("id")).first()
    assert tuple(counted or ()) == (file.rows, file.rows * (file.rows - 1) // 2)
