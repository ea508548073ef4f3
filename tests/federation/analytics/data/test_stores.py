"""Stores: what a name in a URL means, and that each kind keeps what commits rest on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from federation.analytics.data.snapshots import open_for_writing
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.data.stores import Store
from federation.analytics.errors import StoreUnusable
from tests.federation.analytics.s3_server import CARELESS, S3Server
from tests.servers import free_port


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


def test_a_name_is_given_once(folder: StoreUrl) -> None:
    """Of those who write it at once, one does, and what it wrote stays, whole."""
    store = Store(folder)
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: store.put_if_absent("names/1", bytes([number]) * 1000), range(8)))
    assert sorted(wrote) == [False] * 7 + [True]
    assert store.read("names/1") == bytes([wrote.index(True)]) * 1000
    assert not store.put_if_absent("names/1", b"late")
    assert names(store, "names") == ["names/1"]


def test_a_store_that_writes_over_what_is_there_is_refused(folder: StoreUrl, s3: S3Server) -> None:
    """Before anything is computed; nothing of the check stays in the store that does as it is told."""
    open_for_writing(folder)
    assert names(Store(folder), "data") == []
    if folder.scheme == "s3":
        with pytest.raises(StoreUnusable, match=r"s3://careless/out writes over what is there although asked not to"):
            open_for_writing(parse_store_url(f"s3://{CARELESS}/out{s3.options}"))


def test_a_store_that_does_not_answer_is_told(s3_folder: StoreUrl, s3: S3Server) -> None:
    """In a line, with its name: a server that is not there, and a bucket that is not."""
    wrong = [f"s3://analytics/out?endpoint_override=http://127.0.0.1:{free_port()}", f"s3://none/out{s3.options}"]
    for text in wrong:
        url = parse_store_url(text)
        with pytest.raises(StoreUnusable) as error:
            open_for_writing(url)
        assert str(error.value).startswith(f"{url} cannot be ")
        assert "\n" not in str(error.value)
        assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3a://bucket/out", "s3a:// cannot be served: name a directory, s3://bucket/folder"),
        ("gs://bucket/out", "gs:// cannot be served"),
        ("abfs://container/out", "abfs:// cannot be served"),
        ("hdfs://host/out", "hdfs:// cannot be served"),
        ("s3:///out", "lacks its bucket"),
        ("s3:/bucket/out", "lacks its bucket"),
        ("s3://key:s3cret@bucket/out", "credentials do not belong in the URL"),
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
    assert parse_store_url(f"file://{tmp_path}").folder == str(tmp_path)
    assert parse_store_url("S3://Bucket/Out").folder == "Bucket/Out"
