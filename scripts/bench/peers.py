"""Other queues, each measured in a process of its own, on the same kind of server as the storage beside it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.storages import server

NODE_PEERS: Final = {"node-bull": "1.1.3", "node-bull-1.0": "1.0.0"}
"""The versions of npm's `bull`, run by Node."""

PEERS: Final = {
    "arq": "redis",
    "saq": "redis",
    "stock-bullmq": "bullmq",
    "procrastinate": "postgres",
    "pgqueuer": "postgres",
    "pgqueuer-uncapped": "postgres",
    **dict.fromkeys(NODE_PEERS, "bull"),
}
"""The storage of ours with which each is compared."""

INSTALL: Final = (
    "python -m venv .peers && .peers/bin/pip install -e '.[bench]', then --peers-python .peers/bin/python; "
    "those of Node: npm ci in tests/interop"
)

_PROCESS: Final = Path(__file__).with_name("peer_process.py")
_NODE_PROCESS: Final = Path(__file__).with_name("node_bull.mjs")
_NODE_MODULES: Final = Path(__file__).resolve().parents[2] / "tests" / "interop" / "node_modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another queue, and the command that measures it, without server, concurrency and number of jobs."""

    name: str
    version: str
    command: tuple[str, ...]

    @property
    def storage(self) -> str:
        """The storage of ours with which it is compared."""
        return PEERS[self.name]

    async def throughput(self, concurrency: int, jobs: int) -> dict[str, float]:
        """Measure the same as for our own storages, without the idle latency."""
        with server(self.storage) as url:
            command = [*self.command, url, str(concurrency), str(jobs)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said, complained = await process.communicate()
        if process.returncode:
            sys.exit(f"{self.name} failed:\n{complained.decode()[-2000:]}")
        measured: dict[str, float] = json.loads(said.splitlines()[-1])
        return measured


def installed(wanted: list[str], python: str | None) -> list[Peer]:
    """Return the wanted peers that this interpreter or our own has, or Node. Missing ones are named on stderr."""
    found = {peer.name: peer for peer in _in_node()}
    for interpreter in filter(None, (python, sys.executable)):
        question = [interpreter, str(_PROCESS), "installed"]
        answer = subprocess.run(question, check=True, capture_output=True, text=True)
        for name, version in json.loads(answer.stdout).items():
            command = (interpreter, str(_PROCESS), "run", name)
            found.setdefault(name, Peer(name=name, version=version, command=command))
    if missing := set(wanted) - found.keys():
        print(f"not installed: {', '.join(sorted(missing))}; {INSTALL}", file=sys.stderr)
    return [found[name] for name in wanted if name in found]


def _in_node() -> Iterator[Peer]:
    for name, version in NODE_PEERS.items():
        if shutil.which("node") and (_NODE_MODULES / f"bull-{version}").exists():
            yield Peer(name=name, version=version, command=("node", str(_NODE_PROCESS), version))
