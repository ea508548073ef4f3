"""Events and wake-ups, delivered to those in this process who subscribed or wait.

Theory of operation. Within one event loop, a `Subscribers` delivers events to subscribers. On a database, several
threads of this process work, and the thread that made or noticed a commit announces it. Waiters and subscribers live in
event loops; a process may have several, one after another or side by side. Each pair of queue and loop has one
`LoopSubscribers`, touched in its loop alone. The threads share the registry of them, which a lock guards.

Wake-ups can wait for the end of a block, so that many enqueues wake those who wait once. An open block is known to the
task that opened it, and to those begun inside, by a context variable. An enqueue of theirs tells the storage to wake
nobody, and notes the names of its jobs. The end of the block, however it comes about, wakes for all names at once. A
task that outlives the block wakes by itself again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

from workers.errors import StorageUnavailable, WorkersError
from workers.jobs import JobEvent, JobEventKind, NewJob

Wake: TypeAlias = Callable[[Collection[str]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Block:
    owner: HeldWakes
    names: set[str] = field(default_factory=set)
    is_open: bool = True


_blocks: Final[ContextVar[tuple[_Block, ...]]] = ContextVar("workers-held-wakes", default=())


def some_are_held() -> bool:
    """Tell whether an enqueue made here may belong to a block, and so must not share a call with others."""
    return any(block.is_open for block in _blocks.get())


class HeldWakes:
    """The blocks on one storage."""

    @asynccontextmanager
    async def hold(self, wake: Wake) -> AsyncIterator[None]:
        """Let enqueues wake nobody until the block ends; one inside of another leaves that to the outer one.

        `wake` wakes those who wait for jobs of these names.

        Raises:
            StorageUnavailable: nobody may have been woken, unless the block raised an error of its own.
        """
        block = _Block(self)
        before = _blocks.set((*_blocks.get(), block))
        try:
            yield
        except BaseException:
            with suppress(WorkersError):
                await self._end(block, wake)
            raise
        else:
            await self._end(block, wake)
        finally:
            _blocks.reset(before)

    async def _end(self, block: _Block, wake: Wake) -> None:
        block.is_open = False
        outer = self._current()
        if outer is not None:
            outer.names |= block.names
        elif block.names:
            await asyncio.shield(asyncio.ensure_future(wake(block.names)))

    def held(self, jobs: Iterable[NewJob]) -> bool:
        """Tell whether the enqueue of these jobs is to wake nobody, because a block will."""
        block = self._current()
        if block is not None:
            block.names.update(job.name for job in jobs)
        return block is not None

    def _current(self) -> _Block | None:
        return next((block for block in reversed(_blocks.get()) if block.owner is self and block.is_open), None)


_CANCEL_REQUESTED: Final = JobEventKind.CANCEL_REQUESTED  # looking it up in the enum takes longer than everything else
_WAKE: Final = JobEvent(kind=_CANCEL_REQUESTED, job_id="")  # for nobody: it only ends a wait
BUFFER: Final = 1_000
"""How many events are kept for a subscriber that does not read; then the oldest are dropped."""
S = TypeVar("S", bound="BufferedSubscription")


class BufferedSubscription:
    """Events in the order they happened; see `Subscription`."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[JobEvent] = asyncio.Queue(BUFFER)

    async def get(self) -> JobEvent:
        return await self._events.get()

    def put(self, event: JobEvent) -> None:
        """Add `event` to the buffer, dropping the oldest if it is full."""
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(event)


class CancelRequests(BufferedSubscription):
    """Requests to cancel running jobs; a missed one ends the subscription, see `Storage.cancel_requests`."""

    def __init__(self) -> None:
        super().__init__()
        self._missed: str | None = None

    async def get(self) -> JobEvent:
        if self._missed is None:
            event = await super().get()
        if self._missed is not None:
            raise StorageUnavailable(self._missed)
        return event

    def put(self, event: JobEvent) -> None:
        if self._events.full():
            self.miss("more requests to cancel were made at once than a worker keeps")
        super().put(event)

    def miss(self, why: str) -> None:
        """Make `get` raise from now on; `why` says how a request may have been missed."""
        self._missed = why
        super().put(_WAKE)


class Subscribers:
    """The subscribers of single jobs, of all jobs, and of cancel requests.

    An event without subscribers costs one look-up.
    """

    def __init__(self) -> None:
        self._everything: set[BufferedSubscription] = set()
        self._of_job: dict[str, set[BufferedSubscription]] = {}
        self._cancel_requests: set[CancelRequests] = set()

    def publish(self, kind: JobEventKind, job_id: str, result: bytes | None = None) -> None:
        """Put the event into the buffers of the job's subscribers and of those who subscribed to every job."""
        if kind is _CANCEL_REQUESTED:
            self.request_cancel(job_id)
        if not self._everything and job_id not in self._of_job:
            return
        event = JobEvent(kind=kind, job_id=job_id, result=result)
        for subscription in self._everything | self._of_job.get(job_id, set()):
            subscription.put(event)

    def request_cancel(self, job_id: str) -> None:
        """Put this request into the buffer of everyone who subscribed to cancel requests alone."""
        for subscription in self._cancel_requests:
            subscription.put(JobEvent(kind=_CANCEL_REQUESTED, job_id=job_id))

    def miss_cancels(self, why: str) -> None:
        """Tell everyone who subscribed to cancel requests that one may have been missed."""
        for subscription in self._cancel_requests:
            subscription.miss(why)

    def awaited(self) -> list[str]:
        """Return the jobs with subscribers of their own; from any thread."""
        return list(self._of_job)

    def scope(self, job_id: str | None) -> AbstractContextManager[BufferedSubscription]:
        """Subscribe to one job, or to every job with None, until the context ends."""
        return self.everything() if job_id is None else self.of_job(job_id)

    @contextmanager
    def everything(self) -> Iterator[BufferedSubscription]:
        """Subscribe to every job, until the context ends."""
        with _member_of(self._everything, BufferedSubscription()) as subscription:
            yield subscription

    @contextmanager
    def cancel_requests(self) -> Iterator[CancelRequests]:
        """Subscribe to requests to cancel a running job, until the context ends."""
        with _member_of(self._cancel_requests, CancelRequests()) as subscription:
            yield subscription

    @contextmanager
    def of_job(self, job_id: str) -> Iterator[BufferedSubscription]:
        """Subscribe to one job, until the context ends."""
        listeners = self._of_job.setdefault(job_id, set())
        try:
            with _member_of(listeners, BufferedSubscription()) as subscription:
                yield subscription
        finally:
            if not listeners:
                self._of_job.pop(job_id, None)


@contextmanager
def _member_of(listeners: set[S], subscription: S) -> Iterator[S]:
    listeners.add(subscription)
    try:
        yield subscription
    finally:
        listeners.discard(subscription)


Told: TypeAlias = tuple[JobEventKind, str, bytes | None]
"""What happened, to which job, and the result that travels with it, if any."""
Events: TypeAlias = Sequence[Told]


class LoopSubscribers:
    """The waiters and subscribers of one queue in one event loop; the registry keeps the counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.users = 0
        self.subscribers = 0
        self.for_cancels = 0
        self.listening = Subscribers()
        self.waiting: set[asyncio.Event] = set()

    def hear(self, events: Events, wake: bool) -> None:
        """Deliver the events to subscribers; with `wake`, make every waiter look again."""
        for told in events:
            self.listening.publish(*told)
        if wake:
            for woken in self.waiting:
                woken.set()

    def wants(self, events: Events) -> Events:
        """Return those of the events that somebody here subscribed to; from any thread."""
        if self.subscribers:
            return events
        return [event for event in events if event[0] is JobEventKind.CANCEL_REQUESTED] if self.for_cancels else ()

    @contextmanager
    def woken(self) -> Iterator[asyncio.Event]:
        """Make an event that every wake-up sets, until the context ends."""
        woken = asyncio.Event()
        self.waiting.add(woken)
        try:
            yield woken
        finally:
            self.waiting.discard(woken)


class DatabaseSubscribers:
    """All `LoopSubscribers` on one database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: dict[tuple[int, asyncio.AbstractEventLoop], LoopSubscribers] = {}

    @contextmanager
    def listen(self, queue: int, *, subscribe: bool = False, for_cancels: bool = False) -> Iterator[LoopSubscribers]:
        """Register with the running loop's subscribers of `queue` until the context ends.

        They hear wake-ups, and what else is asked for.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            subscribers = self._by_loop.setdefault((queue, loop), LoopSubscribers(loop))
            subscribers.users += 1
            subscribers.subscribers += subscribe
            subscribers.for_cancels += for_cancels
        try:
            yield subscribers
        finally:
            with self._lock:
                subscribers.users -= 1
                subscribers.subscribers -= subscribe
                subscribers.for_cancels -= for_cancels
                if not subscribers.users:
                    self._by_loop.pop((queue, loop), None)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits or listens."""
        return bool(self._by_loop)

    def subscribed(self) -> set[int]:
        """Return the queues that somebody subscribed to."""
        with self._lock:
            return {queue for (queue, _), subscribers in self._by_loop.items() if subscribers.subscribers}

    @property
    def awaits_cancels(self) -> bool:
        """Whether anybody listens to cancel requests alone."""
        with self._lock:
            return any(subscribers.for_cancels for subscribers in self._by_loop.values())

    def awaited(self) -> dict[int, set[str]]:
        """Return the jobs with subscribers of their own, by queue."""
        with self._lock:
            found: dict[int, set[str]] = {}
            for (queue, _), subscribers in self._by_loop.items():
                found.setdefault(queue, set()).update(subscribers.listening.awaited())
            return found

    def tell(self, queue: int, events: Events, *, wake: bool) -> bool:
        """Tell those who subscribed to `queue`, and with `wake` wake its waiters; from any thread.

        Returns whether there was anybody.
        """
        if not events and not wake:
            return False
        with self._lock:
            found = [(key, subscribers) for key, subscribers in self._by_loop.items() if key[0] == queue]
        return self._deliver(found, events, wake)

    def request_cancel(self, queue: int, job_id: str) -> None:
        """Tell those who subscribed to cancel requests alone of this one; from any thread."""
        with self._lock:
            found = [(key, subscribers) for key, subscribers in self._by_loop.items() if key[0] == queue]
        for key, subscribers in found:
            self._call(key, partial(subscribers.listening.request_cancel, job_id))

    def miss_cancels(self, why: str) -> None:
        """Tell those who subscribed to cancel requests alone that one may have been missed; from any thread."""
        with self._lock:
            found = [(key, subscribers) for key, subscribers in self._by_loop.items() if subscribers.for_cancels]
        for key, subscribers in found:
            self._call(key, partial(subscribers.listening.miss_cancels, why))

    def wake_all(self) -> None:
        """Make every waiter of every queue look again; from any thread."""
        with self._lock:
            found = list(self._by_loop.items())
        self._deliver(found, (), True)

    def _deliver(
        self, found: Sequence[tuple[tuple[int, asyncio.AbstractEventLoop], LoopSubscribers]], events: Events, wake: bool
    ) -> bool:
        told = False
        for key, subscribers in found:
            wanted = subscribers.wants(events)
            # Waiters register before they check the queue, so if none is registered, there is nobody to wake.
            if wanted or (wake and subscribers.waiting):
                self._call(key, partial(subscribers.hear, wanted, wake))
                told = True
        return told

    def _call(self, key: tuple[int, asyncio.AbstractEventLoop], hear: Callable[[], None]) -> None:
        try:
            key[1].call_soon_threadsafe(hear)
        except RuntimeError:  # the loop was closed under its waiters
            with self._lock:
                self._by_loop.pop(key, None)
