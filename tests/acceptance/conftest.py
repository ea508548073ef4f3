"""Real processes on real databases."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation
from tests.acceptance.site import OWN_URL
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.conftest import (
    database_file,
    migrated_file,
    migrated_postgres,
    migrated_postgres_url,
    peer,
    queue_prefix,
    queue_settings,
    redis_place,
)
from tests.federation.protocol.vectors import A

__all__ = [
    "database_file",
    "migrated_file",
    "migrated_postgres",
    "migrated_postgres_url",
    "peer",
    "queue_prefix",
    "queue_settings",
]


@pytest.fixture
def base_environment() -> dict[str, str]:
    """Settings of a node that delivers to loopback, but for where its rows and queues are."""
    return {
        "BETTER_AUTH_URL": OWN_URL,
        **A.env,
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "SSL_CERT_FILE": os.environ["SSL_CERT_FILE"],
    }


@pytest.fixture(params=["sqlite", "bullmq and postgres"])
def place(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings that say where rows and queues are."""
    if request.param == "sqlite":
        return {"database_url": f"sqlite:///{request.getfixturevalue('database_file')}"}
    return {
        **redis_place("bullmq", request.getfixturevalue("redis_url")),
        "database_url": request.getfixturevalue("migrated_postgres_url"),
        "federation_queue_prefix": request.getfixturevalue("queue_prefix"),
    }


@pytest.fixture
async def federation(environment: dict[str, str]) -> AsyncIterator[Federation]:
    """The application's side of the node: it enqueues, the worker process delivers. The test says what its
    `environment` is."""
    node = Federation(Settings.from_values(environment))
    yield node
    await node.close()


@pytest.fixture
async def worker(environment: dict[str, str], tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(environment, tmp_path)
    yield process
    process.kill()
