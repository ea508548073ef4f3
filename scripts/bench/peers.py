"""Other queues, each measured in a process of its own, on the same kind of server as the storage it stands next to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.storages import server

PEERS: Final = {
    "arq": "redis",
    "saq": "redis",
    "stock-bullmq": "bullmq",
    "procrastinate": "postgres",
    "pgqueuer": "postgres",
    "pgqueuer-uncapped": "postgres",
}
"""Which of our storages each stands next to."""

INSTALL: Final = "python -m venv .peers && .peers/bin/pip install -e '.[bench]', then --peers-python .peers/bin/python"

_PROCESS: Final = Path(__file__).with_name("peer_process.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another queue, and an interpreter that has it."""

    name: str
    version: str
    python: str

    @property
    def storage(self) -> str:
        """Which of ours it stands next to."""
        return PEERS[self.name]

    async def throughput(self, concurrency: int, jobs: int) -> dict[str, float]:
        """As for our own storages, but for the idle latency."""
        with server(self.storage) as url:
            command = [self.python, str(_PROCESS), "run", self.name, url, str(concurrency), str(jobs)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said, complained = await process.communicate()
        if process.returncode:
            sys.exit(f"{self.name} failed:\n{complained.decode()[-2000:]}")
        measured: dict[str, float] = json.loads(said.splitlines()[-1])
        return measured


def installed(wanted: list[str], python: str | None) -> list[Peer]:
    """The wanted peers that this interpreter or our own has; those missing are named on stderr."""
    found: dict[str, Peer] = {}
    for interpreter in filter(None, (python, sys.executable)):
        command = [interpreter, str(_PROCESS), "installed"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        for name, version in json.loads(answer.stdout).items():
            found.setdefault(name, Peer(name=name, version=version, python=interpreter))
    if missing := set(wanted) - found.keys():
        print(f"not installed: {', '.join(sorted(missing))}; {INSTALL}", file=sys.stderr)
    return [found[name] for name in wanted if name in found]
