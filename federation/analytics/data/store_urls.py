"""The URLs of stores: `s3://`, `gs://`, `abfs://`, `hdfs://`, and `file:///folder` on a mount that all machines share.

This module travels to the executors with `stored_files`. They have obstore where Hadoop has no file system for a store.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

S3: Final = "s3"
S3A: Final = "s3a"
GS: Final = "gs"
ABFS: Final = "abfs"
HDFS: Final = "hdfs"
VIEWFS: Final = "viewfs"
FILE: Final = "file"

_CLIENT: Final[ClientConfig] = {"connect_timeout": "3s", "read_timeout": "30s", "timeout": "5m"}
_RETRIES: Final[RetryConfig] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}

HADOOPS: Final = (HDFS, VIEWFS)
_HADOOP_HOST: Final = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_LAST_PORT: Final = 65535
_OF_AN_ACCOUNT: Final = ("client_email", "private_key", "private_key_id")
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
    S3A: _Kind(example="s3a://bucket/folder", credentials="AWS_ACCESS_KEY_ID"),
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


_ROOTED: Final = (*HADOOPS, FILE)
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
    def for_hadoop(self) -> str:
        """Return how Hadoop names the folder."""
        return str(replace(self, scheme="abfss")) if self.scheme == ABFS else str(self)

    @property
    def is_hadoops(self) -> bool:
        """Tell whether only Spark can look at the store."""
        return self.scheme in HADOOPS

    @property
    def credentials(self) -> str:
        """Return where some are looked for."""
        return _KINDS[self.scheme].credentials

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
    if scheme in HADOOPS and not at:
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


def open_objects(url: StoreUrl) -> ObjectStore:
    """Return the folder of a bucket, or of a container, for obstore's calls.

    Raises:
        ImportError: obstore is not installed.
        ValueError: a token would be sent where everybody could read it.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    bucket, _, folder = url.folder.partition("/")
    prefix = folder or None
    client: ClientConfig = {**_CLIENT, "allow_http": url.is_plain}
    if url.scheme == GS:
        return GCSStore(bucket, prefix=prefix, config=_google(url), client_options=client, retry_config=_RETRIES)
    if url.scheme == ABFS:
        return AzureStore(bucket, prefix=prefix, config=_azure(url), client_options=client, retry_config=_RETRIES)
    return S3Store(bucket, prefix=prefix, config=_amazon(url), client_options=client, retry_config=_RETRIES)


def _amazon(url: StoreUrl) -> S3Config:
    config: S3Config = {}
    if url.endpoint:
        config["endpoint"] = url.endpoint
    if url.region:
        config["region"] = url.region
    return config


def _google(url: StoreUrl) -> GCSConfig:
    if not url.is_plain:
        return {"base_url": url.endpoint} if url.endpoint else {}
    anonymous = {"gcs_base_url": url.endpoint, "disable_oauth": True}
    return {"service_account_key": json.dumps(anonymous | dict.fromkeys(_OF_AN_ACCOUNT, ""))}


def _azure(url: StoreUrl) -> AzureConfig:
    key = os.environ.get("AZURE_STORAGE_KEY")
    if url.is_plain and not key:
        raise ValueError("needs AZURE_STORAGE_KEY over http://, where a token could be read by everybody")
    host = f"{url.endpoint}/{url.account}" if url.endpoint else f"https://{url.host.replace('.dfs.', '.blob.', 1)}"
    config: AzureConfig = {"account_name": url.account, "endpoint": host}
    if key:
        config["account_key"] = key
    return config
