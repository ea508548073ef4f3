"""Claim, renew, settle and recover on BullMQ's structures.

Theory of operation. A claim is BullMQ's lock: a string with our token that expires with the lease. Each verb is one
pipeline of BullMQ's scripts, each of which is atomic. What a script refuses (a negative code) is looked at again with a
second pipeline, which is rare. BullMQ considers a claim lost when its lock has expired, even if nobody has recovered
the job. Our contract does not, so such a claim gets its lock back, under WATCH, and the settlement is repeated.

Most of what a call of a script costs the server does not depend on how many jobs it is about. So one call claims many,
and what completes or fails travels with the claims that follow.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Final

from workers.clock import monotonic
from workers.errors import LossReason, StorageDamaged, StorageError, StorageUnavailable, WorkersError
from workers.jobs import (
    Claim,
    Completed,
    Continued,
    LogLine,
    NewJob,
    ProgressReport,
    Recovery,
    Released,
    Renewal,
    Settlement,
    SettleOutcome,
    SettleStatus,
    Suspended,
)
from workers.storage.abilities import Exchange
from workers.storage.bullmq.access import READ_AT_ONCE, QueueAccess
from workers.storage.bullmq.codec import (
    CANCEL_FIELD,
    decode_id,
)
from workers.storage.bullmq.ends import NO_CHILD_LEFT, Endings, code_outcome
from workers.storage.bullmq.jobs import unknown_to_bullmq
from workers.storage.bullmq.quarantine import BullMQQuarantine
from workers.storage.bullmq.record import (
    BullMQClaim,
    BullMQRecord,
    cancelled_run,
    loss,
    make_claim,
    own_claim,
    reading,
    record,
    still_holds,
    verdict,
)
from workers.storage.bullmq.schedulers import Schedules
from workers.storage.bullmq.scripts import Finish, Wanted
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.claiming import claimed, exchanged
from workers.storage.on_redis.errors import checked
from workers.storage.on_redis.node_values import encode_bytes, to_ms
from workers.storage.on_redis.wire import Command
from workers.storage.rules import unfit_for_redis
from workers.storage.unread import Unread

JOBS_A_SCRIPT: Final = 100
"""How many jobs one call claims or ends at most; the server serves nobody else meanwhile."""


def new_tokens(worker_id: str) -> str:
    """Return what the tokens of claims that are made together begin with."""
    return f"{worker_id}:{secrets.token_hex(8)}"


def lock_ms(lease: timedelta) -> int:
    """Return how many milliseconds a lock lasts: at least one, because Redis refuses a shorter one."""
    return max(1, to_ms(lease))


class Ride:
    """Claims that travel with settlements: what is wanted, and what has arrived."""

    def __init__(self, worker_id: str, longest: timedelta, limit: int, now_ms: int) -> None:
        self.worker_id = worker_id
        self.wanted = Wanted(count=limit, now_ms=now_ms, tokens=new_tokens(worker_id), lock_ms=lock_ms(longest))
        self.taken: Mapping[str, Reply] = {}
        self.arrived = False

    def arrive(self, replies: Sequence[Reply] | None) -> None:
        """Note what `end` brought; an error of a claim is for the next plain claim to meet."""
        if replies is not None:
            self.taken, failure = claim_answers(self.wanted.tokens, replies)
            self.arrived = failure is None or bool(self.taken)


def claiming(queue: QueueAccess, tokens: str, lasts_ms: int, count: int) -> list[Command]:
    """Return the commands that claim up to `count` jobs; `claim_answers` takes their replies."""
    now_ms = queue.now_ms()
    return [
        queue.lua.claim(tokens, lasts_ms, now_ms, count=min(count - first, JOBS_A_SCRIPT), first=first)
        for first in range(0, count, JOBS_A_SCRIPT)
    ]


def claim_answers(tokens: str, replies: Sequence[Reply]) -> tuple[dict[str, Reply], StorageError | None]:
    """Return the answers of `moveToActive` that have a job, by the token that holds it, and the first error."""
    found: dict[str, Reply] = {}
    failure: StorageError | None = None
    for call, reply in enumerate(replies):
        answers = map(checked, reply) if isinstance(reply, list) else [reply]
        for at, answer in enumerate(answers, call * JOBS_A_SCRIPT):
            if isinstance(answer, StorageError):
                failure = failure or answer
            elif isinstance(answer[0], list):
                found[f"{tokens}{at:x}"] = answer
    return found, failure


async def end(
    queue: QueueAccess, endings: Sequence[Finish | Command], wanted: Wanted | None = None, *more: Command
) -> tuple[list[Reply], list[Reply] | None]:
    """End attempts as these say, and claim what is `wanted` in the step that ends the last of them.

    Returns what BullMQ's scripts answer to each ending, a code or an error in its place, and what `claim_answers`
    takes; None if nothing was claimed, because it takes a look of `guard` before. `more` is run as well.
    """
    finished = [(at, one) for at, one in enumerate(endings) if isinstance(one, Finish)]
    others = [(at, one) for at, one in enumerate(endings) if not isinstance(one, Finish)]
    groups = [finished[first : first + JOBS_A_SCRIPT] for first in range(0, len(finished), JOBS_A_SCRIPT)]
    now_ms = queue.server_ms()
    exchanges = [queue.lua.exchange([one for _, one in group], now_ms) for group in groups[:-1]]
    if groups or wanted is not None:
        exchanges.append(queue.lua.exchange([one for _, one in groups[-1]] if groups else [], now_ms, wanted))
    commands = [*more, *(command for _, command in others), *exchanges]
    replies = (await queue.server.run(commands, confirmed=True))[len(more) :]
    codes = {at: code for (at, _), code in zip(others, replies, strict=False)}
    exchanged = replies[len(others) :]
    for group, reply in zip(groups, exchanged, strict=False):
        codes.update(zip((at for at, _ in group), _answers(reply, len(group)), strict=True))
    tried = wanted is not None and isinstance(exchanged[-1], list) and exchanged[-1][2] == 1
    return [codes[at] for at in range(len(endings))], [exchanged[-1][1]] if tried else None


def _answers(reply: Reply, jobs: int) -> list[Reply]:
    """Return the answers in the reply of a script; an error of all of it counts for each of its jobs."""
    return list(map(checked, reply[0])) if isinstance(reply, list) else [reply] * jobs


GUARD_SECONDS: Final = 10.0
"""How long plain claims do without a look of `guard`, which takes longer than they do.

They check what they take, as the claims that travel with settlements do. The look also finds what no claim meets.
"""
CLAIMED_AT_ONCE: Final = 1_000
"""How many jobs are asked for in one round trip at most."""


class Claims:
    """The part of a BullMQ storage that workers and reapers use."""

    def __init__(
        self, queue: QueueAccess, enqueue: Callable[[Sequence[NewJob]], Awaitable[object]], quarantine: BullMQQuarantine
    ) -> None:
        self._queue = queue
        self._quarantine = quarantine
        self._enqueue = enqueue
        self._lua = queue.lua
        self._schedules = Schedules(queue)
        self._endings = Endings(queue)
        self._unread = Unread[str]()
        self._guarded_until = 0.0  # by this process's clock

    async def claim(self, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `Storage.claim`; if it is cancelled meanwhile, what it claimed is released.

        The names cannot be chosen; a job with a name that is not in `leases` gets the longest of them.
        An error may be about the last claim: a job scheduler that cannot go on here, see `Schedules.tell`.
        """
        self._schedules.tell()
        await self._unread.give_back(self._give_back)
        return [*await claimed(self._claim_up_to(limit, worker_id, leases), self.settle)]

    async def _claim_up_to(self, limit: int, worker_id: str, leases: Mapping[str, timedelta]) -> list[BullMQClaim]:
        claims, asked = await self._claim(worker_id, leases, min(limit, CLAIMED_AT_ONCE)), CLAIMED_AT_ONCE
        # A failure of a later step must not lose what was claimed: without the others there are fewer claims, without
        # the last some leases are longer than asked for.
        with contextlib.suppress(WorkersError):
            while len(claims) == asked < limit:
                claims += await self._claim(worker_id, leases, min(limit - asked, CLAIMED_AT_ONCE))
                asked += CLAIMED_AT_ONCE
            await self._shorten(claims, max(leases.values()))
        return claims

    async def _claim(self, worker_id: str, leases: Mapping[str, timedelta], count: int) -> list[BullMQClaim]:
        """Claim in one round trip, or in two where something is out of the ordinary."""
        if monotonic() < self._guarded_until and count <= JOBS_A_SCRIPT and not self._queue.server.confirms:
            ride = Ride(worker_id, max(leases.values()), count, self._queue.now_ms())
            with self._unread.claiming(ride.wanted.tokens):
                _, claimed_with = await end(self._queue, [], ride.wanted, *self._queue.seen(worker_id))
            ride.arrive(claimed_with)
            if ride.arrived:
                return await self._taken(ride.taken, worker_id, leases)
        return await self._claim_guarded(worker_id, leases, count)

    async def _claim_guarded(self, worker_id: str, leases: Mapping[str, timedelta], count: int) -> list[BullMQClaim]:
        """Claim behind a look of `guard`."""
        tokens = new_tokens(worker_id)
        scripts = claiming(self._queue, tokens, lock_ms(max(leases.values())), count)
        with self._unread.claiming(tokens):
            looked, *replies = await self._queue.server.run(
                [self._quarantine.look(count), *scripts, *self._queue.seen(worker_id)]
            )
        failure = self._quarantine.take_note(looked)
        taken, failed = claim_answers(tokens, replies[: len(scripts)])
        failure = failure or failed
        if failure is not None and not taken:
            raise failure
        self._guarded_until = monotonic() + GUARD_SECONDS if failure is None else 0.0
        return await self._taken(taken, worker_id, leases)

    async def _give_back(self, tokens: str) -> None:
        """Release the jobs whose claims have tokens that begin like this."""
        server = self._queue.server
        [active] = await server.run([("LRANGE", self._lua["active"], 0, -1)])
        ids: list[str] = [] if isinstance(active, StorageError) else active
        holders = await server.run([("GET", self._lua.lock(raw)) for raw in ids])
        held = [(raw, holder) for raw, holder in zip(ids, holders, strict=True) if isinstance(holder, str)]
        await server.run_atomic(
            [self._lua.release(raw, holder) for raw, holder in held if holder.startswith(tokens)], confirmed=True
        )

    async def _taken(
        self, taken: Mapping[str, Reply], worker_id: str, leases: Mapping[str, timedelta]
    ) -> list[BullMQClaim]:
        """Return the claims of these answers, by their tokens, that may run."""
        claims = [make_claim(answer, token, worker_id, leases) for token, answer in taken.items()]
        return await self._schedules.go_on(claims, list(taken.values()))

    async def _shorten(self, claims: Iterable[Claim], longest: timedelta) -> None:
        """Give claims with shorter leases theirs: jobs are locked with the longest, before their names are known."""
        shorter = [claim for claim in claims if claim.lease < longest]
        await self._queue.server.run(self._extensions(shorter))

    def _extensions(self, claims: Iterable[Claim]) -> list[Command]:
        by_lease: dict[timedelta, list[Claim]] = {}
        for claim in claims:
            by_lease.setdefault(claim.lease, []).append(claim)
        return [
            self._lua.extend([_raw(claim) for claim in group], [claim.token for claim in group], lock_ms(lease))
            for lease, group in by_lease.items()
        ]

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        """See `Storage.renew`."""
        if not claims:
            return Renewal()
        extensions = self._extensions(claims)
        asked: list[Command] = [("HMGET", self._lua.job(_raw(claim)), CANCEL_FIELD, "ats", "stc") for claim in claims]
        seen = [command for worker in {claim.worker_id for claim in claims} for command in self._queue.seen(worker)]
        replies = await self._queue.server.run(extensions + asked + seen)
        for reply in replies[: len(extensions)]:
            if isinstance(reply, StorageError):
                raise reply
        refused = {raw for reply in replies[: len(extensions)] for raw in reply}
        # One job may be in `claims` twice, with an old token and a new one, so look up which of them was refused.
        lost = await self._lost([claim for claim in claims if _raw(claim) in refused])
        cancelled = frozenset(
            claim.token
            for claim, request in zip(claims, replies[len(extensions) :], strict=False)
            if claim.token not in lost and _asks_to_cancel(request)
        )
        return Renewal(lost=lost, cancel_requested=cancelled)

    async def progress(self, reports: Sequence[ProgressReport]) -> None:
        """See `Storage.progress`. BullMQ's script does not check the lock, so the locks are watched meanwhile."""
        latest = {report.claim.token: report for report in reports}
        values = list(latest.values())
        for batch in (values[start : start + READ_AT_ONCE] for start in range(0, len(values), READ_AT_ONCE)):
            locks = [self._lua.lock(_raw(report.claim)) for report in batch]
            plan = partial(self._plan_progress, batch)
            await self._queue.server.transact(locks, [("GET", lock) for lock in locks], plan)

    def _plan_progress(self, reports: Sequence[ProgressReport], holders: Sequence[Reply]) -> list[Command]:
        return [
            self._lua.progress(_raw(report.claim), encode_bytes(report.value))
            for report, holder in zip(reports, holders, strict=True)
            if holder == report.claim.token
        ]

    async def _lost(self, refused: Sequence[Claim]) -> dict[str, LossReason]:
        examined = zip(refused, await self._examine(refused), strict=True)
        return {claim.token: loss(found) for claim, found in examined if found is not None}

    async def _examine(self, claims: Sequence[Claim]) -> list[BullMQRecord | None]:
        """Return the job that each claim does not hold; None if its lock had merely expired, and is back now."""
        records = await self._queue.records([_raw(claim) for claim in claims], self._queue.now_ms())
        return [
            None if still_holds(own_claim(claim), found) and await self._lock_again(claim) else found
            for claim, found in zip(claims, records, strict=True)
        ]

    async def _lock_again(self, claim: Claim) -> bool:
        raw = _raw(claim)
        now_ms = self._queue.now_ms()
        held = False

        def decide(replies: list[Reply]) -> list[Command]:
            nonlocal held
            held = still_holds(own_claim(claim), record(raw, replies, now_ms))
            if not held:
                return []
            lock: Command = ("SET", self._lua.lock(raw), claim.token, "PX", max(1, to_ms(claim.lease)))
            return [lock, ("SREM", self._lua["stalled"], raw)]

        watched = (self._lua.job(raw), self._lua.lock(raw))
        await self._queue.server.transact(watched, reading(self._lua, raw), decide)
        return held

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        """See `ExchangesJobs.settle_and_claim`; if it is cancelled meanwhile, what it claimed is released."""
        # What is claimed must not be lost with a confirmation of what is settled.
        apart = self._queue.server.confirms or self._schedules.has_news
        if apart or any(isinstance(one, Released) for one in settlements):
            return Exchange(outcomes=await self.settle(settlements))
        return await exchanged(self._exchange(settlements, worker_id, leases, min(limit, JOBS_A_SCRIPT)), self.settle)

    async def _exchange(
        self, settlements: Sequence[Settlement], worker_id: str, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        ride = Ride(worker_id, max(leases.values()), limit, self._queue.now_ms())
        await self._unread.give_back(self._give_back)
        try:
            with self._unread.claiming(ride.wanted.tokens):
                outcomes = await self.settle(settlements, ride)
        except BaseException:  # they are settled again; what was claimed with them is given back
            with contextlib.suppress(WorkersError):
                await self.settle([Released(claim=claim) for claim in await self._taken(ride.taken, worker_id, leases)])
            raise
        if not ride.arrived:
            return Exchange(outcomes=outcomes)
        claims = await self._taken(ride.taken, worker_id, leases)
        with contextlib.suppress(WorkersError):  # then some leases are longer than asked for
            await self._shorten(claims, max(leases.values()))
        return Exchange(outcomes=outcomes, claims=list(claims))

    async def settle(self, settlements: Sequence[Settlement], ride: Ride | None = None) -> list[SettleOutcome]:
        """See `Storage.settle`. A continuation is enqueued before the completion that it follows."""
        outcomes: dict[int, SettleOutcome | None] = dict(enumerate(map(_fault, settlements)))
        sound = [at for at, fault in outcomes.items() if fault is None]
        outcomes.update(zip(sound, await self._settle([settlements[at] for at in sound], ride), strict=True))
        refused = [at for at in sound if outcomes[at] is None]
        if not refused:  # each step below costs something, even about nothing
            return [outcome for outcome in outcomes.values() if outcome is not None]
        found = dict(zip(refused, await self._examine([settlements[at].claim for at in refused]), strict=True))
        again = [at for at in refused if found[at] is None]
        outcomes.update(zip(again, await self._settle([settlements[at] for at in again]), strict=True))
        return [outcome or _without_hold(settlements[at].claim, found.get(at)) for at, outcome in outcomes.items()]

    async def _settle(self, settlements: Sequence[Settlement], ride: Ride | None = None) -> list[SettleOutcome | None]:
        """Settle, and return what BullMQ's scripts answered; None for a claim that does not hold its job."""
        outcomes: list[SettleOutcome | None] = [None] * len(settlements)
        await self._continue(settlements)
        ended = [at for at, settlement in enumerate(settlements) if not isinstance(settlement, Released)]
        codes: list[Reply] = await self._end([settlements[at] for at in ended], ride)
        for at, code in zip(ended, codes, strict=True):
            outcomes[at] = code_outcome(code)
        released = [at for at, settlement in enumerate(settlements) if isinstance(settlement, Released)]
        claims = [settlements[at].claim for at in released]
        units = [self._lua.release(_raw(claim), claim.token) for claim in claims]
        for at, (code, _) in zip(released, await self._queue.server.run_atomic(units, confirmed=True), strict=True):
            codes.append(code)
            outcomes[at] = code_outcome(code)
        await self._stand_by([code for code in codes if isinstance(code, StorageDamaged)])
        return outcomes

    async def _stand_by(self, damages: Sequence[StorageDamaged]) -> None:
        """Mend a damaged queue and raise, so that jobs, which are not at fault, are settled again afterwards.

        Raises:
            StorageUnavailable: a key was, or is, in the way; some may have been settled.
        """
        if damages:
            with contextlib.suppress(StorageDamaged):
                await self._quarantine.mend()
            raise StorageUnavailable(str(damages[0])) from damages[0]

    async def _continue(self, settlements: Sequence[Settlement]) -> None:
        """Enqueue the continuations of completions whose claim holds its lock."""
        following = [one for one in settlements if isinstance(one, Completed) and one.then is not None]
        if not following:
            return
        locks: list[Command] = [("GET", self._lua.lock(own_claim(one.claim).raw)) for one in following]
        holders = await self._queue.server.run(locks)
        held = [one.then for one, holder in zip(following, holders, strict=True) if holder == one.claim.token]
        await self._enqueue([then for then in held if then is not None])

    async def _end(self, settlements: Sequence[Settlement], ride: Ride | None) -> list[Reply]:
        now_ms = self._queue.now_ms()
        endings = [self._endings.of(settlement, now_ms) for settlement in settlements]
        if ride is None:
            codes, _ = await end(self._queue, endings)
        else:
            codes, claimed_with = await end(self._queue, endings, ride.wanted, *self._queue.seen(ride.worker_id))
            ride.arrive(claimed_with)
        freed = [
            at for at, code in enumerate(codes) if isinstance(settlements[at], Suspended) and code == NO_CHILD_LEFT
        ]
        if freed:
            again = [self._endings.run_again(own_claim(settlements[at].claim), now_ms) for at in freed]
            codes_again, _ = await end(self._queue, again)
            for at, code in zip(freed, codes_again, strict=True):
                codes[at] = code
        return codes

    async def recover(self, max_stalls: int) -> Recovery:
        """See `Storage.recover`. BullMQ marks active jobs in one call and requeues all marked ones in the next.

        Jobs that stalled too often are requeued too: they fail at their next claim.
        """
        await self._quarantine.mend()
        commands = self._lua.recover(max_stalls, self._queue.now_ms(), foreign=self._queue.max_foreign_stalls)
        [replies] = await self._queue.server.run_atomic([commands])
        for reply in replies:
            if isinstance(reply, StorageError):
                raise reply
        return Recovery(requeued=tuple(decode_id(raw) for raw in replies[-1]))


def _asks_to_cancel(found: Reply) -> bool:
    """Tell whether a cancel is requested; an error means that the job's key is no hash any more."""
    if isinstance(found, StorageError):
        return False
    run, starts, stalls = found
    return run is not None and run == cancelled_run(starts, stalls)


def _without_hold(claim: Claim, found: BullMQRecord | None) -> SettleOutcome:
    if found is None:  # it held its job a moment ago: another client was faster twice
        return SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN)
    return verdict(own_claim(claim), found)


def _fault(settlement: Settlement) -> SettleOutcome | None:
    """Return why the settlement cannot be carried out, whichever claim holds the job."""
    then = settlement.then if isinstance(settlement, Completed | Continued) else None
    what = None if then is None else unknown_to_bullmq(then)
    if then is None or what is None:
        return unfit_for_redis(settlement)
    return SettleOutcome(status=SettleStatus.ERROR, detail=f"continuation {then.id!r}: {what}")


def _raw(claim: Claim) -> str:
    return own_claim(claim).raw


class JobLogs:
    """The logs of one queue's jobs."""

    def __init__(self, queue: QueueAccess) -> None:
        self._queue = queue

    async def add(self, lines: Sequence[LogLine]) -> None:
        """See `KeepsLogs.log`. BullMQ's script adds one line at a time; a pipeline takes 500 of them."""
        commands = [
            self._queue.lua.log(line.claim.raw, line.text, line.claim.options.logs_kept)
            for line in lines
            if isinstance(line.claim, BullMQClaim)
        ]
        for start in range(0, len(commands), READ_AT_ONCE):
            await self._queue.server.run(commands[start : start + READ_AT_ONCE])
