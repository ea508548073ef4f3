"""Ends attempts in groups: one storage call settles every attempt that finished while the last call was under way.

Theory of operation. Attempts hand in their settlement and wait for its outcome; one loop takes whatever has gathered
and settles it. There is never more than one call under way, so under load groups form by themselves and an idle worker
adds no delay. A storage that does not answer, or is damaged, is asked again with back-off as long as the claim's lease
is kept alive by the renewal loop; after that the job is somebody else's, and the settlement is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from workers.backoff import Backoff
from workers.errors import StorageDamaged, StorageUnavailable
from workers.jobs import Claim, Settlement, SettleOutcome
from workers.storage.base import Storage

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0

Pending: TypeAlias = tuple[Settlement, "asyncio.Future[SettleOutcome | None]"]


class Settler:
    """Settles for one worker. `holds` says whether a claim's lease is still kept; `report` gets storage errors."""

    def __init__(
        self, storage: Storage, *, holds: Callable[[Claim], bool], report: Callable[[BaseException], None]
    ) -> None:
        self._storage = storage
        self._holds = holds
        self._report = report
        self._pending: list[Pending] = []  # written by attempts, emptied by `run`
        self._arrived = asyncio.Event()
        self._ended = False

    async def settle(self, settlement: Settlement) -> SettleOutcome | None:
        """The settlement's outcome, or None when the lease or the worker ended before the storage took it."""
        if self._ended:
            return None
        future: asyncio.Future[SettleOutcome | None] = asyncio.get_running_loop().create_future()
        self._pending.append((settlement, future))
        self._arrived.set()
        return await future

    async def run(self) -> None:
        """Settle until cancelled; whatever is not settled then is given up."""
        group: list[Pending] = []
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                group, self._pending = self._pending, []
                await self._settle_group(group)
        finally:
            self._ended = True
            _give_up(group + self._pending)

    async def _settle_group(self, group: list[Pending]) -> None:
        backoff = Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
        while group:
            try:
                outcomes = await self._storage.settle([settlement for settlement, _ in group])
            except (StorageUnavailable, StorageDamaged) as error:  # no fault of a job, whatever lies in the queue's way
                self._report(error)
                await asyncio.sleep(backoff.pause())
                group = self._give_up_expired(group)
            except Exception as error:
                await self._settle_apart(group, error)
                return
            else:
                _resolve(group, outcomes)
                return

    async def _settle_apart(self, group: list[Pending], error: Exception) -> None:
        """A bug of the storage, or of one settlement: each is tried alone, so that it costs no neighbour anything.

        What fails even so is given up; its lease will run out and the job be recovered.
        """
        if len(group) == 1:
            self._report(error)
            _give_up(group)
            return
        for entry in group:
            await self._settle_group([entry])

    def _give_up_expired(self, group: list[Pending]) -> list[Pending]:
        held = [entry for entry in group if self._holds(entry[0].claim)]
        _give_up([entry for entry in group if entry not in held])
        return held


def _give_up(group: list[Pending]) -> None:
    _resolve(group, [None] * len(group))


def _resolve(group: list[Pending], outcomes: list[SettleOutcome] | list[None]) -> None:
    for (_, future), outcome in zip(group, outcomes, strict=True):
        if not future.done():  # the attempt that waited was abandoned at the end of a forced stop
            future.set_result(outcome)
