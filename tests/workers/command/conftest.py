"""An application with a queue in a folder, and the command that works for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.patience import PATIENCE_SECONDS, until
from tests.workers.manual import ROOT
from workers import Queue
from workers.command import main
from workers.storage import open_storage

Command = Callable[..., Awaitable[tuple[int, str, str]]]

SHOP: Final = """
import asyncio, os, time
from datetime import timedelta
from pathlib import Path

from workers import Queue, QueueOptions, UnrecoverableError
from workers.storage import open_storage

VERSION = 1
here = Path(__file__).parent
options = QueueOptions(grace=timedelta(hours=1), lease=timedelta(seconds=2))
queue = Queue(f"file://{here}/jobs", options=options)


async def who(job):
    return [os.getpid(), VERSION]


async def hang(job):
    (here / f"hangs-{os.getpid()}").touch()
    await asyncio.sleep(3600)


async def refuse(job):
    raise UnrecoverableError("no such recipient")


queue.execute({"who": who, "hang": hang, "refuse": refuse})
"""


@dataclass(slots=True)
class Shop:
    """The folder with `shop.py`, its queue, and the commands that run there."""

    folder: Path
    queue: Queue
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"file://{self.folder}/jobs"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers", *arguments],
                cwd=self.folder,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self._started.append(process)
        return process

    async def until_ready(self, number: int) -> None:
        """So many workers have said that they are ready since the folder was made."""
        await until(lambda: self.log.count(" is ready for the queue ") >= number or self._refute_end())

    async def until_logged(self, text: str) -> None:
        await until(lambda: text in self.log or self._refute_end())

    async def ended(self, process: subprocess.Popen[bytes]) -> int:
        status = await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
        self._started.remove(process)
        return status

    async def close(self) -> None:
        await self.queue.stop()
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # what it started ends by itself, in a second
                process.wait()

    def _refute_end(self) -> bool:
        assert all(process.poll() is None for process in self._started), self.log
        return False


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    (tmp_path / "shop.py").write_text(SHOP)
    made = Shop(tmp_path, Queue(open_storage(f"file://{tmp_path}/jobs")))
    yield made
    await made.close()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process, and returns its status and what it printed."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, arguments)  # which has an event loop of its own
        told = capsys.readouterr()
        return status, told.out, told.err

    return run
