"""Listening for cancel requests, long before the next renewal would report them.

The way of one: `Queue.cancel` marks the job and publishes an event, in one transaction where the storage has those;
the storage's subscription brings it to each worker's `CancelListener`, in another process too; `Worker` asks the
storage, by a renewal (`Leases`), whether it is still meant, and interrupts the attempt, which cancels the handler's
task.

Theory of operation. A request is a hint: by the time it is heard, the attempt it was meant for may have ended and
another begun, so the storage is asked about the claims for that job. Three kinds of request would be missed, and are
looked for instead:

* those made while nobody listened: whenever listening begins, and after every loss of the subscription, the storage is
  asked about all claims;
* those made between the claim and the answer to it, for jobs that are not known to be here yet: they are remembered
  until the answer is there;
* those about which the storage could not be asked: it is asked again, with back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from workers.errors import WorkersError
from workers.retry import Backoff
from workers.storage.base import Storage

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
MOST_REMEMBERED: Final = 1_000
"""How many ids of jobs are remembered at most; with more, every job is looked at."""


class _Suspects:
    """Jobs that somebody may want to cancel: their ids, or None for any job."""

    def __init__(self) -> None:
        self._ids: set[str] | None = set()

    def __bool__(self) -> bool:
        return self._ids is None or bool(self._ids)

    def add(self, ids: Collection[str] | None) -> None:
        if ids is None or self._ids is None or len(self._ids) + len(ids) > MOST_REMEMBERED:
            self._ids = None
        else:
            self._ids.update(ids)

    @property
    def ids(self) -> set[str] | None:
        return None if self._ids is None else set(self._ids)

    def take(self) -> set[str] | None:
        """Return all of them, and forget them."""
        taken, self._ids = self._ids, set()
        return taken


class CancelListener:
    """Calls `look` with the ids of jobs that somebody asked to cancel, or with None for every job.

    The ids may be of jobs that run elsewhere. If `look` raises, it is called again. A missed request, as on a storage
    that does not report a lost connection, is noticed at the next lease renewal.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        look: Callable[[Collection[str] | None], Awaitable[object]],
        report: Callable[[BaseException], None],
    ) -> None:
        self._storage = storage
        self._look = look
        self._report = report
        self._heard = _Suspects()  # and not looked at yet
        self._due = asyncio.Event()  # set when there are any
        self._early = _Suspects()  # heard since the first of the claim calls began that are under way
        self._claiming = 0  # calls

    def claiming(self) -> None:
        """Remember what is heard until `claimed`: a claim call begins. Others may be under way."""
        if self._claiming == 0:
            self._early = _Suspects()
        self._claiming += 1

    def claimed(self) -> None:
        """Look at what was remembered: a claim call has ended, and its claims are held."""
        self._claiming -= 1
        if self._early:
            self._suspect(self._early.ids)

    async def run(self) -> None:
        """Listen until cancelled.

        Errors that keep the storage from reporting requests are reported, and listening is tried again with back-off.
        """
        async with asyncio.TaskGroup() as side:
            side.create_task(self._look_when_due(), name="look-for-cancels")
            await self._listen()

    async def _listen(self) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while True:
            try:
                async with self._storage.cancel_requests() as requests:
                    backoff.reset()
                    self._hear(None)
                    while True:
                        self._hear([(await requests.get()).job_id])
            except WorkersError as error:  # must not end the worker, which can do without
                self._report(error)
            await asyncio.sleep(backoff.pause())

    def _hear(self, ids: Collection[str] | None) -> None:
        self._suspect(ids)
        if self._claiming:
            self._early.add(ids)

    def _suspect(self, ids: Collection[str] | None) -> None:
        self._heard.add(ids)
        self._due.set()

    async def _look_when_due(self) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while True:
            await self._due.wait()
            self._due.clear()
            suspects = self._heard.take()
            try:
                await self._look(suspects)
                backoff.reset()
            except WorkersError as error:
                self._report(error)
                self._suspect(suspects)
                await asyncio.sleep(backoff.pause())
