"""A worker process of ours that sends activities, or sealed deliveries, warm and measured from inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from sqlalchemy import Engine, event, func, select
from sqlmodel import col

from bench.deliveries import cpu_seconds, enqueue
from bench.delivering import fresh_federation
from bench.outage.counting import QUEUE_TABLES
from bench.peer_servers import OWN_URL
from bench.sampling import Samples
from bench.server_cpu import cpu_of
from db import DeliveryJob, new_id
from federation import activitypub
from federation.base.queues.job_data import POST_JOB
from federation.protocol.activities import post_activity
from federation.runtime.composition import Federation
from federation.runtime.nodes import adopt, set_aside_loaded
from federation.runtime.workers import FederationWorkers
from workers.clock import SystemClock

ACTOR: Final = f"{OWN_URL}/users/alice"
WORDS: Final = "words " * 330
"""With these, an activity and a post have 2.4 KB."""
POLL_SECONDS: Final = 0.02
FEW: Final = 1_000
UNITS: Final = ("s", "cpu_s")

_LEFT: Final = select(func.count()).select_from(DeliveryJob).where(col(DeliveryJob.settled_at).is_(None))


def activity() -> dict[str, Any]:
    """Make the Create of a new note."""
    note = {
        "@context": "https://www.w3.org/ns/activitystreams",
        "id": f"{ACTOR}/notes/{new_id()}",
        "type": "Note",
        "attributedTo": ACTOR,
        "to": [activitypub.PUBLIC],
        "cc": [f"{ACTOR}/followers"],
        "published": "2026-11-27T12:00:00Z",
        "content": WORDS,
    }
    return activitypub.create(note)


def post() -> str:
    """Make a post as the sealed wire sends it."""
    content = [{"type": "text", "value": WORDS}]
    now = SystemClock().now()
    return post_activity(
        federation_url=OWN_URL, post_id=new_id(), content=content, author_id="alice", published=now, is_private=False
    )


async def send_all(task: dict[str, Any], *, profiled: bool) -> dict[str, Any]:
    """Send what the task says, and return what it took; with `profiled` also the stacks, as `folded`.

    At the end, what went to servers that hang may still be owed. So it is once the task's `limit` is over.
    """
    samples, sick = Samples(), {*task["hanging"]}
    well = [server for server in task["servers"] if server not in sick]
    async with fresh_federation() as federation:
        adopt(federation)
        if federation.activitypub is not None:
            await _add_actor(federation)
        await _sent(federation, task, well, task["warm"], left=0, during=contextlib.nullcontext())
        set_aside_loaded()
        sampled = samples.taken() if profiled else contextlib.nullcontext()
        found = await _sent(
            federation, task, task["servers"], task["each"], left=task["each"] * len(sick), during=sampled
        )
    return found | ({"folded": samples.folded()} if profiled else {})


async def _sent(
    federation: Federation,
    task: dict[str, Any],
    servers: Sequence[str],
    each: int,
    *,
    left: int,
    during: AbstractContextManager[None],
) -> dict[str, float]:
    """Owe so many to each of the servers, start workers, and measure until no more than `left` are owed."""
    if task["wire"] == "sealed":
        await enqueue(federation, servers, each * len(servers), follows=False, words=WORDS)
    else:
        await _owe(federation, servers, each)
    wanted = each * len(servers) - left
    workers = FederationWorkers(federation)
    beside = [cpu_of(os.environ["DATABASE_URL"]), cpu_of(os.environ.get("REDIS_URL", ""))]
    before, started, cpu = [server.seconds() for server in beside], time.perf_counter(), cpu_seconds()
    with during:
        workers.start()
        over = await _until(federation, left, task["limit"])
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    of_servers = sum(server.seconds() - first for server, first in zip(beside, before, strict=True))
    await workers.stop()
    done = wanted - over
    return {
        "deliveries_per_s": done / seconds,
        "cpu_each_ms": (cpu + of_servers) * 1000 / max(done, 1),
        "worker_cpu_each_ms": cpu * 1000 / max(done, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _add_actor(federation: Federation) -> None:
    async with federation.outbox.transaction() as session:
        await activitypub.add_actor(session, ACTOR)


async def _owe(federation: Federation, servers: Sequence[str], each: int) -> None:
    to = [_recipient(server) for server in servers]
    for _ in range(each):
        async with federation.outbox.transaction() as session:
            await activitypub.send(session, activity(), to)


def _recipient(server: str) -> activitypub.Recipient:
    user = f"{server}/users/bob"
    return activitypub.Recipient(id=user, inbox=f"{user}/inbox", shared_inbox=f"{server}/inbox")


async def _until(federation: Federation, left: int, limit: float) -> int:
    """Wait until no more are owed, or the time is over. Return how many more are."""
    until = time.perf_counter() + limit
    owed = left + 1
    while owed > left and time.perf_counter() < until:
        await asyncio.sleep(POLL_SECONDS)
        owed = (await federation.database.rows(_LEFT))[0][0]
    return max(owed - left, 0)


async def owe_many(task: dict[str, Any]) -> dict[str, float]:
    """Owe an activity to many inboxes, and a post to as many servers, in turns; return medians."""
    servers = [f"https://s{number}.example" for number in range(task["inboxes"])]
    to = [_recipient(server) for server in servers]
    async with fresh_federation() as federation:
        adopt(federation)
        await _add_actor(federation)

        async def send(most: int | None = None) -> None:
            async with federation.outbox.transaction() as session:
                await activitypub.send(session, activity(), to[:most])

        async def fan_out(most: int | None = None) -> None:
            async with federation.outbox.transaction() as session:
                await federation.outbox.enqueue_fanout(session, POST_JOB, "/posts", servers[:most], post())

        await send(FEW)  # both have opened and compiled what they need
        await fan_out(FEW)
        runs = [{**await _taken("send", send), **await _taken("fanout", fan_out)} for _ in range(task["repeat"])]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratios = {
        f"{unit}_ratio": statistics.median(r[f"send_{unit}"] / r[f"fanout_{unit}"] for r in runs) for unit in UNITS
    }
    return found | ratios


async def _taken(name: str, owe: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Return what a call takes: seconds, those of the processor, and statements."""
    with _statements() as statements:
        started, cpu = time.perf_counter(), cpu_seconds()
        await owe()
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    return {f"{name}_s": seconds, f"{name}_cpu_s": cpu, f"{name}_statements": len(statements)}


@contextlib.contextmanager
def _statements() -> Iterator[list[str]]:
    """Yield the statements of the block on our tables, without the queue's: one of many rows counts once."""
    heard: list[str] = []

    def hear(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if QUEUE_TABLES not in statement:
            heard.append(statement)

    event.listen(Engine, "before_cursor_execute", hear)
    try:
        yield heard
    finally:
        event.remove(Engine, "before_cursor_execute", hear)


def run(task: dict[str, Any], *, profiled: bool) -> None:
    """Do the task, and print what was found."""
    work = owe_many(task) if "inboxes" in task else send_all(task, profiled=profiled)
    print(json.dumps(asyncio.run(work)), flush=True)
