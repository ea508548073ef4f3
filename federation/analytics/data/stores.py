"""A store as the driver uses it: list, read, write, write if absent, delete. Names are relative to its folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import pyarrow.fs

from federation.analytics.data.azure import AzurePuts
from federation.analytics.data.gcs import GcsPuts
from federation.analytics.data.hadoop import HadoopPuts
from federation.analytics.data.s3 import S3Puts
from federation.analytics.data.store_urls import (
    ABFS,
    FILE,
    GS,
    HDFS,
    S3,
    VIEWFS,
    StoreUrl,
    open_filesystem,
    open_output,
)
from federation.analytics.errors import StoreUnusable

_AT_ONCE: Final = 16
"""Requests that delete, each of which is one round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object in a store. Its time is by the store's clock."""

    name: str
    modified: datetime


class Store:
    """The folder of a `StoreUrl`. Whatever fails raises `StoreUnusable`, whose message names it in one line."""

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        with self._explained():
            self.files = open_filesystem(url)
        self._puts = _PUTS[url.scheme](url)

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Return what lies anywhere below `folder`, which need not exist."""
        on_hadoop = isinstance(self._puts, HadoopPuts)  # for which pyarrow finds nothing where it gets no answer, too
        selector = pyarrow.fs.FileSelector(folder, allow_not_found=not on_hadoop, recursive=True)
        found: list[pyarrow.fs.FileInfo] = []
        with self._explained(), contextlib.suppress(FileNotFoundError):
            found = self.files.get_file_info(selector)
        is_file = pyarrow.fs.FileType.File
        return (
            StoredObject(name=each.path, modified=each.mtime or datetime.now(UTC))
            for each in found
            if each.type == is_file
        )

    def read(self, name: str) -> bytes:
        with self._explained(), self.files.open_input_stream(name, compression=None) as stream:
            return bytes(stream.read())

    def open(self, name: str) -> pyarrow.NativeFile:
        """Open an object to be read here and there."""
        with self._explained():
            return self.files.open_input_file(name)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[pyarrow.NativeFile]:
        """Open an object to be written, which is there at the end."""
        with self._explained(), open_output(self.url, self.files, name) as output:
            yield output

    def write(self, name: str, data: bytes) -> None:
        """Write an object whole, in place of one that is there."""
        with self._explained():
            self._puts.put(name, data, over=True)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object whole, unless there is one of that name: then return False. Of two at once, one does."""
        with self._explained():
            return self._puts.put(name, data)

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; those that are gone already do no harm."""
        with self._explained(), ThreadPoolExecutor(_AT_ONCE) as pool:
            for done in [pool.submit(self._delete, name) for name in set(names)]:
                done.result()

    def _delete(self, name: str) -> None:
        if isinstance(self._puts, _Deletes):
            self._puts.delete(name)
            return
        with contextlib.suppress(FileNotFoundError):
            self.files.delete_file(name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ImportError) as error:  # pyarrow has no others for what a store answers, and for what it lacks
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreUnusable(f"{self.url} cannot be used: {first_line}") from error


class _Puts(Protocol):
    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        """Write an object whole. Return False if there is one of that name, unless it is to be written `over`."""
        ...


@runtime_checkable
class _Deletes(Protocol):
    def delete(self, name: str) -> None:
        """Delete an object, if it is there, as pyarrow cannot in this kind of store."""
        ...


class _FilePuts:
    """Writes files on a disk, each of them whole: a link is made only where there is no file."""

    def __init__(self, url: StoreUrl) -> None:
        self._folder = Path(url.folder)

    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        try:
            _put_file(self._folder / name, data, os.replace if over else os.link)
        except FileExistsError:
            return False
        return True


def _put_file(place: Path, data: bytes, put: Callable[[Path, Path], None]) -> None:
    """Write a file beside `place`, and then put it there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        put(beside, place)
    finally:
        beside.unlink(missing_ok=True)


_PUTS: Final[Mapping[str, Callable[[StoreUrl], _Puts]]] = {
    S3: S3Puts,
    GS: GcsPuts,
    ABFS: AzurePuts,
    HDFS: HadoopPuts,
    VIEWFS: HadoopPuts,
    FILE: _FilePuts,
}
"""What writes small objects, of each kind of store."""
