"""A durable queue in a directory, for the processes of one machine; nothing but the standard library.

Theory of operation. Each queue has a directory of its own, and in it one file that matters:

    <directory>/<queue>/journal         everything that happened, oldest first
    <directory>/<queue>/journal.new     a compaction in progress, or one whose process died: deleted
    <directory>/<queue>/quarantine/     what was found here and is not ours, or damaged, each with its reason

A queue's directory has the queue's own name if that is short and plain, else a digest of it. Ids are never part of a
path.

*State.* Every process keeps the jobs in memory, payloads included, in the same tables as `MemoryStorage`, and takes its
steps there. What a step changed becomes one frame at the end of the journal (`frames`, `codec`). A frame has the new
state of every job that the step touched, not the verb that was called. So reading a journal needs no rules, and gives
the same result in every process and version. One frame is one step: a completion, its result, its expiry and its
continuation are in the journal together or not at all; so are a cron's row and the jobs of its tick, and a claim and
the tokens that it took. A frame counts when it is whole and its checksum is right.

*Order of writes.* A step is taken under an exclusive `flock` of the directory: (1) read what others appended since the
last look, (2) change the state in memory, (3) append the frames of all steps that were waiting, in one write, (4)
fsync, (5) unlock, (6) answer, and tell waiters and subscribers. Nobody is told of anything that is not safe.
What happens when a process is killed:
 - before (3): nothing has happened;
 - during (3): a torn frame ends the journal. The next process to lock it finds that. It holds the lock, so nobody is
   still writing, and it copies the torn end to quarantine, reports it and cuts it off. Whole frames before it count,
   which is allowed, because their callers were told nothing;
 - between (3) and (4): the frames are in the kernel's cache, and others see them. A process that reads another's frame
   makes the file safe before it answers from it, so a crash of the machine takes back nothing that was told;
 - after (4): the step is done, but the caller does not know. Repeating it is safe, as the contract says.
When a step cannot be written (a full disk), it is cut off again. The memory, which is now ahead of the file, is
discarded, and the next step reads it again. Callers get `StorageUnavailable`; nothing is lost and nothing half done.

*Compaction.* A journal longer than twice its snapshot plus 8 MiB is replaced: a snapshot of the state is written to
`journal.new`, fsynced, and renamed to `journal`; then the directory is fsynced. If the process is killed before the
rename, the old journal stays, and after it the new one; both say the same. Another process still has the old file open.
On its next look it sees that `journal` is another file. It reads the old one to its end, so that it misses no event,
and goes on in the new one behind the snapshot. It fsyncs the directory too before it writes there. A full disk only
delays a compaction.

*Opening* reads the journal from its beginning. Damage in the middle costs the frames that it hit: they are copied to
quarantine and reported, and the journal is rewritten without them. Foreign files, and a journal that does not begin
like one, are moved to quarantine. A journal of another version is refused and left alone.

*Wake-ups* within a process are direct. Changes by other processes are noticed by a look at the journal's size every
50 ms, only while somebody waits or listens. It reads nothing unless the size has changed.

*Limits.* Memory and the time to open grow with the number of jobs in the queue. The file system must be a local one. A
process that is suspended just while it holds the lock, which takes some milliseconds at most, blocks the others until
it goes on or dies: they get `StorageUnavailable` after 10 s. Nothing is mirrored: damage costs the steps that it hits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

from workers.clock import Clock, ManualClock, SystemClock
from workers.errors import StorageUnavailable, WorkersError
from workers.jobs import Claim, Released
from workers.storage.base import Capabilities
from workers.storage.file.thread import POLL, QUEUE_NUMBER, FileThread, acquire, release
from workers.storage.memory.steps import QueueSteps
from workers.storage.memory.storage import StepStorage, T
from workers.storage.subscribers import BufferedSubscription, LoopSubscribers


class FileStorage(StepStorage):
    """One queue in a directory, which is made with mode 0700 when it is missing.

    Every acknowledged step is on the disk. With `fsync=False` it survives the death of any process, but a crash of the
    machine may lose the last steps. All storages of one directory should agree on `fsync`. The event loop is never
    blocked.
    """

    capabilities: Capabilities = Capabilities(
        clock="machine",
        durable=True,
        processes="machine",
        wakeup_latency=POLL,
        limit_keys=True,
        crons=True,
        farewells=True,
        ordered_listing=True,
        outside_continuations=True,
        held_wake_ups=True,
    )

    def __init__(
        self, directory: str | Path, queue: str = "default", *, clock: Clock | None = None, fsync: bool = True
    ) -> None:
        super().__init__(queue)
        self._root = Path(directory).absolute()
        self._clock: Clock = clock or SystemClock()
        self._fsync = fsync
        self._users = 0
        self._connected: FileThread | None = None
        if isinstance(self._clock, ManualClock):
            self._clock.watch(self._wake)

    def __repr__(self) -> str:
        return f"FileStorage({str(self._root)!r}, queue={self._name!r})"

    async def connect(self) -> None:
        """See `Storage.connect`; this reads the queue's journal.

        Raises:
            StorageError: the directory cannot be used, or another version wrote it.
        """
        thread = acquire(self._root, self._name, sync=self._fsync)
        try:
            await asyncio.wrap_future(thread.read(lambda state: None))
        except BaseException:
            await release(thread)
            raise
        self._users += 1
        self._connected = thread

    async def disconnect(self) -> None:
        thread = self._connected
        if thread is None:
            return
        self._users -= 1
        if not self._users:
            self._connected = None
        await release(thread)

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `Storage.claim`; if it is cancelled meanwhile, what it claimed is released."""
        wanted = dict(leases)
        future = self._thread().write(lambda state: state.claim(worker_id, wanted, limit, self._clock.now()))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: Future[list[Claim]]) -> None:
        if future.cancelled() or future.exception() is not None or not future.result():
            return
        released = [Released(claim=claim) for claim in future.result()]
        try:
            self._thread().write(lambda state: state.settle(released, self._clock.now()))
        except WorkersError:
            return  # disconnected: the leases will run out

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        with self._thread().subscribers.listen(QUEUE_NUMBER) as subscribers, subscribers.woken() as woken:
            while True:
                woken.clear()
                until_due = await self._read(lambda state, now: state.claimable_in(names, now))
                left = deadline - clock()
                if until_due == timedelta(0) or left <= 0:
                    return
                if until_due is not None and not isinstance(self._clock, ManualClock):
                    left = min(left, until_due.total_seconds())
                try:
                    async with asyncio.timeout(left):
                        await woken.wait()
                except TimeoutError:
                    continue

    @asynccontextmanager
    async def events(self) -> AsyncIterator[BufferedSubscription]:
        with self._by_loop() as subscribers, subscribers.listening.everything() as subscription:
            await self._hear()
            yield subscription

    @asynccontextmanager
    async def cancel_requests(self) -> AsyncIterator[BufferedSubscription]:
        listening = self._thread().subscribers.listen(QUEUE_NUMBER, for_cancels=True)
        with listening as subscribers, subscribers.listening.cancel_requests() as subscription:
            await self._hear()
            yield subscription

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[BufferedSubscription]:
        with self._by_loop() as subscribers, subscribers.listening.of_job(job_id) as subscription:
            await self._hear()
            yield subscription

    def _by_loop(self) -> AbstractContextManager[LoopSubscribers]:
        return self._thread().subscribers.listen(QUEUE_NUMBER, subscribe=True)

    async def _hear(self) -> None:
        """Let the thread know that somebody listens."""
        await self._read(lambda state, now: None)

    # Running steps

    def _thread(self) -> FileThread:
        if self._connected is None:
            raise StorageUnavailable(f"{self!r} is not connected; call `await storage.connect()` first")
        return self._connected

    # The clock is read under the lock: so what one process wrote is never in the future of another.
    async def _read(self, step: Callable[[QueueSteps, datetime], T]) -> T:
        return await asyncio.wrap_future(self._thread().read(lambda state: step(state, self._clock.now())))

    async def _write(self, step: Callable[[QueueSteps, datetime], T], *, quiet: bool = False) -> T:
        work = self._thread().write(lambda state: step(state, self._clock.now()), quiet=quiet)
        return await asyncio.wrap_future(work)

    def _wake(self) -> None:
        if self._connected is not None:
            self._connected.subscribers.tell(QUEUE_NUMBER, (), wake=True)
