"""One event loop in a thread of its own, for plain code: threads, scripts, synchronous web frameworks.

Theory of operation. A process has one such loop. Its first use starts it in a daemon thread. When the interpreter ends,
it waits a bounded time for the work handed in, closes everything that registered for it, and joins the thread. A fork
copies neither the thread nor the loop: the child begins with none and starts its own when it needs one. A fork does
copy locks, including those inside C libraries, and a lock that another thread holds is never released in the child;
SQLite's make the child hang at its first call. So a fork waits, for a bounded time, until nothing is under way here.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own end of the interpreter, which must come after ours
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from workers.homes import keep_inherited

T = TypeVar("T")
Work: TypeAlias = Callable[[], Coroutine[object, object, T]]

ENDING_SECONDS: Final = 5.0
"""How long the interpreter's end waits for work under way, and again for closing what is open."""

FORK_SECONDS: Final = 10.0
"""How long a fork waits for work under way."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    """An event loop and its thread."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Only the interpreter's end and a fork wait for them; touched in the loop alone."""
    closers: dict[object, Work[None]] = field(default_factory=dict)
    """Called at the end, the youngest first; touched in the loop alone."""


class Background:
    """Runs coroutines for threads that have no event loop. Safe to use from any thread, and after a fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the rest
        self._running: _Running | None = None
        self._under_way = 0
        self._ending = False

    def run(self, work: Work[T]) -> T:
        """Run the coroutine that `work` makes and return its result; the calling thread waits for it.

        Raises:
            RuntimeError: this is called within the loop itself, which would wait for itself.
        """
        if self._running is not None and threading.current_thread() is self._running.thread:
            raise RuntimeError("plain code in the background loop would wait for itself; await the asynchronous call")
        with self._call() as running:
            future = asyncio.run_coroutine_threadsafe(_called(work), running.loop)
            try:
                return future.result()
            except BaseException:
                future.cancel()  # interrupted: nobody waits for it any more
                raise

    def soon(self, work: Work[None]) -> None:
        """Start the coroutine that `work` makes, without waiting for it.

        The interpreter's end waits for it, for a bounded time.
        """
        running = self._running
        if running is not None and threading.current_thread() is running.thread:
            self._entered()
            self._begin(running, work)
            return
        with self._call() as running:
            self._entered()
            running.loop.call_soon_threadsafe(self._begin, running, work)

    def at_end(self, key: object, close: Work[None] | None) -> None:
        """Call `close` when the interpreter ends; None withdraws what was registered for `key`.

        Only to be called in the loop.
        """
        assert self._running is not None, "called in the loop"
        self._running.closers.pop(key, None)
        if close is not None:
            self._running.closers[key] = close

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop, None while there is none."""
        running = self._running
        return None if running is None else running.loop

    def end(self) -> None:
        """Wait a bounded time for the work handed in, then close what is open. A later call begins anew."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, ENDING_SECONDS)
            running, self._ending = self._running, True
        try:
            if running is not None:
                future = asyncio.run_coroutine_threadsafe(_finish(running), running.loop)
                with contextlib.suppress(Exception):
                    future.result(2 * ENDING_SECONDS)
                running.loop.call_soon_threadsafe(running.loop.stop)
                running.thread.join(ENDING_SECONDS)
        finally:
            with self._changed:
                self._running, self._ending = None, False
                self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait a bounded time for what is under way, and let nothing begin until `after_fork` or `forget`."""
        self._changed.acquire()
        running = self._running
        if running is None or threading.current_thread() is not running.thread:
            self._changed.wait_for(lambda: not self._under_way, FORK_SECONDS)

    def after_fork(self) -> None:
        """Go on as the parent."""
        self._changed.release()

    def forget(self) -> None:
        """Begin anew as a fork's child: what the parent runs stays the parent's."""
        keep_inherited(self._running)
        self._changed = threading.Condition()
        self._running, self._under_way, self._ending = None, 0, False

    @contextmanager
    def _call(self) -> Iterator[_Running]:
        with self._changed:
            self._changed.wait_for(lambda: not self._ending)
            self._under_way += 1
            running = self._running = self._running or _start()
        try:
            yield running
        finally:
            self._left()

    def _begin(self, running: _Running, work: Work[None]) -> None:
        task = running.loop.create_task(_logged(work))
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)
        task.add_done_callback(self._left)

    def _entered(self) -> None:
        with self._changed:
            self._under_way += 1

    def _left(self, _: object = None) -> None:
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()


def _start() -> _Running:
    loop = asyncio.new_event_loop()
    # A daemon: a program that ends without a word must not wait for it.
    thread = threading.Thread(target=_serve, args=(loop,), name="workers-background", daemon=True)
    thread.start()
    return _Running(loop, thread)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _called(work: Work[T]) -> T:
    """Make the coroutine in the loop, so that none is left unawaited where the loop has just ended."""
    return await work()


async def _logged(work: Work[None]) -> None:
    try:
        await work()
    except Exception as error:
        _LOG.error("what was to follow in the background failed: %s", type(error).__name__)


async def _finish(running: _Running) -> None:
    if running.tasks:
        await asyncio.wait(running.tasks, timeout=ENDING_SECONDS)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDING_SECONDS):
            for close in reversed(list(running.closers.values())):
                await _logged(close)


background: Final = Background()
"""The loop of this process."""

os.register_at_fork(
    before=background.before_fork, after_in_parent=background.after_fork, after_in_child=background.forget
)
# The private hook runs before executors refuse work and before threads are joined. What threads hand in meanwhile is
# ended by `atexit`, which runs after they are joined.
atexit.register(background.end)
threading._register_atexit(background.end)  # type: ignore[attr-defined]  # as concurrent.futures does; not in the stubs
