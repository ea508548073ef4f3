"""What a worker reports while it runs: its events, and the progress and log lines of its handlers.

Theory of operation. A handler's report is put into a table, from any thread, where the next one of the same claim
replaces it. One loop sends what has gathered, at most every 100 ms. An attempt that ends waits until its last report is
sent before it is settled, because afterwards its token is worthless. Nothing else waits for a report: one that the
storage does not take within 2 s is given up. Log lines gather in the same way, where the storage keeps any; of what one
claim logs between two batches the last 1 000 count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final, TypeAlias

from workers.checks import check_progress
from workers.errors import ForeignQueue
from workers.jobs import Claim, JobRecord, LogLine, ProgressReport
from workers.serde import JsonSerde
from workers.storage.abilities import KeepsLogs
from workers.storage.base import Storage

logger = logging.getLogger(__name__)


class WorkerEventKind(StrEnum):
    """The kinds of worker events.

    `continued`: an attempt succeeded, and the job goes on as the next link of its chain; `failing`: an attempt failed
    and will be repeated; `snoozed`: it was none, because the handler put its job off; `failed`: the job failed for
    good; `cancelled`: an attempt was stopped because somebody cancelled its job; `suspended`: an attempt ended,
    uncounted, because the job waits for its children; `drained`: the last claim left nothing, and all jobs claimed have
    ended; `error`: the storage failed a call, which says nothing about any job; `set_aside`: a job that another program
    wrote cannot be run, and waits for `Management.repair`; `stopping`: it claims no more, and waits for what runs;
    `stopped`: it has ended.
    """

    READY = "ready"
    ACTIVE = "active"
    COMPLETED = "completed"
    CONTINUED = "continued"
    FAILING = "failing"
    SNOOZED = "snoozed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    RELEASED = "released"
    SUSPENDED = "suspended"
    LEASE_LOST = "lease_lost"
    SET_ASIDE = "set_aside"
    ERROR = "error"
    DRAINED = "drained"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """One event of a worker or reaper.

    Events of an attempt carry its `claim`. Those of the reaper carry `job_ids` instead: `stalled` jobs are back in the
    queue; `failed` ones had stalled too often, or with their last attempt, and `records` has what is kept of them, with
    payload and error. `set_aside` carries the id of one job, and
    its `error` says why. `delay` is the time until the next attempt, `duration` how long the handler ran.
    """

    kind: WorkerEventKind
    queue: str
    worker_id: str
    claim: Claim | None = None
    error: BaseException | None = None
    delay: timedelta | None = None
    duration: timedelta | None = None
    job_ids: tuple[str, ...] = ()
    records: tuple[JobRecord, ...] = ()


Observer: TypeAlias = Callable[[WorkerEvent], None]
"""Called in the event loop for every event; must be quick. What it raises is logged and goes no further."""


class Emitter:
    """Tells `observers` what one worker does on one queue."""

    def __init__(self, observers: Sequence[Observer], *, queue: str, worker_id: str) -> None:
        self._observers = observers
        self._queue = queue
        self._worker_id = worker_id
        self._told_foreign = False

    @property
    def has_observers(self) -> bool:
        """Whether anybody is told."""
        return bool(self._observers)

    def emit(
        self,
        kind: WorkerEventKind,
        *,
        claim: Claim | None = None,
        error: BaseException | None = None,
        delay: timedelta | None = None,
        duration: timedelta | None = None,
        job_ids: tuple[str, ...] = (),
        records: tuple[JobRecord, ...] = (),
    ) -> None:
        """Call every observer with the event."""
        if not self._observers:
            return
        event = WorkerEvent(
            kind=kind,
            queue=self._queue,
            worker_id=self._worker_id,
            claim=claim,
            error=error,
            delay=delay,
            duration=duration,
            job_ids=job_ids,
            records=records,
        )
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # an observer's bug must not end the worker
                logger.exception("observer %r failed on event %r", observer, kind.value)

    def report(self, error: BaseException) -> None:
        """Call every observer with the error; that the queue is another library's is told once."""
        if isinstance(error, ForeignQueue):
            if self._told_foreign:
                return
            self._told_foreign = True
        self.emit(WorkerEventKind.ERROR, error=error)


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


MAX_LINE_BYTES: Final = 8_192

# Controls, the line ends of Unicode, and lone surrogates, which no log file can hold.
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def log_line(text: str) -> str:
    """Return the text as one line of at most 8 KiB of UTF-8: control characters are escaped, the excess is cut."""
    escaped = _UNPRINTABLE.sub(_escape, text[:MAX_LINE_BYTES])
    return escaped.encode()[:MAX_LINE_BYTES].decode(errors="ignore")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
