"""What held deliveries cost while nothing happens: operations of the queues in a minute, compared with none held."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from redis.asyncio import Redis

from bench.deliveries import node_environment, own_keys, redis_of, register
from bench.outage.absent import PATIENCE, node, owe_held, payload_of, states, take_down, until
from bench.outage.counting import CountedWorker, commands, counted_worker, since
from bench.outage.figure import Figure
from bench.peer_servers import peer_process
from db import DeliveryState
from federation.runtime.composition import Federation
from federation.scheduler.leases import last_runs

JITTER = 0.1
"""The tolerated part of the operations in a minute with nothing held: idle workers poll and reap when they like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minute:
    """What was asked of the queues and of the database in a minute."""

    commands: Mapping[str, int]
    of_queues: int
    executions: int


def measure(queue: str, *, held: int, servers: int, during: timedelta) -> Figure:
    """Measure one minute, or `during`, with nothing held, and one with `held` held for servers that are down."""
    with node_environment(queue) as environment, peer_process(servers, own_keys(environment)) as peers:
        peers.tell("down")
        idle, busy = asyncio.run(_measure(environment, peers.servers, held, during))
    more = {name: busy.commands.get(name, 0) - idle.commands.get(name, 0) for name in busy.commands}
    operations = sum(busy.commands.values()) if busy.commands else busy.of_queues
    without = sum(idle.commands.values()) if idle.commands else idle.of_queues
    return Figure(
        name="queue operations, more than with nothing held",
        labels={"queue": queue, "held": held, "servers": servers, "seconds": during.total_seconds()},
        value=operations - without,
        bar=max(without * JITTER, 1),
        has_to_be="at most",
        details={
            "operations": operations,
            "without": without,
            "database_statements": busy.executions,
            "without_database_statements": idle.executions,
            **{f"more_{name}": count for name, count in more.items() if count},
        },
    )


async def _measure(
    environment: Mapping[str, str], peers: list[dict[str, str]], held: int, during: timedelta
) -> tuple[_Minute, _Minute]:
    async with node(environment) as federation, redis_of(federation) as redis:
        await register(federation, peers)
        async with counted_worker(environment) as worker:
            await until(partial(_has_swept, federation), within=PATIENCE)
            await asyncio.sleep(during.total_seconds() / 10)  # the rest of its start is not measured
            idle = await _minute(worker, redis, during)
            urls = [peer["url"] for peer in peers]
            await take_down(federation, urls)
            await owe_held(federation, urls, held, payload_of(federation.own_url or ""))
            await _require_held(federation, held)
            busy = await _minute(worker, redis, during)
            await _require_held(federation, held)
    return idle, busy


async def _has_swept(federation: Federation) -> bool:
    return "outbox-sweep" in {run.name for run in await last_runs(federation.database)}


async def _require_held(federation: Federation, held: int) -> None:
    found = await states(federation)
    if found != {DeliveryState.HELD: held}:
        raise RuntimeError(f"not {held} are held, but {found}")


async def _minute(worker: CountedWorker, redis: Redis | None, during: timedelta) -> _Minute:
    called, asked = await commands(redis), await worker.statements()
    await asyncio.sleep(during.total_seconds())
    asked = await worker.statements() - asked
    return _Minute(
        commands=since(called, await commands(redis)), of_queues=asked.of_queues, executions=asked.executions
    )
