"""Writing the results: every day is replaced whole, or stays as it was.

Theory of operation. All six frames are first computed into `OUT/.staging`, a name that no reader looks at; only then is
one file after the other renamed over its predecessor. A run that fails or is killed before the renames leaves OUT as it
was. A run killed between two renames leaves some days old and some replaced, each of them whole, and running it again
replaces the rest. A lock on OUT, which ends with its process, keeps a second run out, so whatever lies in `.staging`
when a run begins was left by a dead one, and is removed. In a store, all of a run becomes visible when it is committed:
see `snapshots`.
"""

from __future__ import annotations

import contextlib
import shutil
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final

import pyarrow.parquet
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from federation.analytics.data.directories import replace_file, staging_in
from federation.analytics.data.results import (
    DAILY,
    DATED,
    NETWORK_SUMMARY,
    QUARANTINE,
    SERVER_DAILY,
    UNDATED,
    Result,
    local,
    stored_dates,
)
from federation.analytics.data.snapshots import Snapshot
from federation.analytics.data.stored_files import UNKNOWN
from federation.analytics.days import DAY, MONTH
from federation.analytics.jvm import size_of
from federation.analytics.session import few_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame

    from federation.analytics.data.snapshots import Place
    from federation.analytics.frames import Outputs, Window

_FEW_BYTES: Final = 64 * 2**20
"""Of rows that Spark keeps in memory."""


def write_outputs(
    outputs: Outputs, out: Place, window: Window, *, told: Callable[[str], None] = lambda _: None
) -> None:
    """Write the rows of `outputs` to the days of `window`, and to what is dated its `as_of`. Other days are untouched.

    Rows of days outside the window are not written. A day without rows gets an empty file, to show that it was
    computed. `told` is called with what is being computed.

    Raises:
        DirectoryUnusable: another run writes to the directory, or it cannot be written to; nothing has changed.
        OSError: the disk refuses; every day is whole.
    """
    with contextlib.closing(_computed(outputs, window, told)) as computed:
        if isinstance(out, Snapshot):
            _write_to_store(computed, out, window)
        else:
            _write_to_directory(computed, out, window, told)


def _computed(outputs: Outputs, window: Window, told: Callable[[str], None]) -> Generator[tuple[Result, DataFrame]]:
    """Yield each output, to be written before the next one is asked for.

    Spark computes those that attempts are counted for first. What is few then is planned and interpreted as such.
    """
    daily, session = outputs.server_daily, outputs.server_daily.sparkSession

    def told_of(*results: Result) -> Iterator[tuple[Result, DataFrame]]:
        for result in results:
            told(f"computing {result.name}")
            yield result, getattr(outputs, result.name)

    yield from told_of(SERVER_DAILY)
    a_month = max(1.0, MONTH / (window.until - window.since).days)
    days_are_few = size_of(daily) * a_month <= _FEW_BYTES
    counts_are_few = outputs.counts is None or size_of(outputs.counts) <= _FEW_BYTES
    with few_rows(session, when=days_are_few and counts_are_few):
        yield from told_of(NETWORK_SUMMARY, QUARANTINE)
    with few_rows(session, when=days_are_few):
        yield from told_of(*DATED)


def _write_to_store(computed: Iterable[tuple[Result, DataFrame]], out: Snapshot, window: Window) -> None:
    for result, frame in computed:
        if result in DATED:
            place = result.place(window.as_of)
            whole = frame.to(result.schema).repartition(1).sortWithinPartitions(*result.order)
            out.place({place: out.write(whole, place).get(place, ())})
            continue
        rows = _inside(frame, result, window)
        if result is not QUARANTINE:  # which may be larger than one task should write
            rows = rows.repartition(sf.col("day")).sortWithinPartitions(*result.order)
        written = out.write(rows, result.name, "day")
        out.place({place: written.get(place, ()) for day in _days(result, window) if (place := result.place(day))})
    tomorrow = _tomorrow(window)
    for result in (*DAILY, *DATED):
        out.remove(
            result.place(date.fromisoformat(each))
            for each in stored_dates(out, result)
            if each != UNKNOWN and each > tomorrow
        )


def _write_to_directory(
    computed: Iterable[tuple[Result, DataFrame]], directory: Path, window: Window, told: Callable[[str], None]
) -> None:
    with staging_in(directory) as staging:
        renames: list[tuple[Path, Path]] = []
        for result, frame in computed:
            if result in DATED:
                renames.append((_stage_dated(frame, result, staging), result.file(directory, window.as_of)))
                continue
            staged = _stage_days(frame, result, window, staging / result.name)
            renames += [(file, result.file(directory, day)) for day, file in staged.items()]
        told("putting the results in place")
        put_in_place(renames, directory, window)


def put_in_place(renames: Iterable[tuple[Path, Path]], directory: Path, window: Window) -> None:
    """Replace one file after the other, and then remove results of days to come."""
    for source, target in renames:
        replace_file(source, target)
    _remove_impossible(directory, window)


def _stage_days(frame: DataFrame, result: Result, window: Window, target: Path) -> dict[date | None, Path]:
    """Write a file for each day of the window and, of the quarantine, one for the rows without a day."""
    by_day = _inside(frame, result, window).repartition(sf.col("day")).sortWithinPartitions(*result.order)
    by_day.write.partitionBy("day").parquet(local(target))
    written = {day: target / (f"day={day.isoformat()}" if day else UNDATED) for day in _days(result, window)}
    return {day: _only_file(path) if path.exists() else _empty_file(result, path) for day, path in written.items()}


def _inside(frame: DataFrame, result: Result, window: Window) -> DataFrame:
    """Return the rows of the window's days, and those without a day."""
    day = sf.col("day")
    return frame.to(result.schema).where(day.isNull() | day.between(sf.lit(window.since), sf.lit(window.as_of)))


def _days(result: Result, window: Window) -> list[date | None]:
    """Return the days of which there are to be rows; None stands for rows without one."""
    return [*window.days, *([None] if result is QUARANTINE else [])]


def _tomorrow(window: Window) -> str:
    return max(window.until, datetime.now(UTC).date() + DAY).isoformat()


def _remove_impossible(directory: Path, window: Window) -> None:
    """Remove results of days to come, as a clock that was wrong leaves them."""
    tomorrow = _tomorrow(window)
    for result in (*DAILY, *DATED):
        for path in (directory / result.name).glob(f"{result.partition}=????-??-??"):
            if path.name.removeprefix(f"{result.partition}=") > tomorrow:
                shutil.rmtree(path)


def _stage_dated(frame: DataFrame, result: Result, staging: Path) -> Path:
    target = staging / result.name
    # Not coalesce(1), which would make one task compute everything before it.
    whole = frame.to(result.schema).drop(result.partition).repartition(1).sortWithinPartitions(*result.order)
    whole.write.parquet(local(target))
    return _only_file(target)


def _empty_file(result: Result, place: Path) -> Path:
    schema = StructType([field for field in result.schema if field.name != result.partition])
    file = place.with_name(f"{place.name}.parquet")
    pyarrow.parquet.write_table(to_arrow_schema(schema).empty_table(), file)
    return file


def _only_file(directory: Path) -> Path:
    [file] = directory.glob("*.parquet")
    return file
