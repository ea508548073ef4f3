"""Storages are found by the scheme of their URL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.errors import StorageError
from workers.storage import open_storage
from workers.storage.urls import SCHEMES
from workers.testing.steps import claim_one, enqueue, job


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", "MemoryStorage"),
        ("sqlite:///jobs.db", "SqlStorage"),
        ("sqlite+aiosqlite:///jobs.db", "SqlStorage"),
        ("bull+redis://127.0.0.1:1/0", "BullStorage"),
        ("bull+rediss://127.0.0.1:1/0", "BullStorage"),
        ("bull+unix:///run/redis.sock", "BullStorage"),
        ("bullmq+redis://127.0.0.1:1/0", "BullMQStorage"),
        ("bullmq+rediss://127.0.0.1:1/0", "BullMQStorage"),
        ("bullmq+unix:///run/redis.sock", "BullMQStorage"),
    ],
)
def test_the_scheme_picks_the_storage(url: str, kind: str) -> None:
    """Each scheme opens its storage; the queue is the argument's, else the URL's, else `default`."""
    storage = open_storage(url)
    assert (type(storage).__name__, storage.queue) == (kind, "default")
    assert open_storage(f"{url}?queue=mail").queue == "mail"
    assert open_storage(f"{url}?queue=mail", queue="post").queue == "post"


def test_the_rest_of_the_url_is_kept(tmp_path: Path) -> None:
    """Only `queue` is taken out of the query, and a path keeps its slashes and its percent signs."""
    assert repr(open_storage(f"sqlite:///{tmp_path}/50%25.db?queue=a%2Fb")) == repr(
        open_storage(f"sqlite:///{tmp_path}/50%25.db", queue="a/b")
    )


@pytest.mark.parametrize(
    "url",
    [
        "memory://here?wait=s3cret",
        "file:///jobs?wait=s3cret",
        "sqlite:///jobs.db?wait=s3cret",
        "postgresql://localhost/x?wait=s3cret",
        "redis://localhost?wait=s3cret",
        "redis+cluster://localhost?wait=s3cret",
        "redis+sentinel://localhost/master?wait=s3cret",
        "bull+unix:///x?wait=s3cret",
        "bullmq+rediss://localhost?wait=s3cret",
    ],
)
def test_an_unknown_parameter_is_named(url: str) -> None:
    """When the storage is opened, not with its first connection, and not never."""
    with pytest.raises(StorageError, match=r"parameter.*\bwait\b") as caught:
        open_storage(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/x?connect_timeout=3&options=-csearch_path%3Djobs&sslmode=require",
        "redis://localhost?socket_timeout=3&client_name=mail&protocol=3",
        "rediss+cluster://localhost?ssl_ca_certs=/ca.pem&wait_replicas=1",
        "bull+unix:///x?db=3&allow_eviction=true",
        "bullmq+rediss://localhost?ssl_cert_reqs=none&max_foreign_stalls=1&metrics=5",
    ],
)
def test_parameters_that_are_read_are_taken(url: str) -> None:
    """Those of the libraries that connect, and ours."""
    assert open_storage(f"{url}&queue=mail").queue == "mail"


@pytest.mark.parametrize("url", ["jobs.db", "carrier-pigeon://user:s3cret@host", "", "sqlite:jobs.db", "MEMORY://"])
def test_an_unknown_scheme_lists_the_known(url: str) -> None:
    """The error names every scheme there is, and nothing of the URL but its scheme."""
    with pytest.raises(StorageError) as caught:
        open_storage(url)
    assert all(f"{scheme}://" in str(caught.value) for scheme in SCHEMES)
    assert "s3cret" not in str(caught.value)


async def test_one_memory_url_is_one_space() -> None:
    """Storages on one URL see each other's jobs, those on another do not, and nothing outlives the last of them."""
    producer, worker, other = open_storage("memory://here"), open_storage("memory://here"), open_storage("memory://")
    await enqueue(producer, job("job"))
    assert await other.status(["job"]) == [None]
    assert (await claim_one(worker)).job_id == "job"
    del producer, worker
    assert await open_storage("memory://here").status(["job"]) == [None]


@pytest.mark.parametrize(
    ("url", "kind", "package", "extra"),
    [
        ("sqlite:///x", "SqlStorage", "sqlalchemy", "sqlite"),
        ("postgresql://localhost/x", "SqlStorage", "sqlalchemy", "postgres"),
        ("postgresql+psycopg://localhost/x", "SqlStorage", "psycopg", "postgres"),
        ("redis://localhost", "RedisStorage", "redis", "redis"),
        ("rediss://localhost", "RedisStorage", "msgpack", "redis"),
        ("bull+redis://localhost", "BullStorage", "redis", "redis"),
        ("bull+unix:///x", "BullStorage", "msgpack", "redis"),
        ("bullmq+redis://localhost", "BullMQStorage", "redis", "bullmq"),
        ("bullmq+rediss://localhost", "BullMQStorage", "bullmq", "bullmq"),
    ],
)
def test_a_missing_package_is_named(url: str, kind: str, package: str, extra: str) -> None:
    """Opening a storage whose package is not installed says what to install, and other storages need it not."""
    program = (
        "import sys\n"
        "class Absent:\n"
        " def find_spec(self, name, path=None, target=None):\n"
        f"  if name == {package!r}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from workers.storage import open_storage\n"
        "open_storage('memory://')\n"
        "from workers import StorageError\n"
        f"try: open_storage({url!r})\n"
        "except StorageError as error: print(error)\n"
    )
    root = Path(__file__).resolve().parents[3]
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout == f"{kind} needs the package {package!r}: pip install 'federation-delivery[{extra}]'\n"
