"""The README's tasks of one's own, as an operator runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import warm
from tests.acceptance.worker_process import WorkerProcess
from tests.federation.protocol.vectors import A
from tests.patience import PATIENCE_SECONDS, until
from tests.workers.manual import ROOT, examples

PAGE = ROOT / "docs" / "embed" / "tasks.md"


@pytest.fixture
def environment(database_file: Path, tmp_path: Path) -> dict[str, str]:
    """A node with its queues in its database, and the page's module where it can be imported."""
    (tmp_path / "digests.py").write_text(examples(PAGE)["Tasks of your own"])
    return {
        "BETTER_AUTH_URL": "https://a.example",
        **A.env,
        "DATABASE_URL": f"sqlite:///{database_file}",
        "FEDERATION_TASKS": "digests",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "PYTHONWARNINGS": "error",
    }


@pytest.fixture
async def worker(environment: dict[str, str], tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(environment, tmp_path)
    yield process
    process.kill()


async def python(environment: dict[str, str], *arguments: str) -> tuple[int | None, str]:
    """Exit status and output of a Python that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        warm.PYTHON,
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_digest_mailer_works_as_shown(environment: dict[str, str], worker: WorkerProcess) -> None:
    """One process enqueues in its transaction, the worker process runs the task, and stops in order."""
    assert (await python(environment, "-m", "federation", "upgrade"))[0] == 0
    order = (
        "import asyncio, digests, federation\n"
        "async def main():\n"
        "    await digests.subscribe('bob')\n"
        "    await federation.close_federation()\n"
        "asyncio.run(main())\n"
    )
    assert await python(environment, "-c", order) == (0, "")
    await worker.start()
    await until(lambda: "digest for bob\n" in worker.log.read_text())
    assert worker.terminate() == 0
    log = worker.log.read_text()
    assert "Traceback" not in log
    assert log.count('"worker_stopped"') == 4


async def test_a_module_that_cannot_be_imported_ends_the_start(environment: dict[str, str]) -> None:
    """With status 2 and the module's name, and without a traceback."""
    wrong = {**environment, "FEDERATION_TASKS": "digests,nobody.has_this"}
    status, output = await python(wrong, "-m", "federation", "workers", "run")
    assert status == 2
    assert "FEDERATION_TASKS: nobody.has_this cannot be imported" in output
    assert "Traceback" not in output
