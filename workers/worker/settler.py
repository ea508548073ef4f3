"""Ends attempts in batches: one storage call settles every attempt that finished while the last call was under way.

A storage that does not answer, or is damaged, is asked again with back-off for as long as the renewal loop keeps the
claim's lease alive. After that the job is another worker's, and the settlement is given up. A settlement for which the
storage has no room waits alone, and holds up no other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

from workers.batching import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Batcher
from workers.errors import StorageDamaged, StorageUnavailable, WorkersError
from workers.jobs import Claim, PartlySettled, Settlement, SettleOutcome
from workers.retry import Backoff


class _Ended(WorkersError):
    """The settler settles nothing any more."""


class Settler:
    """Settles for one worker by `store`, which is as `Storage.settle`.

    With a `limit` two calls of so many are under way at once, without one a single call of any size. `holds` says
    whether a claim's lease is still kept; `report` gets storage errors.
    """

    def __init__(
        self,
        store: Callable[[Sequence[Settlement]], Awaitable[Sequence[SettleOutcome]]],
        *,
        limit: int | None,
        holds: Callable[[Claim], bool],
        report: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._holds = holds
        self._report = report
        self._batcher: Batcher[Settlement, SettleOutcome | PartlySettled] = Batcher(
            self._settle,
            limit or sys.maxsize,
            calls=1 if limit is None else 2,
            is_common=_is_no_fault_of_a_job,
            repeats=lambda each: holds(each.claim),
            skips_cancelled=False,
        )
        self._ended = False

    @property
    def is_busy(self) -> bool:
        """Whether something is being settled, or is about to be."""
        return self._batcher.is_busy

    async def settle(self, settlement: Settlement) -> SettleOutcome | None:
        """Return the settlement's outcome, or None if the lease or the worker ended before the storage took it.

        A settlement that the storage cannot take is given up as well: its lease will run out and the job be recovered.
        An attempt that is cancelled meanwhile is settled all the same.
        """
        backoff: Backoff | None = None
        try:
            while not self._ended:
                outcome = await self._batcher.put(settlement)
                if not isinstance(outcome, PartlySettled):
                    return outcome
                backoff = backoff or Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
                await asyncio.sleep(backoff.pause())
                if not self._holds(settlement.claim):
                    break
            return None
        except _Ended:
            return None
        except Exception as error:
            if not _is_no_fault_of_a_job(error):  # which was reported when it happened
                self._report(error)
            return None

    async def run(self) -> None:
        """Settle until cancelled, and give up whatever is not settled then."""
        try:
            await asyncio.Event().wait()
        finally:
            self._ended = True
            self._batcher.abandon(_Ended())

    async def _settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome | PartlySettled]:
        try:
            return await self._store(settlements)
        except PartlySettled as partly:
            self._report(partly)
            return [partly if outcome is None else outcome for outcome in partly.outcomes]
        except Exception as error:
            if _is_no_fault_of_a_job(error):
                self._report(error)
            raise


def _is_no_fault_of_a_job(error: Exception) -> bool:
    return isinstance(error, StorageUnavailable | StorageDamaged)
