"""The short steps that tests of the Redis storage are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta

from workers import JobState
from workers.deduplication import Deduplication, DeduplicationMode
from workers.jobs import (
    Claim,
    Completed,
    ErrorInfo,
    Failed,
    Released,
    Retried,
)
from workers.storage.redis import RedisStorage
from workers.testing.steps import HOUR, job

LEASES = {"*": timedelta(seconds=30)}
ERROR = ErrorInfo(type="ValueError", message="no")

SETS = (
    *("jobs", "runs", "ready", "held", "scheduled", "failing", "leases", "completed", "failed", "cancelled", "busy"),
    *("workers", "sleepers", "meta", "marks", "dependents", "waiting", "after"),
)

THROTTLED = "throttled"
"""Read by none but those that have to do with keys whose time is over."""


def key(storage: RedisStorage, name: str) -> str:
    return f"{{workers:{storage.queue}}}:{name}"


async def one_in_every_set(storage: RedisStorage) -> None:
    """Each key of the queue has something in it."""
    names = ("completed", "failed", "failing", "cancelled", "k1", "k2")
    await storage.enqueue([job(name, ordering_key="key" if name[0] == "k" else None) for name in names])
    claims = {claim.job_id: claim for claim in await storage.claim("w", leases=LEASES, limit=10)}
    await storage.settle(
        [
            Completed(claim=claims["completed"], result=b"1"),
            Failed(claim=claims["failed"], error=ERROR),
            Retried(claim=claims["failing"], delay=HOUR, error=ERROR),
            Released(claim=claims["cancelled"]),
        ]
    )
    await storage.cancel("cancelled")
    await storage.enqueue([job("scheduled", delay=HOUR)])
    await storage.wait(["work"], timeout=timedelta(0))  # which notes a sleeper
    throttled = Deduplication(key="key", mode=DeduplicationMode.THROTTLE, ttl=HOUR)
    await storage.enqueue([job("ready", name="other", deduplication=throttled)])
    await storage.enqueue([replace(job("waiting"), after=("scheduled",))])
    await storage.pause()


async def enter(storage: RedisStorage) -> None:
    async with storage.events():
        pass


VERBS: dict[str, Callable[[RedisStorage, Claim], Awaitable[object]]] = {
    "enqueue": lambda storage, _: storage.enqueue([job("x"), job("y")]),
    "wait": lambda storage, _: storage.wait(("*",), timeout=timedelta(seconds=60)),
    "claim": lambda storage, _: storage.claim("w", leases=LEASES, limit=10),
    "renew": lambda storage, claim: storage.renew([claim]),
    "settle": lambda storage, claim: storage.settle([Completed(claim=claim, result=b"1")]),
    "recover": lambda storage, _: storage.recover(10),
    "sweep": lambda storage, _: storage.sweep(10),
    "cancel": lambda storage, _: storage.cancel("a"),
    "status": lambda storage, _: storage.status(["a"]),
    "result": lambda storage, _: storage.result("a"),
    "counts": lambda storage, _: storage.counts(),
    "list": lambda storage, _: storage.list(JobState.QUEUED),
    "workers": lambda storage, _: storage.workers(),
    "farewell": lambda storage, _: storage.farewell("gone"),
    "pause": lambda storage, _: storage.pause(),
    "resume": lambda storage, _: storage.resume(),
    "retry": lambda storage, _: storage.retry(["a"]),
    "remove": lambda storage, _: storage.remove(["b"], running=True),
    "complete": lambda storage, _: storage.complete("b", b"1"),
    "promote": lambda storage, _: storage.promote(["b"]),
    "drain": lambda storage, _: storage.drain(),
    "clean": lambda storage, _: storage.clean(JobState.FAILED, older_than=HOUR),
    "update_result_ttl": lambda storage, _: storage.update_result_ttl("a", HOUR),
}
