"""The URLs of stores: `s3://`, `gs://`, `abfs://`, `hdfs://`, and `file:///folder` on a mount that all machines share.

This module travels to the executors with `stored_files`. They have pyarrow, and nothing else of what we need.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import pyarrow.fs

S3: Final = "s3"
GS: Final = "gs"
ABFS: Final = "abfs"
HDFS: Final = "hdfs"
VIEWFS: Final = "viewfs"
FILE: Final = "file"

_CONNECT_SECONDS: Final = 3.0
_ATTEMPTS: Final = 4
"""Of each request, with pauses that grow to a second."""
_PATIENCE: Final = timedelta(seconds=30)
"""How long Google's client repeats a request that fails; its default is a quarter of an hour."""

_HADOOPS: Final = (HDFS, VIEWFS)
_HADOOP_NEEDS: Final = ("JAVA_HOME", "ARROW_LIBHDFS_DIR", "CLASSPATH")
_HADOOP_OPTIONS: Final = "-Xrs -Xmx256m"
"""Of the Java that libhdfs starts in each process of ours: it leaves signals to Python, and has so much memory."""
_HADOOP_HOST: Final = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_LAST_PORT: Final = 65535
_ACCOUNT: Final = re.compile(r"[a-z0-9-]+\.dfs\.[a-z0-9.-]+")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What there is to say of all stores of a scheme."""

    example: str
    options: tuple[str, ...] = ()
    credentials: str = ""
    """A variable that has some."""


_KINDS: Final = {
    S3: _Kind(example="s3://bucket/folder", options=("endpoint_override", "region"), credentials="AWS_ACCESS_KEY_ID"),
    GS: _Kind(
        example="gs://bucket/folder", options=("endpoint_override",), credentials="GOOGLE_APPLICATION_CREDENTIALS"
    ),
    ABFS: _Kind(
        example="abfs://container@account.dfs.core.windows.net/folder",
        options=("endpoint_override",),
        credentials="AZURE_STORAGE_KEY",
    ),
    HDFS: _Kind(example="hdfs://namenode:8020/folder", credentials="HADOOP_USER_NAME, or `kinit`"),
    VIEWFS: _Kind(example="viewfs://cluster/folder", credentials="HADOOP_USER_NAME, or `kinit`"),
    FILE: _Kind(example="file:///mount/folder"),
}


_ROOTED: Final = (*_HADOOPS, FILE)
"""Those whose folders are paths from a root, in no bucket."""


@dataclass(frozen=True, kw_only=True)
class StoreUrl:
    """A folder in a store. As text it has no options; `text` has all that opening it takes."""

    scheme: str
    folder: str
    """With its bucket or container, or from the root of the disk; no slash at its end."""
    host: str = ""
    """Of an account of Azure's, as `account.dfs.core.windows.net`, or Hadoop's, perhaps with a port."""
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        bucket, slash, path = self.folder.partition("/")
        return f"{self.scheme}://{bucket}{'@' if bucket and self.host else ''}{self.host}{slash}{path}"

    def __truediv__(self, name: str) -> StoreUrl:
        return replace(self, folder=f"{self.folder}/{name}")

    @property
    def text(self) -> str:
        return f"{self}?{urlencode(self.options)}" if self.options else str(self)

    @property
    def endpoint(self) -> str | None:
        """Return the URL of a server that is not the vendor's."""
        given = dict(self.options).get("endpoint_override")
        return given and (given if "://" in given else f"https://{given}")

    @property
    def is_plain(self) -> bool:
        """Tell whether everybody on the way could read what is sent, so that no token should be."""
        return (self.endpoint or "").startswith("http://")

    @property
    def region(self) -> str | None:
        return dict(self.options).get("region")

    @property
    def account(self) -> str:
        """Return the name of the account at Azure."""
        return self.host.partition(".")[0]


def parse_store_url(text: str) -> StoreUrl:
    """Return the store that a URL names; `abfss` is another name for `abfs`, which is always encrypted here.

    Raises:
        ValueError: there is no such store; the message says what to write, and quotes no credentials.
    """
    parts = urlsplit(text)
    scheme = parts.scheme.lower()
    scheme = ABFS if scheme == "abfss" else scheme
    kind = _KINDS.get(scheme)
    if kind is None:
        raise ValueError(_refusal(scheme))
    bucket, host = _bucket_and_host(scheme, parts)
    folder = f"{bucket}{unquote(parts.path)}".rstrip("/")
    if scheme in _ROOTED and (bucket or not folder):
        raise ValueError(f"{scheme}:// names a folder by its absolute path: {kind.example}")
    if parts.fragment or any(name in ("", ".", "..") for name in folder.split("/")[1:]):
        raise ValueError(f"{scheme}://{folder} has an empty name in it, a dot, or a #")
    options = tuple(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    if unknown := [name for name, _ in options if name not in kind.options]:
        raise ValueError(f"{scheme}:// knows no option {unknown[0]!r} ({', '.join(kind.options) or 'nor any'})")
    if "@" in dict(options).get("endpoint_override", ""):
        raise ValueError(
            f"credentials do not belong in `endpoint_override`, where `ps` shows them: see {kind.credentials}"
        )
    return StoreUrl(scheme=scheme, folder=folder, host=host, options=options)


def _bucket_and_host(scheme: str, parts: SplitResult) -> tuple[str, str]:
    kind = _KINDS[scheme]
    bucket, at, host = parts.netloc.partition("@")
    if scheme in _HADOOPS and not at:
        if not _HADOOP_HOST.fullmatch(bucket) or int(bucket.partition(":")[2] or 0) > _LAST_PORT:
            raise ValueError(f"{scheme}:// lacks its host, or has no such one: {kind.example}")
        return "", bucket
    if ":" in bucket or (at and scheme != ABFS):
        raise ValueError(f"credentials do not belong in the URL, where `ps` shows them: see {kind.credentials}")
    if scheme != FILE and not bucket:
        raise ValueError(f"{scheme}:// lacks its {'container' if scheme == ABFS else 'bucket'}: {kind.example}")
    if scheme == ABFS and not _ACCOUNT.fullmatch(host):
        raise ValueError(f"{scheme}:// lacks its account: {kind.example}")
    return bucket, host


def _refusal(scheme: str) -> str:
    *others, last = (kind.example for kind in _KINDS.values())
    return f"{scheme}:// cannot be served: name a directory, {', '.join(others)} or {last}"


def open_filesystem(url: StoreUrl) -> pyarrow.fs.FileSystem:
    """Return the folder as a file system of its own."""
    return pyarrow.fs.SubTreeFileSystem(url.folder, _whole(url))


def _whole(url: StoreUrl) -> pyarrow.fs.FileSystem:
    if url.scheme == FILE:
        return pyarrow.fs.LocalFileSystem()
    if url.scheme in _HADOOPS:
        return _hadoop(url)
    scheme, _, host = (url.endpoint or "https://").partition("://")
    if url.scheme == ABFS:
        return _azure(url, scheme, host)
    chosen = {name: value for name, value in (("endpoint_override", host), ("region", url.region)) if value}
    if url.scheme == GS:
        return pyarrow.fs.GcsFileSystem(anonymous=url.is_plain, scheme=scheme, retry_time_limit=_PATIENCE, **chosen)
    retries = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
    return pyarrow.fs.S3FileSystem(scheme=scheme, connect_timeout=_CONNECT_SECONDS, retry_strategy=retries, **chosen)


def _azure(url: StoreUrl, scheme: str, host: str) -> pyarrow.fs.FileSystem:
    return pyarrow.fs.AzureFileSystem(
        url.account,
        account_key=azure_key(),
        blob_storage_authority=host or f".{blob_host(url).partition('.')[2]}",
        blob_storage_scheme=scheme,
        dfs_storage_authority=host or f".{url.host.partition('.')[2]}",
        dfs_storage_scheme=scheme,
    )


def _hadoop(url: StoreUrl) -> pyarrow.fs.FileSystem:
    os.environ.setdefault("LIBHDFS_OPTS", _HADOOP_OPTIONS)
    try:
        return pyarrow.fs.HadoopFileSystem(*hadoop_host(url))
    except OSError as error:
        unset = [name for name in _HADOOP_NEEDS if not os.environ.get(name)]
        raise OSError(
            f"{str(error).splitlines()[0]}; it takes JAVA_HOME, ARROW_LIBHDFS_DIR (the folder of Hadoop's libhdfs.so)"
            f" and CLASSPATH (`hadoop classpath --glob`); unset: {', '.join(unset) or 'none'}"
        ) from error


def hadoop_host(url: StoreUrl) -> tuple[str, int]:
    """Return the host as Hadoop names it, and its port, which is 0 where Hadoop's configuration is to know it."""
    host, _, port = url.host.partition(":")
    return f"{url.scheme}://{host}", int(port or 0)


def azure_key() -> str | None:
    """Return the account's key, or None where Azure's own ways to find credentials are to be gone."""
    return os.environ.get("AZURE_STORAGE_KEY") or None


def blob_host(url: StoreUrl) -> str:
    """Return the host of an account of Azure's that serves blobs; that in its URL serves directories."""
    return url.host.replace(".dfs.", ".blob.", 1)


@contextlib.contextmanager
def open_output(url: StoreUrl, files: pyarrow.fs.FileSystem, name: str) -> Iterator[pyarrow.NativeFile]:
    """Open an object to be written. In the end it is there for good, even if the power is cut.

    Hadoop keeps what is written last in the memory of some machines; see its `dfs.datanode.synconclose`.
    """
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
