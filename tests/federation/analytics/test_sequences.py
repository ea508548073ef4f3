"""Whatever windows are computed, in whatever order: what went in is counted, or set aside, and nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from federation.analytics import frames
from federation.analytics.data.inputs import read_exports
from federation.analytics.data.results import DAILY, DATED, QUARANTINE, SERVER_DAILY
from federation.analytics.data.sinks import write_outputs
from federation.analytics.figures.compute import compute
from federation.analytics.frames import Outputs, Window
from federation.analytics.session import keeping
from tests.federation.analytics.history import DAY, Row, attempt

DAYS: Final = [DAY + timedelta(days=number) for number in range(5)]
NOW: Final = datetime.combine(DAYS[-1] + timedelta(days=1), datetime.min.time(), UTC)
RUNS: Final = 2
"""Days that are new, and days of which some are known; three more, all days among them, with `--full`."""
UNDATED: Final = [None, datetime(1970, 1, 1, tzinfo=UTC), NOW + timedelta(days=400)]


def moment(chance: random.Random, day: date) -> datetime:
    return datetime.combine(day, datetime.min.time(), UTC) + timedelta(seconds=chance.randrange(86_400))


def rows_of(chance: random.Random, day: date) -> list[Row]:
    """Good attempts, some of them parked, bad ones and copies."""
    made = []
    for number in range(chance.randrange(30)):
        odd = chance.choice(({}, {}, {"duration_ms": -1}, {"outcome": "lost"}, {"unreadable": "{}"}))
        made.append(attempt(number, moment(chance, day), **{"unreadable": None, **odd}))
    return made + [chance.choice(made) for _ in range(min(len(made), 3))]


def write(directory: Path, rows: list[Row]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows, to_arrow_schema(frames.ATTEMPTS))
    pyarrow.parquet.write_table(table, directory / "part-0.parquet")


def stored(out: Path, name: str) -> list[dict[str, object]]:
    """Every row that lies in OUT."""
    files = sorted((out / name).glob("*/data.parquet"))
    return [row for file in files for row in pyarrow.parquet.ParquetFile(file).read().to_pylist()]


def without_the_rest(outputs: Outputs) -> Outputs:
    """Only what is counted and what is set aside: to plan and compute all else would be most of the work."""
    looked_at = (SERVER_DAILY, QUARANTINE)
    rest = {each.name: getattr(outputs, each.name).limit(0) for each in (*DAILY, *DATED) if each not in looked_at}
    return replace(outputs, **rest)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_what_goes_in_is_counted_or_set_aside(spark: SparkSession, tmp_path: Path, seed: int, full: bool) -> None:
    """Over all of OUT, after each of some runs, whose days change meanwhile."""
    chance = random.Random(seed)
    exports, out = tmp_path / "exports", tmp_path / "out"
    (exports / "servers").mkdir(parents=True)
    rows = {day: rows_of(chance, day) for day in DAYS}
    seen: dict[date, int] = {}
    for _ in range(RUNS + 3 * full):
        changed = chance.choice(DAYS)
        rows[changed] = rows[changed] + rows_of(chance, changed)
        for day in DAYS:
            write(exports / "attempts" / f"day={day}", rows[day])
        undated = [attempt(number, at) for number, at in enumerate(chance.choices(UNDATED, k=4))]
        write(exports / "attempts" / "day=__HIVE_DEFAULT_PARTITION__", undated)
        first, last = sorted(chance.choices(range(len(DAYS)), k=2))
        window = Window(since=DAYS[first], until=DAYS[last] + timedelta(days=1))
        with keeping(few_servers=True) as keep:
            outputs = compute(read_exports(spark, exports, window), window=window, now=NOW, keep=keep)
            write_outputs(without_the_rest(outputs), out, window)
        seen.update((day, len(rows[day])) for day in window.days)
        counted = sum(int(str(row["attempts"])) + int(str(row["parked"])) for row in stored(out, SERVER_DAILY.name))
        aside = [row for row in stored(out, QUARANTINE.name) if row["source"] == "attempts"]
        assert counted + len(aside) == sum(seen.values()) + len(undated)
