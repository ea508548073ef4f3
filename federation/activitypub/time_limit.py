"""A limit of time that also ends what never waits: a loop, `time.sleep`, a request without a timeout.

`asyncio.timeout` interrupts a task where it waits for something. For one that keeps the event loop to itself, a thread
looks once a second and sends the main thread a signal while one is overdue. The handler of the signal runs there,
amid whatever Python runs, and raises if that is an overdue task. What waits in a system call is woken by the signal.

Nothing ends a call of C code that neither returns nor lets Python look at signals. Outside of the main thread, and
where the program has a handler for `SIGURG` itself, only what waits is interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Final

SIGNAL: Final = signal.SIGURG
"""Nobody notices one that comes late: by default it is ignored."""
MARGIN_SECONDS: Final = 1.0
"""So much longer has a task that waits, which `asyncio.timeout` ends better: it has the driver tidy up."""
_LOOK_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 5.0
"""After so long it is raised once more: some code forgets every error."""


class Blocked(TimeoutError):
    """It kept the event loop to itself. The connection that it used may be in the midst of something."""


class _Overdue(BaseException):
    """No `except Exception` of a function that tries again for ever keeps it."""


@asynccontextmanager
async def time_limit(limit: timedelta) -> AsyncIterator[None]:
    """End the block after `limit`, and a second later what does not wait in it.

    Raises:
        TimeoutError: the time was over.
        Blocked: so it was, and the block did not wait. The traceback shows where it was.
    """
    seconds = limit.total_seconds()
    try:
        async with asyncio.timeout(seconds):
            with _interrupted_after(seconds + MARGIN_SECONDS):
                yield
    except _Overdue as overdue:
        error = Blocked(f"it kept the event loop to itself, and had {seconds:g} s")
        raise error.with_traceback(overdue.__traceback__) from None


_due: Final[dict[asyncio.Task[Any], float]] = {}
"""When each task is overdue."""
_is_needed: Final = threading.Event()
_watcher = threading.Thread()


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    task = asyncio.current_task()
    if task is None or not _handles_signals():
        yield
        return
    try:
        _due[task] = time.monotonic() + seconds
        _watch()
        try:
            yield
        finally:
            _forget(task)
    finally:  # once more, as it may have been raised amid the first
        _forget(task)


def _handles_signals() -> bool:
    """Tell whether signals are handled in this thread, and this one by us."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(SIGNAL, _interrupt)
    return signal.getsignal(SIGNAL) is _interrupt


def _forget(task: asyncio.Task[Any]) -> None:
    _due.pop(task, None)
    if not _due:
        _is_needed.clear()


def _watch() -> None:
    global _watcher
    _is_needed.set()
    if not _watcher.is_alive():  # also in a process that was forked
        _watcher = threading.Thread(target=_look, name="time-limit", daemon=True)
        _watcher.start()


def _look() -> None:
    main = threading.main_thread().ident
    while main is not None:
        _is_needed.wait()
        time.sleep(_LOOK_SECONDS)
        if any(due <= time.monotonic() for due in tuple(_due.values())):
            signal.pthread_kill(main, SIGNAL)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise in the task that runs now, if it is overdue."""
    now = time.monotonic()
    for task, due in tuple(_due.items()):
        if due <= now and asyncio.current_task(task.get_loop()) is task:
            _due[task] = now + _AGAIN_SECONDS
            raise _Overdue
