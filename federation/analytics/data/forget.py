"""Removing a server from exports and results: each file that names it is replaced whole.

Rows about the server go. Rows about others that were sent through it stay, with another name for their relay.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet

from federation.analytics.data.directories import STAGING, replace_file, staging_in
from federation.analytics.data.snapshots import Snapshot

if TYPE_CHECKING:
    from federation.analytics.data.snapshots import Place

FORGOTTEN: Final = "https://forgotten.invalid"
"""What stands for a relay that is forgotten: RFC 2606 has this name for nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """How many files were replaced, and how many rows about the server they lack now."""

    files: int
    rows: int


def forget(out: Place, url: str) -> Forgotten:
    """Remove the server of this canonical URL from every Parquet file in `out`.

    Repeating it changes nothing; what was done when it is killed stays done, in a store nothing is. The driver holds a
    batch at a time. A store keeps what it held before for a day, and the first commit after that removes it.

    Raises:
        DirectoryUnusable: another run is writing to `out`; nothing has changed.
        OSError: the disk refuses; every file is whole.
    """
    if isinstance(out, Snapshot):
        return _forget_stored(out, url)
    files = rows = 0
    with staging_in(out) as staging:
        for file in sorted(out.rglob("*.parquet")):
            if STAGING in file.relative_to(out).parts:
                continue
            gone, changed = _without(file, staging / "fresh.parquet", url)
            if changed:
                replace_file(staging / "fresh.parquet", file)
                files, rows = files + 1, rows + gone
    return Forgotten(files=files, rows=rows)


def _forget_stored(out: Snapshot, url: str) -> Forgotten:
    """Put files without the server in the place of those that name it, and commit that."""
    changed = rows = 0
    with tempfile.TemporaryDirectory(prefix="fd-forget-") as directory:
        read, written = Path(directory, "read"), Path(directory, "written")
        for partition in out.partitions():
            kept = []
            for file in out.files(partition):
                out.fetch(file, read)
                gone, differs = _without(read, written, url)
                if differs:
                    changed, rows = changed + 1, rows + gone
                if gone < file.rows:
                    kept.append(out.send(written, partition) if differs else file)
            out.place({partition: kept})
    if changed:
        out.commit()
    return Forgotten(files=changed, rows=rows)


def _without(file: Path, target: Path, url: str) -> tuple[int, bool]:
    """Write the file without the server. Return how many rows it lacks, and whether it differs."""
    gone, changed = 0, False
    with pyarrow.parquet.ParquetFile(file) as read:
        schema = read.schema_arrow
        with pyarrow.parquet.ParquetWriter(target, schema) as written:
            for batch in read.iter_batches():
                fresh = _forgetful(batch, url)
                gone += batch.num_rows - fresh.num_rows
                changed = changed or not fresh.equals(batch)
                written.write_batch(fresh)
    return gone, changed


def _forgetful(batch: pyarrow.RecordBatch, url: str) -> pyarrow.RecordBatch:
    """Return the rows that are not about the server, with another name where it was the relay."""
    rows = batch.filter(pc.invert(_about(batch, url)))
    if "relayed_by" not in rows.schema.names:
        return rows
    is_it = pc.fill_null(pc.equal(rows["relayed_by"], url), False)
    return rows.set_column(
        rows.schema.get_field_index("relayed_by"),
        rows.schema.field("relayed_by"),
        pc.if_else(is_it, FORGOTTEN, rows["relayed_by"]),
    )


def _about(batch: pyarrow.RecordBatch, url: str) -> pyarrow.Array:
    """Tell of each row whether it is about the server: by its name, among several, or as a row that was set aside."""
    about = pyarrow.array([False] * batch.num_rows)
    for name in batch.schema.names:
        if name in ("server_url", "url"):
            about = pc.or_(about, pc.fill_null(pc.equal(batch[name], url), False))
        elif name == "row":
            about = pc.or_(about, pc.fill_null(pc.match_substring(batch[name], json.dumps(url)), False))
        elif name == "server_urls":
            held = [bool(urls) and url in urls for urls in batch[name].to_pylist()]
            about = pc.or_(about, pyarrow.array(held, pyarrow.bool_()))
    return about
