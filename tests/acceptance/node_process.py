"""A whole node as an operator runs it, under a name that only some of the others can resolve."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from federation.base.settings.settings import Settings
from federation.protocol.keys import OwnKeys
from tests import warm
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port
from tests.workers.manual import ROOT

# What /etc/hosts would do, for one node: names under .test that it knows are on loopback, the others do not exist.
RESOLVE = """
import os, socket
from pathlib import Path

hosts, resolve = Path(os.environ["HOSTS_FILE"]), socket.getaddrinfo

def getaddrinfo(host, *rest, **named):
    if isinstance(host, str) and host.endswith(".test"):
        if host not in hosts.read_text().split():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host = "127.0.0.1"
    return resolve(host, *rest, **named)

socket.getaddrinfo = getaddrinfo
"""

# For a story in which attempts are to hang, and not to be given up before it goes on, on a slow machine either.
HANG_FOR_AN_HOUR = """
from datetime import timedelta
from federation.sealed.outbound.wire import SealedWire

SealedWire.__init__.__kwdefaults__["timeout"] = timedelta(hours=1)
"""


@dataclass(slots=True)
class NodeProcess:
    """`federation run` as `http://<name>.test:<port>`, with a directory of its own that holds its log.

    With another `command` it is one of several processes of the node, each of them with a directory of its own. `site`
    runs before the command, in the process.
    """

    name: str
    keys: OwnKeys
    directory: Path
    database_url: str
    settings: Mapping[str, str] = field(default_factory=dict)
    knows: Collection[str] = ()
    command: tuple[str, ...] = ("run",)
    site: str = RESOLVE
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def host(self) -> str:
        return f"{self.name}.test"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "BETTER_AUTH_URL": self.url,
            **self.keys.to_env(),
            "DATABASE_URL": self.database_url,
            "DEV_ALLOWED_HOSTNAMES": "127.0.0.1,a.test,b.test,c.test",
            "FEDERATION_PORT": str(self.port),
            "FEDERATION_DELIVERY_BACKOFF": "200ms",
            "HOSTS_FILE": str(self._hosts),
            "PYTHONPATH": f"{self.directory}:{ROOT}",
            **self.settings,
        }

    @property
    def own_settings(self) -> Settings:
        """For a test that acts as the application beside the process."""
        return Settings.from_values(self.environment)

    @property
    def log(self) -> Path:
        return self.directory / "node.log"

    def learn(self, *names: str) -> None:
        """It resolves these names from now on, and no others."""
        self.knows = names
        written = self.directory / "hosts.new"
        written.write_text("\n".join(names))
        os.replace(written, self._hosts)

    def events(self, name: str) -> list[dict[str, object]]:
        """The lines of its log of this event."""
        lines = self.log.read_text().splitlines()
        named = (json.loads(line) for line in lines if line.startswith("{") and f'"{name}"' in line)
        return [line for line in named if line["event"] == name]

    async def start(self) -> None:
        """It serves, and its workers have said that they are ready, as far as its command has them do so."""
        self.directory.mkdir(exist_ok=True)
        self.learn(*self.knows)
        (self.directory / "sitecustomize.py").write_text(self.site)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [warm.PYTHON, "-m", "federation", "--log-level", "info", *self.command],
                env=self.environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        await until(self._is_at_work)

    def stop(self) -> int:
        """It has ended in good order; its exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(PATIENCE_SECONDS)
        self._process = None
        return status

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def died(self) -> None:
        """Something has killed it."""
        assert self._process is not None
        process, self._process = self._process, None
        await until(lambda: process.poll() is not None)
        assert process.returncode == -signal.SIGKILL, self.log.read_text()[-3000:]

    def suspend(self) -> None:
        """It does nothing until `resume`: its kernel takes connections, and nobody answers them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def _hosts(self) -> Path:
        return self.directory / "hosts"

    @property
    def _workers(self) -> int:
        """Delivery, health check and discovery."""
        return 0 if self.command[0] == "node" else 3

    async def _is_at_work(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        return len(self.events("worker_ready")) >= self._workers and await self._answers()

    async def _answers(self) -> bool:
        if self.command[0] == "workers":
            return True
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True
