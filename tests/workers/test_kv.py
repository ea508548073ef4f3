"""The stores of keys and values keep one promise: memory, Redis, SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import create_engine, text

from tests.conftest import postgres_database
from workers import StorageError, StorageUnavailable, Unsupported
from workers.clock import ManualClock
from workers.kv import ConditionalKvStore, Key, KvStore, MemoryKvStore, writes_conditionally
from workers.kv.base import MAX_KEY_BYTES, MAX_TTL, MAX_VALUE_BYTES
from workers.kv.redis import RedisKvStore
from workers.kv.sql import SWEPT_BY_A_WRITE, SqlKvStore
from workers.storage.sql import SqlStorage
from workers.testing.steps import until

HOUR = timedelta(hours=1)


class Kept:
    """A store under test, a second client of it, and a way to let values expire."""

    def __init__(self, store: ConditionalKvStore, other: ConditionalKvStore, clock: ManualClock | None) -> None:
        self.store = store
        self.other = other
        self._clock = clock
        self.short = timedelta(milliseconds=30) if clock is None else timedelta(seconds=1)

    async def expired(self, key: Key) -> None:
        """The value, written with the time to live `short`, has expired."""
        if self._clock is not None:
            self._clock.advance(self.short)

        async def is_gone() -> bool:
            return await self.store.get(key) is None

        await until(is_gone)


@pytest.fixture(scope="module")
def postgres_kv_url(postgres_server: str) -> Iterator[str]:
    """One database for all tests, each of which leaves its table empty: making one takes longer than they do."""
    with postgres_database(postgres_server) as url:
        yield url


def emptied(url: str) -> None:
    """The table has no rows."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM workers_kv"))
    engine.dispose()


@pytest.fixture(params=["memory", "redis", "sqlite", "postgres"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kept]:
    """Each store in turn."""
    match request.param:
        case "memory":
            clock = ManualClock()
            memory = MemoryKvStore(clock)
            yield Kept(memory, memory, clock)
        case "redis":
            url = request.getfixturevalue("redis_url")
            prefix = f"kv-{uuid.uuid4().hex}"
            async with RedisKvStore(url, prefix=prefix) as redis, RedisKvStore(url, prefix=prefix) as other_redis:
                yield Kept(redis, other_redis, None)
        case "sqlite":
            clock = ManualClock()
            # Another timeout, and so another database object with threads of its own: another process, as it were.
            sql = SqlKvStore(f"sqlite:///{tmp_path}/kv.db", clock=clock)
            other = SqlKvStore(f"sqlite:///{tmp_path}/kv.db", clock=clock, busy_timeout=timedelta(seconds=11))
            await sql.migrate()
            async with sql, other:
                yield Kept(sql, other, clock)
        case "postgres":
            url = request.getfixturevalue("postgres_kv_url")
            sql, other = SqlKvStore(url), SqlKvStore(url, busy_timeout=timedelta(seconds=11))
            await sql.migrate()
            async with sql, other:
                yield Kept(sql, other, None)
            emptied(url)


async def test_a_value_is_there_until_it_is_replaced_or_expires(kept: Kept) -> None:
    """What is set is read by every client, the last write wins, and its time to live counts."""
    assert await kept.store.get("key") is None
    await kept.store.set("key", b"one", ttl=HOUR)
    assert await kept.other.get("key") == b"one"
    await kept.other.set("key", b"\x00\xff", ttl=HOUR)
    assert await kept.store.get("key") == b"\x00\xff"
    await kept.store.set("key", b"two", ttl=kept.short)
    await kept.expired("key")
    assert await kept.other.get("key") is None


async def test_the_first_to_set_a_key_has_it(kept: Kept) -> None:
    """`set_if_absent` tells the value that is there and leaves it, empty as it may be; the key of another is free."""
    assert await kept.store.set_if_absent("key", b"", ttl=HOUR) is None
    assert await kept.other.set_if_absent("key", b"two", ttl=HOUR) == b""
    assert await kept.store.set_if_absent(("key", "x"), b"three", ttl=HOUR) is None
    assert await kept.store.get("key") == b""


async def test_an_expired_key_is_free(kept: Kept) -> None:
    """A value past its time is in nobody's way, and no condition on it holds."""
    await kept.store.set_if_absent("key", b"one", ttl=kept.short)
    await kept.expired("key")
    assert not await kept.store.compare_and_set("key", b"one", b"two", ttl=HOUR)
    assert not await kept.store.compare_and_delete("key", b"one")
    assert await kept.other.set_if_absent("key", b"three", ttl=HOUR) is None
    assert await kept.store.get("key") == b"three"


async def test_only_the_expected_value_is_changed(kept: Kept) -> None:
    """Compare-and-set and compare-and-delete act on the value they name, and on no other."""
    await kept.store.set("key", b"one", ttl=HOUR)
    assert not await kept.store.compare_and_set("key", b"two", b"three", ttl=HOUR)
    assert not await kept.store.compare_and_delete("key", b"two")
    assert await kept.other.get("key") == b"one"
    assert await kept.other.compare_and_set("key", b"one", b"two", ttl=HOUR)
    assert not await kept.store.compare_and_delete("key", b"one")
    assert await kept.store.compare_and_delete("key", b"two")
    assert await kept.other.get("key") is None
    assert not await kept.store.compare_and_set("key", b"two", b"three", ttl=HOUR)


async def test_a_swapped_value_has_the_new_time_to_live(kept: Kept) -> None:
    """Compare-and-set starts the time to live again."""
    await kept.store.set("key", b"one", ttl=HOUR)
    assert await kept.store.compare_and_set("key", b"one", b"two", ttl=kept.short)
    await kept.expired("key")


async def test_a_hundred_at_once_find_one_winner(kept: Kept) -> None:
    """Of many that set a key at the same time from two clients one does, and the others are told its value."""
    stores = [kept.store, kept.other] * 50
    found = await asyncio.gather(*(store.set_if_absent("key", b"%d" % at, ttl=HOUR) for at, store in enumerate(stores)))
    winners = [at for at, value in enumerate(found) if value is None]
    assert len(winners) == 1
    assert {value for value in found if value is not None} == {b"%d" % winners[0]}


@pytest.mark.parametrize(
    ("one", "another"),
    [
        pytest.param(("a", "b"), "a/b", id="slash"),
        pytest.param(("a/", "b"), ("a", "/b"), id="slash-in-parts"),
        pytest.param("a%2Fb", "a/b", id="escape"),
        pytest.param("a\x00b", "a\x01\x01b", id="nul"),
        pytest.param("é", "e\u0301", id="unicode"),
        pytest.param("x" * MAX_KEY_BYTES, "x" * (MAX_KEY_BYTES - 1), id="longest"),
        pytest.param(("..", "\n", "{🦊}"), ("..", "\n", "{🦊} "), id="odd"),
    ],
)
async def test_different_keys_never_meet(kept: Kept, one: Key, another: Key) -> None:
    """Separators, escapes, NUL and lookalikes make no key another's."""
    await kept.store.set(one, b"one", ttl=HOUR)
    assert await kept.store.set_if_absent(another, b"another", ttl=HOUR) is None
    assert await kept.other.get(one) == b"one"


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("", id="empty"),
        pytest.param((), id="no-parts"),
        pytest.param(("a", ""), id="empty-part"),
        pytest.param("x" * (MAX_KEY_BYTES + 1), id="huge"),
        pytest.param("\ud800", id="surrogate"),
    ],
)
async def test_a_bad_key_is_refused_by_every_verb(kept: Kept, key: Key) -> None:
    """A key out of bounds raises `ValueError` wherever it is used."""
    store = kept.store
    with pytest.raises(ValueError, match="key"):
        await store.get(key)
    with pytest.raises(ValueError, match="key"):
        await store.set(key, b"", ttl=HOUR)
    with pytest.raises(ValueError, match="key"):
        await store.set_if_absent(key, b"", ttl=HOUR)
    with pytest.raises(ValueError, match="key"):
        await store.compare_and_set(key, b"", b"", ttl=HOUR)
    with pytest.raises(ValueError, match="key"):
        await store.compare_and_delete(key, b"")


@pytest.mark.parametrize(
    "ttl",
    [
        pytest.param(timedelta(0), id="zero"),
        pytest.param(timedelta(seconds=-1), id="negative"),
        pytest.param(timedelta.max, id="endless"),
        pytest.param(60.0, id="float"),
        pytest.param(float("inf"), id="infinite"),
        pytest.param(None, id="none"),
    ],
)
async def test_a_bad_time_to_live_writes_nothing(kept: Kept, ttl: timedelta) -> None:
    """A time to live that is no positive, bounded timedelta raises `ValueError`, and the key stays free."""
    with pytest.raises(ValueError, match="time to live"):
        await kept.store.set("key", b"", ttl=ttl)
    with pytest.raises(ValueError, match="time to live"):
        await kept.store.set_if_absent("key", b"", ttl=ttl)
    with pytest.raises(ValueError, match="time to live"):
        await kept.store.compare_and_set("key", b"", b"new", ttl=ttl)
    assert await kept.store.get("key") is None
    await kept.store.set("key", b"", ttl=HOUR)
    with pytest.raises(ValueError, match="time to live"):
        await kept.store.compare_and_set("key", b"", b"new", ttl=ttl)
    assert await kept.store.get("key") == b""


async def test_the_largest_value_and_longest_time_are_kept(kept: Kept) -> None:
    """1 MiB for 200 years is fine, one byte more is not, and neither is text."""
    await kept.store.set("key", b"x" * MAX_VALUE_BYTES, ttl=MAX_TTL)
    assert await kept.other.get("key") == b"x" * MAX_VALUE_BYTES
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        await kept.store.set("key", b"x" * (MAX_VALUE_BYTES + 1), ttl=HOUR)
    with pytest.raises(TypeError, match="bytes, not str"):
        await kept.store.set_if_absent("other", "text", ttl=HOUR)  # type: ignore[arg-type]  # what is refused


async def test_every_store_is_known_to_write_conditionally(kept: Kept) -> None:
    """The capability is found by the verbs, without calling them."""
    assert writes_conditionally(kept.store)


class Plain:
    """A foreign store without conditions."""

    async def get(self, key: Key) -> bytes | None:
        return None

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None: ...


class Declined(Plain):
    """One that says of each condition that it has none."""

    set_if_absent = compare_and_set = compare_and_delete = None


@pytest.mark.parametrize("store", [Plain(), Declined(), None], ids=["plain", "declined", "none"])
def test_a_store_without_conditions_is_found_out(store: KvStore | None) -> None:
    """Missing verbs, and verbs that are None, are no conditional writes."""
    assert not writes_conditionally(store)


async def test_memory_forgets_what_has_expired() -> None:
    """A million marks that came and went leave no million entries, though nobody looks at them again."""
    clock = ManualClock()
    store = MemoryKvStore(clock)
    for at in range(10_000):
        await store.set(f"{at}", b"", ttl=timedelta(seconds=10))
        clock.advance(timedelta(seconds=1))
    assert len(store) <= 64


async def test_sql_writes_remove_what_has_expired(tmp_path: Path) -> None:
    """Each write takes some expired rows with it, a refused one none, and living ones stay."""
    clock = ManualClock()
    url = f"sqlite:///{tmp_path}/kv.db"
    store = SqlKvStore(url, clock=clock)
    await store.migrate()
    engine = create_engine(url)

    def rows() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM workers_kv")).scalar_one())

    async with store:
        for at in range(3 * SWEPT_BY_A_WRITE):
            await store.set(f"{at}", b"", ttl=timedelta(seconds=1))
        clock.advance(timedelta(seconds=1))
        assert rows() == 3 * SWEPT_BY_A_WRITE
        await store.set("living", b"", ttl=HOUR)
        assert rows() == 2 * SWEPT_BY_A_WRITE + 1
        await store.set_if_absent("living", b"", ttl=HOUR)
        assert rows() == 2 * SWEPT_BY_A_WRITE + 1
        for _ in range(3):
            await store.set("living", b"", ttl=HOUR)
        assert rows() == 1
    engine.dispose()


async def test_redis_removes_keys_by_itself(redis_url: str) -> None:
    """Every key Redis holds has a time to live there, to the millisecond."""
    prefix = f"kv-{uuid.uuid4().hex}"
    async with RedisKvStore(redis_url, prefix=prefix) as store, Redis.from_url(redis_url) as client:
        await store.set("a", b"", ttl=timedelta(seconds=5))
        await store.set_if_absent(("b", "c/d"), b"", ttl=timedelta(seconds=5))
        await store.compare_and_set("a", b"", b"x", ttl=timedelta(seconds=5))
        keys = sorted([key async for key in client.scan_iter(match=f"{prefix}:*")])
        assert keys == [f"{prefix}:a".encode(), f"{prefix}:b/c%2Fd".encode()]
        for key in keys:
            assert 0 < await client.pttl(key) <= 5_000


async def test_redis_that_forgot_its_scripts_is_told_again(redis_url: str) -> None:
    """A flush of the server's scripts is not noticed."""
    async with RedisKvStore(redis_url, prefix=f"kv-{uuid.uuid4().hex}") as store, Redis.from_url(redis_url) as client:
        await client.script_flush()
        assert await store.set_if_absent("key", b"one", ttl=HOUR) is None
        assert await store.compare_and_delete("key", b"one")


async def test_foreign_data_under_a_key_is_an_error_of_ours(redis_url: str) -> None:
    """A list where a value should be raises `StorageError`, and is left alone."""
    prefix = f"kv-{uuid.uuid4().hex}"
    async with RedisKvStore(redis_url, prefix=prefix) as store, Redis.from_url(redis_url) as client:
        await client.lpush(f"{prefix}:key", "x")
        with pytest.raises(StorageError):
            await store.get("key")
        with pytest.raises(StorageError):
            await store.set_if_absent("key", b"one", ttl=HOUR)
        assert await client.llen(f"{prefix}:key") == 1


async def test_a_store_that_is_not_connected_says_so(tmp_path: Path) -> None:
    """Before `connect`, and without tables, an error names what to do; no password is quoted."""
    store = SqlKvStore(f"sqlite:///{tmp_path}/kv.db")
    with pytest.raises(StorageUnavailable, match="connect"):
        await store.get("key")
    with pytest.raises(StorageError, match="migrate"):
        await store.connect()
    await SqlStorage(f"sqlite:///{tmp_path}/kv.db").migrate()
    with pytest.raises(StorageError, match="migrate"):
        await store.connect()
    with pytest.raises(StorageError, match="connect"):
        await RedisKvStore("redis://user:hidden@localhost:1").get("key")
    assert "hidden" not in repr(SqlKvStore("postgresql://user:hidden@localhost/db")) + repr(
        RedisKvStore("redis://user:hidden@localhost:1")
    )
    with pytest.raises(Unsupported, match="clock"):
        SqlKvStore("postgresql://localhost/db", clock=ManualClock())


async def test_a_server_that_is_gone_is_unavailable() -> None:
    """No server at all: `StorageUnavailable`, at `connect`."""
    with pytest.raises(StorageUnavailable):
        await RedisKvStore("redis://127.0.0.1:1").connect()
    with pytest.raises(StorageUnavailable):
        await SqlKvStore("postgresql://nobody@127.0.0.1:1/none").connect()


async def test_the_table_stands_beside_a_queue_and_is_made_once(postgres_url: str, tmp_path: Path) -> None:
    """Several processes may migrate at once and again; a queue on the same database goes on."""
    for url in (postgres_url, f"sqlite:///{tmp_path}/both.db"):
        await asyncio.gather(*(SqlKvStore(url).migrate() for _ in range(3)))
        store, queue = SqlKvStore(url), SqlStorage(url)
        await queue.migrate()
        await queue.connect()
        async with store:
            await store.set("key", b"kept", ttl=HOUR)
            await SqlKvStore(url).migrate()
            assert await store.get("key") == b"kept"
        assert sum((await queue.counts()).values()) == 0
        await queue.disconnect()
