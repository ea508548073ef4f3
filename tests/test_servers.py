"""The test servers themselves: real, reachable, and empty at the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
import sqlalchemy

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent

RUN = """
import signal
from tests.servers import postgres_process, valkey

with valkey() as keys, postgres_process() as rows:
    pid = (rows.directory / "data" / "postmaster.pid").read_text().split()[0]
    print(keys.port, keys.directory, pid, rows.directory, flush=True)
    signal.pause()
"""


def test_valkey_answers(redis_url: str) -> None:
    """The shared Valkey speaks RESP."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


def test_postgres_database_is_empty(postgres_url: str) -> None:
    """Each test gets a PostgreSQL database without tables."""
    engine = sqlalchemy.create_engine(postgres_url)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_a_run_that_is_killed(ending: signal.Signals) -> None:
    """Nothing of it unwinds; its servers and their directories are gone nevertheless."""
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        port, keys, pid, rows = run.stdout.readline().split()
        run.send_signal(ending)

    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(keys).exists() or Path(rows).exists():
        assert time.monotonic() < deadline, f"{keys} or {rows} is still there"
        time.sleep(0.05)
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", int(port)), timeout=PATIENCE_SECONDS),
    ):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
