"""A queue on Redis or Valkey in a layout of its own: many processes, one script per transition.

Theory of operation. All keys of a queue begin with `{<prefix>:<queue>}`, which puts them in one slot of a cluster:

| key | type | what |
|---|---|---|
| `:jobs` | hash by id | what a job was enqueued with, packed; less its payload once it has completed |
| `:runs` | hash by id | what became of it since, packed; missing as long as nothing has changed |
| `:ready`, `:held` | sorted set | claimable jobs in order; those whose ordering key is busy |
| `:scheduled`, `:failing` | sorted set | delayed jobs by when they are due |
| `:leases` | sorted set | processing jobs by the end of their lease |
| `:completed`, `:failed`, `:cancelled` | sorted set | records by when they expire |
| `:marks` | hash | deduplication keys, and the jobs that have to release one |
| `:keys`, `:passing` | hash, sorted set | limits, and the fronts of fair keys; running jobs by their limit's key |
| `:crons`, `:crons_due` | hash, sorted set | what recurs, and by when it is due |
| `:filling`, `:opening` | sorted set | keys of limits by when their bucket is full, and by when parked jobs go on |
| `:waiting` | sorted set | jobs that wait for others, by when they were enqueued |
| `:after`, `:dependents` | hash, sorted set | whom they wait for; for each job, who waits for it |
| `:throttled` | sorted set | deduplication keys by when they are free |
| `:quarantine`, `:quarantine:<id>` | hash | what was set aside, by id, and what was there |
| `:busy`, `:workers`, `:sleepers`, `:meta` | hash, set | busy ordering keys; workers seen; who to wake; pause |

Each transition is one Lua script, so it happens as a whole or not at all, and a batch is one round trip. A waiting job
is in exactly one of the sets, in order of name, priority and place; one with a priority above the default stands under
a name of its own there. Claims read the first of each name wanted, so their cost does not grow with the backlog. It
grows with the number of different names that have jobs ready.

A waiter that finds nothing notes its names in `:sleepers` in the same script. A script that makes a job of such a name
claimable removes the note and publishes a wake-up. So one message wakes all waiters, and busy workers cause none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from redis.asyncio import Redis

from workers.checks import LONGEST_LEASE, check_text
from workers.errors import StorageError, StorageFull
from workers.jobs import (
    DROP,
    SILENT_AFTER,
    UNCOUNTED_RETRIES,
    CancelResult,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    ErrorInfo,
    Failed,
    JobEventKind,
    JobState,
    NewJob,
    PartlySettled,
    ProgressReport,
    Recovery,
    Retention,
    Retried,
    Settlement,
    SettleOutcome,
    check_retention,
)
from workers.storage.base import ANY_NAME, Capabilities
from workers.storage.on_redis import quarantine
from workers.storage.on_redis.batches import AT_ONCE, in_steps, portions
from workers.storage.on_redis.examination import Care, take_eviction
from workers.storage.on_redis.messages import KINDS, STATES, duration, end_kind, pack, unpack
from workers.storage.on_redis.quarantine import text
from workers.storage.on_redis.server import RedisServer, parse_url
from workers.storage.on_redis.storage import (
    OUTCOMES,
    Claiming,
    Settling,
    cancel_result,
    outcomes_of_codes,
)
from workers.storage.on_redis.subscribers import ChannelSubscribers
from workers.storage.on_redis.wire import Reply
from workers.storage.redis import codec, inspect
from workers.storage.redis.codec import bytes_of, decode_new_job, text_of
from workers.storage.redis.declared import RedisDeclared
from workers.storage.redis.inspect import RedisReading
from workers.storage.redis.scripts import RedisScripts, base, loaded_scripts
from workers.storage.rules import (
    WORKER_RECORD,
    bounded_count,
    check_fits_redis,
    link_is_over,
    next_elsewhere,
    refuse_other_queues,
    refuse_transaction,
    unfit_for_redis,
    weight,
)
from workers.storage.subscribers import HeldWakes, Told

DEFAULT_QUEUE: Final = "default"

LOOK_SECONDS: Final = 10.0
"""How long a waiter relies on being woken; somebody may have emptied the database meanwhile."""


class RedisStorage(RedisReading, RedisDeclared):
    """One queue on a Redis (6.2 or newer) or Valkey server.

    `target` is a URL (`redis://`, `rediss://`, `unix://`, or as in `redis_urls`) or a client. A client's settings are
    used, and its connections are left alone. A URL may name the queue by `?queue=`; the argument has precedence.
    Storages with different prefixes share nothing. `timeout` is how long the server may be silent in a call; then the
    method raises `StorageUnavailable`.

    A job that a server forgot in a failover is lost; `?wait_replicas=` in the URL makes sure that replicas have it.
    `connect` looks at how the server is set up, and `limits` and `faults` say what it found. No worker starts on a
    server that evicts keys, unless `allow_eviction`, which a URL may say by `?allow_eviction=true`.

    Raises:
        StorageError: a target that is no Redis URL.
    """

    capabilities = Capabilities(
        clock="server",
        durable=None,
        processes="many",
        limit_keys=True,
        crons=True,
        farewells=True,
        outside_continuations=True,
        held_wake_ups=True,
    )

    def __init__(
        self,
        target: str | Redis,
        queue: str = DEFAULT_QUEUE,
        *,
        prefix: str = "workers",
        timeout: timedelta = timedelta(seconds=5),
        allow_eviction: bool = False,
    ) -> None:
        if isinstance(target, str):
            target, allowed = take_eviction(target)
            allow_eviction = allow_eviction or allowed
            target, named = parse_url(target)
            queue = named if named and queue == DEFAULT_QUEUE else queue
        check_text("queue name", queue)
        keys = base(prefix, queue)
        care = Care(allow_eviction=allow_eviction, channel=keys + b":seen")
        server = RedisServer(target, timeout, base=keys, scripts=loaded_scripts, text=False, care=care)
        self._lua = RedisScripts(server, keys)
        super().__init__(queue, RedisSubscribers(self._lua), allow_eviction=allow_eviction)
        self._may_hold = False  # whether this storage has let the queue have limit keys and fair keys
        self._quarantine = RedisQuarantine(self._lua, self.enqueue)
        self._held_wakes = HeldWakes()

    def __repr__(self) -> str:
        return f"RedisStorage(queue={self._name!r})"

    async def _look(self, names: Collection[str]) -> float | None:
        due = await self._lua.run("look", *(name.encode() for name in names))
        if due is None:
            return None
        seconds = float(due) / 1e6  # infinite for some scores that another program may write
        return min(seconds, LOOK_SECONDS) if seconds >= 0 else LOOK_SECONDS

    def _held(self, claim: Claim) -> tuple[bytes, bytes, int]:
        return codec.bytes_of(claim.job_id), codec.token_of(claim), duration(claim.lease)

    # Jobs

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        """See `Storage.enqueue`; a batch of more than 1 000 jobs or 64 MiB is sent in portions.

        A batch with several jobs of one deduplication key, or with jobs that follow others, is sent as a whole.
        """
        refuse_transaction(connection, "RedisStorage")
        refuse_other_queues(jobs, "RedisStorage")
        for job in jobs:
            check_fits_redis(job.id, job.payload)
        if not self._may_hold and any(job.limit_key is not None or job.fair_key is not None for job in jobs):
            await self._make_holding()
            self._may_hold = True
        results: list[EnqueueResult] = []
        keys = [job.deduplication.key for job in jobs if job.deduplication is not None]
        follow = any(job.after for job in jobs)
        whole = follow or len(keys) > len(set(keys))
        script = "enqueue_after" if follow else "enqueue_once" if keys else "enqueue"
        how = ("quiet",) if self._held_wakes.held(jobs) else ()
        for some in [jobs] if whole else portions(jobs, lambda job: len(job.payload)):
            answer = await self._lua.run(script, pack([codec.encode_job(job) for job in some]), *how)
            results += codec.enqueue_results(some, unpack(answer))
        return results

    def with_notify(self, connection: object | None = None) -> AbstractAsyncContextManager[None]:
        """See `HoldsWakeUps.with_notify`."""
        refuse_transaction(connection, "RedisStorage")
        return self._held_wakes.hold(self._wake)

    async def _wake(self, names: Collection[str]) -> None:
        await self._lua.run("wake", *(name.encode() for name in names))

    def _claiming(self, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Claiming:
        wanted: list[object] = [duration(leases[ANY_NAME]) if ANY_NAME in leases else 0]
        for name, lease in leases.items():
            if name != ANY_NAME:
                wanted += (name.encode(), duration(lease))
        secret = os.urandom(codec.SECRET_BYTES)
        arguments = worker_id.encode(), secret, min(limit, AT_ONCE), pack(wanted)
        return arguments, partial(self._claims, worker_id, secret)

    def _claims(self, worker_id: str, secret: bytes, reply: Reply) -> Sequence[Claim]:
        answer, told = reply
        self._quarantine.heed(told)
        return list(codec.decode_claims(worker_id, secret, answer))

    async def _run_exchange(self, settlements: bytes, wanted: tuple[str | bytes | int, ...]) -> Sequence[Reply]:
        # One script has to look at the queue once, where two looked at it twice.
        try:
            answers: Sequence[Reply] = await self._lua.run("exchange", settlements, UNCOUNTED_RETRIES, *wanted)
        except StorageError as error:  # nothing has changed: the queue is looked at before it is
            return error, error
        return answers

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        refuse_transaction(connection, "RedisStorage")
        unfit = [unfit_for_redis(one) or next_elsewhere(one) for one in settlements]
        fit = [one for one, fault in zip(settlements, unfit, strict=True) if fault is None]
        codes: list[int | None] = []
        for some in portions(fit, weight):
            codes += await self._settle(some)
        answers = iter(codes)
        outcomes = [fault or _outcome(next(answers)) for fault in unfit]
        settled = [outcome for outcome in outcomes if outcome is not None]
        if len(settled) < len(outcomes):
            raise PartlySettled(outcomes)
        return settled

    def _settling(self, settlements: Sequence[Settlement]) -> Settling:
        faults = [unfit_for_redis(one) or next_elsewhere(one) for one in settlements]
        fit = [codec.encode_settlement(one) for one, fault in zip(settlements, faults, strict=True) if fault is None]
        return fit, partial(outcomes_of_codes, faults)

    async def _settle(self, settlements: Sequence[Settlement]) -> Sequence[int | None]:
        """Settle, and return the codes of the outcomes; None if the server has no room for one."""
        try:
            return await self._codes(self._lua.run, settlements)
        except StorageFull:
            fitting = [at for at, one in enumerate(settlements) if fits(one)]
            if not fitting:
                return [None] * len(settlements)
            codes = await self._codes(self._lua.drain, [briefly(settlements[at]) for at in fitting])
            found = dict(zip(fitting, codes, strict=True))
            return [found.get(at) for at in range(len(settlements))]

    async def _codes(self, run: Callable[..., Awaitable[Reply]], settlements: Sequence[Settlement]) -> list[int]:
        packed = pack([codec.encode_settlement(one) for one in settlements])
        codes: list[int] = unpack(await run("settle", packed, UNCOUNTED_RETRIES))
        return codes

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        for some in portions(reports):
            packed = [(codec.bytes_of(one.claim.job_id), codec.token_of(one.claim), one.value) for one in some]
            await self._lua.run("progress", pack(packed))

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        await self.examine()
        most = min(bounded_count(limit), AT_ONCE)
        bounds = duration(LONGEST_LEASE), duration(SILENT_AFTER)
        *ended, told = unpack(await self._lua.run("recover", most, max_stalls, *bounds))
        self._quarantine.heed(told)
        requeued, failed = ([codec.text_of(one) for one in ids] for ids in ended)
        return Recovery(requeued=tuple(requeued), failed=tuple(failed))

    async def sweep(self, limit: int) -> int:
        return await in_steps(lambda some: self._lua.run("sweep", some, duration(WORKER_RECORD)), limit)

    async def cancel(self, job_id: str) -> CancelResult:
        return cancel_result(await self._lua.run("cancel", codec.bytes_of(job_id)))

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        refuse_transaction(connection, "RedisStorage")
        check_fits_redis(job_id, result)
        kept = "" if keep is None else codec.encode_retention(keep)
        return STATES.get(await self._lua.run("complete", codec.bytes_of(job_id), result, kept))

    async def continue_job(self, then: NewJob, *, connection: object | None = None) -> JobState | None:
        refuse_transaction(connection, "RedisStorage")
        check_fits_redis(then.id, then.payload)
        code = await self._lua.run("go_on", pack(codec.encode_job(then)), then.chain_index)
        if code == _OTHER_LINK:
            raise link_is_over(then.id)
        return STATES.get(code)

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        check_retention(ttl)
        return bool(await self._lua.run("keep", codec.bytes_of(job_id), duration(ttl)))


_OTHER_LINK: Final = -1


def _outcome(code: int | None) -> SettleOutcome | None:
    return None if code is None else OUTCOMES[code]


SMALL_BYTES: Final = 256
"""A result or a next link's payload of this size is always taken, and so much of an error's message."""
RECORD_BYTES: Final = 512
"""What a job takes beside its payload, at least."""


def fits(settlement: Settlement) -> bool:
    """Tell whether a server takes the settlement although its memory is full: it stores hardly more than it frees.

    A full server has to let go of jobs, and must not grow by that without bound: what waits may be millions of jobs,
    each with a result larger than its payload. So a settlement may store a few hundred bytes per job more than it
    frees. The payload of a job that completes is freed. Copies of the result for jobs that came after it (65 536 bytes
    each at most) are not counted. What needs more has to wait for room, with its lease renewed.
    """
    freed = len(settlement.claim.payload)
    match settlement:
        case Completed(then=None):
            return _keep(settlement) is DROP or len(settlement.result) <= max(freed, SMALL_BYTES)
        case Completed(then=then) if then is not None:
            kept = 0 if _keep(settlement) is DROP else RECORD_BYTES + len(settlement.result)
            return kept + len(then.payload) <= freed
        case Continued(then=then):
            return len(then.payload) <= max(freed, SMALL_BYTES)
    return True


def _keep(settlement: Completed) -> object:
    return settlement.claim.keep_completed if settlement.keep is None else settlement.keep


def briefly(settlement: Settlement) -> Settlement:
    """Return the settlement with as little of an error as says what it was; the worker has reported its stack."""
    if isinstance(settlement, Failed | Retried):
        return replace(settlement, error=_brief(settlement.error))
    return settlement


def _brief(error: ErrorInfo) -> ErrorInfo:
    return replace(error, message=error.message[:SMALL_BYTES], stack="")


Enqueue = Callable[[Sequence[NewJob]], Awaitable[Sequence[EnqueueResult]]]


class RedisQuarantine(quarantine.Quarantine):
    """The quarantine of one queue: jobs with damaged records, and keys that take the place of the queue's own.

    A job whose record cannot be read fails, so that those who wait for it learn of it; its remains are kept here. It
    can be queued again if only its run was damaged, and not what it was enqueued with.
    """

    def __init__(self, lua: RedisScripts, enqueue: Enqueue) -> None:
        super().__init__(lua.server, text(lua.base) + ":quarantine")
        self._lua = lua
        self._enqueue_all = enqueue

    def _name(self, raw: str) -> str:
        return raw

    async def _move_what_is_in_the_way(self) -> Sequence[Reply]:
        told: Sequence[Reply] = unpack(await self._lua.run("repair"))
        return told

    async def _enqueue(self, job: NewJob) -> EnqueueResult:
        [result] = await self._enqueue_all([job])
        return result

    async def _job(self, job_id: str, place: str) -> NewJob | None:
        record = (await self._fields(place, "job")).get("job")
        try:
            return decode_new_job(job_id, record) if record else None
        except (ValueError, OverflowError, struct.error):  # not all of it is ours
            return None


RESULT: Final = 9
"""Stands in the place of an event in front of the end that it is the result of; `lua/queue.lua` has the same."""


class RedisSubscribers(ChannelSubscribers):
    """The wake-ups and events of one queue."""

    def __init__(self, queue: RedisScripts) -> None:
        super().__init__(queue.server, repr(queue.base))
        self._queue = queue

    @property
    def wake_channels(self) -> tuple[bytes, ...]:
        return self._queue.channels[:1]

    @property
    def event_channels(self) -> tuple[bytes, ...]:
        return self._queue.channels[1:2]

    @property
    def cancel_channel(self) -> bytes:
        return self._queue.channels[2]

    def read_names(self, body: bytes) -> Collection[bytes]:
        names: Collection[bytes] = unpack(body)
        return names

    def read_events(self, channel: bytes, body: bytes) -> Iterable[Told]:
        events, result = unpack(body), None
        for kind, about in zip(events[::2], events[1::2], strict=True):
            if kind in KINDS:
                yield KINDS[kind], text_of(about), result
            result = about if kind == RESULT else None

    def read_id(self, body: bytes) -> str:
        return text_of(body)

    async def ends(self, ids: Sequence[str]) -> Sequence[JobEventKind | None]:
        found = await inspect.ends(self._queue, [bytes_of(job_id) for job_id in ids])
        return [end_kind(end[0]) if end else None for end in found]
