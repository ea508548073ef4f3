"""A queue's way to its storage: in which event loop it is connected, which jobs go there together, and within what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, TypeAlias, runtime_checkable

from workers.batching import Batcher
from workers.errors import ForeignLoop, StorageError, StorageUnavailable, Unsupported, WorkersError
from workers.homes import AtLoopEnd, Home
from workers.jobs import EnqueueResult, NewJob
from workers.limits import Limit, check_limits
from workers.slices import in_slices, sliced
from workers.storage.abilities import Joinable, KeepsLimits, KeepsSomeLimits, Migratable, OfOneLoop
from workers.storage.base import Storage
from workers.storage.subscribers import some_are_held

BATCH: Final = 100
"""How many concurrent enqueues go to the storage together at most."""
PORTION: Final = 500
"""How many jobs of one call go to the storage together at most, where nothing depends on it."""
BATCH_BYTES: Final = 16 * 1024
"""A larger payload is sent alone."""


class QueueConnection:
    """Connects `storage` at its first use in a loop, and in another once that is gone; `forget` is then called."""

    def __init__(self, storage: Storage, *, forget: Callable[[], None]) -> None:
        self._storage = storage
        self._forget = forget
        self.makes_tables = False  # whether those of an embedded database are made where they are missing
        self.limits: dict[str, Limit] = {}
        self._undeclared: dict[str, Limit] = {}
        self._connected = False
        self._home: Home | None = None  # where the storage was connected
        self._at_loop_end: AtLoopEnd | None = None
        self._connecting = asyncio.Lock()
        self._batcher = Batcher(storage.enqueue, BATCH)

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """See `Queue.declare_limits`."""
        check_limits(limits)
        if limits and not isinstance(self._storage, KeepsLimits):
            raise Unsupported(f"{self._storage!r} keeps no limits; see its `capabilities.limit_keys`")
        if isinstance(self._storage, KeepsSomeLimits):
            self._storage.refuse_limits(limits)
        if isinstance(self._storage, Joinable):
            self._storage.bring_limits(limits)
        self.limits.update(limits)
        self._undeclared.update(limits)

    def check_loop(self) -> None:
        """See `Queue.check_loop`."""
        if self._home is not None and not (self._home.is_here or self._home.is_gone):
            raise ForeignLoop(
                f"the queue {self._storage.queue!r} is in use in another event loop; make a Queue and a storage for"
                " each, or call workers.sync.Queue, which any thread may"
            )

    async def open(self, connection: object | None = None) -> None:
        """Connect the storage, unless it joins the caller's transaction, whose locks that might wait for."""
        joins = connection is not None and isinstance(self._storage, Joinable)
        if (joins or (self._connected and not self._undeclared)) and self._home is not None and self._home.is_here:
            return
        self.check_loop()
        if self._home is not None and self._home.is_gone:
            await self._move_out()
        self._home = Home.here()
        if self._at_loop_end is None:
            self._at_loop_end = AtLoopEnd(self.close)
        if joins:
            return
        async with self._connecting:
            if not self._connected:
                await self._connect()
                self._connected = True
            if self._undeclared and isinstance(self._storage, KeepsLimits):
                await self._storage.declare_limits(self._undeclared)
                self._undeclared = {}

    async def _connect(self) -> None:
        try:
            await self._storage.connect()
        except StorageError:
            if not (self.makes_tables and await self.make_tables()):
                raise
            await self._storage.connect()

    async def make_tables(self) -> bool:
        """Make the tables that an embedded storage lacks; return False where there are none to be made.

        Raises:
            StorageError: another version made them, or there is no place for them.
        """
        if self._storage.capabilities.processes == "many" or not isinstance(self._storage, Migratable):
            return False
        await self._storage.migrate()
        return True

    async def _move_out(self) -> None:
        """Forget what belonged to a loop that is gone."""
        connected, self._connected, self._at_loop_end = self._connected, False, None
        self._connecting = asyncio.Lock()
        self._batcher = Batcher(self._storage.enqueue, BATCH)
        self._forget()
        if isinstance(self._storage, OfOneLoop):
            self._storage.forget_loop()
        elif connected:
            with contextlib.suppress(WorkersError):
                await self._storage.disconnect()

    async def close(self) -> None:
        """Disconnect the storage, if it is connected."""
        connected, self._connected, self._home = self._connected, False, None
        if self._at_loop_end is not None:
            self._at_loop_end.dismiss()
            self._at_loop_end = None
        if connected:
            await self._storage.disconnect()
        elif isinstance(self._storage, Joinable):
            await self._storage.leave()

    async def store(self, job: NewJob) -> EnqueueResult:
        """Store the job, together with those that other callers store at this moment."""
        # A task that holds its own transaction open must be refused alone, not together with its neighbours; so must a
        # job that follows an unknown one. Jobs of one call that share a deduplication key are one group.
        alone = job.belongs_to_others or len(job.payload) > BATCH_BYTES
        if alone or self._storage.capabilities.transactions or some_are_held():
            return (await self._storage.enqueue([job]))[0]
        return await self._batcher.ask_at_once(job)

    async def store_many(self, jobs: Sequence[NewJob], connection: object | None) -> list[EnqueueResult]:
        """Store the jobs of one call, in portions unless they have to be one step; other tasks go on meanwhile."""
        together = self._storage.capabilities.transactions or any(await in_slices(_belongs_to_others, jobs))
        results: list[EnqueueResult] = []
        async for some in sliced([jobs] if together else _portions(jobs)):
            results += await self._storage.enqueue(some, connection=connection)
            await asyncio.sleep(0)
        return results


def _belongs_to_others(job: NewJob) -> bool:
    return job.belongs_to_others


def _portions(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    """Yield the jobs as they go to the storage together."""
    for start in range(0, max(1, len(jobs)), PORTION):
        yield jobs[start : start + PORTION]


class Naming:
    """Tells with a lost answer which jobs it was about; each enqueue makes one, and so it is no generator's context."""

    def __init__(self, jobs: Sequence[NewJob]) -> None:
        self._jobs = jobs

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StorageUnavailable):
            raise error.naming(job.id for job in self._jobs) from error


Surroundings: TypeAlias = Callable[[list[NewJob]], contextlib.AbstractContextManager[list[NewJob]]]
"""Opens what surrounds the enqueue of these jobs, and gives the jobs to enqueue."""


@runtime_checkable
class SurroundsEnqueues(Protocol):
    """A middleware, or an observer, that is there for enqueues as well."""

    def enqueuing(self, queue: str, jobs: list[NewJob]) -> contextlib.AbstractContextManager[list[NewJob]]:
        """Open what surrounds one call that enqueues these jobs; it may give them other metadata, and nothing else."""


def surroundings(queue: str, parts: Iterable[object]) -> Surroundings:
    """Return what middlewares and observers together put around the enqueues of a queue: the first is outermost."""
    found = [each for each in parts if isinstance(each, SurroundsEnqueues)]
    if not found:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def surround(jobs: list[NewJob]) -> Iterator[list[NewJob]]:
        with contextlib.ExitStack() as stack:
            for each in found:
                jobs = stack.enter_context(each.enqueuing(queue, jobs))
            yield jobs

    return surround
