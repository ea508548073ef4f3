"""Sending of the progress that handlers report, in batches and without making anybody wait.

Theory of operation. A report is put into a table, from any thread, where the next one of the same claim replaces it.
One loop sends what has gathered, at most every 100 ms. An attempt that ends waits until its last report is sent before
it is settled, because afterwards its token is worthless. Nothing else waits for a report: one that the storage does not
take within 2 s is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Final

from workers.checks import check_progress
from workers.jobs import Claim, ProgressReport
from workers.serde import JsonSerde
from workers.storage.base import Storage

PAUSE_SECONDS: Final = 0.1
SEND_SECONDS: Final = 2.0

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
    """Sends the progress of one worker's jobs; `report` is called with storage errors."""

    def __init__(self, storage: Storage, *, report: Callable[[BaseException], None]) -> None:
        self._storage = storage
        self._report = report
        self._lock = threading.Lock()
        self._latest: dict[str, ProgressReport] = {}  # by token; written by handlers' threads, under the lock
        self._under_way: Mapping[str, ProgressReport] = {}
        self._sending = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, claim: Claim, value: bytes) -> None:
        """Make `value` the latest progress of this claim; from any thread, without blocking."""
        with self._lock:
            first = not self._latest
            self._latest[claim.token] = ProgressReport(claim=claim, value=value)
        if first and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived its worker
                self._loop.call_soon_threadsafe(self._arrived.set)

    def has(self, claim: Claim) -> bool:
        """Tell whether progress of this claim is still to be sent, or on its way."""
        return claim.token in self._latest or claim.token in self._under_way

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
            try:
                if self._under_way:
                    async with asyncio.timeout(SEND_SECONDS):
                        await self._storage.progress(list(self._under_way.values()))
            except Exception as error:  # whatever it is: no job may fail because of its progress
                self._report(error)
            finally:
                self._under_way = {}
