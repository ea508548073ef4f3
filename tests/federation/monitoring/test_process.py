"""A real process that is watched, from both of its ports."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from db.migrate import upgrade
from federation.base.settings.settings import write_env_file
from federation.protocol.keys import generate_own_keys
from tests.federation.test_run import ROOT, Folder
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port

IMPORTS = """
import sys
import federation.run, federation.cli, federation.node.app, federation.monitoring.monitor
assert "prometheus_client" not in sys.modules
"""


@pytest.fixture
async def folder(tmp_path: Path, migrated_file: Path) -> AsyncIterator[Folder]:
    """A node on SQLite that listens on FEDERATION_PORT."""
    path = tmp_path / "node"
    path.mkdir()
    made = Folder(path)
    port = str(free_port())
    keys = generate_own_keys().to_env()
    values = {"BETTER_AUTH_URL": f"http://127.0.0.1:{port}", **keys, "FEDERATION_PORT": port}
    write_env_file(path / ".env", values)
    shutil.copy(migrated_file, path / "federation.sqlite3")
    await asyncio.to_thread(upgrade, f"sqlite:///{path}/federation.sqlite3", host_tables=True)
    yield made
    await made.close()


def answer(url: str) -> httpx.Response | None:
    """What is answered, None while nobody does."""
    try:
        return httpx.get(url, timeout=PATIENCE_SECONDS, trust_env=False)
    except httpx.TransportError:
        return None


def is_ready(url: str) -> bool:
    """Whether `/readyz` says so."""
    ready = answer(f"{url}/readyz")
    return ready is not None and ready.is_success


def exposes(url: str, *texts: str) -> bool:
    """Whether all of these are in `/metrics`."""
    metrics = answer(f"{url}/metrics")
    return metrics is not None and all(text in metrics.text for text in texts)


async def test_both_ports_of_a_process_tell_how_it_is(folder: Folder) -> None:
    """`run --metrics-port`: ready on both, and metrics of workers, database and inbound side, for who is named."""
    port = free_port()
    own, apart = f"http://127.0.0.1:{folder.settings().federation_port}", f"http://127.0.0.1:{port}"
    readers = {"FEDERATION_METRICS_CLIENTS": "127.0.0.1"}
    command = await folder.start("federation", "run", "--metrics-port", str(port), **readers)
    await command.until_logged("metrics_serving", "node_serving", "worker_ready")
    assert (discovered := answer(f"{own}/discover")) is not None
    assert discovered.is_success
    for url in (own, apart):
        await command.until(partial(is_ready, url))
        wanted = ('endpoint="/discover"', "federation_worker_events_total{", "federation_servers{")
        queues = [f'federation_jobs{{queue="federation-{name}"' for name in ("delivery", "health-check", "discovery")]
        await command.until(partial(exposes, url, *wanted, *queues))
        assert (alive := answer(f"{url}/healthz")) is not None
        assert alive.json() == {"status": "ok"}
    command.process.terminate()
    assert await command.ended() == 0


def test_metrics_are_an_extra() -> None:
    """Nothing imports the client library that was not asked for metrics."""
    subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)
