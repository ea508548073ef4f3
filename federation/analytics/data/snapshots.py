"""A store as a run sees it: what one manifest names, and what this run has written, which nobody else sees yet.

Reading takes neither locks nor the driver's memory: tasks open the files that are named. Writing replaces whole
partitions, and `commit` makes all of it visible at once, or none.

The manifest with the greatest number names every file, and what no manifest names is not there.

    OUT/_manifests/000000000012.json    written once, if there is none of that number; then never changed
    OUT/data/RUN/…                      files with names of their own, written before a manifest names them

A writer goes by manifest N and commits N + 1: of two, one does. A reader goes by one manifest from its beginning to its
end, for which it has a day: older manifests, and files that none names, are removed when they are a day old by the
store's own clock.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, Union

import pyarrow.parquet

from federation.analytics.data.directories import sync
from federation.analytics.data.spark_files import read_parquet, root_of, write_parquet
from federation.analytics.data.store_urls import FILE
from federation.analytics.data.stored_files import DataFile, describe_file, listed_files, read_files, write_files
from federation.analytics.data.stores import Store, StoredObject
from federation.analytics.errors import StoreChanged, StoreUnusable
from federation.analytics.frames import no_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from federation.analytics.data.store_urls import StoreUrl

LONGEST: Final = timedelta(hours=20)
"""How long a run may take: files that no manifest names are removed when they are a day old."""


Place: TypeAlias = Union[Path, "Snapshot"]
"""Where exports or results lie: a directory on this machine, or a store."""


def open_place(location: Path | StoreUrl) -> Place:
    """Return a directory as it is, and a store as it is now.

    Raises:
        StoreUnusable: see `Snapshot`.
    """
    return location if isinstance(location, Path) else Snapshot(location)


def open_for_writing(location: Path | StoreUrl) -> Place:
    """Return a place as `open_place` does, and check that a store can be committed to, before hours of computing.

    Raises:
        StoreUnusable: see `Snapshot`; or it cannot be written to, or writes over what is there.
    """
    place = open_place(location)
    if isinstance(place, Snapshot):
        place.require_writable()
    return place


def commit(place: Place) -> None:
    """Make visible what was put in place; in a directory it is already.

    Raises:
        StoreChanged, StoreUnusable: see `Snapshot.commit`.
    """
    if isinstance(place, Snapshot):
        place.commit()


class Snapshot:
    """One moment of a store, and changes to it. It is for one thread."""

    def __init__(self, url: StoreUrl) -> None:
        """Look at the store as it is now.

        Raises:
            StoreUnusable: it does not answer, or holds something else.
        """
        self.url = url
        self._store = Store(url)
        self._begun = time.monotonic()
        self._base = self._now = latest_manifest(self._store)
        self._run = uuid.uuid4().hex
        self._written: list[str] = []

    def __str__(self) -> str:
        return str(self.url)

    @property
    def number(self) -> int:
        """The number of its manifest; 0 if nothing was ever committed."""
        return self._base.number

    @property
    def exported_on(self) -> str | None:
        """The day on which the registry was exported."""
        return self._now.exported_on

    def has(self, partition: str) -> bool:
        return partition in self._now.partitions

    def partitions(self, folder: str | None = None) -> list[str]:
        """Return the names of the partitions of `folder`, without it, in order; by default whole names of all."""
        prefix = f"{folder}/" if folder else ""
        return sorted(name.removeprefix(prefix) for name in self._now.partitions if name.startswith(prefix))

    def files(self, partition: str) -> tuple[DataFile, ...]:
        return self._now.partitions.get(partition, ())

    def rows(self, partition: str) -> int:
        return sum(file.rows for file in self.files(partition))

    def size(self, partition: str) -> int:
        """Return how many bytes the files have."""
        return sum(file.size for file in self.files(partition))

    def read(self, spark: SparkSession, schema: StructType, *partitions: str) -> DataFrame:
        """Read the rows of these partitions; those that are not there have none."""
        return self.read_files(spark, schema, [file for name in partitions for file in self.files(name)])

    def read_files(self, spark: SparkSession, schema: StructType, files: Sequence[DataFile]) -> DataFrame:
        """Read the rows of files that are perhaps not in place yet."""
        if not files:
            return no_rows(spark, schema)
        root = root_of(spark, self.url)
        return read_parquet(spark, root, files, schema) if root else read_files(spark, self.url, files, schema)

    def fetch(self, file: DataFile, target: Path) -> None:
        """Copy a file to one of this machine."""
        self._store.fetch(file.name, target)

    def send(self, source: Path, partition: str) -> DataFile:
        """Copy a file of this machine to one that is perhaps put in place."""
        name = f"{DATA}/{self._run}/{partition}/{uuid.uuid4().hex}.parquet"
        self._written.append(name)
        self._store.send(source, name)
        return describe_file(name, source.stat().st_size, pyarrow.parquet.read_metadata(source))

    def write(self, frame: DataFrame, name: str, column: str | None = None) -> dict[str, tuple[DataFile, ...]]:
        """Write the rows, and return the files by partition. They belong to nothing until they are put in place."""
        root = root_of(frame.sparkSession, self.url)
        found: dict[str, list[DataFile]] = {}
        for partition, file in (
            self._write_by_spark(frame, root, name, column) if root else self._write(frame, name, column)
        ):
            found.setdefault(partition, []).append(file)
            self._written.append(file.name)
        return {
            partition: tuple(sorted(files, key=lambda file: file.name)) for partition, files in sorted(found.items())
        }

    def _write_by_spark(
        self, frame: DataFrame, root: str, name: str, column: str | None
    ) -> Iterator[tuple[str, DataFile]]:
        for partition, file in write_parquet(frame, root, folder=f"{DATA}/{self._run}", name=name, column=column):
            if self.url.scheme == FILE:
                sync(Path(self.url.folder, file.name))
            yield partition, file

    def _write(self, frame: DataFrame, name: str, column: str | None) -> list[tuple[str, DataFile]]:
        told = write_files(frame, self.url, folder=f"{DATA}/{self._run}", name=name, column=column)
        self._written.append(told)
        return listed_files(self._store.read(told))

    def place(self, partitions: Mapping[str, Iterable[DataFile]]) -> None:
        """Have these partitions hold these files, and no others."""
        fresh = {name: tuple(files) for name, files in partitions.items()}
        self._now = replace(self._now, partitions={**self._now.partitions, **fresh})

    def remove(self, partitions: Iterable[str]) -> None:
        gone = set(partitions)
        kept = {name: files for name, files in self._now.partitions.items() if name not in gone}
        self._now = replace(self._now, partitions=kept)

    def note_exported(self, day: str) -> None:
        self._now = replace(self._now, exported_on=day)

    def write_text(self, name: str, text: str) -> None:
        """Write a small file. Once it is committed it also lies under its own name, for people."""
        place = f"{DATA}/{self._run}/{name}"
        self._store.write(place, text.encode())
        self._written.append(place)
        self._now = replace(self._now, texts={**self._now.texts, name: place})

    def read_text(self, name: str) -> str:
        return self._store.read(self._now.texts[name]).decode()

    def require_writable(self) -> None:
        """Check that the store keeps the promise that commits rest on. Call it before hours of computing.

        Raises:
            StoreUnusable: it cannot be written to, or writes over what is there though asked not to.
        """
        name = f"{DATA}/{self._run}/probe"
        self._store.put_if_absent(name, b"1")  # if it is taken, then by us: an answer was lost
        if self._store.put_if_absent(name, b"2"):
            raise StoreUnusable(
                f"{self.url} writes over what is there although asked not to, so two runs could lose each other's"
                " results; use another store"
            )
        self._store.delete([name])

    def commit(self) -> None:
        """Make visible all that was put in place, at once.

        Raises:
            StoreChanged: another run committed meanwhile; nothing of this one is visible.
            StoreUnusable: it was too long ago that the run began; or it is not known whether all of it is visible, or
                none.
        """
        if time.monotonic() - self._begun > LONGEST.total_seconds():
            raise StoreUnusable(f"this run took longer than {LONGEST}, and {self.url} keeps what it wrote for a day")
        fresh: Manifest = replace(self._now, number=self._base.number + 1, run=self._run)
        data = fresh.encoded()
        # If the answer was lost and the request repeated, the manifest of that number is this one.
        if not self._store.put_if_absent(fresh.name, data) and self._store.read(fresh.name) != data:
            with contextlib.suppress(StoreUnusable):  # else it is swept
                self._store.delete(self._written)
            raise StoreChanged(
                f"another run committed to {self.url} while this one was at work; nothing of this one is visible: run"
                " it again"
            )
        self._base = self._now = fresh
        self._run, self._written = uuid.uuid4().hex, []
        for name in fresh.texts:
            self._store.write(name, self.read_text(name).encode())
        sweep(self._store)


MANIFESTS: Final = "_manifests"
DATA: Final = "data"
VERSION: Final = 1
KEPT: Final = timedelta(days=1)
"""How long what is superseded stays, for those who read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that one moment of a store holds. It grows with the days that are kept, not with their rows."""

    number: int = 0
    """0 is that of a store to which nothing was ever committed."""
    run: str = ""
    """Which run committed it."""
    partitions: Mapping[str, tuple[DataFile, ...]] = field(default_factory=dict)
    """Files by partition, as `server_daily/day=2026-11-21`. One without files was computed, and is empty."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Names in the store by name, as `report.html`."""
    exported_on: str | None = None
    """The UTC day on which the registry was exported."""

    @property
    def name(self) -> str:
        return f"{MANIFESTS}/{self.number:012d}.json"

    @property
    def named(self) -> set[str]:
        """Every object that it names."""
        return {file.name for files in self.partitions.values() for file in files} | set(self.texts.values())

    def encoded(self) -> bytes:
        told = {"version": VERSION, **asdict(self), "partitions": dict(sorted(asdict(self)["partitions"].items()))}
        del told["number"]  # which its name tells
        return json.dumps(told, separators=(",", ":")).encode()


def latest_manifest(store: Store) -> Manifest:
    """Return the manifest that readers go by now.

    Raises:
        StoreUnusable: the store does not answer, or holds something else under that name.
    """
    found = _listed(store)
    return _read(store, found[-1].name) if found else Manifest()


def sweep(store: Store) -> int:
    """Remove what nobody reads any more. Return how many objects that were."""
    found = _listed(store)
    if not found:
        return 0
    now = found[-1].modified
    superseded = sum(now - newer.modified >= KEPT for newer in found[1:])
    kept = {each.name for each in found[superseded:]}
    for name in sorted(kept):
        kept |= _read(store, name).named
    there = itertools.chain(store.list(MANIFESTS), store.list(DATA))
    gone = [each.name for each in there if each.name not in kept and now - each.modified >= KEPT]
    store.delete(gone)
    return len(gone)


def _listed(store: Store) -> list[StoredObject]:
    """Return the manifests in the order of their numbers."""
    found = (each for each in store.list(MANIFESTS) if each.name.endswith(".json") and "/." not in each.name)
    return sorted(found, key=lambda each: each.name)


def _read(store: Store, name: str) -> Manifest:
    data = store.read(name)
    try:
        told = json.loads(data)
        if told.pop("version") != VERSION:
            raise StoreUnusable(f"{store.url}/{name} was written by a later version of this program; use that one")
        held = {partition: tuple(DataFile(**file) for file in files) for partition, files in told["partitions"].items()}
        number = int(name.removeprefix(f"{MANIFESTS}/").removesuffix(".json"))
        return Manifest(**told | {"number": number, "partitions": held})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreUnusable(f"{store.url}/{name} is no manifest of ours") from None
