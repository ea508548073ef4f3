"""A store as the driver uses it: list, read, write, write if absent, delete. Names are relative to its folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from federation.analytics.data.directories import sync
from federation.analytics.data.store_urls import FILE, HADOOPS, StoreUrl, open_objects
from federation.analytics.errors import StoreUnusable
from federation.analytics.jvm import HadoopFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AT_ONCE: Final = 16
"""Requests that delete, each of which is one round trip."""
_ATTEMPTS: Final = 2
"""Of a put, each of which is repeated by obstore where it is sure that nothing was written."""

_ANSWER: Final = re.compile(r"\?\S*|:? ?<.*")
"""Matches what is not told of an error: the query of a URL, which may be a signature, and the body of an answer."""
_METADATA: Final = re.compile(r"169\.254\.16\d\.|metadata\.google|no Azure credentials|credentials", re.IGNORECASE)
"""Matches the places where a machine has credentials, which are asked last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object in a store. Its time is by the store's clock."""

    name: str
    modified: datetime


class Store:
    """The folder of a `StoreUrl`. Whatever fails raises `StoreUnusable`, whose message names it in one line."""

    def __init__(self, url: StoreUrl) -> None:
        """Open it. A file system of Hadoop's takes a Spark that runs."""
        self.url = url
        with self._explained():
            self._files = _open(url)

    def list(self, folder: str) -> Iterator[StoredObject]:
        """Return what lies anywhere below `folder`, which need not exist."""
        with self._explained():
            return iter([StoredObject(name=name, modified=modified) for name, modified in self._files.list(folder)])

    def read(self, name: str) -> bytes:
        with self._explained():
            return self._files.read(name)

    def fetch(self, name: str, target: Path) -> None:
        """Copy an object to a file of this machine."""
        with self._explained():
            self._files.fetch(name, target)

    def send(self, source: Path, name: str) -> None:
        """Copy a file of this machine to an object."""
        with self._explained():
            self._files.send(source, name)

    def write(self, name: str, data: bytes) -> None:
        """Write an object whole, in place of one that is there."""
        with self._explained():
            self._files.put(name, data, over=True)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object whole, unless there is one of that name: then return False. Of two at once, one does.

        If an answer was lost and the request sent again, that one may be ours.
        """
        with self._explained():
            return self._files.put(name, data, over=False)

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; those that are gone already do no harm."""
        with self._explained(), ThreadPoolExecutor(_AT_ONCE) as pool:
            for done in [pool.submit(self._files.delete, name) for name in set(names)]:
                done.result()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError:
            raise StoreUnusable(f"{self.url} needs the extra `stores` (obstore)") from None
        except Exception as error:
            if not isinstance(error, OSError | ValueError) and not type(error).__module__.startswith("obstore"):
                raise
            raise StoreUnusable(f"{self.url} cannot be used: {self._told(error)}") from error

    def _told(self, error: Exception) -> str:
        first_line = _ANSWER.sub("", (str(error).splitlines() or [type(error).__name__])[0]).strip()
        hint = self.url.credentials and _METADATA.search(first_line)
        return f"{first_line}; no credentials were found: see {self.url.credentials}" if hint else first_line


def _open(url: StoreUrl) -> _Disk | _Objects | HadoopFolder:
    """Return the folder. Its errors are `OSError`, `ValueError` or those of obstore."""
    if url.scheme == FILE:
        return _Disk(Path(url.folder))
    if url.scheme in HADOOPS:
        return HadoopFolder(url.for_hadoop)
    return _Objects(open_objects(url))


class _Objects:
    """Objects of a bucket, by obstore."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def list(self, folder: str) -> Iterator[tuple[str, datetime]]:
        import obstore

        for several in obstore.list(self._objects, folder or None):
            yield from ((each["path"], each["last_modified"]) for each in several)

    def read(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._objects, name).bytes())

    def put(self, name: str, data: bytes, *, over: bool) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, GenericError

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                obstore.put(self._objects, name, data, mode="overwrite" if over else "create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except GenericError:
                if attempt == _ATTEMPTS:
                    raise
            else:
                break
        return True

    def delete(self, name: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._objects, name)

    def fetch(self, name: str, target: Path) -> None:
        import obstore

        with target.open("wb") as file:
            for part in obstore.get(self._objects, name).stream():
                file.write(part)

    def send(self, source: Path, name: str) -> None:
        import obstore

        obstore.put(self._objects, name, source)


class _Disk:
    """Files on a disk, each of them whole, and there for good: a link is made only where there is no file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self, folder: str) -> Iterator[tuple[str, datetime]]:
        for path in (self._folder / folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    yield str(path.relative_to(self._folder)), datetime.fromtimestamp(path.stat().st_mtime, UTC)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def put(self, name: str, data: bytes, *, over: bool) -> bool:
        try:
            self._place(name, lambda beside: beside.write_bytes(data), os.replace if over else os.link)
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def fetch(self, name: str, target: Path) -> None:
        shutil.copyfile(self._folder / name, target)

    def send(self, source: Path, name: str) -> None:
        self._place(name, lambda beside: shutil.copyfile(source, beside), os.replace)

    def _place(self, name: str, write: Callable[[Path], object], put: Callable[[Path, Path], None]) -> None:
        """Write a file beside its place, and then put it there."""
        place = self._folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
        try:
            write(beside)
            sync(beside)
            put(beside, place)
        finally:
            beside.unlink(missing_ok=True)
