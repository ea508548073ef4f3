"""The delivering process as an operator runs it, to be killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS, until

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
                [warm.PYTHON, "-m", "federation", "--log-level", "info", "workers", "run"],
                env=dict(self.environment),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await until(lambda: self._is_at_work(before))

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def died(self) -> None:
        """Something has killed it."""
        assert self._process is not None
        process, self._process = self._process, None
        await until(lambda: process.poll() is not None)
        assert process.returncode == -signal.SIGKILL, self.log.read_text()[-3000:]

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(PATIENCE_SECONDS)
        self._process = None
        return status

    def _is_at_work(self, before: int) -> bool:
        """Whether the workers have said so in the log, from there on."""
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        return self.log.read_bytes()[before:].count(b'"worker_ready"') >= WORKERS
