"""How soon a server that was away for an hour is noticed, and has everything that was held for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial

from bench.deliveries import node_environment, own_keys, register
from bench.outage.absent import PATIENCE, is_up, node, owe_held, payload_of, states, take_down, until
from bench.outage.figure import Figure
from bench.peer_servers import Peers, peer_process
from federation.runtime.composition import Federation


def measure(queue: str, *, held: int, next_look: timedelta | None = None) -> Iterator[Figure]:
    """Measure with shipped settings and a real worker process.

    The server returns right after a failed probe, which is the worst moment, unless the next probe is due in
    `next_look`.
    """
    with node_environment(queue) as environment, peer_process(1, own_keys(environment)) as peers:
        peers.tell("down")
        noticed, applied, taken = asyncio.run(_measure(environment, peers, held, next_look))
    labels: dict[str, object] = {"queue": queue, "held": held}
    yield Figure(
        name="seconds from a server's return to its link being up",
        labels=labels,
        value=noticed,
        bar=180,
        has_to_be="at most",
    )
    yield Figure(
        name="seconds from its link being up until everything is applied",
        labels=labels,
        value=applied,
        bar=300,
        has_to_be="at most",
        details={"per_s": held / applied, "taken": taken},
    )


async def _measure(
    environment: Mapping[str, str], peers: Peers, held: int, next_look: timedelta | None
) -> tuple[float, float, int]:
    url = peers.urls[0]
    async with node(environment) as federation:
        await register(federation, peers.servers)
        await take_down(federation, [url])
        await owe_held(federation, [url], held, payload_of(federation.own_url or ""))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "federation.workers"),
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.DEVNULL,
        )
        try:
            await asyncio.sleep(5)  # until it runs
            await take_down(federation, [url], next_look=next_look)
            peers.tell("up")
            noticed = await until(partial(is_up, federation, url), within=PATIENCE)
            applied = await until(partial(_owes_nothing, federation), within=PATIENCE)
            return noticed, applied, peers.tell("taken")
        finally:
            process.kill()
            await process.wait()


async def _owes_nothing(federation: Federation) -> bool:
    return not await states(federation)
