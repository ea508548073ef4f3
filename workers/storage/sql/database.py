"""The interface of `SqlStorage` to a database: the steps of a queue, which never block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

from workers.jobs import (
    Claim,
    CronRow,
    EnqueueResult,
    NewJob,
    ProgressReport,
    Recovery,
    Renewal,
    Settlement,
    SettleOutcome,
)
from workers.storage.abilities import Turn
from workers.storage.sql.caller import Caller
from workers.storage.sql.direct import Executor
from workers.storage.sql.rows import Transaction
from workers.storage.subscribers import DatabaseSubscribers

T = TypeVar("T")
R = TypeVar("R", covariant=True)

Begin: TypeAlias = Callable[[Executor], Transaction]
"""Makes a queue's transaction of a connection."""


class InEventLoop(Protocol[R]):
    """A step that the event loop carries out to its end; what it has of a future is like that's."""

    def __await__(self) -> Generator[object, None, R]: ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...  # of this very object

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def result(self) -> R: ...


Step: TypeAlias = Future[T] | InEventLoop[T]
"""What a thread, or the event loop that began it, carries out to its end, whether somebody waits for it or not."""


async def outcome(step: Step[T]) -> T:
    """Wait for a step; if this is cancelled, it goes on, unless it has not begun."""
    return await (asyncio.wrap_future(step) if isinstance(step, Future) else step)


class Database(Protocol):
    """One database as this process uses it, shared by all storages on it."""

    subscribers: DatabaseSubscribers

    def enqueue(self, begin: Begin, jobs: Sequence[NewJob]) -> Step[list[EnqueueResult]]: ...

    async def enqueue_with(self, connection: object, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """Enqueue; see `change_with`."""

    def claim(self, begin: Begin, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Step[list[Claim]]: ...

    def claimable_in(self, begin: Begin, names: Collection[str]) -> Step[timedelta | None]:
        """Return how long until a claim for `names` may succeed, 0 for now; None while there is nothing to wait for."""

    def renew(self, begin: Begin, claims: Sequence[Claim]) -> Step[Renewal]: ...

    def settle(self, begin: Begin, settlements: Sequence[Settlement]) -> Step[list[SettleOutcome]]: ...

    def turn(
        self,
        begin: Begin,
        settlements: Sequence[Settlement],
        worker_id: str,
        leases: Mapping[str, timedelta],
        limit: int,
    ) -> Step[Turn] | None:
        """Settle and claim in one transaction; None, with nothing done, if that would be more work than apart."""

    def turn_cron(self, begin: Begin, row: CronRow, jobs: Sequence[NewJob]) -> Future[bool]: ...

    async def settle_with(
        self, connection: object, begin: Begin, settlements: Sequence[Settlement]
    ) -> list[SettleOutcome]:
        """Settle; see `change_with`."""

    def progress(self, begin: Begin, reports: Sequence[ProgressReport]) -> Step[None]: ...

    def recover(self, begin: Begin, limit: int, max_stalls: int) -> Future[Recovery]: ...

    def look(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        """Run `work`, which only reads; each statement sees what was committed before it.

        With `at_leisure` a server may take minutes over it; otherwise one that is silent for long is absent.
        """

    def change(self, begin: Begin, work: Callable[[Transaction], T], *, at_leisure: bool = False) -> Future[T]:
        """Run `work` in a transaction of its own, rolled back when it raises, and announce its events; see `look`."""

    async def change_with(self, connection: object, begin: Begin, work: Callable[[Transaction], T]) -> T:
        """Run `work` as part of the caller's transaction, and announce its events when that has committed.

        Raises:
            TypeError: `connection` is not an SQLAlchemy connection or session.
            StorageError: it belongs to another database.
        """

    def change_on(self, caller: Caller, begin: Begin, work: Callable[[Transaction], T]) -> T:
        """Run `work` on a synchronous connection or session, in the calling thread; see `change_with`."""

    def enqueue_on(self, caller: Caller, begin: Begin, jobs: Sequence[NewJob]) -> list[EnqueueResult]:
        """Enqueue; see `change_on`."""

    def refuse_nested(self) -> None:
        """Raise if a change would wait for a transaction that the running task itself holds open.

        Raises:
            TransactionError: it would wait for itself.
        """

    def look_now(self) -> None:
        """Tell those who wait or listen at once what a caller's connection has committed."""

    def wake(self, begin: Begin) -> Step[None]:
        """Wake those who wait for jobs of the queue."""

    def hear(self) -> None:
        """Tell waiters, from now on, what other processes commit; once that works, they look again."""

    async def subscribe(self, begin: Begin, queue: int, *, of_one_job: bool = False) -> None:
        """Let every event of the queue that is committed from now on reach `subscribers`.

        With `of_one_job` some from before may reach them too, as a subscriber of one job has to expect.
        """

    async def listen_for_cancels(self) -> None:
        """Let every request to cancel a running job that is committed from now on reach `subscribers`."""

    async def release(self) -> None:
        """Count one user less; with the last one its threads end and its connections are closed."""
