"""Stores: what a name in a URL means, and that each kind keeps what commits rest on."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from federation.analytics.data import store_urls
from federation.analytics.data.snapshots import open_for_writing
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.data.stores import Store
from federation.analytics.errors import StoreUnusable
from tests.federation.analytics.azure_server import AZURE_CREDENTIALS
from tests.federation.analytics.s3_server import CARELESS, S3Server
from tests.servers import free_port

SECRETS = ("s3cret", *AZURE_CREDENTIALS.values())


def names(store: Store, folder: str) -> list[str]:
    return sorted(each.name for each in store.list(folder))


def test_what_is_written_is_listed_read_and_deleted(folder: StoreUrl) -> None:
    """Whole, by its name; a folder that is not there is empty, and deleting twice is no error."""
    store = Store(folder)
    assert names(store, "data") == []
    for name in ("data/a b/1.json", "data/2", "other/3"):
        store.write(name, name.encode())
    store.write("data/2", b"again")
    assert names(store, "data") == ["data/2", "data/a b/1.json"]
    assert store.read("data/2") == b"again"
    with store.open("data/a b/1.json") as file:
        file.seek(5)
        assert file.read(3) == b"a b"
    store.delete(["data/2", "data/2"])
    store.delete(["data/2"])
    assert names(store, "data") == ["data/a b/1.json"]


def test_what_two_delete_is_gone(folder: StoreUrl) -> None:
    """Neither minds the other: pyarrow leases a blob of Azure's first, and fails where somebody else does."""
    store = Store(folder)
    with ThreadPoolExecutor(16) as pool:
        for name in ("data/1", "data/2", "data/3"):
            store.write(name, b"1")
            for done in [pool.submit(store.delete, [name, name]) for _ in range(16)]:
                done.result()
    assert names(store, "data") == []


def test_a_name_is_given_once(folder: StoreUrl) -> None:
    """Of those who write it at once, one does, and what it wrote stays, whole."""
    store = Store(folder)
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: store.put_if_absent("names/1", bytes([number]) * 1000), range(8)))
    assert sorted(wrote) == [False] * 7 + [True]
    assert store.read("names/1") == bytes([wrote.index(True)]) * 1000
    assert not store.put_if_absent("names/1", b"late")
    assert names(store, "names") == ["names/1"]


def test_what_is_written_again_is_never_less_than_whole(folder: StoreUrl) -> None:
    """Whoever reads it meanwhile finds one or the other, on Hadoop perhaps none: people open the report then, too."""
    store, done = Store(folder), Event()
    absent = contextlib.suppress(*([StoreUnusable] if folder.scheme == "hdfs" else []))
    texts = [bytes([number]) * 100_000 for number in range(2)]
    store.write("report.html", texts[0])

    def read() -> set[bytes]:
        found = set()
        while not done.is_set():
            with absent:
                found.add(store.read("report.html"))
        return found

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for number in range(20):
            store.write("report.html", texts[number % 2])
        done.set()
        assert reading.result() <= set(texts)


def test_a_store_that_writes_over_what_is_there_is_refused(folder: StoreUrl, s3: S3Server) -> None:
    """Before anything is computed; nothing of the check stays in the store that does as it is told."""
    open_for_writing(folder)
    assert names(Store(folder), "data") == []
    if folder.scheme == "s3":
        with pytest.raises(StoreUnusable, match=r"s3://careless/out writes over what is there although asked not to"):
            open_for_writing(parse_store_url(f"s3://{CARELESS}/out{s3.options}"))


@pytest.mark.parametrize("kind", ["s3", "gs", "abfs"])
def test_a_store_that_does_not_answer_is_told(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In a line, with its name and no secret: a server that is not there, and a bucket that is not."""
    monkeypatch.setattr(store_urls, "_PATIENCE", timedelta(seconds=1))
    there: StoreUrl = request.getfixturevalue(f"{kind}_folder")
    nowhere = replace(there, options=(("endpoint_override", f"http://127.0.0.1:{free_port()}"),))
    no_bucket = there.text.replace("//analytics", "//none")
    for text in (nowhere.text, no_bucket):
        url = parse_store_url(text)
        with pytest.raises(StoreUnusable) as error:
            open_for_writing(url)
        assert str(error.value).startswith(f"{url} cannot be ")
        assert "\n" not in str(error.value)
        assert not [secret for secret in SECRETS if secret in str(error.value)]


def test_hadoop_that_does_not_answer_is_told(hdfs_folder: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning and later: for pyarrow, what cannot be listed is not there, and a run would begin anew."""
    monkeypatch.setenv("CLASSPATH", "jars")
    with pytest.raises(StoreUnusable, match=r"^hdfs://nowhere:8020/.* cannot be used: HDFS .*; unset: none$"):
        Store(replace(hdfs_folder, host="nowhere:8020"))
    store = Store(hdfs_folder)
    store.write("data/1", b"1")
    monkeypatch.setenv("STAND_IN_HDFS_ROOT", os.devnull)  # below a file nothing can be known
    for asked in (lambda: store.list("data"), lambda: store.delete(["data/1"]), lambda: store.put_if_absent("2", b"2")):
        with pytest.raises(StoreUnusable, match=r"^hdfs://namenode:8020/.* cannot be used: "):
            asked()


def test_a_missing_client_of_hadoop_is_told(tmp_path: Path) -> None:
    """With what to set, before anything else is done; nothing of it is known for sure but the variables."""
    command = ["-m", "federation", "analytics", "run", "--input", "hdfs://namenode/in", "--out", str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name not in ("ARROW_LIBHDFS_DIR", "CLASSPATH")}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "hdfs://namenode/in cannot be used: Unable to load lib" in line
    assert re.search(r"; it takes JAVA_HOME, .*; unset: (JAVA_HOME, )?ARROW_LIBHDFS_DIR, CLASSPATH$", line)


@pytest.mark.parametrize(
    ("kind", "module"), [("s3", "botocore"), ("gs", "google.auth"), ("abfs", "azure.storage.blob")]
)
def test_a_missing_extra_is_told(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    """By its name."""
    folder = request.getfixturevalue(f"{kind}_folder")  # its server needs the extra
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreUnusable, match=r"needs the extra `(s3|gcs|azure)`"):
        Store(folder)


def test_azure_is_sent_no_token_that_everybody_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library refuses that, too, but not in a way that we could tell of."""
    pytest.importorskip("azure.storage.blob", reason="needs the extra `azure`")
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    url = parse_store_url("abfs://c@account.dfs.core.windows.net/out?endpoint_override=http://h:1")
    with pytest.raises(StoreUnusable, match="needs AZURE_STORAGE_KEY over http://"):
        Store(url)


@contextlib.contextmanager
def answering(*statuses: int) -> Iterator[tuple[StoreUrl, list[tuple[str, str | None]]]]:
    """A server that gives one of these answers after the other; 0 breaks the connection. With what it was asked."""
    asked: list[tuple[str, str | None]] = []
    left = iter(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.rfile.read(int(self.headers["Content-Length"]))
            if status := next(left):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield parse_store_url(f"gs://b/out?endpoint_override=http://127.0.0.1:{server.server_port}"), asked
        server.shutdown()


@pytest.mark.parametrize(
    ("statuses", "outcome"), [((200,), True), ((503, 0, 200), True), ((0, 412), False), ((429, 429, 429, 200), True)]
)
def test_what_passes_is_asked_again(statuses: tuple[int, ...], outcome: bool) -> None:
    """Of Google's: S3's and Azure's libraries do it. No credentials go where everybody could read them."""
    with answering(*statuses) as (url, asked):
        assert Store(url).put_if_absent("names/a b", b"1") is outcome
    assert asked == [("/upload/storage/v1/b/b/o?uploadType=multipart&ifGenerationMatch=0", None)] * len(statuses)


@pytest.mark.parametrize(
    ("statuses", "problem"), [((403,), "it answered 403"), ((500,) * 4, "500"), ((0,) * 4, "aborted")]
)
def test_what_does_not_pass_is_told(statuses: tuple[int, ...], problem: str) -> None:
    """It is not known whether it was written."""
    with answering(*statuses) as (url, asked), pytest.raises(StoreUnusable, match=f"^gs://b/out cannot .*{problem}"):
        Store(url).put_if_absent("names/a b", b"1")
    assert len(asked) == len(statuses)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3a://bucket/out", "s3a:// cannot be served: name a directory, s3://bucket/folder, gs://.* or file:///mount"),
        ("webhdfs://host/out", "webhdfs:// cannot be served: name a directory, .* hdfs://namenode:8020/folder"),
        ("hdfs:///out", "lacks its host, or has no such one: hdfs://namenode:8020/folder"),
        ("hdfs://user:s3cret@host/out", "credentials do not belong in the URL.*HADOOP_USER_NAME"),
        ("hdfs://host:80x/out", "no such one"),
        ("hdfs://host:65536/out", "no such one"),
        ("hdfs://host/", "by its absolute path"),
        ("hdfs://host/out?user=root", "knows no option 'user'"),
        ("s3:///out", "lacks its bucket"),
        ("gs:///out", "lacks its bucket: gs://bucket/folder"),
        ("gs://user@bucket/out", "credentials do not belong in the URL.*GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://bucket/out?region=eu", "knows no option 'region'"),
        ("abfs://container/out", "lacks its account: abfs://container@account.dfs.core.windows.net/folder"),
        ("abfs://container@account.blob.core.windows.net/out", "lacks its account"),
        ("abfs:///out", "lacks its container"),
        ("abfs://c:s3cret@account.dfs.core.windows.net/out", "credentials do not belong in the URL.*AZURE_STORAGE_KEY"),
        ("abfs://container@account.dfs.core.windows.net/out?sas_token=s3cret", "knows no option 'sas_token'"),
        ("s3:/bucket/out", "lacks its bucket"),
        ("s3://key:s3cret@bucket/out", "credentials do not belong in the URL"),
        ("s3://bucket/out?endpoint_override=http://key:s3cret@h:1", "credentials do not belong in `endpoint_override`"),
        ("s3://bucket/a//b", "empty name"),
        ("s3://bucket/../b", "a dot"),
        ("s3://bucket/b?sheme=http", "knows no option 'sheme'"),
        ("file://host/out", "by its absolute path"),
        ("file:///", "by its absolute path"),
    ],
)
def test_a_url_of_no_store_is_refused(text: str, problem: str) -> None:
    """With what to write instead."""
    with pytest.raises(ValueError, match=problem) as error:
        parse_store_url(text)
    assert "s3cret" not in str(error.value)


def test_a_url_names_a_folder(tmp_path: Path) -> None:
    """Options are its own, and not shown."""
    url = parse_store_url("s3://bucket/a%20b/?region=eu-1&endpoint_override=http://h:1") / "c"
    assert (str(url), url.region, url.endpoint) == ("s3://bucket/a b/c", "eu-1", "http://h:1")
    assert str(parse_store_url("s3://bucket")) == "s3://bucket"
    url = parse_store_url("hdfs://haCluster/user/a%20b/") / "c"
    assert (str(url), url.folder, url.host) == ("hdfs://haCluster/user/a b/c", "/user/a b/c", "haCluster")
    assert parse_store_url("viewfs://c:1/a").text == "viewfs://c:1/a"
    url = parse_store_url("abfss://container@account.dfs.core.windows.net/a?endpoint_override=https://h") / "c"
    assert str(url) == "abfs://container@account.dfs.core.windows.net/a/c"
    assert (url.folder, url.account, url.endpoint) == ("container/a/c", "account", "https://h")
    assert parse_store_url(url.text) == url
    assert parse_store_url(f"file://{tmp_path}").folder == str(tmp_path)
    assert parse_store_url("S3://Bucket/Out").folder == "Bucket/Out"
