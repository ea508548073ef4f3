"""Renewal of all leases of one worker, with one call; and a warning, once, of an event loop that endangers them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from workers.clock import monotonic
from workers.errors import LossReason, StorageError, StorageUnavailable
from workers.jobs import Claim
from workers.storage.base import Storage
from workers.worker.events import log_line

logger = logging.getLogger(__name__)

ADVICE = "run what blocks in a plain function, which gets a thread, or in asyncio.to_thread; or use a longer lease"


class LoopWatch:
    """Hears of every wake-up that was late, and of the leases that were lost in that time.

    A wake-up that is more than `bearable` seconds late was held up by something that did not await: nothing else keeps
    a task that is due from running, but a machine that stood still.
    """

    def __init__(self, bearable: float) -> None:
        self._bearable = bearable
        self._warned_of_late = self._warned_of_lost = False

    def woke(self, late: float) -> bool:
        """Note how late a wake-up was; returns whether the loop was blocked."""
        blocked = late > self._bearable
        if blocked and not self._warned_of_late:
            self._warned_of_late = True
            logger.warning(
                "the event loop was blocked for %.1f s, in which no lease was renewed: a handler that is async must not"
                " block; %s",
                late,
                ADVICE,
            )
        return blocked

    def lost(self, job_ids: Sequence[str]) -> None:
        """Note the jobs that others may have taken because the loop was blocked."""
        if job_ids and not self._warned_of_lost:
            self._warned_of_lost = True
            logger.warning(
                "the event loop was blocked for so long that leases were lost, and other workers may run the same jobs"
                " meanwhile: %s; %s",
                ", ".join(log_line(job_id) for job_id in job_ids[:10]),
                ADVICE,
            )


NAPS = 5
"""In how many parts a pause between renewals is slept."""
_AWAKE = math.inf


class LeaseKeeper:
    """Renews all claims it holds every `interval`; reports which were lost and which are to be cancelled.

    While the storage does not answer, or answers with errors, a claim is kept until its lease must have ended, counted
    on the event loop's clock from before the last successful call. Then it is lost with reason `error`.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        interval: timedelta,
        on_lost: Callable[[Claim, LossReason], None],
        on_cancel: Callable[[Claim], None],
        report: Callable[[BaseException], None],
    ) -> None:
        self._storage = storage
        self._interval = interval.total_seconds()
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._report = report
        self._watch = LoopWatch(self._interval)
        self._held: dict[str, Claim] = {}  # by token; written by the claim loop and attempts, read by renewals
        self._safe_until: dict[str, float] = {}
        self._wakes_at = _AWAKE  # when its present nap ends
        self._was_blocked = False  # since the last renewal of all

    def hold(self, claim: Claim, *, since: float) -> None:
        """Renew `claim` from now on; `since` is the monotonic time before the call that claimed it."""
        self._held[claim.token] = claim
        self._safe_until[claim.token] = since + claim.lease.total_seconds()

    def drop(self, claim: Claim) -> None:
        """Stop renewing `claim`."""
        self._held.pop(claim.token, None)
        self._safe_until.pop(claim.token, None)

    def holds(self, claim: Claim) -> bool:
        """Tell whether the lease is still alive, as far as this machine can know."""
        return self._safe_until.get(claim.token, 0.0) > monotonic()

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            # Jittered, so that many workers do not renew in step.
            await self._sleep(self._interval * random.uniform(0.9, 1.0))  # noqa: S311 - spreads load, guards nothing
            try:
                await self.renew_all()
            except (StorageUnavailable, StorageError) as error:
                self._report(error)

    async def _sleep(self, seconds: float) -> None:
        """Sleep in naps, each of which may hide as much of a blockage; no longer, if the event loop was blocked."""
        nap = seconds / NAPS
        for _ in range(NAPS):
            self._wakes_at = monotonic() + nap
            await asyncio.sleep(nap)
            self._look_for_blockage()
            self._wakes_at = _AWAKE
            if self._was_blocked:
                return

    def _look_for_blockage(self) -> None:
        self._was_blocked |= self._watch.woke(monotonic() - self._wakes_at)

    async def renew_all(self) -> None:
        """Renew all claims, and warn of those that were lost while the event loop was blocked.

        Raises:
            StorageUnavailable, StorageError: as `renew_jobs`.
        """
        self._look_for_blockage()
        over = [claim.token for claim in self._held.values() if self._was_blocked and not self.holds(claim)]
        self._was_blocked = False
        lost = await self.renew_jobs(None)
        self._watch.lost([claim.job_id for claim in lost if claim.token in over])

    async def renew_jobs(self, ids: Collection[str] | None) -> list[Claim]:
        """Renew the claims for these jobs, or all with None, act on what the storage reports, and return those lost.

        Raises:
            StorageUnavailable: nothing was learned; claims whose lease must have ended are lost.
            StorageError: likewise.
        """
        claims = [claim for claim in self._held.values() if ids is None or claim.job_id in ids]
        return await self._renew(claims) if claims else []

    async def _renew(self, claims: list[Claim]) -> list[Claim]:
        lost = []
        asked_at = monotonic()
        try:
            renewal = await self._storage.renew(claims)
        except (StorageUnavailable, StorageError):
            self._lose_expired(claims)
            raise
        for claim in claims:
            if claim.token not in self._held:
                continue  # settled while the call was under way
            if reason := renewal.lost.get(claim.token):
                self._lose(claim, reason)
                lost.append(claim)
                continue
            self._safe_until[claim.token] = asked_at + claim.lease.total_seconds()
            if claim.token in renewal.cancel_requested:
                self._on_cancel(claim)
        return lost

    def _lose_expired(self, claims: list[Claim]) -> None:
        for claim in claims:
            if claim.token in self._held and not self.holds(claim):
                self._lose(claim, LossReason.ERROR)

    def _lose(self, claim: Claim, reason: LossReason) -> None:
        self.drop(claim)
        self._on_lost(claim, reason)
