"""Stores: what a name in a URL means, and that each kind keeps what commits rest on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from pyspark.sql import SparkSession

from federation.analytics.data import store_urls
from federation.analytics.data.snapshots import open_for_writing
from federation.analytics.data.spark_files import root_of
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.data.stores import Store
from federation.analytics.errors import StoreUnusable
from tests.federation.analytics.azure_server import AZURE_CREDENTIALS
from tests.federation.analytics.s3_server import CARELESS, CREDENTIALS, S3Server
from tests.servers import free_port

SECRETS = ("s3cret", *AZURE_CREDENTIALS.values())


def names(store: Store, folder: str) -> list[str]:
    return sorted(each.name for each in store.list(folder))


def test_what_is_written_is_listed_read_and_deleted(folder: StoreUrl, tmp_path: Path) -> None:
    """Whole, by its name; a folder that is not there is empty, and deleting twice is no error."""
    store = Store(folder)
    assert names(store, "data") == []
    for name in ("data/a b/1.json", "data/2", "other/3"):
        store.write(name, name.encode())
    store.write("data/2", b"again")
    assert names(store, "data") == ["data/2", "data/a b/1.json"]
    assert store.read("data/2") == b"again"
    store.fetch("data/a b/1.json", tmp_path / "here")
    store.send(tmp_path / "here", "other/4")
    assert store.read("other/4") == (tmp_path / "here").read_bytes() == b"data/a b/1.json"
    store.delete(["data/2", "data/2"])
    store.delete(["data/2"])
    assert names(store, "data") == ["data/a b/1.json"]


def test_what_two_delete_is_gone(folder: StoreUrl) -> None:
    """Neither minds the other."""
    store = Store(folder)
    with ThreadPoolExecutor(16) as pool:
        for name in ("data/1", "data/2", "data/3"):
            store.write(name, b"1")
            for done in [pool.submit(store.delete, [name, name]) for _ in range(16)]:
                done.result()
    assert names(store, "data") == []


def test_a_name_is_given_once(folder: StoreUrl) -> None:
    """Of those who write it at once, one does, and what it wrote stays, whole.

    The disk under Hadoop's view of it looks first and then renames, which HDFS does in one step.
    """
    store = Store(folder)
    with ThreadPoolExecutor(1 if folder.is_hadoops else 8) as pool:
        wrote = list(pool.map(lambda number: store.put_if_absent("names/1", bytes([number]) * 1000), range(8)))
    assert sorted(wrote) == [False] * 7 + [True]
    assert store.read("names/1") == bytes([wrote.index(True)]) * 1000
    assert not store.put_if_absent("names/1", b"late")
    assert names(store, "names") == ["names/1"]


def test_what_is_written_again_is_never_less_than_whole(folder: StoreUrl) -> None:
    """Whoever reads it meanwhile finds one or the other: people open the report then, too."""
    store, done = Store(folder), Event()
    absent = contextlib.suppress(
        *([StoreUnusable] if folder.is_hadoops else [])
    )  # HDFS does it at once, a disk does not
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
    monkeypatch.setitem(store_urls._RETRIES, "max_retries", 0)
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


def test_credentials_that_are_not_there_are_told(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With where they are looked for: what a store is asked without them is where a machine has some of its own."""
    monkeypatch.setitem(store_urls._RETRIES, "max_retries", 0)
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}/169.254.169.254")
    with pytest.raises(
        StoreUnusable, match=r"^s3://b/out cannot be used: .*; no credentials were found: see AWS_ACCESS"
    ):
        open_for_writing(parse_store_url(f"s3://b/out{s3.options}"))


def test_hadoop_that_does_not_answer_is_told(spark: SparkSession, viewfs_folder: StoreUrl) -> None:
    """At the beginning and later, in a line: a name node that is not there, and what its users may not do."""
    with pytest.raises(StoreUnusable, match=r"^hdfs://127\.0\.0\.1:\d+/out cannot be used: .*[Rr]efused"):
        open_for_writing(parse_store_url(f"hdfs://127.0.0.1:{free_port()}/out"))
    store = Store(replace(viewfs_folder, folder="/none"))
    for asked in (lambda: store.read("1"), lambda: store.put_if_absent("2", b"2")):
        with pytest.raises(StoreUnusable, match=r"^viewfs://tests/none cannot be used: [^\n]+$"):
            asked()


def test_a_missing_connector_is_told(spark: SparkSession) -> None:
    """Spark's wheel has none for S3. Elsewhere the URL says who reads and writes."""
    with pytest.raises(
        StoreUnusable, match=r"^s3a://b/out needs Hadoop's connector .*: start it with one, or write s3://"
    ):
        root_of(spark, parse_store_url("s3a://b/out"))
    known = {"file:///out": "file:///out", "hdfs://n:1/a b": "hdfs://n:1/a b", "s3://b/out": None, "gs://b/out": None}
    assert {text: root_of(spark, parse_store_url(text)) for text in known} == known


def test_a_missing_extra_is_told(s3_folder: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name."""
    for name in ["obstore", *(name for name in sys.modules if name.startswith("obstore."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreUnusable, match="needs the extra `stores`"):
        Store(s3_folder)


def test_azure_is_sent_no_token_that_everybody_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key it would be sent one."""
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
        def do_PUT(self) -> None:
            assert self.headers["Authorization"] in (None, "Bearer ", "Bearer")
            asked.append((self.path, self.headers["x-goog-if-generation-match"]))
            self.rfile.read(int(self.headers["Content-Length"]))
            if status := next(left):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.send_header("ETag", "1")
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
    """Also where an answer was lost. No credentials go where everybody could read them."""
    with answering(*statuses) as (url, asked):
        assert Store(url).put_if_absent("names/a", b"1") is outcome
    assert asked == [("/b/out%2Fnames%2Fa", "0")] * len(statuses)


@pytest.mark.parametrize(("statuses", "problem"), [((403,), "403 Forbidden"), ((0,) * 8, "sending request")])
def test_what_does_not_pass_is_told(statuses: tuple[int, ...], problem: str) -> None:
    """It is not known whether it was written."""
    with answering(*statuses) as (url, asked), pytest.raises(StoreUnusable, match=f"^gs://b/out cannot .*{problem}"):
        Store(url).put_if_absent("names/a", b"1")
    assert len(asked) <= len(statuses)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("oss://bucket/out", "oss:// cannot be served: name a directory, s3://bucket/folder, .* or file:///mount"),
        ("s3a://bucket/out?region=eu", "knows no option 'region'"),
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
