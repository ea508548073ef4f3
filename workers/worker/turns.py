"""Claims that travel with settlements: one round trip ends some jobs and brings as many others.

Theory of operation. Whoever settles claims along for the slots that are free then, as long as the last claim, of either
kind, brought all it asked for. So the claim loop need not claim meanwhile; it begins when there are too few jobs, and
goes on when a storage leaves a claim to it. On some storages a turn ends and claims jobs of half of the slots at most,
and two may be under way: while the storage serves one half, the other half works. On the others, where a call costs
more, one turn after the other is about all slots. Slots for which a claim is under way are reserved, so that each is
filled once.

A worker that is asked to stop claims nothing along. What it was already asked for is given back, uncounted, before the
outcome of the settlements is told, so the worker waits for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from workers.clock import monotonic
from workers.errors import WorkersError
from workers.jobs import Claim, Released, Settlement, SettleOutcome
from workers.storage.abilities import TakesTurns
from workers.storage.base import Storage
from workers.worker.appetite import Appetite
from workers.worker.cancels import CancelListener
from workers.worker.slots import Slots


class Claimer(Protocol):
    """What a worker's claims depend on."""

    def may_claim(self) -> bool:
        """Tell whether something may be claimed now."""

    def start(self, claims: Sequence[Claim], asked_at: float, *, found_all: bool) -> bool:
        """Start an attempt for each claim; False if the worker stops, and starts none any more."""


class Turns:
    """Settles for one worker, and claims along on a storage that can."""

    def __init__(
        self,
        storage: Storage,
        claimer: Claimer,
        slots: Slots,
        cancels: CancelListener,
        *,
        worker_id: str,
        leases: Mapping[str, timedelta],
        appetite: Appetite,
    ) -> None:
        self._storage = storage
        self._appetite = appetite
        self._taking = storage if isinstance(storage, TakesTurns) else None
        self._claimer = claimer
        self._slots = slots
        self._cancels = cancels
        self._worker_id = worker_id
        self._leases = leases
        self._more = False

    @property
    def limit(self) -> int | None:
        """How many jobs one turn ends at most, of two at a time; None if there is one at a time, of any size."""
        if self._taking is None or self._taking.turns_at_once == 1:
            return None
        return max(2, (self._slots.count + 1) // 2)

    @property
    def claim(self) -> bool:
        """Whether those who settle claim along."""
        return self._more and self._taking is not None

    def note(self, *, more: bool) -> None:
        """Note whether a claim brought all it asked for, so that there may be more."""
        self._more = more

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """Settle as by `Storage.settle`, and claim along."""
        free = self._free(settlements)
        if self._taking is None or free == 0:
            return await self._storage.settle(settlements)
        with self._slots.reserved(free):
            return await self._settle_and_claim(self._taking, settlements, free)

    async def _settle_and_claim(
        self, storage: TakesTurns, settlements: Sequence[Settlement], limit: int
    ) -> Sequence[SettleOutcome]:
        asked_at = monotonic()
        self._cancels.claiming()
        try:
            turn = await storage.settle_and_claim(settlements, self._worker_id, leases=self._leases, limit=limit)
            self._more = turn.claims is not None and len(turn.claims) == limit
            if turn.claims is not None:
                self._appetite.was_read(limit)
                await self._take(turn.claims, asked_at)
            return turn.outcomes
        except Exception:  # raised again: after any failure the claim loop claims
            self._appetite.was_lost(limit)
            self._more = False
            raise
        finally:
            self._cancels.claimed()

    async def _take(self, claims: Sequence[Claim], asked_at: float) -> None:
        if not self._claimer.start(claims, asked_at, found_all=not self._more):
            with contextlib.suppress(WorkersError):  # the leases will run out
                await self._storage.settle([Released(claim=claim) for claim in claims])

    def _free(self, settlements: Sequence[Settlement]) -> int:
        if not self.claim or not self._claimer.may_claim():
            return 0
        free = self._appetite.of(self._slots.free_without([settlement.claim.token for settlement in settlements]))
        return free if self.limit is None else min(self.limit, free)
