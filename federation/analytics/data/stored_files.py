"""Parquet files in a store, read and written by Spark's tasks.

This is for stores of which Spark's Hadoop has no file system; of others see `spark_files`. Files are the data source
`federation-files`, which goes through obstore and pyarrow in Arrow batches. Its options name them: `url`, and `files`,
a list of `[name, row groups, bytes]` in JSON. A task that is tried again writes files with other names.

The modules of ours that this one needs travel to the executors with it; these need pyarrow and obstore installed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from federation.analytics.data.python_workers import OwnSource, SparesWorker
from federation.analytics.data.store_urls import StoreUrl, open_objects, parse_store_url

if TYPE_CHECKING:
    from obstore import ReadableFile, WritableFile
    from obstore.store import ObjectStore
    from pyspark.sql import DataFrame, SparkSession

UNKNOWN: Final = "unknown"
"""The partition of rows without a date."""

FORMAT: Final = "federation-files"
BATCH_ROWS: Final = 20_000
GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 16 * 2**20
"""A file being written holds a row group of this size in memory, compressed or not."""
FILES_AT_ONCE: Final = 4
"""Being written by one task."""
READ_BYTES: Final = 64 * 2**10
"""The fewest that are asked for at once; pyarrow asks for whole columns of a row group."""
PART_BYTES: Final = 5 * 2**20
"""How much of a file that is written is sent at once, the least that S3 takes."""
TASK_BYTES: Final = 16 * 2**20
"""How much of files one task reads, which are compressed."""

_SHIPPED: Final = (
    "federation.analytics.data.store_urls",
    __name__,
)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file: its name in the store, and what there is to know of it without opening it."""

    name: str
    rows: int
    size: int
    """In bytes."""
    groups: int = 0
    """0 if they are not known: one task reads the file."""
    first_id: int | None = None
    """The smallest, if it has a column `id`."""


def describe_file(name: str, size: int, footer: pyarrow.parquet.FileMetaData) -> DataFile:
    """Return what the footer tells of a file."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    column = footer.schema.names.index("id") if "id" in footer.schema.names else None
    found = [] if column is None else [group.column(column).statistics for group in groups]
    ids = [each.min for each in found if each is not None and each.has_min_max]
    return DataFile(name=name, rows=footer.num_rows, size=size, groups=len(groups), first_id=min(ids, default=None))


Piece = tuple[str, int, int]
"""Some row groups of a file: its name, the first, and the one after the last; 0 is all of them."""


def register_files(spark: SparkSession) -> None:
    """Make `spark.read.format("federation-files")` work in this session, and our functions in its executors."""
    FilesSource.register(spark, _SHIPPED)


def read_files(spark: SparkSession, url: StoreUrl, files: Sequence[DataFile], schema: StructType) -> DataFrame:
    """Read these columns of the rows of the files, and no others. Columns that one lacks are null.

    Spark does not tell a Python data source which columns a query needs: name only those.
    """
    register_files(spark)
    named = json.dumps([(file.name, file.groups, file.size) for file in files])
    return (
        spark.read.format(FORMAT)
        .options(url=url.text, files=named, tasks=str(spark.sparkContext.defaultParallelism))
        .schema(schema)
        .load()
    )


def write_files(frame: DataFrame, url: StoreUrl, *, folder: str, name: str, column: str | None) -> str:
    """Write the rows to files in `folder`, and return the name of the list of them, for `listed_files`.

    Their partition is `name`, or `name/column=value` of the rows in them.
    """
    register_files(frame.sparkSession)
    told = f"{folder}/{name}-{uuid.uuid4().hex}.json"
    options = {"url": url.text, "folder": folder, "name": name, "told": told}
    chosen = {**options, "column": column} if column else options
    frame.write.format(FORMAT).options(**chosen).mode("append").save()
    return told


def listed_files(data: bytes) -> list[tuple[str, DataFile]]:
    """Return the files of a list, each with its partition."""
    return [(partition, DataFile(**file)) for partition, file in json.loads(data)]


class FilesSource(OwnSource):
    """Files in a store."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> FilesReader:
        return FilesReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> FilesWriter:
        return FilesWriter(self.options)


@dataclass(frozen=True)
class FilesPart(InputPartition):
    """What one task reads."""

    pieces: tuple[Piece, ...]


class FilesReader(SparesWorker, DataSourceReader):
    """Reads row groups, a batch at a time."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._url = options["url"]
        self._files = json.loads(options["files"])
        self._tasks = int(options["tasks"])
        self._schema = schema

    def partitions(self) -> Sequence[FilesPart]:
        return [FilesPart(tuple(pieces)) for pieces in share(self._files, self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        if not isinstance(partition, FilesPart):
            raise TypeError(f"{type(partition).__name__} is no part of these files")
        url = parse_store_url(self._url)
        objects, expected = open_objects(url), to_arrow_schema(self._schema)
        for piece in partition.pieces:
            try:
                yield from _read_piece(objects, piece, expected)
            except Exception as error:  # obstore's errors have no common one with pyarrow's
                problem = (str(error).splitlines() or [type(error).__name__])[0].partition("?")[0]
                raise ValueError(f"{url}/{piece[0]} cannot be read: {problem}") from None


def share(files: Sequence[tuple[str, int, int]], tasks: int) -> Iterator[list[Piece]]:
    """Yield what each task reads: about as much, in at least `tasks` tasks where there is enough for them."""
    total = sum(size for _, _, size in files)
    most = max(1, min(TASK_BYTES, total // max(1, tasks)))
    pieces: list[Piece] = []
    held = 0
    for name, groups, size in files:
        if not groups:
            yield [(name, 0, 0)]
        for group in range(groups):
            if pieces and held + size // groups > most:
                yield pieces
                pieces, held = [], 0
            held += size // groups
            if pieces and pieces[-1][0] == name:
                pieces[-1] = (name, pieces[-1][1], group + 1)
            else:
                pieces.append((name, group, group + 1))
    if pieces:
        yield pieces


def _read_piece(objects: ObjectStore, piece: Piece, expected: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    import obstore

    name, first, end = piece
    file = _Input(obstore.open_reader(objects, name, buffer_size=READ_BYTES))
    with pyarrow.parquet.ParquetFile(file, pre_buffer=True) as read:
        there = [column for column in expected.names if column in read.schema_arrow.names]
        groups = range(first, end) if end else None
        for batch in read.iter_batches(BATCH_ROWS, row_groups=groups, columns=there):
            columns = [
                batch[field.name].cast(field.type) if field.name in there else pyarrow.nulls(batch.num_rows, field.type)
                for field in expected
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, schema=expected)


@dataclass
class FilesWritten(WriterCommitMessage):
    """What one task wrote."""

    files: list[tuple[str, DataFile]]
    """Each with its partition."""


class FilesWriter(SparesWorker, DataSourceArrowWriter):
    """Writes rows to files of their partitions, and then lists those files, by one attempt of each task.

    A task holds a row group for each of a few files. What a task wrote that failed is in no list.
    """

    def __init__(self, options: dict[str, str]) -> None:
        self._url = options["url"]
        self._folder, self._name = options["folder"], options["name"]
        self._told, self._column = options["told"], options.get("column")

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> FilesWritten:
        url = parse_store_url(self._url)
        objects = open_objects(url)
        growing: dict[str, _Growing] = {}
        done = []
        for batch in iterator:
            for partition, rows in self._by_partition(batch):
                file = growing.pop(partition, None)
                if file is None:
                    if len(growing) == FILES_AT_ONCE:
                        done.append(growing.pop(next(iter(growing))).close())
                    file = _Growing(objects, partition, f"{self._folder}/{partition}/{uuid.uuid4().hex}.parquet")
                growing[partition] = file  # the last one: the first is that which waited longest for rows
                file.add(rows)
        return FilesWritten([*done, *(file.close() for file in growing.values())])

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """List what was written, in a process of Spark's on the driver's machine."""
        import obstore

        done = (file for message in messages if isinstance(message, FilesWritten) for file in message.files)
        told = [(partition, asdict(file)) for partition, file in done]
        obstore.put(open_objects(parse_store_url(self._url)), self._told, json.dumps(told).encode())

    def _by_partition(self, batch: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
        if self._column is None:
            if batch.num_rows:
                yield self._name, batch
            return
        values = batch[self._column]
        for value in values.unique():
            chosen = pc.equal(values, value) if value.is_valid else pc.is_null(values)
            text = value.as_py().isoformat() if value.is_valid else UNKNOWN
            yield f"{self._name}/{self._column}={text}", batch.filter(chosen)


class _Input:
    """What pyarrow reads from; obstore's own is a closed file to it."""

    closed = False

    def __init__(self, file: ReadableFile) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


class _Output:
    """What pyarrow writes to; obstore's own is a closed file to it."""

    closed = False

    def __init__(self, output: WritableFile) -> None:
        self._output = output
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return self._output.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Leave it to obstore to send what it has as soon as that is a part."""


class _Growing:
    """A file that is being written, whose rows become a row group as soon as they are enough."""

    def __init__(self, objects: ObjectStore, partition: str, name: str) -> None:
        import obstore

        self._partition, self._name = partition, name
        self._object = obstore.open_writer(objects, name, buffer_size=PART_BYTES)
        self._output = _Output(self._object)
        self._writer: pyarrow.parquet.ParquetWriter | None = None
        self._footers: list[pyarrow.parquet.FileMetaData] = []
        """That of the file, once it is complete."""
        self._held: list[pyarrow.RecordBatch] = []

    def add(self, rows: pyarrow.RecordBatch) -> None:
        self._held.append(rows)
        count, size = sum(each.num_rows for each in self._held), sum(each.nbytes for each in self._held)
        if count >= GROUP_ROWS or size >= GROUP_BYTES:
            self._flush()

    def close(self) -> tuple[str, DataFile]:
        """Complete the file. Return it with its partition."""
        self._flush()
        assert self._writer is not None
        self._writer.close()
        self._object.close()
        return self._partition, describe_file(self._name, self._output.size, self._footers[0])

    def _flush(self) -> None:
        if not self._held:
            return
        table = pyarrow.Table.from_batches(self._held)
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._output, table.schema, metadata_collector=self._footers)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._held = []
