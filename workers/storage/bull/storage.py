"""A Bull 1.x queue as a storage: Node processes that still run Bull 1.x work on it at the same time.

Keys, fields and messages are Bull's own. Beside them we keep what Node neither reads nor changes: in the hash of a job
`name` (Bull 1.x has no names) and fields `workers:...`; in its options the member `workers`; and the keys
`<prefix>:<queue>:workers:completed` and `...:failed` (which records expire when), `...:cancelled` (which of them
are cancelled ones), `...:seen` (workers) and `...:quarantine` (what was set aside). Events are on channels
`...:workers:events@<database>` and `...:cancels@<database>`.

Each transition is one Lua script of ours, which happens as a whole or not at all, and a batch is one round trip. Where
Bull takes several steps, or forgets one, our scripts do not: a job is taken off the line and locked in one step, and
ended and unlocked in one step. It is never put into the line of a paused queue, and never considered abandoned at the
first look (`recovery`).

Jobs of Node are run as they are: they have the name `default`, a crash does not count as an attempt, and their records
stay for ever unless `removeOnComplete` says otherwise, to Bull 1.1 alone. Their back-off and their `timeout` are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from redis.asyncio import Redis

from workers.checks import check_text, new_id
from workers.errors import JobLockedError, StorageError, Unsupported
from workers.jobs import (
    UNCOUNTED_RETRIES,
    CancelResult,
    Claim,
    EnqueueResult,
    JobState,
    Moved,
    NewJob,
    ProgressReport,
    Recovery,
    Repaired,
    Retention,
    Settlement,
    SettleOutcome,
    SettleStatus,
    check_retention,
)
from workers.retention import LEAST_TO_READ, TOLD_BYTES
from workers.storage.abilities import Exchange
from workers.storage.base import ANY_NAME, Capabilities
from workers.storage.bull import codec
from workers.storage.bull.codec import (
    TOKEN_HEAD_BYTES,
    BullClaim,
    Dialect,
    known_dialect,
    lease_ms,
    raw_ids,
)
from workers.storage.bull.inspect import BullReading
from workers.storage.bull.options import LONGEST_DELAY, bull_job, keep_ms
from workers.storage.bull.quarantine import BullQuarantine
from workers.storage.bull.recovery import GRACES, RECOVERY_INTERVAL, Recoverer, StrandedJobs, report_dropped
from workers.storage.bull.scripts import BullScripts, loaded_scripts
from workers.storage.on_redis.batches import AT_ONCE, portions
from workers.storage.on_redis.examination import Care, take_eviction
from workers.storage.on_redis.messages import STATES, pack, unpack
from workers.storage.on_redis.ownership import Ownership
from workers.storage.on_redis.server import RedisServer, parse_url
from workers.storage.on_redis.storage import Settling, cancel_result, outcomes_of_codes
from workers.storage.on_redis.wire import Reply
from workers.storage.redis_urls import read_deployment, take_parameter
from workers.storage.rules import (
    check_fits_redis,
    refuse_deduplication,
    refuse_dependencies,
    refuse_transaction,
    unfit_for_redis,
    weight,
)

DEFAULT_QUEUE: Final = "default"
SCHEME: Final = "bull+"

LOOK_SECONDS: Final = 1.0
"""How long a waiter relies on being woken: Node does not always announce a job."""


class BullStorage(BullReading):
    """One queue of Bull 1.x on Redis 6.2 or newer, or Valkey.

    `target` is a URL (`redis://`, `rediss://`, `unix://`, or Sentinels' as in `redis_urls`, each also with `bull+` in
    front) or a client. A client's settings are used, and its connections are left alone. A URL may name the queue by
    `?queue=`, and the dialect by `&dialect=`; the arguments have precedence. `dialect` says what the oldest Node
    process on the queue runs: "C", the default, is Bull 1.1, "B" 1.0 from rc4 on, "A" older. `grace` is how long a job
    that Node took must be seen without a lock before it is recovered; its default depends on the dialect. `prefix` is
    Bull's. `timeout` is how long the server may be silent in a call; then the method raises `StorageUnavailable`.
    `allow_eviction`: as on `RedisStorage`.

    Ids that Bull would confuse are refused with `Unsupported`: names of its keys and locks, and numbers, which its
    counter gives out. Beside A and B it is the other way round: ids are decimal numbers below 2^53, as Node reads them.
    `next_id` has one for every dialect. The server's clock decides what is due, and Node's clock for what Node delays
    or promotes. An id that is in no line of the queue, as Bull's own pause may leave one, reads as queued:
    `stranded` finds such jobs, and `repair` queues them.

    `enqueue` takes a `BullJob` for what the contract cannot express: a time limit per run, and last in, first out.

    Raises:
        StorageError: a target that is no Redis URL, or has an unknown dialect.
        ValueError: an unknown dialect.
    """

    ids_at_once = 50  # each id is searched for along the whole line
    capabilities = Capabilities(
        clock="server",
        durable=None,
        works_when_full=False,
        processes="many",
        wakeup_latency=timedelta(seconds=LOOK_SECONDS),
        any_id=False,
        name_filter=False,
        ordering_keys=False,
        deduplication=False,
        dependencies=False,
        priority_order=False,
        urgent_priorities=False,
        results_told=False,
        longest_delay=LONGEST_DELAY,
        fresh_retries=False,
        recovery_interval=RECOVERY_INTERVAL,
        farewells=True,
        cancelled_apart=False,
    )

    _quarantine: BullQuarantine

    def __init__(
        self,
        target: str | Redis,
        queue: str = DEFAULT_QUEUE,
        *,
        dialect: Dialect | None = None,
        prefix: str = "bull",
        grace: timedelta | None = None,
        timeout: timedelta = timedelta(seconds=5),
        allow_eviction: bool = False,
    ) -> None:
        if isinstance(target, str):
            target, allowed = take_eviction(target)
            allow_eviction = allow_eviction or allowed
            target, named = parse_url(target.removeprefix(SCHEME))
            queue = named if named and queue == DEFAULT_QUEUE else queue
            target, spoken = take_parameter(target, "dialect")
            dialect = dialect or _spoken(spoken)
            _refuse_cluster(target)
        check_text("queue name", queue)
        self._dialect = known_dialect(dialect or "C")
        base = f"{prefix}:{queue}:".encode()
        care = Care(allow_eviction=allow_eviction, channel=base + b"workers:seen")
        server = RedisServer(target, timeout, base=base, scripts=loaded_scripts, text=False, care=care)
        self._lua = BullScripts(server, base, queue, self._dialect)
        self._quarantine = BullQuarantine(self._lua, self._dialect, self.enqueue, self.next_id)
        self._stranded = StrandedJobs(self._lua)
        grace = GRACES[self._dialect] if grace is None else grace
        self._recoverer = Recoverer(self._lua, self._quarantine, self._dialect, grace)
        self.capabilities = replace(self.capabilities, chosen_ids=self._dialect == "C")
        super().__init__(queue, allow_eviction=allow_eviction)
        self._ownership = Ownership(partial(self._lua.run, "owner"))

    def __repr__(self) -> str:
        return f"BullStorage(queue={self._name!r}, dialect={self._dialect!r})"

    async def _look(self, names: Collection[str]) -> float | None:
        changes_in_ms = await self._lua.run("look")
        if changes_in_ms is None:
            return None
        seconds = float(changes_in_ms) / 1_000  # infinite for some scores that another program may write
        return min(seconds, LOOK_SECONDS) if seconds >= 0 else LOOK_SECONDS

    def _held(self, claim: Claim) -> tuple[bytes, bytes, int]:
        return self._raw(claim), codec.token_of(claim), lease_ms(claim.lease)

    async def connect(self) -> None:
        """See `Storage.connect`.

        Raises:
            ForeignQueue: Bull 3, a newer one or BullMQ uses the queue.
        """
        await super().connect()
        try:
            await self._ownership.check()
        except BaseException:
            await self._server.close()
            raise

    def forget_loop(self) -> None:
        super().forget_loop()
        self._ownership.forget()

    # Jobs

    async def next_id(self) -> str:
        """Return an id that no other job of the queue gets.

        Beside A and B it is a number, as Bull's own producers use.
        """
        if self._dialect == "C":
            return new_id()
        [number] = await self._server.run([("INCR", self._lua.base + b"id")])
        if isinstance(number, StorageError):
            raise number
        return str(number)

    async def enqueue(self, jobs: Sequence[NewJob], *, connection: object | None = None) -> list[EnqueueResult]:
        """See `Storage.enqueue`; a batch of more than 1 000 jobs or 64 MiB is sent in portions."""
        refuse_transaction(connection, "BullStorage")
        refuse_deduplication(jobs, "BullStorage")
        refuse_dependencies(jobs, "BullStorage")
        for job in jobs:
            check_fits_redis(job.id, job.payload)
        encoded = [codec.encode_job(job, self._dialect) for job in jobs]  # before any is sent: it may raise
        await self._ownership.check_now_and_then()
        results: list[EnqueueResult] = []
        pairs = list(zip(jobs, encoded, strict=True))
        for some in portions(pairs, lambda pair: len(pair[0].payload)):
            answer = unpack(await self._lua.run("enqueue", pack([one for _, one in some])))
            for (job, _), found in zip(some, answer, strict=True):
                if found == [0]:
                    raise StorageError(f"job {job.id!r}: its key in Redis holds something else; remove that")
                results.append(codec.enqueue_result(job, found))
        return results

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `ScriptedStorage.claim`.

        The names cannot be chosen; a job with a name that is not in `leases` gets the longest of them.
        """
        if leases:
            await self._ownership.check_now_and_then()
        return await super().claim(worker_id, leases=leases, limit=limit)

    async def _run_claim(self, arguments: tuple[str | bytes | int, ...]) -> Reply:
        return await self._quarantine.run("claim", *arguments)

    def _claiming(
        self, worker_id: str, leases: Mapping[str, timedelta], limit: int
    ) -> tuple[tuple[str | bytes | int, ...], Callable[[Reply], Sequence[BullClaim]]]:
        wanted: list[object] = [lease_ms(leases.get(ANY_NAME) or max(leases.values()))]
        for name, lease in leases.items():
            wanted += (name.encode(), lease_ms(lease))
        head = os.urandom(TOKEN_HEAD_BYTES)
        arguments = worker_id.encode(), head.hex(), min(limit, AT_ONCE), pack(wanted)
        return arguments, partial(self._claims, worker_id, head)

    def _claims(self, worker_id: str, head: bytes, reply: Reply) -> Sequence[BullClaim]:
        answer, dropped, told = reply
        report_dropped(self._name, dropped)
        self._quarantine.heed(told)
        return list(codec.decode_claims(worker_id, head, self._dialect, answer))

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        if self._ownership.is_foreign:
            return Exchange(outcomes=await self.settle(settlements))
        return await super().settle_and_claim(settlements, worker_id, leases=leases, limit=limit)

    def with_node_options(self, job: NewJob, options: Mapping[str, object]) -> NewJob:
        """See `bull_job`."""
        return bull_job(job, options)

    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        refuse_transaction(connection, "BullStorage")
        outcomes: list[SettleOutcome] = []
        for some in portions(settlements, weight):
            encoded, outcomes_of = self._settling(some)
            codes = unpack(await self._lua.run("settle", pack(encoded), UNCOUNTED_RETRIES)) if encoded else ()
            outcomes += outcomes_of(codes)
        return outcomes

    def _settling(self, settlements: Sequence[Settlement]) -> Settling:
        faults: list[SettleOutcome | None] = []
        encoded: list[Sequence[object]] = []
        for settlement in settlements:
            fault = unfit_for_redis(settlement)
            try:
                if fault is None:
                    encoded.append(codec.encode_settlement(settlement, self._raw(settlement.claim), self._dialect))
            except Unsupported as error:
                fault = SettleOutcome(status=SettleStatus.ERROR, detail=str(error))
            faults.append(fault)
        return encoded, partial(outcomes_of_codes, faults)

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        for some in portions(reports):
            values = [(codec.shown_progress(one.value), one.value) for one in some]
            packed = [(*self._held(one.claim)[:2], *value) for one, value in zip(some, values, strict=True)]
            await self._lua.run("progress", pack(packed))

    async def recover(self, limit: int, *, max_stalls: int = 3) -> Recovery:
        await self.examine()
        await self._ownership.check_now_and_then()
        return await self._recoverer.recover(limit, max_stalls)

    async def cancel(self, job_id: str) -> CancelResult:
        return cancel_result(await self._lua.run("cancel", self._names(job_id), *codec.encode_cancel(job_id)))

    def _names(self, job_id: str) -> bytes:
        packed: bytes = pack(raw_ids(job_id, self._dialect))
        return packed

    def _raw(self, claim: Claim) -> bytes:
        if not isinstance(claim, BullClaim):
            raise StorageError(f"job {claim.job_id!r}: this claim was made by another storage")
        return claim.raw(self._dialect)

    async def retry(self, ids: Sequence[str]) -> Moved:
        """See `Storage.retry`; attempts count on, as in Bull.

        Raises:
            JobLockedError: another program has the locks of some, which are not queued.
        """
        return await self._unless_locked("retry", ids)

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        """See `Storage.remove`.

        Raises:
            JobLockedError: without `running`: another program has the locks of some that wait or have ended, which are
                not removed.
        """
        refuse_transaction(connection, "BullStorage")
        return await self._unless_locked("remove", ids, int(running))

    async def _unless_locked(self, script: str, ids: Sequence[str], *how: int) -> Moved:
        done, locked = list[str](), list[str]()
        for some in portions(ids, at_once=self.ids_at_once):
            places, refused = unpack(await self._lua.run(script, self._packed_ids(some), *how))
            done += [some[place - 1] for place in places]
            locked += [codec.decode_id(raw) for raw in refused]
        if locked:
            raise JobLockedError(locked, len(done))
        return Moved(done)

    async def complete(
        self, job_id: str, result: bytes, *, keep: Retention | None = None, connection: object | None = None
    ) -> JobState | None:
        refuse_transaction(connection, "BullStorage")
        check_fits_redis(job_id, result)
        returnvalue, exact = codec.encode_result(result)
        kept = "" if keep is None else keep_ms(keep)
        least = keep_ms(LEAST_TO_READ) if len(result) > TOLD_BYTES else 0
        return STATES.get(await self._lua.run("complete", self._names(job_id), returnvalue, exact or b"", kept, least))

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        """See `Repairable.repair`; jobs that are in no line are queued again, too."""
        return [*await super().repair(drop=drop), *await self._stranded.requeue()]

    async def stranded(self) -> Sequence[str]:
        return await self._stranded.find()

    async def update_result_ttl(self, job_id: str, ttl: timedelta) -> bool:
        check_retention(ttl)
        return bool(await self._lua.run("keep", self._names(job_id), keep_ms(ttl)))


def _spoken(dialect: str | None) -> Dialect | None:
    try:
        return None if dialect is None else known_dialect(dialect)
    except ValueError as error:
        raise StorageError(f"not the URL of a Bull queue: {error}") from None


def _refuse_cluster(url: str) -> None:
    deployment = read_deployment(url)
    if deployment is not None and deployment.is_cluster:
        raise StorageError("Bull's keys carry no hash tags, so its queues cannot be on a Redis Cluster")


def server_url(url: str) -> str:
    """Return the URL of the Redis server under the storage that `url` names, as redis-py takes it."""
    server, _ = parse_url(url.removeprefix(SCHEME))
    return take_parameter(server, "dialect")[0]
