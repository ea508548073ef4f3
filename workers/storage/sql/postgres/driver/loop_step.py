"""A step that asks for one statement after the other, whoever carries them out: a thread, or the event loop.

In the event loop it sends a statement, and goes on when the answer has arrived. It is neither a task nor a greenlet:
each of them costs as much as the switch to a thread that this saves.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

from sqlalchemy import TextClause
from sqlalchemy.exc import DBAPIError

from workers.errors import StorageUnavailable
from workers.storage.sql.direct import Values
from workers.storage.sql.errors import translate
from workers.storage.sql.postgres.driver.direct import PostgresDirect, Sent, give_up
from workers.storage.sql.rows import Transaction

T = TypeVar("T")

Ask: TypeAlias = "tuple[TextClause, Values] | Callable[[Transaction], object]"
"""A statement, to be answered with its rows, or any work that may block, to be answered with what it returns."""

Asking: TypeAlias = "Generator[Ask, Any, T]"  # answers of any type, as rows have columns of any
"""What a step asks for; it returns the step's result."""


def run_blocking(transaction: Transaction, asking: Asking[T], first: Ask | None = None) -> T:
    """Carry the step out here, blocking; if it has begun elsewhere, from what it asks for `first`."""
    try:
        ask = next(asking) if first is None else first
        while True:
            try:
                answer = ask(transaction) if callable(ask) else transaction.connection.execute(*ask)
            except BaseException as error:
                ask = asking.throw(error)
            else:
                ask = asking.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class LoopStep(Generic[T]):
    """A step in the event loop that it was made in; it goes on as long as that runs, whether somebody waits or not.

    What would block takes it to a thread of `aside` for the rest of the way, above all a statement that is not prepared
    yet. `on_end` is called, once and in any thread, when it makes no more use of its connection.
    """

    def __init__(self, database: str, aside: ThreadPoolExecutor, on_end: Callable[[LoopStep[T]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_aside = False
        self._database = database
        self._threads = aside
        self._on_end = on_end
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[Callable[[LoopStep[T]], object]] = []
        self._sent: Sent | None = None
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def start(self, direct: PostgresDirect, transaction: Transaction, asking: Asking[T]) -> None:
        """Carry out what is asked for on `direct`, the transaction's connection."""
        self._direct, self._transaction, self._asking = direct, transaction, asking
        self._go_on(partial(next, asking))

    def __await__(self) -> Generator[object, None, T]:
        if not self._is_done:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._waiters.append(waiter)
            yield from waiter
        return self.result()

    # As of a future

    def add_done_callback(self, callback: Callable[[LoopStep[T]], object]) -> None:
        if self._is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    # In the event loop

    def _go_on(self, move: Callable[[], Ask]) -> None:
        try:
            ask = move()
        except StopIteration as end:
            self._end(result=end.value)
        except BaseException as error:  # whatever it is belongs to who waits
            self._end(error=error)
        else:
            self._ask(ask)

    def _ask(self, ask: Ask) -> None:
        if callable(ask):
            self._go_aside(ask)
            return
        self._asked = ask  # not handed through the event loop, which shows the arguments of what fails
        try:
            self._sent = self._direct.send(*ask)
            if self._sent is not None:
                self._heard = time.monotonic()
                self._look_at_the_time()
                self.loop.add_reader(self._sent.descriptor, self._receive)
                if not self._sent.is_whole:
                    self.loop.add_writer(self._sent.descriptor, self._send_more)
        except Exception as error:
            self._fail(error)
            return
        if self._sent is None:
            self._go_aside(ask)

    def _send_more(self) -> None:
        if self._sent is None:  # the answer came meanwhile
            return
        self._heard = time.monotonic()
        try:
            if self._direct.send_more(self._sent):
                self.loop.remove_writer(self._sent.descriptor)
        except Exception as error:
            self._fail(error)

    def _receive(self) -> None:
        if self._sent is None:  # sending more of it failed meanwhile
            return
        self._heard = time.monotonic()
        try:
            answer = self._direct.receive(self._sent)
        except Exception as error:
            self._fail(error)
            return
        if answer is None:
            return
        self._unwatch()
        if isinstance(answer, Sent):
            self._go_aside(self._asked)
        else:
            self._go_on(partial(self._asking.send, answer))

    def _look_at_the_time(self) -> None:
        """Hang up on a server that has been silent for too long, or look again when that may be so."""
        sent, silence = self._sent, self._direct.silence
        if sent is None or silence is None:
            return
        left = self._heard + silence - time.monotonic()
        if left <= 0 and _has_news(sent):  # this event loop was blocked, and nobody has read it
            left = silence
        if left > 0:
            self._timer = self.loop.call_later(left, self._look_at_the_time)
        else:
            self._unwatch()
            self._fail(self._direct.hang_up(sent, self._heard))

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        sent, self._sent = self._sent, None
        if sent is None:
            return
        with contextlib.suppress(OSError):  # libpq has closed it
            self.loop.remove_reader(sent.descriptor)
        if not sent.is_whole:
            with contextlib.suppress(OSError):
                self.loop.remove_writer(sent.descriptor)

    def _fail(self, error: Exception) -> None:
        self._unwatch()
        if not isinstance(error, DBAPIError):  # ours, and the connection may be in the middle of anything
            give_up(self._direct.plain)
        self._go_on(partial(self._asking.throw, error))

    def _go_aside(self, ask: Ask) -> None:
        self.is_aside = True
        try:
            rest = self._threads.submit(run_blocking, self._transaction, self._asking, ask)
        except RuntimeError:
            error = StorageUnavailable(f"{self._database} was disconnected")
            self._go_on(partial(self._asking.throw, error))
        else:
            rest.add_done_callback(self._come_back)

    def _end(self, *, result: T | None = None, error: BaseException | None = None) -> None:
        if isinstance(error, DBAPIError):
            self._error = translate(error, self._database)
            self._error.__cause__ = error
        else:
            self._error = error
        self._result = result
        self._is_done = True
        try:
            self._on_end(self)
        finally:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            for callback in self._callbacks:
                callback(self)

    # In a thread

    def _come_back(self, rest: Future[T]) -> None:
        self.is_aside = False
        try:
            self.loop.call_soon_threadsafe(self._end_with, rest)
        except RuntimeError:  # the event loop has ended
            self._on_end(self)

    def _end_with(self, rest: Future[T]) -> None:
        error = rest.exception()
        if error is None:
            self._end(result=rest.result())
        else:
            self._end(error=error)


def _has_news(sent: Sent) -> bool:
    poll = select.poll()
    poll.register(sent.descriptor, select.POLLIN)
    return bool(poll.poll(0))
