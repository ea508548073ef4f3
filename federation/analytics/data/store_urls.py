"""The URLs of stores: `s3://bucket/folder`, and `file:///folder` on a mount that all machines share.

This module travels to the executors with `stored_files`. They have pyarrow, and nothing else of what we need.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import pyarrow.fs

S3: Final = "s3"
FILE: Final = "file"

_OPTIONS: Final = {S3: ("endpoint_override", "region"), FILE: ()}
_CONNECT_SECONDS: Final = 3.0
_ATTEMPTS: Final = 4
"""Of each request, with pauses that grow to a second."""


@dataclass(frozen=True, kw_only=True)
class StoreUrl:
    """A folder in a store. As text it has no options; `text` has all that opening it takes."""

    scheme: str
    folder: str
    """With its bucket, or from the root of the disk; no slash at its end."""
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.folder}"

    def __truediv__(self, name: str) -> StoreUrl:
        return replace(self, folder=f"{self.folder}/{name}")

    @property
    def text(self) -> str:
        return f"{self}?{urlencode(self.options)}" if self.options else str(self)

    @property
    def endpoint(self) -> str | None:
        """Return the URL of a server that is not Amazon's."""
        given = dict(self.options).get("endpoint_override")
        return given and (given if "://" in given else f"https://{given}")

    @property
    def region(self) -> str | None:
        return dict(self.options).get("region")


def parse_store_url(text: str) -> StoreUrl:
    """Return the store that a URL names.

    Raises:
        ValueError: there is no such store; the message says what to write, and quotes no credentials.
    """
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    if scheme not in _OPTIONS:
        raise ValueError(f"{scheme}:// cannot be served: name a directory, s3://bucket/folder or file:///mount/folder")
    if "@" in parts.netloc:
        raise ValueError("credentials do not belong in the URL, where `ps` shows them: see AWS_ACCESS_KEY_ID")
    folder = f"{parts.netloc}{unquote(parts.path)}".rstrip("/")
    if scheme == S3 and not parts.netloc:
        raise ValueError(f"{scheme}:// lacks its bucket: s3://bucket/folder")
    if scheme == FILE and (parts.netloc or not folder):
        raise ValueError("file:// names a folder by its absolute path: file:///mount/folder")
    if parts.fragment or any(name in ("", ".", "..") for name in folder.split("/")[1:]):
        raise ValueError(f"{scheme}://{folder} has an empty name in it, a dot, or a #")
    options = tuple(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    if unknown := [name for name, _ in options if name not in _OPTIONS[scheme]]:
        raise ValueError(f"{scheme}:// knows no option {unknown[0]!r} ({', '.join(_OPTIONS[scheme]) or 'nor any'})")
    return StoreUrl(scheme=scheme, folder=folder, options=options)


def open_filesystem(url: StoreUrl) -> pyarrow.fs.FileSystem:
    """Return the folder as a file system of its own."""
    return pyarrow.fs.SubTreeFileSystem(url.folder, _whole(url))


def _whole(url: StoreUrl) -> pyarrow.fs.FileSystem:
    if url.scheme == FILE:
        return pyarrow.fs.LocalFileSystem()
    scheme, _, host = (url.endpoint or "https://").partition("://")
    chosen = {name: value for name, value in (("endpoint_override", host), ("region", url.region)) if value}
    retries = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
    return pyarrow.fs.S3FileSystem(scheme=scheme, connect_timeout=_CONNECT_SECONDS, retry_strategy=retries, **chosen)


@contextlib.contextmanager
def open_output(url: StoreUrl, files: pyarrow.fs.FileSystem, name: str) -> Iterator[pyarrow.NativeFile]:
    """Open an object to be written. In the end it is there for good, even if the power is cut."""
    if url.scheme == FILE:  # S3 has no directories; making one would leave an object of its name
        files.create_dir(name.rpartition("/")[0], recursive=True)
    with files.open_output_stream(name, compression=None) as output:
        yield output
    if url.scheme == FILE:
        descriptor = os.open(f"{url.folder}/{name}", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
