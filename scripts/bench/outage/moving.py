"""How many statements it takes to hold and to release very many deliveries to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from bench.deliveries import enqueue, node_environment, own_keys, redis_of, register
from bench.fan_out import payload_of
from bench.outage.absent import PATIENCE, node, owe_held, states, take_down, until
from bench.outage.counting import Statements, commands, counted_statements, counted_worker, since
from bench.outage.figure import Figure
from bench.peer_servers import peer_process
from db import DeliveryState
from federation.app import Federation
from federation.delivery.release import INTERVAL, Releaser

BATCH = 1_000
"""The greatest number released per second, where the pace is not measured."""
OF_BATCH = 20
"""How many statements a batch may take, whatever its size."""
RAMP = 11
"""How many batches a release takes to reach its rate, and room for what a worker asks at its start."""


def hold(queue: str, *, deliveries: int, concurrency: int) -> Figure:
    """Measure a worker with a backlog of jobs to a server whose link is down: each is claimed, and its row held."""
    with node_environment(queue) as environment, peer_process(1, own_keys(environment)) as peers:
        environment["FEDERATION_DELIVERY_CONCURRENCY"] = str(concurrency)
        asked, called = asyncio.run(_hold(environment, peers.servers, deliveries))
    return _figure("holding", queue, deliveries, asked, called, batch=concurrency)


def release(queue: str, *, deliveries: int) -> Figure:
    """Measure the releaser as it sends what is held for a server that is back, up to a thousand at once."""
    with node_environment(queue) as environment, peer_process(1, own_keys(environment)) as peers:
        asked, called = asyncio.run(_release(environment, peers.servers, deliveries))
    return _figure("releasing", queue, deliveries, asked, called, batch=BATCH)


def _figure(
    what: str,
    queue: str,
    deliveries: int,
    asked: Statements,
    called: Mapping[str, int],
    *,
    batch: int,
) -> Figure:
    """Make the figure.

    A statement that is executed for many sets of parameters counts as often; the queues' own do not.
    """
    return Figure(
        name=f"statements on the application's tables, {what}",
        labels={"queue": queue, "deliveries": deliveries, "batch": batch},
        value=asked.executions,
        bar=OF_BATCH * (deliveries / batch + RAMP),
        has_to_be="at most",
        details={
            "each": asked.executions / deliveries,
            "of_queues": asked.of_queues,
            **{f"calls_{name}": count for name, count in called.items() if count >= deliveries / 100},
        },
    )


async def _hold(
    environment: Mapping[str, str], peers: list[dict[str, str]], deliveries: int
) -> tuple[Statements, dict[str, int]]:
    async with node(environment) as federation, redis_of(federation) as redis:
        await register(federation, peers)
        await enqueue(federation, [peers[0]["url"]], deliveries, follows=False)
        await take_down(federation, [peers[0]["url"]])
        before = await commands(redis)
        async with counted_worker(environment) as worker:
            await until(partial(_are_held, federation, deliveries), within=PATIENCE)
            return await worker.statements(), since(before, await commands(redis))


async def _are_held(federation: Federation, deliveries: int) -> bool:
    return await states(federation) == {DeliveryState.HELD: deliveries}


async def _release(
    environment: Mapping[str, str], peers: list[dict[str, str]], deliveries: int
) -> tuple[Statements, dict[str, int]]:
    url = peers[0]["url"]
    with counted_statements() as counted:
        async with node(environment) as federation, redis_of(federation) as redis:
            await register(federation, peers)
            await take_down(federation, [url])
            await owe_held(federation, [url], deliveries, payload_of(federation.own_url or ""))
            releaser = Releaser(
                federation.database,
                federation.delivery_queue,
                links=federation.links,
                rate=BATCH,
                most_waiting=2 * deliveries,
            )
            await federation.links.returned(url, reason="bench")
            called, asked, released = await commands(redis), replace(counted), 0
            while released < deliveries:
                released += await releaser.tick()
                await asyncio.sleep(INTERVAL.total_seconds() / 10)
            return counted - asked, since(called, await commands(redis))
