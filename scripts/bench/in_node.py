"""Deliveries by a worker in Node, which does the steps of ours; what it does is in `node_delivery.mjs`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy import make_url

from bench.delivering import fresh_federation, outcome, owe
from tests.interop.peer import HERE as INTEROP
from tests.interop.peer import NodeProcess, install_npm_packages

SCRIPT: Final = Path(__file__).with_name("node_delivery.mjs")
PACKAGES: Final = ("bullmq-6", "pg", "undici")


def install() -> None:
    """Install what the worker needs, or exit with one line."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        sys.exit("--peer node: there is no `node` and `npm` on this machine")
    install_npm_packages()


def versions() -> dict[str, str]:
    """Return the versions of the worker's packages."""
    files = {name: INTEROP / "node_modules" / name / "package.json" for name in PACKAGES}
    return {f"node-{name}": json.loads(path.read_text())["version"] for name, path in files.items()}


async def deliver_in_node() -> dict[str, float]:
    """Have Node deliver what is owed, after a warm-up, and return what that took it."""
    warm_up, deliveries = int(os.environ["BENCH_WARM_UP"]), int(os.environ["BENCH_DELIVERIES"])
    async with fresh_federation() as federation, node_worker(os.environ) as node:
        await owe(federation, warm_up)
        await node.call("deliver")
        await federation.delivery_queue.manage.pause()
        await owe(federation, deliveries)
        began = datetime.now(UTC)
        took = await node.call("deliver")
        return {
            "deliveries_per_s": deliveries / took["seconds"],
            "cpu_ms_each": took["cpu_seconds"] * 1000 / deliveries,
            **await outcome(federation, began),
            "memory_mib": took["memory_mib"],
        }


@contextlib.asynccontextmanager
async def node_worker(environment: Mapping[str, str]) -> AsyncIterator[NodeProcess]:
    """Run the worker on the node of this environment; it is gone when the block ends."""
    pipe = asyncio.subprocess.PIPE
    process = NodeProcess(
        await asyncio.create_subprocess_exec(
            *("node", str(SCRIPT)), stdin=pipe, stdout=pipe, env={**environment, **variables(environment)}
        )
    )
    try:
        await process.answer()
        yield process
    finally:
        await process.kill()


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what Node's libraries call our settings."""
    database = make_url(environment["DATABASE_URL"])
    found = {
        "NODE_ENV": "production",
        "PGHOST": database.host or str(database.query.get("host", "")),
        "PGPORT": str(database.port or database.query.get("port", "")),
        "PGUSER": database.username,
        "PGPASSWORD": database.password,
        "PGDATABASE": database.database,
        "NODE_EXTRA_CA_CERTS": environment.get("SSL_CERT_FILE"),
    }
    return {name: value for name, value in found.items() if value}
