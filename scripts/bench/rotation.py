"""A node that brings new keys to all servers it knows: the shipped command, as a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

from bench.deliveries import register
from bench.node import fresh_places
from bench.outage.figure import Figure
from bench.peer_servers import OWN_URL
from bench.rotating_servers import RotatingServers, rotating_servers
from federation.app import Federation
from federation.base.settings import Settings, write_env_file
from federation.cli.running import upgrade
from federation.protocol.keys import generate_own_keys

BAR: Final = timedelta(minutes=3)


def measure(place: str, *, servers: int, kill_after: timedelta | None, profile: Path | None = None) -> Figure:
    """Measure a rotation.

    With *kill_after* the command is killed by `kill -9` each time, and run again until it ends by itself.
    """
    keys = generate_own_keys()
    with (
        fresh_places(place) as places,
        tempfile.TemporaryDirectory(prefix="fd-bench-") as directory,
        rotating_servers(servers, keys) as others,
    ):
        values = {"BETTER_AUTH_URL": OWN_URL, "DEV_ALLOWED_HOSTNAMES": "127.0.0.1", **places}
        write_env_file(Path(directory) / ".env", {**values, **keys.to_env()})
        settings = Settings.from_values({**values, **keys.to_env()})
        upgrade(settings)
        asyncio.run(_register(settings, others))
        seconds, runs = _rotate(Path(directory), kill_after, profile)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # only of the command, as the servers have not ended
        known = others.known_keys()
        newest = _newest(Path(directory))
    if known != {newest: servers}:
        sys.exit(f"{known.get(newest, 0)} of {servers} servers know the new key")
    return Figure(
        name="seconds to bring new keys to all servers",
        labels={"place": place, "servers": servers, "killed": runs - 1},
        value=seconds,
        bar=BAR.total_seconds(),
        has_to_be="at most",
        details={"servers_per_s": servers / seconds, "cpu_s": used.ru_utime + used.ru_stime},
    )


async def _register(settings: Settings, others: RotatingServers) -> None:
    node = Federation(settings)
    await register(node, others.servers)
    await node.close()


def _rotate(directory: Path, kill_after: timedelta | None, profile: Path | None) -> tuple[float, int]:
    """Rotate, and return how long it took altogether, and in how many runs."""
    measured = ["-m", "cProfile", "-o", str(profile.absolute())] if profile else []
    command = [sys.executable, *measured, "-m", "federation", "keys", "rotate", "--json"]
    started = time.monotonic()
    for runs in itertools.count(1):
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # Each run gets a little longer than the one before, otherwise a busy machine would never get anywhere.
        patience = None if kill_after is None else kill_after.total_seconds() * (1 + runs / 10)
        try:
            said, complained = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode:
            sys.exit(f"the command failed: {said}{complained}"[-3000:])
        return time.monotonic() - started, runs
    raise AssertionError("counting ends never")


def _newest(directory: Path) -> str:
    [line] = [
        line for line in (directory / ".env").read_text().splitlines() if line.startswith("FEDERATION_PUBLIC_KEY=")
    ]
    return str(json.loads(line.partition("=")[2]))
