"""`python -m workers.dashboard`: it serves until it is stopped, or says why it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS, eventually
from tests.servers import free_port
from workers.queue import Queue
from workers.storage.sql import SqlStorage


async def started(
    *arguments: str, accounts: str = "", program: Sequence[str] = (warm.PYTHON, "-m", "workers.dashboard")
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*program, *arguments),
        env={**os.environ, "WORKERS_DASHBOARD_ACCOUNTS": accounts},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process, text: bytes | None = None) -> tuple[int | None, str, str]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate(text)
    return process.returncode, out.decode(), err.decode()


async def test_it_shows_the_queues_of_a_url_until_it_is_stopped(tmp_path: Path) -> None:
    """As many as are named; with accounts everybody has to log in."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    await SqlStorage(url).migrate()
    async with Queue(SqlStorage(url, "mail")) as queue:
        await queue.enqueue(1)
    port = free_port()
    process = await started(url, "--queue", "mail", "--queue", "other", "--port", str(port))
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:

        async def seen() -> str:
            try:
                return (await client.get(f"http://127.0.0.1:{port}/queues")).text
            except httpx.ConnectError:
                assert process.returncode is None
                return ""

        page = await eventually(seen, bool)
    assert "0 running, 1 waiting." in page
    assert ">other</a>" in page
    process.send_signal(signal.SIGTERM)
    status, _, err = await ended(process)
    assert status == 0
    assert f"the dashboard is at http://127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("arguments", "accounts", "told"),
    [
        (["memory://x", "--bind", "0.0.0.0"], "", "loopback only"),
        (["nothing://x"], "", "a storage's URL begins with"),
        (["memory://x"], "anna:viewer:s3cret", "the hash of anna"),
        (["memory://x", "--url", "ops.example"], "", "https://dashboard.example"),
        ([], "", "the URL of a storage is missing"),
    ],
)
async def test_what_it_cannot_do_it_says(arguments: list[str], accounts: str, told: str) -> None:
    """With exit status 2, and nothing secret."""
    status, _, err = await ended(await started(*arguments, accounts=accounts))
    assert status == 2
    assert told in err
    assert "s3cret" not in err


async def test_it_makes_accounts() -> None:
    """Whose password is the first line of its input, and is none if it is too short."""
    status, out, err = await ended(await started("--make-account", "anna"), b"")
    assert (status, out) == (2, "")
    assert "no account is made: a password must have at least 8 characters" in err
    status, out, _ = await ended(await started("--make-account", "anna", "--role", "viewer"), b"secret word\n")
    assert status == 0
    assert out.startswith("anna:viewer:$argon2id$")
    status, out, err = await ended(await started("--make-account", "bot", "--token"))
    assert (status, out.startswith("bot:operator:sha256:"), "shown once" in err) == (0, True, True)


def test_a_missing_package_is_named_with_its_extra() -> None:
    """In one line, before anything is served."""
    program = (
        "import runpy, sys\n"
        "sys.modules['jinja2'] = None\n"
        "runpy.run_module('workers.dashboard', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.stderr == (
        "cannot be started: it needs the package 'jinja2': pip install 'federation-delivery[dashboard]'\n"
    )
    assert done.returncode == 2
