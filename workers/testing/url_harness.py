"""A harness for any storage with a URL, in real time."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import Final, Protocol, runtime_checkable

from workers.errors import StorageUnavailable
from workers.storage import open_storage
from workers.storage.base import Capabilities, Storage
from workers.testing.harness import Harness, HarnessFailed
from workers.testing.numbered import GivenIds, numbered

LONGEST_RESTART: Final = timedelta(seconds=30)
"""How long the command may take, and the server after it until it answers."""
SHOWN_CHARACTERS: Final = 2_000
"""How much of what a failed command printed is shown: its end."""


@runtime_checkable
class _Migrates(Protocol):
    async def migrate(self) -> None: ...


class UrlHarness(Harness):
    """The storage that a URL names, with leases and delays of 150 ms that are really waited for.

    Every case works on queues of its own, named `case-...`, and leaves them behind: use a database or a server that may
    be thrown away. Missing tables are created. With `restart_command`, for a shell, cases restart the server, which
    also cuts all connections: then only one case may run at a time.

    Raises:
        ValueError: a restart command for a storage without a server.
    """

    def __init__(self, url: str, *, restart_command: str | None = None) -> None:
        super().__init__()
        self._url = url
        self._restart_command = restart_command
        self._ids: defaultdict[str, GivenIds] = defaultdict(GivenIds)
        # Kept as long as the harness: what storages on one URL share must not vanish between two clients.
        self._first = open_storage(url)
        if restart_command is not None and self.capabilities.processes != "many":
            raise ValueError("there is no server to restart: this storage lies in the process or on this machine")
        self.restarts = self.cuts = restart_command is not None
        self.restartable = self.capabilities.processes == "many"

    @property
    def capabilities(self) -> Capabilities:
        return self._first.capabilities

    async def make(self, queue: str) -> Storage:
        storage = open_storage(self._url, queue=queue)
        return storage if self.capabilities.chosen_ids else numbered(storage, self._ids[queue])

    async def prepare(self) -> None:
        """Connect once, creating missing tables.

        Raises:
            WorkersError: the storage does not exist, or cannot be used.
        """
        if isinstance(self._first, _Migrates):
            await self._first.migrate()
        await self._first.connect()
        await self._first.disconnect()

    async def restart_server(self) -> None:
        """Run the restart command, and wait until the server answers.

        Raises:
            HarnessFailed: the command failed, or all of it took too long.
        """
        assert self._restart_command is not None
        try:
            async with asyncio.timeout(LONGEST_RESTART.total_seconds()):
                await _run(self._restart_command)
                while not await self._answers():  # noqa: ASYNC110 - a server tells nobody that it is back
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise HarnessFailed(f"{LONGEST_RESTART} after the restart command the server does not answer") from None

    async def cut_connections(self) -> None:
        await self.restart_server()

    async def _answers(self) -> bool:
        storage = open_storage(self._url)
        with suppress(StorageUnavailable):
            await storage.connect()
            await storage.disconnect()
            return True
        return False


async def _run(command: str) -> None:
    """Run the command in a shell; if this is cancelled, what it started is killed.

    Raises:
        HarnessFailed: it failed, with the end of what it printed.
    """
    with tempfile.TemporaryFile() as printed:  # not a pipe, which a server that goes on would hold open
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        printed.seek(0)
        if status != 0:
            said = printed.read().decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
            raise HarnessFailed(f"the restart command ended with status {status}: {said or 'it printed nothing'}")
