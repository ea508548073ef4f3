"""What storages on Redis make of how their server is set up."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from tests.servers import ValkeyProcess, valkey
from workers import StorageError, StorageUnavailable, Worker
from workers.errors import ServerUnfit, StorageFull
from workers.jobs import Claim, Completed, JobState, SettleStatus
from workers.storage.abilities import Severity
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.on_redis import examination
from workers.storage.redis import RedisStorage
from workers.storage.redis import storage as redis_storage
from workers.testing.steps import PATIENCE, claim_one, enqueue, job, until

OnRedis: TypeAlias = BullStorage | BullMQStorage | RedisStorage

SOUND: Mapping[str, str] = {"maxmemory": "0", "maxmemory-policy": "noeviction", "appendonly": "yes", "save": ""}
EVICTS = SOUND | {"maxmemory": "500000000", "maxmemory-policy": "allkeys-lru"}


@pytest.fixture(scope="module")
def shared() -> Iterator[ValkeyProcess]:
    """A server that the tests of this file set up as they need it."""
    with valkey() as server:
        yield server


@pytest.fixture
async def server(shared: ValkeyProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, set up well, of which nothing has been told yet; a client."""
    monkeypatch.setattr(examination.TELLER, "_faults", set())
    async with Redis.from_url(shared.url) as admin:
        for name, value in SOUND.items():
            await admin.config_set(name, value)
        yield admin


@pytest.fixture(params=[BullStorage, BullMQStorage, RedisStorage])
def kind(request: pytest.FixtureRequest) -> type[OnRedis]:
    found: type[OnRedis] = request.param
    return found


async def faults(storage: OnRedis) -> list[tuple[str, str]]:
    await storage.connect()
    found = [(fault.severity.value, fault.found) for fault in storage.faults()]
    await storage.disconnect()
    return found


async def configure(server: Any, settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        await server.config_set(name, value)


async def test_a_sound_server_has_no_faults(
    kind: type[OnRedis], server: Any, shared: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is told of it, and it is known to be durable once it is connected, and not before."""
    storage = kind(shared.url, "q")
    assert storage.capabilities.durable is None
    assert await faults(storage) == []
    assert storage.capabilities.durable is True
    assert kind.capabilities.durable is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("settings", "severity", "said"),
    [
        (EVICTS, Severity.ERROR, "(maxmemory-policy allkeys-lru): acknowledged jobs"),
        (EVICTS | {"maxmemory-policy": "volatile-ttl"}, Severity.ERROR, "(maxmemory-policy volatile-ttl)"),
        (EVICTS | {"maxmemory": "0"}, Severity.WARNING, "which has no limit yet (maxmemory 0)"),
        ({"maxmemory": "1"}, Severity.WARNING, "of the 1 bytes of its maxmemory"),
        ({"appendonly": "no"}, Severity.WARNING, "keeps nothing on disk"),
        ({"appendonly": "no", "save": "3600 1"}, Severity.NOTE, "only takes snapshots"),
    ],
    ids=["evicts", "evicts-some", "may-evict", "full", "nothing-kept", "snapshots"],
)
async def test_each_fault_is_found(
    server: Any, shared: ValkeyProcess, settings: Mapping[str, str], severity: Severity, said: str
) -> None:
    """With its severity; what is not known to last is not called durable."""
    await configure(server, settings)
    storage = RedisStorage(shared.url, "q")
    [(is_severity, found)] = await faults(storage)
    assert (is_severity, said in found) == (severity.value, True)
    assert storage.capabilities.durable is {"nothing-kept": False, "snapshots": None}.get(_name(settings), True)


def _name(settings: Mapping[str, str]) -> str:
    if settings.get("appendonly") != "no":
        return "kept"
    return "snapshots" if settings.get("save") else "nothing-kept"


async def test_a_server_that_tells_nothing_is_unknown(server: Any, shared: ValkeyProcess) -> None:
    """A user who may ask for no settings works on; nothing is known, which is a note and no more."""
    await server.acl_setuser("app", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"],
                             categories=["+@all", "-@admin", "-@dangerous"])  # fmt: skip
    storage = RedisStorage(shared.url.replace("//", "//app:secret@"), "untold")
    found = await faults(storage)
    assert [severity for severity, _ in found] == ["note", "note"]
    assert all("does not tell" in text for _, text in found)
    assert storage.capabilities.durable is None
    await storage.connect()
    await enqueue(storage, job("a"))
    assert isinstance(await claim_one(storage), Claim)
    await storage.disconnect()


async def test_a_fault_is_logged_once(
    kind: type[OnRedis], server: Any, shared: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning, for all storages of a process on that server."""
    await configure(server, EVICTS)
    for queue in ("a", "b"):
        assert len(await faults(kind(shared.url, queue))) == 1
    [record] = caplog.records
    assert (record.levelno, "set its maxmemory-policy to noeviction" in record.getMessage()) == (logging.WARNING, True)


async def test_a_fault_that_comes_later_is_logged_by_the_reaper(
    kind: type[OnRedis],
    server: Any,
    shared: ValkeyProcess,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another server may have taken the place of the one that was connected to."""
    monkeypatch.setattr(examination, "LOOK_SECONDS", 0.0)
    storage = kind(shared.url, "q")
    await storage.connect()
    await configure(server, EVICTS | {"appendonly": "no"})
    await storage.recover(10)
    assert len(caplog.records) == 2
    assert storage.capabilities.durable is False
    await storage.disconnect()


async def _is_alone(server: Any) -> bool:
    return len(await server.client_list()) == 1


async def do_nothing(_: object) -> None:
    pass


async def test_no_worker_starts_where_jobs_may_vanish(
    kind: type[OnRedis], server: Any, shared: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what to set, and leaves no connection; if that is allowed, it starts, and nobody is warned."""
    await configure(server, EVICTS)
    with pytest.raises(ServerUnfit, match=r"allkeys-lru.*set its maxmemory-policy.*allow_eviction"):
        await Worker(kind(shared.url, "q"), {"*": do_nothing}).run()
    await until(lambda: _is_alone(server))
    caplog.clear()
    for allowed in (kind(shared.url, "q", allow_eviction=True), kind(f"{shared.url}?allow_eviction=true", "q")):
        worker = Worker(allowed, {"*": do_nothing})
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(PATIENCE):
            while not allowed.faults():
                await asyncio.sleep(0.01)
            worker.stop()
            await running
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_url_says_yes_or_no(kind: type[OnRedis]) -> None:
    """Anything else is an error, and no password is quoted."""
    with pytest.raises(StorageError, match="must be true or false") as refused:
        kind("redis://:s3cret@127.0.0.1/0?allow_eviction=perhaps")
    assert "s3cret" not in str(refused.value)
    kind("redis://127.0.0.1/0?allow_eviction=no&queue=q")


async def test_bullmq_and_bull_say_that_they_are_full(server: Any, shared: ValkeyProcess) -> None:
    """Their layouts cannot be worked off then, which their limits declare."""
    for kind in (BullStorage, BullMQStorage):
        storage = kind(shared.url, f"full-{kind.__name__}")
        await storage.connect()
        assert storage.capabilities.works_when_full is False
        await server.config_set("maxmemory", "1")
        with pytest.raises(StorageFull):
            await storage.enqueue([job("a")])
        await server.config_set("maxmemory", "0")
        await enqueue(storage, job("a"))
        await storage.disconnect()


@pytest.mark.parametrize("rights", ["no channels", "-publish", "-@pubsub"])
async def test_a_user_who_may_not_publish_has_jobs_all_the_same(
    kind: type[OnRedis],
    server: Any,
    shared: ValkeyProcess,
    rights: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new user of Redis 7 has no channels. An enqueue raised though the job was stored, and no worker had it.

    Operators are told, as others then notice jobs later.
    """
    monkeypatch.setattr(redis_storage, "LOOK_SECONDS", 0.5)
    channels, forbidden = ("resetchannels", "+@all") if rights == "no channels" else ("&*", rights)
    user = f"user-{uuid.uuid4().hex}"
    await server.execute_command("ACL", "SETUSER", user, "on", ">secret", "~*", "+@all", channels, forbidden)
    storage = kind(shared.url.replace("//", f"//{user}:secret@"), user)
    told = [] if kind is BullMQStorage else [("warning", True)]
    assert [(severity, "publish" in text) for severity, text in await faults(storage)] == told
    assert len(caplog.records) == len(told)
    await storage.connect()
    if told and rights != "-publish":
        with pytest.raises(StorageUnavailable, match=r"did not confirm a subscription: .* (permission|channel)"):
            await storage.subscribe("a").__aenter__()
    await enqueue(storage, job("a"), job("b"))
    await storage.cancel("b")
    claim = await claim_one(storage)
    [settled] = await storage.settle([Completed(claim=claim, result=b"1")])
    assert settled.status is SettleStatus.APPLIED
    await storage.pause()
    await storage.resume()
    worker = Worker(storage, {"*": do_nothing})
    running = asyncio.create_task(worker.run())
    await enqueue(storage, job("c"))
    await until(lambda: _has_completed(storage, 2))
    worker.stop()
    await running
    await storage.disconnect()
    await server.execute_command("ACL", "DELUSER", user)


async def _has_completed(storage: OnRedis, number: int) -> bool:
    return (await storage.counts())[JobState.COMPLETED] == number
