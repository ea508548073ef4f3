"""A server is removed from all that a run has written, and from what it read."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
from pyspark.sql.pandas.types import to_arrow_schema

from federation.analytics import frames
from federation.analytics.data.forget import FORGOTTEN, Forgotten, forget
from tests.federation.analytics.history import DAY, attempt, moment

GONE, STAYS = "https://gone.example", "https://gone.example.org"


def write(file: Path, schema: pyarrow.Schema, *rows: dict[str, object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), file)
    return file


def read(file: Path) -> list[dict[str, object]]:
    return list(pyarrow.parquet.ParquetFile(file).read().to_pylist())


def test_a_server_is_removed_from_everything(tmp_path: Path) -> None:
    """Rows about it go; those of others stay, also of one whose name begins like its, and those that it relayed."""
    attempts = write(
        tmp_path / "exports" / "attempts" / f"day={DAY}" / "a.parquet",
        to_arrow_schema(frames.ATTEMPTS),
        attempt(1, moment(), server_url=GONE),
        attempt(2, moment(), server_url=STAYS, relayed_by=GONE),
        attempt(3, moment(), server_url=None),
    )
    servers = write(
        tmp_path / "exports" / "servers" / "a.parquet", to_arrow_schema(frames.SERVERS), {"url": GONE}, {"url": STAYS}
    )
    anomalies = write(
        tmp_path / "key_anomalies" / f"as_of={DAY}" / "data.parquet",
        to_arrow_schema(frames.KEY_ANOMALIES),
        {"server_urls": [STAYS, GONE]},
        {"server_urls": [STAYS]},
        {"server_urls": None},
    )
    aside = write(
        tmp_path / "quarantine" / "day=unknown" / "data.parquet",
        to_arrow_schema(frames.QUARANTINE),
        {"row": json.dumps({"server_url": GONE})},
        {"row": json.dumps({"server_url": STAYS})},
    )
    network = write(
        tmp_path / "network_summary" / f"day={DAY}" / "data.parquet",
        to_arrow_schema(frames.NETWORK_SUMMARY),
        {"day": DAY + timedelta(days=0)},
    )
    before = network.stat().st_ino
    assert forget(tmp_path, GONE) == Forgotten(files=4, rows=4)
    assert [(row["id"], row["relayed_by"]) for row in read(attempts)] == [(2, FORGOTTEN), (3, None)]
    assert [row["url"] for row in read(servers)] == [STAYS]
    assert [row["server_urls"] for row in read(anomalies)] == [[STAYS], None]
    assert [json.loads(str(row["row"]))["server_url"] for row in read(aside)] == [STAYS]
    assert network.stat().st_ino == before
    assert forget(tmp_path, GONE) == Forgotten(files=0, rows=0)
    assert GONE.encode() + b'"' not in b"".join(file.read_bytes() for file in tmp_path.rglob("*.parquet"))
