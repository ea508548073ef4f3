"""The delivering process as an operator runs it, to be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

START_TIMEOUT_SECONDS = 30
WORKERS = 3
"""Delivery, health check and discovery."""


@dataclass(slots=True)
class WorkerProcess:
    """`python -m federation workers run` in an environment of its own."""

    environment: Mapping[str, str]
    directory: Path
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def log(self) -> Path:
        return self.directory / "worker.log"

    async def start(self) -> None:
        """The process runs and its workers have said so."""
        with open(self.log, "ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "federation", "--log-level", "info", "workers", "run"],
                env=dict(self.environment),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while self.log.read_bytes()[before:].count(b'"worker_ready"') < WORKERS:
                assert self._process.poll() is None, self.log.read_text()[-3000:]
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(timeout=30)
        self._process = None
        return status
