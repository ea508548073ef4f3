"""Handlers that end their job in the transaction of their own writes.

Theory of operation. The settlement goes over the session that the handler wrote with, so both are committed together.
It is the last statement before the commit. It checks the claim's token, so a lost claim rolls the handler's writes
back, and it holds its locks for a moment only. Settlement and commit run in a task of their own that nothing cancels: a
handler that is cancelled meanwhile waits for it and knows how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

from workers.errors import LeaseLost, LossReason, StorageError, StorageUnavailable, TransactionError, Unsupported
from workers.jobs import Claim, Completed, Continued, SettleStatus
from workers.storage.base import Storage

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession  # an extra: only storages that have it make sessions

ANSWERED_IN: Final = timedelta(seconds=30)
"""How long a database may take over settlement and commit."""

Success: TypeAlias = Completed | Continued


@runtime_checkable
class Transactional(Protocol):
    """A storage on an SQL database, in which handlers may keep tables of their own."""

    def session(self) -> AbstractAsyncContextManager[AsyncSession]:
        """Open a session in a transaction on the storage's database. What it has not committed at its end is undone."""


class OwnTransaction:
    """Lets one attempt's handler end its job in a transaction.

    `flush` sends the progress that the attempt reported before.
    """

    __slots__ = ("_chosen", "_claim", "_flush", "_storage", "_success", "beyond_recall", "open", "settled")

    def __init__(
        self,
        storage: Storage,
        claim: Claim,
        *,
        success: Callable[[object], Success],
        flush: Callable[[Claim], Awaitable[None]],
    ) -> None:
        self._storage = storage
        self._claim = claim
        self._success = success
        self._flush = flush
        self._chosen: Success | None = None
        self.open = False
        self.beyond_recall = False
        """Whether the settlement is committed or about to be: from then on the lease is not needed any more."""
        self.settled: Success | None = None
        """The settlement that has been committed."""

    def complete(self, result: object) -> None:
        """See `Job.complete`."""
        if not self.open:
            raise RuntimeError("job.complete() belongs inside `async with job.transaction()`; elsewhere, return")
        if self._chosen is not None:
            raise RuntimeError(f"job {self._claim.job_id!r}: complete() was called before, and a job ends once")
        self._chosen = self._success(result)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncSession]:
        """See `Job.transaction`."""
        if not isinstance(self._storage, Transactional):
            raise Unsupported(f"{self._storage!r} has no transactions, see its `limits`; return the result instead")
        if self.open or self.settled is not None:
            raise RuntimeError(f"job {self._claim.job_id!r} has one transaction, and it was begun before")
        await self._flush(self._claim)
        self._chosen = None
        async with self._storage.session() as session:
            transaction = session.sync_session.get_transaction()
            self.open = True
            try:
                yield session
            finally:
                self.open = False
            if session.sync_session.get_transaction() is not transaction:
                raise TransactionError(
                    f"job {self._claim.job_id!r}: its transaction was ended inside the block; leave that to the block"
                )
            await self._end(session)

    async def _end(self, session: AsyncSession) -> None:
        success = self._chosen or self._success(None)
        self.beyond_recall = True
        try:
            await _to_its_end(self._commit(session, success))
        finally:
            self.beyond_recall = self.settled is not None

    async def _commit(self, session: AsyncSession, success: Success) -> None:
        await session.flush()
        try:
            async with asyncio.timeout(ANSWERED_IN.total_seconds()):
                await self._settle(session, success)
        except TimeoutError:
            raise StorageUnavailable(
                f"the database does not answer, and may have committed the transaction of job {self._claim.job_id!r}"
            ) from None
        self.settled = success

    async def _settle(self, session: AsyncSession, success: Success) -> None:
        [outcome] = await self._storage.settle([success], connection=session)
        if outcome.status is SettleStatus.ERROR:
            raise StorageError(f"job {self._claim.job_id!r} could not be settled: {outcome.detail}")
        if outcome.status is not SettleStatus.APPLIED:
            raise LeaseLost(self._claim.job_id, outcome.reason or LossReason.COMPLETED)
        await session.commit()


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Wait until `work` is done; a cancellation meanwhile is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
