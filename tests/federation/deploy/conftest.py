"""A node that was scraped: real series for whatever names some."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from db import Database, RunOutcome, SchedulerJob
from federation.base.settings.settings import write_env_file
from federation.monitoring.prometheus import ProcessMetrics
from federation.protocol.keys import generate_own_keys
from tests.federation.deploy.promql import Exposed, scraped
from tests.federation.monitoring.test_process import answer, exposes, folder
from tests.federation.test_run import Command, Folder
from tests.servers import free_port

__all__ = ["folder"]

NAMES_OF_TASKS = ("outbox-sweep", "long-range-probes", "purge", "storage-sweep")


@pytest.fixture
async def exposed(tmp_path: Path, migrated_file: Path) -> Exposed:
    """What a real process exposes once its recurring jobs ran, and, by the names of their labels, what it may."""
    path = tmp_path / "node"
    path.mkdir()
    own, port = str(free_port()), str(free_port())
    values = {"BETTER_AUTH_URL": f"http://127.0.0.1:{own}", "FEDERATION_PORT": own}
    write_env_file(path / ".env", {**values, **generate_own_keys().to_env()})
    await succeed(shutil.copy(migrated_file, path / "federation.sqlite3"))
    folder = Folder(path)
    try:
        found = scraped(await metrics_of(await folder.start("federation", "run", "--metrics-port", port), port))
    finally:
        await folder.close()
    for name, labels in declared().items():
        found.expect(name, labels)
    found.values["federation_scheduler_runs_total", "outcome"] |= set(RunOutcome)
    return found


async def metrics_of(command: Command, port: str) -> str:
    """What a process tells once it has read the numbers of its database."""
    await command.until_logged("metrics_serving", "node_serving")
    wanted = [f'="{name}"}}' for name in NAMES_OF_TASKS]  # under whatever label: a test looks at that
    url = f"http://127.0.0.1:{port}"
    await command.until(partial(exposes, url, *wanted, 'source="database"'))
    metrics = answer(f"{url}/metrics")
    assert metrics is not None
    return metrics.text


async def succeed(database_file: Path) -> None:
    """Every recurring job has succeeded once: nobody has to wait until they do by themselves."""
    database = Database(f"sqlite:///{database_file}")
    async with database.transaction() as session:
        for name in NAMES_OF_TASKS:
            session.add(SchedulerJob(name=name, token=1, outcome=RunOutcome.DONE, finished_at=datetime.now(UTC)))
    await database.close()


def declared() -> dict[str, set[str]]:
    """The labels of our own metrics, also of those that have no series before something happens."""
    labels = {}
    for metric in vars(ProcessMetrics()).values():
        if describe := getattr(metric, "describe", None):
            (family,) = describe()
            ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[family.type]
            for end in ends:
                labels[family.name + end] = set(metric._labelnames) | ({"le"} if end == "_bucket" else set())
    return labels
