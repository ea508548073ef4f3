"""`federation workers run --processes`: several processes deliver for one node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest

from db import Database
from federation.base.errors import ConfigurationError
from federation.protocol.keys import generate_own_keys
from federation.run import require_connections
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port
from tests.workers.manual import ROOT
from tests.workers.supervisor.crew import is_alive
from workers.storage import open_storage
from workers.storage.abilities import Admission


@dataclass(slots=True)
class Supervised:
    """A node's workers under a supervisor, and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def events(self, name: str) -> list[dict[str, object]]:
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == name]

    async def until(self, name: str, number: int = 1) -> list[dict[str, object]]:
        """So many events of that name are in the log."""

        def there() -> bool:
            found = len(self.events(name)) >= number
            assert found or self.process.poll() is None, self.log.read_text()
            return found

        await until(there)
        return self.events(name)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)


Start: TypeAlias = Callable[..., Supervised]


@pytest.fixture
def environment(database_file: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "BETTER_AUTH_URL": "http://node.test",
        **generate_own_keys().to_env(),
        "DATABASE_URL": f"sqlite:///{database_file}",
    }


@pytest.fixture
async def start(tmp_path: Path, environment: dict[str, str]) -> AsyncIterator[Start]:
    """Starts the command with these options."""
    started: list[Supervised] = []

    def run(*options: str, **settings: str) -> Supervised:
        log = tmp_path / f"log-{len(started)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "federation", "workers", "run", *options],
                cwd=tmp_path,
                env={**environment, **settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        started.append(Supervised(process, log))
        return started[-1]

    yield run
    for each in started:
        if each.process.poll() is None:
            each.process.terminate()
            assert await each.ended() == 0


async def test_several_processes_deliver_for_one_node(start: Start) -> None:
    """One of them runs the recurring jobs; one port tells of all; each line of the log says whose it is."""
    port = free_port()
    running = start("--processes", "2", "--metrics-port", str(port))
    first, _ = await running.until("process_ready", 2)
    await running.until("metrics_serving")
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        ready = (await client.get(f"http://127.0.0.1:{port}/readyz")).json()
    for number in (1, 2):
        assert f'federation_delivery_attempts_total{{process="{number}",' in metrics
        assert f'process_resident_memory_bytes{{process="{number}"}}' in metrics
    assert [each["checks"]["database"] for each in ready["processes"].values()] == ["ok", "ok"]
    await running.until("scheduler_job")
    os.kill(int(str(first["pid"])), signal.SIGKILL)
    await running.until("process_ready", 3)
    assert {line["process"] for line in running.events("worker_ready")} == {1, 2}
    running.process.terminate()
    assert await running.ended() == 0
    assert {line["process"] for line in running.events("stopped")} == {1, 2}
    assert not any(is_alive(int(str(each["pid"]))) for each in running.events("process_ready"))
    died = str(running.events("process_died")[0]["timestamp"])
    assert {job["process"] for job in running.events("scheduler_job") if str(job["timestamp"]) < died} == {1}


async def test_wrong_settings_are_told_once(start: Start) -> None:
    """By the first process; the supervisor ends with its status."""
    running = start("--processes", "4", FEDERATION_LEASE="no time")
    assert await running.ended() == 2
    assert running.log.read_text().count("FEDERATION_LEASE") == 1


async def test_a_memory_limit_needs_processes(start: Start) -> None:
    running = start("--memory-limit", "300M")
    assert await running.ended() == 2
    assert "add --processes" in running.log.read_text()


async def test_more_processes_than_the_database_admits_are_refused(postgres_url: str) -> None:
    """With the arithmetic: the pools of each, one process more for a restart, what the server keeps for itself."""
    database = Database(postgres_url)
    try:
        await require_connections(database, open_storage("memory://"), processes=2)
        with pytest.raises(ConfigurationError) as refused:
            await require_connections(database, open_storage(postgres_url), processes=50)
    finally:
        await database.close()
    (problem,) = refused.value.problems
    assert problem.startswith("--processes 50, DATABASE_URL: 50 processes, and one more while it replaces another")
    assert "up to 26 connections each. That is 1326, and the server admits" in problem


async def test_an_sqlite_file_admits_any_number(database_file: Path) -> None:
    database = Database(f"sqlite:///{database_file}")
    try:
        await require_connections(database, open_storage("memory://"), processes=1000)
    finally:
        await database.close()


def test_the_arithmetic_of_connections() -> None:
    """What is left to a user with a limit of its own is less."""
    server = Admission(maximum=100, reserved=3)
    assert server.shortage(3, each=24) is None
    told = server.shortage(4, each=24)
    assert told is not None
    assert "4 processes" in told
    assert "That is 120, and the server admits 97 (max_connections 100 less 3 reserved). 3 of them fit" in told
    limited = Admission(maximum=100, reserved=3, limit=40).shortage(4, each=24)
    assert limited is not None
    assert "admits 40 (max_connections 100 less 3 reserved, 40 for this user or database). 0 of them fit" in limited
