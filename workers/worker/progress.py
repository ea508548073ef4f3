"""Sending of what handlers report, progress and log lines, in batches and without making anybody wait.

Theory of operation. A report is put into a table, from any thread, where the next one of the same claim replaces it.
One loop sends what has gathered, at most every 100 ms. An attempt that ends waits until its last report is sent before
it is settled, because afterwards its token is worthless. Nothing else waits for a report: one that the storage does not
take within 2 s is given up. Log lines gather in the same way, where the storage keeps any; of what one claim logs
between two batches the last 1 000 count.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from workers.checks import check_progress
from workers.jobs import Claim, LogLine, ProgressReport
from workers.serde import JsonSerde
from workers.storage.abilities import KeepsLogs
from workers.storage.base import Storage

PAUSE_SECONDS: Final = 0.1
SEND_SECONDS: Final = 2.0
LINES_AT_ONCE: Final = 1_000

_serde: Final = JsonSerde()


def encode_progress(value: object) -> bytes:
    """Encode the value as JSON.

    Raises:
        ValueError: it is no JSON value, or longer than 4 KiB as one.
    """
    try:
        encoded = _serde.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"progress must be a JSON value: {error}") from error
    check_progress(encoded)
    return encoded


class ProgressReporter:
    """Sends the progress and the log lines of one worker's jobs; `report` is called with storage errors."""

    def __init__(self, storage: Storage, *, report: Callable[[BaseException], None]) -> None:
        self._storage = storage
        self._report = report
        self._lock = threading.Lock()
        self._latest: dict[str, ProgressReport] = {}  # by token; written by handlers' threads, under the lock
        self._under_way: Mapping[str, ProgressReport] = {}
        self._logs = storage if isinstance(storage, KeepsLogs) else None
        self._lines: dict[str, deque[LogLine]] = {}  # like `_latest`
        self._lines_under_way: Mapping[str, deque[LogLine]] = {}
        self._sending = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, claim: Claim, value: bytes) -> None:
        """Make `value` the latest progress of this claim; from any thread, without blocking."""
        with self._lock:
            self._latest[claim.token] = ProgressReport(claim=claim, value=value)
        self._wake()

    def log(self, claim: Claim, text: str) -> None:
        """Add a line to the log of this claim's job, if the storage keeps any; from any thread, without blocking."""
        if self._logs is None:
            return
        with self._lock:
            self._lines.setdefault(claim.token, deque(maxlen=LINES_AT_ONCE)).append(LogLine(claim=claim, text=text))
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None and not self._arrived.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived its worker
                self._loop.call_soon_threadsafe(self._arrived.set)

    def has(self, claim: Claim) -> bool:
        """Tell whether a report of this claim is still to be sent, or on its way."""
        token = claim.token
        if token in self._latest or token in self._under_way:
            return True
        return token in self._lines or token in self._lines_under_way

    async def run(self) -> None:
        """Send until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self.flush()
            await asyncio.sleep(PAUSE_SECONDS)

    async def flush(self) -> None:
        """Send, or give up, everything that was reported until now."""
        async with self._sending:
            with self._lock:
                self._under_way, self._latest = self._latest, {}
                self._lines_under_way, self._lines = self._lines, {}
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await self._send()
            except Exception as error:  # whatever it is: no job may fail because of its progress
                self._report(error)
            finally:
                self._under_way, self._lines_under_way = {}, {}

    async def _send(self) -> None:
        if self._lines_under_way and self._logs is not None:
            await self._logs.log([line for lines in self._lines_under_way.values() for line in lines])
        if self._under_way:
            await self._storage.progress(list(self._under_way.values()))
