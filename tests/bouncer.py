"""A real PgBouncer (Debian's package `pgbouncer`) in front of a PostgreSQL server of the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psycopg
import pytest
from sqlalchemy import make_url

from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port

_SETTINGS: Final = """\
[databases]
* = host={folder}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = {mode}
{more}
"""


@contextmanager
def bouncer(server: str, mode: str, **settings: int) -> Iterator[int]:
    """Its port, with its own defaults but for these; where it is not installed, the test says what did not run."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer was not found: queues behind one are NOT TESTED (apt install pgbouncer)")
    url = make_url(server)
    folder, port = str(url.query["host"]), free_port()
    with tempfile.TemporaryDirectory(prefix="fd-bouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "users").write_text(f'"{url.username}" ""\n')
        more = "\n".join(f"{name} = {value}" for name, value in settings.items())
        (directory / "settings").write_text(
            _SETTINGS.format(folder=folder, port=port, users=directory / "users", mode=mode, more=more)
        )
        # It refuses to be root, and whoever runs the server may read its folder.
        owner = next(Path(folder).glob(".s.PGSQL.*")).owner()
        as_owner = ("-u", owner) if os.geteuid() == 0 else ()
        process = subprocess.Popen(
            [program, "-q", *as_owner, str(directory / "settings")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.kill()
            process.wait(timeout=PATIENCE_SECONDS)


@contextmanager
def busy(port: int, url: str, clients: int) -> Iterator[None]:
    """Let so many clients of the pool each have had a session at the same time, and stay."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(through(port, url).replace("+psycopg", ""))) for _ in range(clients)
        ]
        for connection in connections:
            connection.execute("SELECT 1")
        for connection in connections:
            connection.commit()
        yield


def through(port: int, url: str, **query: str) -> str:
    """The URL of the same database behind the one at that port."""
    behind = make_url(url).set(host="127.0.0.1", port=port, query=query)
    return behind.render_as_string(hide_password=False)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("pgbouncer does not answer") from None
            time.sleep(0.01)
