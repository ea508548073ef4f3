"""The client's side of a queue and, if wanted, a worker in the same process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from types import MappingProxyType, TracebackType
from typing import Self, Unpack

from workers.chains import Chain, Continuation
from workers.checks import MAX_ATTEMPTS, as_duration, as_lease, check_whole
from workers.connection import Naming, QueueConnection, surroundings
from workers.crons import Crons
from workers.details import JobDetails, JobReader
from workers.ends import result_of
from workers.errors import JobEndedError, JobGoneError, Unsupported
from workers.flows import EnqueuedFlow, FlowJob, answers, flatten
from workers.jobs import CancelResult, EnqueueResult, JobState, JobStatus, NewJob
from workers.limits import HeldBack, Limit
from workers.management import Management
from workers.options import QueueOptions
from workers.serde import Serde
from workers.slices import in_slices
from workers.specs import DEFAULT_NAME, Enqueued, JobOptions, JobSpec, as_ttl, check_spec, link_spec, new_job
from workers.storage import open_storage
from workers.storage.abilities import ContinuesFromOutside, HoldsWakeUps, Joinable, Migratable
from workers.storage.base import ANY_NAME, FlowStorage, Storage
from workers.waiting import check_timeout, end_of, wait_for_end
from workers.worker import Worker
from workers.worker.events import Observer
from workers.worker.exchanges import check_slots
from workers.worker.handlers import Handler, HandlerFunction, Middleware
from workers.worker.startup_checks import UnhandledNames


class Queue:
    """Enqueues jobs to `storage` and asks about them; after `execute`, `start` also runs a worker on it.

    `storage` may be its URL. A job is tried up to `max_attempts` times, unless it says otherwise; that worker runs
    `concurrency` jobs at a time. A completed job is kept for `result_ttl`. Durations may be numbers of seconds, except
    that a whole `result_ttl` is in milliseconds. What else can be set is in `options`. A queue belongs to the event
    loop that uses it first, until it is stopped or that loop is closed; plain code has `workers.sync.Queue`. The
    operator's verbs, from `pause` to `drain`, are under `manage`, what recurs under `crons`.

    Raises:
        Unsupported: limits on a storage that keeps none, or not these.
        ValueError, TypeError: a setting out of its range, or of another kind, by its name.
        StorageError: see `open_storage`.
    """

    def __init__(
        self,
        storage: Storage | str,
        *,
        concurrency: int = 1,
        max_attempts: int = 3,
        result_ttl: timedelta | int = timedelta(hours=1),
        options: QueueOptions = QueueOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        if not isinstance(options, QueueOptions):
            raise TypeError(f"options of a queue are QueueOptions(...), not {options!r}")
        makes_tables = isinstance(storage, str) if options.makes_tables is None else options.makes_tables
        self.storage = storage = open_storage(storage) if isinstance(storage, str) else storage
        self._options = options
        self._connection = QueueConnection(storage, forget=self._forget_loop)
        self._connection.makes_tables = makes_tables
        self._connection.declare_limits(options.limits)
        check_whole("max_attempts", max_attempts, 1, MAX_ATTEMPTS)
        check_slots(concurrency, options.overtime)
        self._make_job = partial(
            new_job,
            serde=options.payload_serde,
            queue=storage.queue,
            max_attempts=max_attempts,
            result_ttl=as_ttl(result_ttl),
            keep_failed=options.keep_failed,
            limits=self._connection.limits,
        )
        self._concurrency = concurrency
        self._result_serde = options.result_serde
        self._surround = surroundings(storage.queue, (*options.middlewares, *options.observers))
        self._handlers: Mapping[str, HandlerFunction | Handler] = {}
        self._unhandled = UnhandledNames(storage.queue)
        self._worker: Worker | None = None
        self._running: asyncio.Task[None] | None = None
        self._reader = JobReader(storage, options.payload_serde, options.result_serde)

    @cached_property
    def crons(self) -> Crons:
        """What recurs in the queue, and what this object declares."""
        return Crons(self.storage, self._connection.open)

    @cached_property
    def manage(self) -> Management:
        """The operator's steps."""
        return Management(self.storage, self._connection.open, self._reader)

    async def migrate(self) -> None:
        """Make the tables where they are missing; a storage without any has nothing to be made.

        Raises:
            StorageError, StorageUnavailable: see the storage's own `migrate`.
        """
        if isinstance(self.storage, Migratable):
            await self.storage.migrate()

    @property
    def makes_tables(self) -> bool:
        """Whether the tables of an embedded database are made at the first use."""
        return self._connection.makes_tables

    async def make_tables(self) -> None:
        """Make them now, before something else connects the storage, if this queue makes them at all."""
        if self.makes_tables:
            await self._connection.make_tables()

    def declare_limits(self, limits: Mapping[str, Limit]) -> None:
        """Keep these limits too, from the next use of the queue on; see `Queue`.

        Raises:
            Unsupported, ValueError, TypeError: see `Queue`.
        """
        self._connection.declare_limits(limits)

    async def held_back(self, job_id: str) -> HeldBack | None:
        """Return which limit keeps the queued job back, and until when; None for any other job.

        See `KeepsLimits.held_back`.
        """
        return (await self.manage.held_back([job_id]))[0]

    @property
    def limits(self) -> Mapping[str, Limit]:
        """The limits that were declared here."""
        return MappingProxyType(self._connection.limits)

    @property
    def payload_serde(self) -> Serde:
        """How payloads become bytes."""
        return self._options.payload_serde

    @property
    def lease(self) -> timedelta:
        """How long a claim of its worker holds a job."""
        return as_lease("lease", self._options.lease)

    @property
    def grace(self) -> timedelta:
        """How long a stop of its worker lets handlers finish."""
        return as_duration("grace", self._options.grace)

    async def enqueue(
        self,
        payload: object,
        *,
        name: str = DEFAULT_NAME,
        connection: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Store the job, or report what has its id or deduplication key already; see `JobSpec`, `Storage.enqueue`.

        With `connection`, an SQLAlchemy connection or session on the storage's database, it is part of that
        transaction. The options are the fields of a `JobSpec`: `id`, `delay`, `at`, `max_attempts`, `result_ttl`,
        `keep_completed`, `keep_failed`, `priority`, `ordering_key`, `limit_key`, `fair_key`, `backoff`,
        `deduplication`, `after`, `after_failure` and `meta`.

        Raises:
            Unsupported: the storage keeps no deduplication keys, or lets no job follow others; see its `capabilities`.
            ValueError: an argument out of its range, a payload the serde cannot encode; `UnknownDependency`.
            TypeError: a payload of a type the serde does not know.
            StorageUnavailable: nothing is known; its `job_ids` has the id, and enqueueing that again is safe.
                `StorageFull`: the storage's server has no memory left for the job.
        """
        spec = JobSpec(payload=payload, name=name, **options)
        if connection is not None:
            return (await self.enqueue_many([spec], connection=connection))[0]
        return await self.enqueue_spec(spec)

    async def enqueue_spec(self, spec: JobSpec) -> Enqueued:
        """See `enqueue`."""
        job = self._new_job(spec)
        with Naming([job]):
            await self._connection.open()
            return self._decoded(await self._store(job))

    async def enqueue_many(self, specs: Iterable[JobSpec], *, connection: object | None = None) -> list[Enqueued]:
        """Enqueue many jobs, as by `enqueue`, in one round trip or one per 500 jobs; other tasks go on meanwhile.

        Every job is checked before the first is stored. In a database, and with jobs that follow others or share a
        deduplication key, it is one round trip always, and all or none are stored.
        """
        jobs = await in_slices(lambda spec: self._new_job(check_spec(spec)), specs)
        with Naming(jobs):
            await self._connection.open(connection)
            with self._surround(jobs) as chosen:
                results = await self._connection.store_many(chosen, connection)
        return await in_slices(self._decoded, results)

    def enqueue_on(self, connection: object, specs: Iterable[JobSpec]) -> list[Enqueued]:
        """Enqueue on a synchronous connection or session, in the calling thread; as `enqueue_many` with `connection=`.

        This needs no event loop, opens no connection and waits for no other transaction.

        Raises:
            Unsupported: the storage has no `capabilities.transactions`.
            TypeError, StorageError: an asynchronous connection or session; one of another database.
        """
        jobs = [self._new_job(check_spec(spec)) for spec in specs]
        if not isinstance(self.storage, Joinable):
            raise Unsupported(f"{self.storage!r} cannot join a transaction; enqueue after it has committed")
        with self._surround(jobs) as chosen:
            return [self._decoded(result) for result in self.storage.enqueue_on(chosen, connection)]

    @contextlib.asynccontextmanager
    async def with_notify(self, connection: object | None = None) -> AsyncIterator[None]:
        """Wake workers once, at the end of the block, for all that it enqueues; see `HoldsWakeUps.with_notify`.

        Raises:
            Unsupported: the storage has no `capabilities.held_wake_ups`, or no transactions.
            StorageUnavailable: the jobs are stored, and perhaps nobody was woken.
        """
        if not isinstance(self.storage, HoldsWakeUps):
            raise Unsupported(f"{self.storage!r} wakes for each job; see its `capabilities.held_wake_ups`")
        await self._connection.open(connection)
        async with self.storage.with_notify(connection):
            yield

    async def enqueue_flow(self, tree: FlowJob) -> EnqueuedFlow:
        """Enqueue a job and those it waits for, up to 1 000 in several queues: all or none; those that exist stay.

        Raises:
            Unsupported: the storage has no `capabilities.flows`.
            ValueError, TypeError: as `enqueue`; more than 1 000 jobs, an id twice in one queue.
            StorageError: one of the jobs is the child of another job already.
            StorageUnavailable: nothing is known; a tree whose jobs have ids may be enqueued again.
        """
        if not isinstance(self.storage, FlowStorage):
            raise Unsupported(f"{self.storage!r} has no flows, see its `capabilities`; continue jobs as chains instead")
        nodes = flatten([tree], self.storage.queue, self._new_job)
        await self._connection.open()
        with self._surround([node.job for node in nodes]) as jobs:
            nodes = [replace(node, job=job) for node, job in zip(nodes, jobs, strict=True)]
            results = await self.storage.enqueue_flow(nodes)
        [answer] = answers(nodes, results, self._result_serde.loads)
        return answer

    async def enqueue_and_wait(
        self,
        payload: object,
        *,
        timeout: timedelta | float = timedelta(seconds=30),
        name: str = DEFAULT_NAME,
        **options: Unpack[JobOptions],
    ) -> object:
        """Enqueue the job as by `enqueue`, and return its decoded result as soon as it has completed.

        A duplicate waits for the end of the job that has the id or deduplication key; a result that exists already is
        returned at once. Retries in between do not end the wait. `timeout` covers everything. The job goes on when the
        time runs out or this call is cancelled.

        Raises:
            ValueError, TypeError: as `enqueue`; a timeout that is not above zero.
            JobFailedError: the job failed for good; `MaxRetriesError` if with its last attempt.
            JobCancelledError: the job was cancelled.
            JobTimeoutError: it did not end in time.
            JobGoneError: it ended, and nothing of it was kept.
            StorageUnavailable: nobody knows whether it was enqueued; calling again with the id in `job_ids` is safe.
        """
        timeout = check_timeout(timeout)
        spec = JobSpec(payload=payload, name=name, **options)
        job = self._new_job(spec)
        with Naming([job]):
            await self._connection.open()
            async with self._reader.explaining(job.id, job.payload):
                return self._result_serde.loads(await end_of(self.storage, job.id, partial(self._store, job), timeout))

    async def get_result(self, job_id: str) -> object:
        """Return the decoded result of a completed job; None while it has none, and for ids unknown or no longer known.

        Raises:
            JobFailedError: the job failed for good; `MaxRetriesError` if with its last attempt.
            JobCancelledError: the job was cancelled, and its record is still kept.
        """
        await self._connection.open()
        outcome = await self.storage.result(job_id)
        async with self._reader.explaining():
            return None if outcome is None else self._result_serde.loads(result_of(job_id, outcome))

    async def get_job(self, job_id: str) -> JobDetails | None:
        """Return the job with its payload, result, last error and failed attempts; None if the queue knows none."""
        await self._connection.open()
        return await self._reader.read(job_id)

    async def update_result_ttl(self, job_id: str, ttl: timedelta | int) -> bool:
        """Keep a finished job's record for `ttl` from now, a timedelta or whole milliseconds; False for other ids.

        Raises:
            ValueError: a duration that is not above zero.
            Unsupported: the storage keeps all records alike; see `capabilities.result_ttl_updates`.
        """
        ttl = as_ttl(ttl)
        await self._connection.open()
        return await self.storage.update_result_ttl(job_id, ttl)

    async def cancel(self, job_id: str) -> CancelResult:
        """See `Storage.cancel`."""
        await self._connection.open()
        return await self.storage.cancel(job_id)

    async def get_status(self, job_id: str) -> JobStatus | None:
        """Return the job as it stands, None if the queue does not know it, or no longer does."""
        await self._connection.open()
        return (await self.storage.status([job_id]))[0]

    async def counts(self) -> dict[JobState, int]:
        """Return how many jobs are in each state, with every state present."""
        await self._connection.open()
        return await self.storage.counts()

    async def waiting_since(self) -> datetime | None:
        """Return since when the queued job that has waited longest could be claimed; None if none is queued.

        See `Storage.waiting_since` for what it cannot see.
        """
        await self._connection.open()
        return await self.storage.waiting_since()

    # Chains

    async def start_job_chain(
        self, name: str, payload: object, *, connection: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue the first link of a chain, as by `enqueue`; its id is the chain's.

        A handler that returns `continue_with(...)` adds the next link. Any other value that it returns completes the
        chain. A link that fails for good fails the chain.
        """
        return await self.enqueue(payload, name=name, connection=connection, **options)

    async def get_job_chain(self, chain_id: str) -> Chain | None:
        """Return the chain as it stands, None if the queue does not know it, or no longer does."""
        status = await self.get_status(chain_id)
        if status is None:
            return None
        outcome = await self.storage.result(chain_id) if status.state is JobState.COMPLETED else None
        encoded = None if outcome is None else outcome.result
        return Chain.of(status, None if encoded is None else self._result_serde.loads(encoded))

    async def delete_job_chains(self, chain_ids: Sequence[str], *, connection: object | None = None) -> int:
        """Remove these chains without a trace, whatever they are doing, and return how many.

        A running handler is told by its signal. Nothing it does has an effect any more: its lease is lost with
        `not_found`.
        """
        await self._connection.open(connection)
        return await self.storage.remove(chain_ids, running=True, connection=connection)

    async def complete_job_chain(self, chain_id: str, result: object, *, connection: object | None = None) -> None:
        """Complete the chain with `result`, from outside of any worker; or continue it, with `continue_with(...)`.

        A running handler is told by its signal and loses its lease. If two callers complete a chain at once, or a
        caller and its last handler do, the first wins; so it is if they continue one link. Of a continued chain
        `max_attempts` and `priority` default to those of the current link, and retention and back-off to the queue's.

        Raises:
            JobGoneError: there is no such chain.
            JobEndedError: it had ended, or the link that was to be continued.
            Unsupported: see `capabilities.outside_endings`, and `capabilities.outside_continuations`.
        """
        if isinstance(result, Continuation):
            state = await self._continue_chain(chain_id, result, connection)
        else:
            encoded = self._result_serde.dumps(result)
            await self._connection.open(connection)
            state = await self.storage.complete(chain_id, encoded, connection=connection)
        if state is None:
            raise JobGoneError(f"there is no chain {chain_id!r}: it never was, or its record is over")
        if state.is_final:
            ended = "was cancelled" if state is JobState.CANCELLED else f"had {state.value}"
            raise JobEndedError(f"chain {chain_id!r} {ended} before")

    async def _continue_chain(self, chain_id: str, link: Continuation, connection: object | None) -> JobState | None:
        if not isinstance(self.storage, ContinuesFromOutside):
            raise Unsupported(
                f"{self.storage!r} has no `capabilities.outside_continuations`; let a handler continue the chain"
            )
        if link.after:
            raise ValueError(f"chain {chain_id!r}: a link from outside of a handler follows no other jobs")
        found = await self.get_job(chain_id)
        if found is None:
            return None
        spec = link_spec(link, found.status, found.meta)
        then = replace(self._new_job(spec), chain_index=found.status.chain_index + 1)
        await self._connection.open(connection)
        return await self.storage.continue_job(then, connection=connection)

    async def wait_for_job_chain_completion(
        self, chain_id: str, timeout: timedelta | float = timedelta(seconds=30)
    ) -> object:
        """Return the decoded result of the chain as soon as its last link has completed.

        Raises:
            JobGoneError: there is no such chain, or nothing of it was kept.
            ValueError, JobFailedError, JobCancelledError, JobTimeoutError: as `enqueue_and_wait`.
        """
        timeout = check_timeout(timeout)
        await self._connection.open()
        async with self._reader.explaining():
            return self._result_serde.loads(await wait_for_end(self.storage, chain_id, timeout))

    # Working

    def execute(self, handlers: HandlerFunction | Handler | Mapping[str, HandlerFunction | Handler]) -> None:
        """Choose the handlers that `start` will run; a single one takes every name."""
        if self._worker is not None:
            raise RuntimeError("execute() must come before start()")
        self._handlers = handlers if isinstance(handlers, Mapping) else {ANY_NAME: handlers}

    @property
    def has_handlers(self) -> bool:
        """Whether `execute` was called, so that there is something to run."""
        return bool(self._handlers)

    def worker(
        self,
        *,
        concurrency: int | None = None,
        grace: timedelta | float | None = None,
        observers: Iterable[Observer] = (),
        middlewares: Sequence[Middleware] = (),
    ) -> Worker:
        """Make the worker that `start` would run, for whoever runs it otherwise: `await queue.worker().run()`.

        `concurrency` and `grace` replace the queue's own. `observers` and `middlewares` come before the queue's own, of
        which it has each only once.

        Raises:
            ValueError: there are no handlers, or no place for a job.
        """
        if self._handlers:
            self.crons.check_names(self._handlers)
        own = self._options
        return Worker(
            self.storage,
            self._handlers,
            concurrency=self._concurrency if concurrency is None else concurrency,
            lease=own.lease,
            observers=(*observers, *own.observers),
            options=replace(
                own,
                grace=own.grace if grace is None else grace,
                middlewares=(*(each for each in middlewares if each not in own.middlewares), *own.middlewares),
                crons=(*own.crons, *self.crons.declared),
            ),
        )

    async def start(self) -> None:
        """Connect the storage and, after `execute`, run a worker. Idempotent."""
        await self._connection.open()
        if self._handlers and self._worker is None:
            self._worker = self.worker()
            self._running = asyncio.create_task(self._worker.run(), name=f"worker-{self.storage.queue}")

    async def stop(self) -> None:
        """Stop the worker in its three phases and disconnect the storage. Idempotent.

        Raises:
            Exception: what ended the worker, had it failed.
        """
        try:
            if self._worker is not None and self._running is not None:
                self._worker.stop()
                await self._running
        finally:
            self._worker = self._running = None
            await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def check_loop(self) -> None:
        """Raise unless the queue can be used here: in its event loop, or in any loop while it is not connected.

        Raises:
            ForeignLoop: it is in use in another loop, which still runs.
        """
        self._connection.check_loop()

    def _forget_loop(self) -> None:
        """Forget what belonged to a loop that is gone; a worker went with it."""
        self._worker = self._running = None

    def _new_job(self, spec: JobSpec) -> NewJob:
        if self._handlers:
            self._unhandled.look_at(spec.name, self._handlers)
        return self._make_job(spec)

    async def _store(self, job: NewJob) -> EnqueueResult:
        with self._surround([job]) as [chosen]:
            return await self._connection.store(chosen)

    def _decoded(self, result: EnqueueResult) -> Enqueued:
        return Enqueued(
            id=result.id,
            status=result.status,
            existing_state=result.existing_state,
            result=None if result.result is None else self._result_serde.loads(result.result),
        )
