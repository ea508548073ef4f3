"""Queues whose changes are confirmed by replicas (`?wait_replicas=`)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import pytest

from tests.deployments import ask
from tests.patience import until
from tests.servers import ValkeyProcess, valkey
from workers import StorageError
from workers.errors import NotReplicated
from workers.jobs import Completed, EnqueueStatus, Released, SettleStatus
from workers.storage.bull import BullStorage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.testing.steps import HOUR, claim_one, job


class Pair:
    """A master and its replica, which may be stopped for a while."""

    def __init__(self, master: ValkeyProcess, replica: ValkeyProcess) -> None:
        self.master, self.replica = master, replica
        self._process = int(ask(replica, "INFO").partition("process_id:")[2].split()[0])

    def stop(self) -> None:
        os.kill(self._process, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process, signal.SIGCONT)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        valkey("--repl-diskless-sync-delay", "0") as master,
        valkey("--replicaof", "127.0.0.1", str(master.port)) as other,
    ):
        found = Pair(master, other)
        yield found
        found.go_on()


T = TypeVar("T")


async def confirmed(call: Callable[[], Awaitable[T]]) -> T:
    """What the call returned once the replica confirmed it, which it does when it has caught up."""
    found: list[T] = []

    async def is_confirmed() -> bool:
        with contextlib.suppress(NotReplicated):
            found.append(await call())
        return bool(found)

    await until(is_confirmed)
    return found[0]


@pytest.mark.parametrize("kind", [RedisStorage, BullMQStorage, BullStorage])
async def test_what_replicas_do_not_confirm_is_said(
    kind: type[RedisStorage | BullMQStorage | BullStorage], pair: Pair
) -> None:
    """Whatever changes a job says so and has changed it all the same. Repeated later, it finds that, and is confirmed.

    Claims and leases are not waited for. So it is where the server has forgotten the scripts, as a new master has.
    """
    await until(lambda: "master_link_status:up" in ask(pair.replica, "INFO", "replication"))
    storage = kind(f"{pair.master.url}?wait_replicas=1&wait_timeout_ms=50", f"mail-{kind.__name__}")
    await storage.connect()
    await confirmed(lambda: storage.enqueue([job("a"), job("b"), job("c")]))
    first = await claim_one(storage)
    pair.stop()
    second = await claim_one(storage)
    assert not (await storage.renew([first, second])).lost
    ask(pair.master, "SCRIPT", "FLUSH")
    with pytest.raises(NotReplicated, match="0 of 1 replicas confirmed the change within 50 ms; it is stored"):
        await storage.enqueue([job("d")])
    assert await storage.status(["d"]) != [None]
    ends = [Completed(claim=first, result=b"1", then=job("next", delay=HOUR))]
    for change in (
        lambda: storage.settle(ends),
        lambda: storage.settle([Released(claim=second)]),
        lambda: storage.cancel("b"),
        lambda: storage.retry(["b"]),
        lambda: storage.remove(["b"]),
        lambda: storage.complete("c", b"1"),
        storage.drain,
    ):
        ask(pair.master, "SCRIPT", "FLUSH")
        with pytest.raises(NotReplicated):
            await change()
    found = await storage.status(["a", "b", "c", "d", "next"])
    assert [status and status.state for status in found] == ["completed", None, "completed", None, None]
    pair.go_on()
    [settled] = await confirmed(lambda: storage.settle(ends))
    assert settled.status is SettleStatus.ALREADY_APPLIED
    [enqueued] = await confirmed(lambda: storage.enqueue([job("c")]))
    assert enqueued.status is EnqueueStatus.COMPLETED
    assert [status and status.state for status in await storage.status(["a", "b", "d"])] == ["completed", None, None]
    await storage.disconnect()


@pytest.mark.parametrize("query", ["wait_replicas=0", "wait_replicas=one", "wait_replicas=1&wait_timeout_ms=-5"])
def test_impossible_waits_are_refused(query: str) -> None:
    """What replicas cannot do is an error before anybody is asked."""
    with pytest.raises(StorageError, match="whole numbers above 0"):
        RedisStorage(f"redis://127.0.0.1:1?{query}")


def test_a_wait_is_shorter_than_a_call() -> None:
    """Otherwise the call would end first, and say less."""
    with pytest.raises(StorageError, match="less than the time of a call, 2000"):
        RedisStorage("redis://127.0.0.1:1?wait_replicas=1&wait_timeout_ms=2000", timeout=timedelta(seconds=2))
