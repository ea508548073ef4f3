"""The verbs of producers and operators on BullMQ's structures: enqueue, cancel, retry, remove, complete, promote.

Theory of operation. BullMQ's adding scripts never add an id twice; an EXISTS just before, in the same transaction,
tells whether they added it. BullMQ has no script for some steps (a new generation of a failed id, cancelling). They
look at the job and act under WATCH of its hash and its lock: every script that moves a job changes one of the two.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from workers.errors import StorageError, Unsupported
from workers.jobs import DROP, CancelResult, EnqueueResult, EnqueueStatus, JobState, Moved, NewJob, Retention
from workers.retention import chosen_for_waiters
from workers.storage.bullmq.access import QueuePart, meant
from workers.storage.bullmq.codec import (
    CANCEL_FIELD,
    FAILURES_FIELD,
    KEEP_FIELD,
    SETTLED_FIELD,
    STOPPED_FIELD,
    UNCOUNTED_FIELD,
    BullMQJob,
    decode_id,
    encode_id,
    encode_options,
    keep_jobs,
    raw_ids,
)
from workers.storage.bullmq.ends import go_on, stop
from workers.storage.bullmq.listener import CANCEL_REQUESTED_EVENT
from workers.storage.bullmq.record import STATE_FIELDS, BullMQRecord, cancelled_run, reading, record
from workers.storage.bullmq.scripts import CANCELLED, Finish
from workers.storage.bullmq.server import Contended, Reply
from workers.storage.on_redis.errors import checked
from workers.storage.on_redis.node_values import ERROR_FIELD, decode_bytes, encode_bytes, to_ms
from workers.storage.on_redis.wire import Command
from workers.storage.rules import STARTS_ANEW, check_fits_redis, link_is_over

TRANSACTION_JOBS: Final = 500
"""How many jobs are added in one transaction at most; the server serves nobody else meanwhile: about 10 ms."""
EVENTS_KEPT: Final = 10_000
"""The length of the event stream, BullMQ's default."""
CHANGED_TOGETHER: Final = 20
"""How many jobs are changed in one transaction at most. More would make it likelier that a worker moves one of them
meanwhile, and would keep the server longer from everybody else: it takes some milliseconds to find a job in the middle
of a million that wait.
"""
ROUNDS_TOGETHER: Final = 3
REMOVED_TOGETHER: Final = 5_000
"""How many waiting jobs one script removes at most; the server serves nobody else meanwhile: a tenth of a
second, and about a second in a list of a million. Smaller steps would walk the list more often.
"""
LOOKED_FOR_TOGETHER: Final = 1_000
REQUESTS_KEPT_MS: Final = 3_600_000
REQUESTS_KEPT: Final = 1_000
"""The length of our stream of cancel requests. It is no less than a page of events, because a full page tells workers
that they may have missed some.
"""

NO_ORDERING_KEYS: Final = "BullMQ has no ordering, limit or fair keys; see BullMQStorage.capabilities"
NO_DEPENDENCIES: Final = "BullMQ lets no job follow others; see BullMQStorage.capabilities"
NO_URGENT_PRIORITIES: Final = "BullMQ has no priority above 0; see BullMQStorage.capabilities"
WAITING: Final = frozenset({JobState.QUEUED, JobState.SCHEDULED, JobState.WAITING, JobState.FAILING})


def unknown_to_bullmq(job: NewJob) -> str | None:
    """Return what BullMQ has no word for in the job; None if it has words for all."""
    if job.follows:
        return NO_DEPENDENCIES
    if job.holding_key is not None:
        return NO_ORDERING_KEYS
    return NO_URGENT_PRIORITIES if job.priority < 0 else None


def _is_plain(job: NewJob) -> bool:
    """Tell whether the job has nothing that another script of BullMQ's is for."""
    return not (isinstance(job, BullMQJob) or job.delay or job.priority)


def refuse_unknown_to_bullmq(job: NewJob) -> None:
    """Accept jobs that BullMQ can express.

    Raises:
        Unsupported: it has jobs to follow, an ordering, limit or fair key, or a priority above 0.
    """
    if (what := unknown_to_bullmq(job)) is not None:
        raise Unsupported(f"job {job.id!r}: {what}")


class Jobs(QueuePart):
    """The part of a BullMQ storage that changes jobs which no worker runs."""

    async def enqueue(self, jobs: Sequence[NewJob], *, confirmed: bool = True) -> list[EnqueueResult]:
        """See `Storage.enqueue`; without `confirmed` replicas are not waited for."""
        for job in jobs:
            check_fits_redis(job.id, job.payload)
            refuse_unknown_to_bullmq(job)
        results: list[EnqueueResult] = []
        for start in range(0, len(jobs), TRANSACTION_JOBS):
            results += await self._add(jobs[start : start + TRANSACTION_JOBS], confirmed)
        return results

    async def _add(self, jobs: Sequence[NewJob], confirmed: bool) -> list[EnqueueResult]:
        now_ms = self._queue.now_ms()
        if all(map(_is_plain, jobs)):
            answers: Sequence[Sequence[Reply]] = await self._add_plain(jobs, now_ms, confirmed)
        else:
            units: list[tuple[Command, ...]] = [
                (("EXISTS", self._lua.job(raw)), self._insertion(job, raw, now_ms))
                for job, raw in ((job, encode_id(job.id)) for job in jobs)
            ]
            answers = await self._queue.server.run_atomic(units, confirmed=confirmed)
        results: list[EnqueueResult] = []
        for job, (existed, added) in zip(jobs, answers, strict=False):
            if isinstance(added, StorageError):
                raise added
            results.append(await self._add_again(job, confirmed) if existed else await self._added(job, added))
        return results

    async def _add_plain(self, jobs: Sequence[NewJob], now_ms: int, confirmed: bool) -> list[Sequence[Reply]]:
        """Add the jobs by one script, and return for each whether it was there before, and the answer."""
        raws = ((job, encode_id(job.id)) for job in jobs)
        parts = ((raw, job.name, encode_bytes(job.payload), encode_options(job, raw)) for job, raw in raws)
        [reply] = await self._queue.server.run([self._lua.add_many(parts, now_ms)], confirmed=confirmed)
        if isinstance(reply, StorageError):
            raise reply
        return list(zip(reply[::2], map(checked, reply[1::2]), strict=True))

    async def _added(self, job: NewJob, answer: Reply) -> EnqueueResult:
        """Return what the script's answer means: the job's id, that of the job with its key, or an error code."""
        if isinstance(answer, int) and answer < 0:
            raise StorageError(f"job {job.id!r}: its parent in the flow does not exist (code {answer})")
        if not isinstance(job, BullMQJob) or str(answer) == encode_id(job.id):
            return _queued(job)
        [other] = await self._queue.records([str(answer)], self._queue.now_ms())
        return EnqueueResult(id=decode_id(other.raw), status=EnqueueStatus.DUPLICATE, existing_state=other.state)

    def _insertion(self, job: NewJob, raw: str, now_ms: int) -> Command:
        created_ms, parent = now_ms, None
        if isinstance(job, BullMQJob):
            created_ms, parent = now_ms if job.created_ms is None else job.created_ms, job.parent
        return self._lua.add(raw, job.name, encode_bytes(job.payload), encode_options(job, raw), created_ms, parent)

    async def _add_again(self, job: NewJob, confirmed: bool) -> EnqueueResult:
        """Insert a new generation of an id that may have one, or has just gone, or return what is in the way."""
        raw, by_answer = encode_id(job.id), isinstance(job, BullMQJob)  # which BullMQ may refuse, or take for another

        def decide(found: BullMQRecord) -> list[Command]:
            if found.state is not None and found.state not in STARTS_ANEW:
                return []
            gone = self._removal(found) if found.fields else ()
            return [*gone] if by_answer else [*gone, self._insertion(job, raw, self._queue.now_ms())]

        found = await self._change(raw, decide, confirmed=confirmed)
        if found.state is JobState.COMPLETED:
            result = decode_bytes(found.fields.get("returnvalue", "null"))
            return EnqueueResult(id=job.id, status=EnqueueStatus.COMPLETED, existing_state=found.state, result=result)
        if found.state is None or found.state in STARTS_ANEW:
            return await self._add_in_place(job, raw) if by_answer else _queued(job)
        return EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=found.state)

    async def _add_in_place(self, job: NewJob, raw: str) -> EnqueueResult:
        """Insert a job where there is none any more, and heed what the script says."""
        insertion = (("EXISTS", self._lua.job(raw)), self._insertion(job, raw, self._queue.now_ms()))
        [(existed, added)] = await self._queue.server.run_atomic([insertion])
        if isinstance(added, StorageError):
            raise added
        if not existed:
            return await self._added(job, added)
        [found] = await self._queue.records([raw], self._queue.now_ms())
        return EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=found.state)

    async def cancel(self, job_id: str) -> CancelResult:
        """See `Storage.cancel`."""
        [first] = await self._queue.find([job_id])
        raw = first.raw

        def decide(found: BullMQRecord) -> list[Command]:
            if found.state is JobState.PROCESSING:
                run = cancelled_run(found.fields.get("ats"), found.fields.get("stc"))
                return [("HSET", self._lua.job(raw), CANCEL_FIELD, run), *self._requests_cancel(raw)]
            if found.state not in WAITING:
                return []
            _check_unscheduled(job_id, found)
            return self._cancellation(found)

        state = (await self._change(raw, decide)).state
        if state is None:
            return CancelResult.NOT_FOUND
        return CancelResult.CANCELLED if state in WAITING else CancelResult(state.value)

    def _cancellation(self, found: BullMQRecord) -> list[Command]:
        """Return the commands that cancel a job.

        BullMQ fails active jobs only, and counts an attempt for each.
        """
        token = secrets.token_hex(8)
        no_attempt: Command = ("HINCRBY", self._lua.job(found.raw), "atm", -1)
        ended_ms, was = self._queue.server_ms(), found.place
        ending = stop(self._lua, found.raw, token, keep=None, options=found.options, now_ms=ended_ms, was=was)
        return [no_attempt, *self._lua.take(found.raw, token), ending]

    def _removal(self, found: BullMQRecord) -> list[Command]:
        noted = found.state is JobState.CANCELLED
        return [*self._lua.remove(found.raw), *([("ZREM", self._lua[CANCELLED], found.raw)] if noted else [])]

    def _requests_cancel(self, raw: str) -> list[Command]:
        key = self._queue.cancels_key
        for_workers: Command = ("XADD", key, "MAXLEN", "~", REQUESTS_KEPT, "*")
        event = ("event", CANCEL_REQUESTED_EVENT, "jobId", raw)
        forgotten: Command = ("PEXPIRE", key, REQUESTS_KEPT_MS)
        return [self._event(CANCEL_REQUESTED_EVENT, raw), (*for_workers, *event), forgotten]

    async def retry(self, ids: Sequence[str]) -> Moved:
        """See `Storage.retry`."""
        marks = (UNCOUNTED_FIELD, CANCEL_FIELD, SETTLED_FIELD, STOPPED_FIELD, ERROR_FIELD, KEEP_FIELD, FAILURES_FIELD)

        def plan(found: BullMQRecord) -> list[Command]:
            again = self._lua.reprocess(found.raw)
            forgotten: Command = ("HDEL", self._lua.job(found.raw), "stc", "progress", *marks)
            return [again, forgotten, ("ZREM", self._lua[CANCELLED], found.raw)]

        return Moved(await self._change_each(ids, lambda found: found.state in STARTS_ANEW, plan))

    async def remove(self, ids: Sequence[str], *, running: bool) -> int:
        """See `Storage.remove`."""
        removed = await self._remove_waiting(ids)
        spared = (None,) if running else (None, JobState.PROCESSING)

        def plan(found: BullMQRecord) -> list[Command]:
            told = self._requests_cancel(found.raw) if found.state is JobState.PROCESSING else []
            return [*self._removal(found), *told]

        def wanted(found: BullMQRecord) -> bool:
            return found.state not in spared and "rjk" not in found.fields

        others = [job_id for job_id in ids if job_id not in removed]
        return len(removed) + len(await self._change_each(others, wanted, plan))

    async def _remove_waiting(self, ids: Sequence[str]) -> set[str]:
        """Remove the jobs of a backlog, without a look at each; return which of them are gone.

        Those that another producer has stored under an id that we encode are not among them.
        """
        places = {raw_ids(job_id)[0]: job_id for job_id in ids}
        raws, removed = [*places], set[str]()
        for start in range(0, len(raws), REMOVED_TOGETHER):
            command = self._lua.remove_waiting(raws[start : start + REMOVED_TOGETHER])
            [gone] = await self._queue.server.run([command], confirmed=True)
            if isinstance(gone, StorageError):
                raise gone
            removed.update(places[raw] for raw in gone)
        return removed

    async def complete(self, job_id: str, result: bytes, keep: Retention | None) -> JobState | None:
        """See `Storage.complete`."""
        return await self._end(job_id, lambda found: self._completion(found, result, keep))

    async def continue_job(self, then: NewJob) -> JobState | None:
        """See `ContinuesFromOutside.continue_job`."""
        refuse_unknown_to_bullmq(then)
        check_fits_redis(then.id, then.payload)

        def plan(found: BullMQRecord) -> list[Command]:
            if then.chain_index != found.options.chain_index + 1:
                raise link_is_over(then.id)
            token, now_ms = secrets.token_hex(8), self._queue.now_ms()
            taken = self._lua.take(found.raw, token)
            return [*taken, go_on(self._lua, found.raw, token, then, found.options, now_ms)]

        return await self._end(then.id, plan)

    async def _end(self, job_id: str, plan: Callable[[BullMQRecord], list[Command]]) -> JobState | None:
        """Carry out the plan for the unfinished job, from outside of any attempt, and return the state it was in."""
        [first] = await self._queue.find([job_id])
        key, now_ms = self._lua.job(first.raw), self._queue.now_ms()
        unfinished, unsuccessful = f"{key}:dependencies", f"{key}:unsuccessful"

        def decide(replies: list[Reply]) -> list[Command]:
            found = record(first.raw, replies[:-2], now_ms)
            if found.state is not JobState.PROCESSING and found.state not in WAITING:
                return []
            _check_unscheduled(job_id, found)
            if found.place == "waiting-children" or any(replies[-2:]):  # BullMQ would refuse it, after `take`
                raise StorageError(f"job {job_id!r} waits for its children in a BullMQ flow; complete those")
            told = self._requests_cancel(found.raw) if found.state is JobState.PROCESSING else []
            return [*told, *plan(found)]

        reads: list[Command] = [*reading(self._lua, first.raw), ("SCARD", unfinished), ("ZCARD", unsuccessful)]
        watched = (key, self._lua.lock(first.raw), unfinished, unsuccessful)
        return record(
            first.raw, (await self._queue.server.transact(watched, reads, decide, confirmed=True))[:-2], now_ms
        ).state

    def _completion(self, found: BullMQRecord, result: bytes, keep: Retention | None) -> list[Command]:
        """Return the commands that complete a job.

        BullMQ finishes active jobs only, and counts an attempt for each.
        """
        token = secrets.token_hex(8)
        fields: dict[str, object] = {SETTLED_FIELD: token}
        keep = chosen_for_waiters(result, keep, found.options.keep_completed)
        if keep is not None and keep is not DROP:
            fields[KEEP_FIELD] = str(to_ms(keep))
        ending = Finish(
            raw=found.raw,
            token=token,
            target="completed",
            value=encode_bytes(result),
            keep=keep_jobs(keep, found.options.remove_on_complete),
            max_attempts=found.options.max_attempts,
            fields=fields,
        )
        finish = self._lua.finish(ending, self._queue.server_ms())
        no_attempt: Command = ("HINCRBY", self._lua.job(found.raw), "atm", -1)
        uncounted = [] if found.state is JobState.PROCESSING else [no_attempt]
        return [*uncounted, *self._lua.take(found.raw, token), finish]

    async def promote(self, ids: Sequence[str]) -> int:
        """See `Storage.promote`."""
        waits = (JobState.SCHEDULED, JobState.FAILING)
        promoted = await self._change_each(
            ids,
            lambda found: found.state in waits and found.place == "delayed",
            lambda found: [self._lua.promote(found.raw)],
        )
        return len(promoted)

    async def _change_each(
        self,
        ids: Sequence[str],
        wanted: Callable[[BullMQRecord], bool],
        plan: Callable[[BullMQRecord], Sequence[Command]],
    ) -> list[str]:
        """Carry out the plan for each job that is `wanted`, judged by `STATE_FIELDS`; return which there were."""
        ids, changed = await self._existing(ids), list[str]()
        for start in range(0, len(ids), CHANGED_TOGETHER):
            some = ids[start : start + CHANGED_TOGETHER]
            try:
                changed += await self._change_together(some, wanted, plan)
            except Contended:
                changed += await self._change_one_by_one(some, wanted, plan)
        return changed

    async def _existing(self, ids: Sequence[str]) -> Sequence[str]:
        """Return those ids that have a job, which may be few among many old ones."""
        found: list[str] = []
        for start in range(0, len(ids), LOOKED_FOR_TOGETHER):
            some = ids[start : start + LOOKED_FOR_TOGETHER]
            keys = [[self._lua.job(raw) for raw in raw_ids(job_id)] for job_id in some]
            replies = await self._queue.server.run([("EXISTS", *each) for each in keys])
            found += [job_id for job_id, reply in zip(some, replies, strict=True) if reply]
        return found

    async def _change_together(
        self,
        ids: Sequence[str],
        wanted: Callable[[BullMQRecord], bool],
        plan: Callable[[BullMQRecord], Sequence[Command]],
    ) -> list[str]:
        """Do the same as `_change_each`, in one transaction.

        Raises:
            Contended: other clients keep changing these jobs; nothing has changed here.
        """
        now_ms = self._queue.server_ms()
        candidates = [raw_ids(job_id) for job_id in ids]
        raws = list(dict.fromkeys(raw for group in candidates for raw in group))
        read = [reading(self._lua, raw, STATE_FIELDS) for raw in raws]
        chosen: list[BullMQRecord] = []

        def decide(replies: list[Reply]) -> Sequence[Command]:
            parts = zip(*[iter(replies)] * len(read[0]), strict=True)
            found = {raw: record(raw, part, now_ms, STATE_FIELDS) for raw, part in zip(raws, parts, strict=True)}
            each = {one.raw: one for one in (meant([found[raw] for raw in group]) for group in candidates)}
            chosen[:] = [one for one in each.values() if wanted(one)]
            return [command for one in chosen for command in plan(one)]

        watched = [key for raw in raws for key in (self._lua.job(raw), self._lua.lock(raw))]
        commands = [command for each in read for command in each]
        await self._queue.server.transact(watched, commands, decide, rounds=ROUNDS_TOGETHER, confirmed=True)
        return [decode_id(one.raw) for one in chosen]

    async def _change_one_by_one(
        self,
        ids: Sequence[str],
        wanted: Callable[[BullMQRecord], bool],
        plan: Callable[[BullMQRecord], Sequence[Command]],
    ) -> list[str]:
        changed: list[str] = []
        for raw in dict.fromkeys(found.raw for found in await self._queue.find(ids) if wanted(found)):
            found = await self._change(raw, lambda found: plan(found) if wanted(found) else [])
            changed += [decode_id(raw)] if wanted(found) else []
        return changed

    async def _change(
        self, raw: str, decide: Callable[[BullMQRecord], Sequence[Command]], *, confirmed: bool = True
    ) -> BullMQRecord:
        """Carry out what `decide` returns for the job, and return the job as it was then."""
        now_ms = self._queue.server_ms()

        def decide_on(replies: list[Reply]) -> Sequence[Command]:
            return decide(record(raw, replies, now_ms))

        watched = (self._lua.job(raw), self._lua.lock(raw))
        read = reading(self._lua, raw)
        return record(raw, await self._queue.server.transact(watched, read, decide_on, confirmed=confirmed), now_ms)

    def _event(self, name: str, raw: str) -> Command:
        return "XADD", self._lua["events"], "MAXLEN", "~", EVENTS_KEPT, "*", "event", name, "jobId", raw


def _check_unscheduled(job_id: str, found: BullMQRecord) -> None:
    """Refuse a run of a Node job scheduler: the schedule would end with it."""
    if "rjk" in found.fields:
        raise StorageError(f"job {job_id!r} belongs to a BullMQ job scheduler; remove the scheduler instead")


def _queued(job: NewJob) -> EnqueueResult:
    return EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
