"""The claims and settlements of one worker: which slots its jobs get, and how both travel in one round trip.

Theory of operation. The claim loop takes a slot for every claim. The attempt gives it back when it ends, or earlier, by
going on in overtime. Only the event loop takes slots and ends attempts, but a plain function leaves its slot from a
thread of its own, so every change is made under a lock. The claim loop reads without the lock: since it looked, more
slots may have become free, but never fewer, because nobody else takes them.

A handler that has ended needs its slot no more, though its end is not stored yet. As many such attempts as there are
slots keep none, so that claims and settlements travel at the same time. A worker with a single slot does one after the
other: its next job begins when the end of the last one is stored.

One round trip ends some jobs and brings as many others. Whoever settles claims along for the slots that are free then,
as long as the last claim, of either kind, brought all it asked for. So the claim loop need not claim meanwhile; it
begins when there are too few jobs, and goes on when a storage leaves a claim to it. On some storages such a call ends
and claims jobs of half of the slots at most, and two may be under way: while the storage serves one half, the other
half works. On the others, where a call costs more, one call after the other is about all slots. Slots for which a claim
is under way are reserved, so that each is filled once.

A worker that is asked to stop claims nothing along. What it was already asked for is given back, uncounted, before the
outcome of the settlements is told, so the worker waits for that.

Attempts end in batches: one storage call settles every attempt that finished while the last call was under way. A
storage that does not answer, or is damaged, is asked again with back-off for as long as the renewal loop keeps the
claim's lease alive. After that the job is another worker's, and the settlement is given up. A settlement for which the
storage has no room waits alone, and holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final, Protocol

from workers.batching import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Batcher
from workers.checks import check_whole
from workers.clock import monotonic
from workers.errors import StorageDamaged, StorageUnavailable, WorkersError
from workers.jobs import Claim, PartlySettled, Released, Settlement, SettleOutcome
from workers.retry import Backoff
from workers.storage.abilities import ExchangesJobs
from workers.storage.base import Storage
from workers.worker.cancels import CancelListener


class Appetite:
    """As many as there are slots, until an answer could not be read: then half as many, and slowly more again."""

    def __init__(self) -> None:
        self._most = sys.maxsize

    def of(self, free: int) -> int:
        """Return how many of the free slots to ask for."""
        return min(free, self._most)

    def was_lost(self, asked: int) -> None:
        """Note that the answer to a claim of so many did not arrive, as it may have been too large."""
        self._most = max(1, min(self._most, asked) // 2)

    def was_read(self, asked: int) -> None:
        """Note that the answer to a claim of so many arrived."""
        if asked >= self._most:
            self._most += 1


MOST_SLOTS: Final = 1_000_000


def check_slots(concurrency: int, overtime: int) -> None:
    """Accept at least one slot.

    Raises:
        ValueError: it is none, or no whole number.
    """
    check_whole("concurrency", concurrency, 1, MOST_SLOTS)
    check_whole("overtime", overtime, 0, MOST_SLOTS)


class Slots:
    """`count` slots, and room for `overtime` attempts without a slot; attempts are known by their tokens."""

    def __init__(self, count: int, overtime: int) -> None:
        self.count = count
        self._room = overtime
        self._lock = threading.Lock()
        self._ahead = count if count > 1 else 0  # ended, and not stored yet, without a slot
        self._taken: set[str] = set()
        self._ending: set[str] = set()
        self._overtime: set[str] = set()
        self._reserved = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.freed = asyncio.Event()
        """Set when a slot becomes free; the one who waits for the next clears it."""

    @property
    def free(self) -> int:
        """How many more attempts may start now."""
        return self.free_without(())

    def free_without(self, tokens: Collection[str]) -> int:
        """Return how many more attempts may start once the ends of these are stored."""
        ending = len(self._ending) - sum(token in self._ending for token in tokens)
        return max(0, self.count - self._reserved - len(self._taken) - max(0, ending - self._ahead))

    @contextlib.contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Keep so many free slots for claims that are under way; in the event loop only."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._note_free()

    def take(self, token: str) -> None:
        """Put the attempt into a slot; in the event loop only."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._taken.add(token)

    def leave(self, token: str) -> bool:
        """Let the attempt go on in overtime, unless it does already; from any thread, without blocking.

        Returns False when there is no room, or no such attempt.
        """
        with self._lock:
            if token not in self._taken:
                return token in self._overtime
            if len(self._overtime) >= self._room:
                return False
            self._taken.remove(token)
            self._overtime.add(token)
        self._tell()
        return True

    def begin_end(self, token: str) -> None:
        """Note that the handler has ended and its end is about to be stored; in the event loop only."""
        with self._lock:
            if token in self._taken:
                self._taken.remove(token)
                self._ending.add(token)
        self._note_free()

    def end(self, token: str) -> None:
        """Give back what the attempt held, a slot or room for overtime; in the event loop only."""
        with self._lock:
            for attempts in (self._taken, self._ending, self._overtime):
                attempts.discard(token)
        self._note_free()

    def _note_free(self) -> None:
        if not self.freed.is_set() and self.free:  # it is mostly known
            self.freed.set()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a thread outlived its worker
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.freed.set)


class Claimer(Protocol):
    """What a worker's claims depend on."""

    def may_claim(self) -> bool:
        """Tell whether something may be claimed now."""

    def start(self, claims: Sequence[Claim], asked_at: float, *, found_all: bool) -> bool:
        """Start an attempt for each claim; False if the worker stops, and starts none any more."""


class Exchanges:
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
        self._taking = storage if isinstance(storage, ExchangesJobs) else None
        self._claimer = claimer
        self._slots = slots
        self._cancels = cancels
        self._worker_id = worker_id
        self._leases = leases
        self._more = False

    @property
    def limit(self) -> int | None:
        """How many jobs one exchange ends at most, of two at a time; None if there is one at a time, of any size."""
        if self._taking is None or self._taking.exchanges_at_once == 1:
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
        self, storage: ExchangesJobs, settlements: Sequence[Settlement], limit: int
    ) -> Sequence[SettleOutcome]:
        asked_at = monotonic()
        self._cancels.claiming()
        try:
            exchange = await storage.settle_and_claim(settlements, self._worker_id, leases=self._leases, limit=limit)
            self._more = exchange.claims is not None and len(exchange.claims) == limit
            if exchange.claims is not None:
                self._appetite.was_read(limit)
                await self._take(exchange.claims, asked_at)
            return exchange.outcomes
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
