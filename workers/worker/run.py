"""What a job that runs asks of the worker that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from workers.ends import EndedJob
from workers.errors import Unsupported
from workers.follow_ups import FollowUp
from workers.jobs import JobRef
from workers.retention import Retention
from workers.worker.children import OwnChildren

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class Run(Protocol):
    """What a job knows of the attempt that runs it."""

    @property
    def queue(self) -> str: ...

    def abandonment(self) -> asyncio.Future[None] | None:
        """Return a future that is done when a plain function is not waited for any more.

        None: it is not waited for once the attempt is cancelled.
        """

    def report(self, progress: bytes) -> None:
        """Report how far the job has come; from any thread, without blocking."""

    def log(self, line: str) -> None:
        """Keep the line beside the job, if its storage keeps any; from any thread, without blocking."""

    def leave_slot(self) -> bool:
        """See `Job.leave_slot`."""

    def keep_result(self, keep: Retention) -> None:
        """See `Job.keep_result`."""

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """See `Job.transaction`."""

    def complete(self, result: object) -> None:
        """See `Job.complete`."""

    def children(self) -> OwnChildren:
        """Return what reads the job's children, adds some, and waits for them; `Unsupported` if it can have none."""

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        """See `Job.results`."""

    def then(self, follow_up: FollowUp) -> None:
        """See `Job.then`."""


class NoRun:
    """The run of a job that no worker runs, as in tests of a handler."""

    queue = ""

    def abandonment(self) -> None:
        """Do nothing: nobody waits."""

    def report(self, progress: bytes) -> None:
        """Do nothing: nobody listens."""

    def log(self, line: str) -> None:
        """Do nothing: there is no storage."""

    def leave_slot(self) -> bool:
        """Return False: there is no slot to leave."""
        return False

    def keep_result(self, keep: Retention) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could keep its result")

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        raise Unsupported("no worker of this package runs the job, which alone could commit its end")

    def complete(self, result: object) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could commit its end")

    def children(self) -> OwnChildren:
        raise Unsupported("no worker of this package runs the job, which alone knows its children")

    async def results(self) -> Mapping[str | JobRef, EndedJob]:
        raise Unsupported("no worker of this package runs the job, which alone could read what others gave")

    def then(self, follow_up: FollowUp) -> None:
        raise Unsupported("no worker of this package runs the job, which alone could enqueue another with its end")
