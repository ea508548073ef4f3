"""Deliveries by `federation workers run --processes N`, measured from outside of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from bench.deliveries import enqueue, is_owed, make_tables, register
from federation.app import Federation
from federation.base.settings import Settings

TICKS: Final = os.sysconf("SC_CLK_TCK")
READY_SECONDS: Final = 120


def deliver_in_several(processes: int) -> dict[str, float]:
    """Fill a fresh queue while it is paused, have so many processes empty it, and return what that took them.

    `worker_cores` and `other_cores` are how much of the machine the workers had, and everything else: peers, servers,
    and whatever else ran.
    """
    make_tables()
    asyncio.run(_with_node(_fill))
    log = Path("log").absolute()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "federation", "workers", "run", "--processes", str(processes)]
        supervisor = subprocess.Popen(command, stderr=file, stdin=subprocess.DEVNULL)
    try:
        workers = _ready(log, processes)
        started, cpu, machine = time.perf_counter(), _cpu_seconds(workers), _machine_seconds()
        asyncio.run(_with_node(_empty))
        seconds = time.perf_counter() - started
        cpu, machine = _cpu_seconds(workers) - cpu, _machine_seconds() - machine
        memory, supervisor_memory = max(map(_peak_mib, workers)), _peak_mib(supervisor.pid)
    finally:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(READY_SECONDS)
    return {
        "deliveries_per_s": _deliveries() / seconds,
        "cpu_ms_each": cpu * 1000 / _deliveries(),
        "worker_cores": cpu / seconds,
        "other_cores": (machine - cpu) / seconds,
        "memory_mib": memory,
        "supervisor_mib": supervisor_memory,
    }


def _deliveries() -> int:
    return int(os.environ["BENCH_DELIVERIES"])


async def _with_node(work: Callable[[Federation], Awaitable[None]]) -> None:
    federation = Federation(Settings.from_values(os.environ))
    try:
        await work(federation)
    finally:
        await federation.close()


async def _fill(federation: Federation) -> None:
    peers = json.loads(os.environ["BENCH_PEERS"])
    await register(federation, peers)
    await enqueue(federation, [peer["url"] for peer in peers], _deliveries())
    await federation.delivery_queue.manage.pause()


async def _empty(federation: Federation) -> None:
    await federation.delivery_queue.manage.resume()
    left = True
    while left:
        await asyncio.sleep(0.05)
        left = await is_owed(federation)


def _ready(log: Path, processes: int) -> list[int]:
    """Wait until all processes deliver, and return their ids."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        ready = [int(line["pid"]) for line in lines if line["event"] == "process_ready"]
        if len(ready) == processes:
            return ready
        time.sleep(0.05)
    raise TimeoutError(log.read_text()[-2000:])


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of these processes so far."""
    times = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids)
    return sum(int(user) + int(system) for user, system in times) / TICKS


def _machine_seconds() -> float:
    """Return how long the machine's cores have been busy so far."""
    user, nice, system, _idle, _wait, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / TICKS


def _peak_mib(pid: int) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024
