"""The command that calls each script of BullMQ.

The package's argument builders need its heavyweight `Job` objects and make one call at a time. The builders here make
the same arguments from plain values, so that a batch is one pipeline. A test compares the two, argument by argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgpack
from bullmq.queue_keys import QueueKeys

from workers.storage.bullmq.lua_files import scripts
from workers.storage.on_redis.wire import Command

Options: TypeAlias = Mapping[str, object]

READY_MARKER: Final = "0"
"""A member of the marker set, with score 0: something can be claimed. Other members stand for delayed jobs."""

CANCELLED: Final = "workers:cancelled"
"""A sorted set of ours: the jobs that may be cancelled, by when their records expire."""

REMOVED_CRONS: Final = "workers:removed-crons"
"""A hash of ours: the version in which each removed cron of ours was removed."""
LIMITS: Final = "workers:limits"
"""A hash of ours: which limits of the queue we declared, and in which version."""

_pack = msgpack.Packer(use_bin_type=True, unicode_errors="surrogateescape").pack  # ids of others may be any bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """How an active job ends: as `completed` with a `value` that is JSON text, or as `failed` for the reason `value`.

    `fields` are set with it, and `keep` is BullMQ's `keepJobs`. `related`: it has a parent in a flow or a deduplication
    key, or may have.
    """

    raw: str
    token: str
    target: str
    value: str | bytes
    keep: Options
    max_attempts: int
    fields: Options
    related: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How many jobs are to be claimed in the step that ends others; the rest is as in `BullMQScripts.claim`."""

    count: int
    now_ms: int
    tokens: str
    lock_ms: int


class BullMQScripts:
    """The keys of one queue, and the commands that run BullMQ's scripts on them. `raw` ids are as in Redis."""

    def __init__(self, queue: str, prefix: str) -> None:
        self._keys: dict[str, str] = QueueKeys(prefix).getKeys(queue)
        self.base: str = self._keys[""]
        self._keys |= {name: self.base + name for name in (CANCELLED, REMOVED_CRONS, LIMITS)}
        self.metrics: int | None = None  # for how many minutes the queue counts what ended
        every = ("wait", "active", "prioritized", "events", "stalled", "limiter", "delayed", "paused", "meta", "pc")
        self._claim = self._head("claimMany", *every, "marker")
        self._exchange = (*self._head("exchange", *every, "marker", "completed", "failed"), self.base)
        self._finish = {target: self._head("moveToFinished", *every, target) for target in ("completed", "failed")}
        self._stop = self._head("stop", *every, "failed")
        aside = ("marker", "active", "prioritized", "delayed")
        self._delay, self._continue = self._head("moveToDelayed", *aside), self._head("continue", *aside)
        self._retry = self._head("retryJob", "active", "wait", "paused")
        self._retry_tail = self._named("meta", "events", "delayed", "prioritized", "pc", "marker", "stalled")
        self._delay_tail = self._named("events", "meta", "stalled", "wait", "limiter", "pc")
        adding = ("completed", "delayed", "active", "events", "marker")
        self._add = self._head("addStandardJob", "wait", "paused", "meta", "id", *adding)
        self._add_many = (*self._head("addMany", "wait", "paused", "meta", "id", *adding), self.base)
        self._add_delayed = self._head("addDelayedJob", "marker", "meta", "id", "delayed", "completed", "events")
        prioritized = ("prioritized", "delayed", "completed", "active", "events", "pc")
        self._add_prioritized = self._head("addPrioritizedJob", "marker", "meta", "id", *prioritized)
        self._add_parent = self._head(
            "addParentJob", "meta", "id", "delayed", "waiting-children", "completed", "events"
        )
        lists = ("completed", "failed", "delayed", "active", "wait", "paused", "waiting-children", "prioritized")
        self._state = self._head("getStateV2", *lists)

    def __getitem__(self, name: str) -> str:
        """Return the key that BullMQ calls `name`: `wait`, `active`, `marker`, `events` ..."""
        return self._keys[name]

    def job(self, raw: str) -> str:
        """Return the key of a job's hash."""
        return self.base + raw

    def lock(self, raw: str) -> str:
        """Return the key of the string that holds the token of a job's claim, and expires with its lease."""
        return f"{self.base}{raw}:lock"

    def add(
        self,
        raw: str,
        name: str,
        data: str | bytes,
        options: Options,
        timestamp_ms: int,
        parent: Mapping[str, object] | None = None,
        *,
        awaits: bool = False,
    ) -> Command:
        """Insert a job unless its hash exists; answers the id either way, that of another job for a duplicate by key.

        `parent` is as BullMQ writes it, with `id` and `queueKey`; a job that exists becomes its child. If there is no
        such parent, the answer is an error code. With `awaits` the job waits for its children.
        """
        upwards: tuple[str | None, ...] = (None, None)
        if parent is not None:
            key = f"{parent['queueKey']}:{parent['id']}"
            upwards = key, f"{key}:dependencies"
        unique = options.get("de")
        marked = f"{self.base}de:{unique['id']}" if isinstance(unique, Mapping) else None
        packed = _pack([self.base, raw, name, timestamp_ms, *upwards, parent, None, marked])
        head = self._add
        if awaits:
            head = self._add_parent
        elif options.get("delay"):
            head = self._add_delayed
        elif options.get("priority"):
            head = self._add_prioritized
        return (*head, packed, data, _pack(options))

    def add_many(self, jobs: Iterable[tuple[str, str, str | bytes, Options]], timestamp_ms: int) -> Command:
        """Insert jobs that have no delay, priority, key or parent: raw id, name, data and options of each.

        Answers for each whether its hash was there before, then what `add` does, or an error.
        """
        parts = (part for raw, name, data, options in jobs for part in (raw, name, data, _pack(options)))
        return (*self._add_many, timestamp_ms, *parts)

    def guard(self, now_ms: int, claims: int) -> Command:
        """Set aside what would break the next `claims`; with 0, a recovery.

        Answers `[[raw id, why, ...], damage or ""]`. With -1 it also sets aside keys that are in the way of the queue.
        """
        return (*self._head("guard", "wait"), self.base, now_ms, claims)

    def owner(self) -> Command:
        """Answer an error if the queue is surely one of Bull, else what speaks for that, '' for nothing."""
        return (*self._head("owner", "wait"), self.base)

    def fit_for_flows(self) -> Command:
        """Answer an error if a key is in the way of a job that is inserted with its parent or children."""
        return (*self._head("fitForFlows", "wait"), self.base)

    def claim(self, tokens: str, lock_ms: int, now_ms: int, *, count: int, first: int = 0) -> Command:
        """Make up to `count` jobs active; answers `[fields, id, 0, 0]` for each, and an error for one that failed.

        If there are fewer, the last answer is `[0, 0, rate limit ms, next delayed ms]`. Their tokens begin with
        `tokens` and end with a number in hexadecimal, from `first` on. Each is also stored in `pb` ("processed by"),
        where it outlives the lock and dashboards show it.
        """
        return (*self._claim, self.base, now_ms, tokens, lock_ms, count, first)

    def exchange(self, endings: Sequence[Finish], now_ms: int, wanted: Wanted | None = None) -> Command:
        """Complete and fail jobs, then make as many jobs active as are wanted.

        Answers `[endings, claims, tried]`: what `finish` does, or an error, for each that ends; what `claim` does for
        those claimed; 0 if none was claimed because it takes a look of `guard` before.
        """
        claims = (0, 0, "", 0) if wanted is None else (wanted.count, wanted.now_ms, wanted.tokens, wanted.lock_ms)
        ways: dict[tuple[str | bytes, ...], int] = {}
        known: dict[tuple[object, ...], int] = {}  # by the `keep` that many jobs have in common
        jobs: list[str | bytes | int] = []
        for one in endings:
            key = one.target, one.related, one.max_attempts, id(one.keep)
            if key not in known:
                way = one.target, "related" if one.related else "", self._options(one)
                known[key] = ways.setdefault(way, len(ways) + 1)
            jobs += known[key], one.raw, one.token, one.value, _flat(one.fields)
        return (*self._exchange, now_ms, *claims, len(ways), *(part for way in ways for part in way), *jobs)

    def _options(self, ending: Finish, **more: object) -> bytes:
        """Pack the options of `moveToFinished`."""
        metrics = self.metrics or ""
        options = {"keepJobs": ending.keep, "attempts": ending.max_attempts, "maxMetricsSize": metrics, **more}
        packed: bytes = _pack(options)
        return packed

    def finish(self, ending: Finish, now_ms: int) -> Command:
        """Complete or fail a job; answers 0 or an error code."""
        raw, target, value = ending.raw, ending.target, ending.value
        options = self._options(ending, token=ending.token)
        fields = _flat(ending.fields)
        return (
            *self._finish[ending.target],
            *(self.base + ending.raw, f"{self.base}metrics:{ending.target}", self._keys["marker"]),
            *(raw, now_ms, "returnvalue" if target == "completed" else "failedReason", value, target),
            *("", self.base, options, fields),
        )

    def stop(self, ending: Finish, now_ms: int, *, until_ms: int | None, was: str) -> Command:
        """Fail an active job that is cancelled, until when its record lasts, and tell where it `was`.

        Answers 0 or an error code.
        """
        failing = self.finish(ending, now_ms)
        return (*self._stop, *failing[len(self._finish["failed"]) :], "" if until_ms is None else until_ms, was)

    def cancelled(self, now_ms: int, start: int) -> Command:
        """Look at the next jobs that may be cancelled: `[how many are, looked at, forgotten]`."""
        return (*self._head("cancelled", CANCELLED, "failed"), self.base, now_ms, start)

    def delay(self, raw: str, token: str, *, delay_ms: int, counted: bool, fields: Options, now_ms: int) -> Command:
        """Delay an active job by `delay_ms`; answers 0 or an error code."""
        arguments = (self.base, str(now_ms), raw, token, delay_ms, "0" if counted else "1", _flat(fields), "0")
        return (*self._delay, self.base + raw, *self._delay_tail, *arguments)

    def retry(self, raw: str, token: str, *, lifo: bool, fields: Options, now_ms: int) -> Command:
        """Let an active job wait that failed, in front of all others if `lifo`; answers 0 or an error code."""
        arguments = (self.base, now_ms, "RPUSH" if lifo else "LPUSH", raw, token, _flat(fields))
        return (*self._retry, self.base + raw, *self._retry_tail, *arguments)

    def go_on(
        self, raw: str, token: str, *, delay_ms: int, fields: Options, over: Sequence[str], now_ms: int
    ) -> Command:
        """Delay an active job that did not fail: as the next link of its chain, or because it was not tried.

        It loses the fields that are `over`.

        Answers 0 or an error code.
        """
        arguments = (self.base, str(now_ms), raw, token, delay_ms, "1", _flat(fields), "0", "", *over)
        return (*self._continue, self.base + raw, *self._delay_tail, *arguments)

    def release(self, raw: str, token: str) -> tuple[Command, Command]:
        """Put an active job back in front, and wake a waiter, which the script forgets for a prioritized job.

        The first command answers a number of milliseconds (a rate limit) or an error code.
        """
        head = self._head("moveJobFromActiveToWait", "active", "wait", "stalled", "paused", "meta", "limiter")
        keys = self._named("prioritized", "marker", "events")
        return (*head, *keys, raw, token, self.base + raw), self.mark()

    def suspend(self, raw: str, token: str, now_ms: int) -> Command:
        """Let an active job wait for its children; answers 0, 1 if none is unfinished, or an error code."""
        key = self.base + raw
        head = (*self._head("moveToWaitingChildren", "active", "waiting-children"), key, f"{key}:dependencies")
        return (*head, f"{key}:unsuccessful", *self._named("stalled", "events"), token, "", now_ms, raw, self.base)

    def mark(self, member: str = READY_MARKER, due_ms: float = 0) -> Command:
        """Wake one waiter."""
        return "ZADD", self._keys["marker"], due_ms, member

    def extend(self, raws: list[str], tokens: list[str], lock_ms: int) -> Command:
        """Prolong locks; answers the ids whose lock is gone, or belongs to another token."""
        return (*self._head("extendLocks", "stalled"), self.base, _pack(tokens), _pack(raws), lock_ms)

    def recover(self, max_stalls: int, now_ms: int, *, foreign: int) -> tuple[Command, Command]:
        """Requeue marked jobs without a lock, and mark what is active now; answers the ids requeued.

        A job of ours may stall `max_stalls` times, one of another producer `foreign` times; after that it is to fail.

        The script throttles itself by a key that Node workers keep for their own, much longer interval. The key is
        removed first, because otherwise a Node worker on the queue would suppress our passes. Marks and locks make
        extra passes harmless.
        """
        head = self._head("moveStalledJobsToWait", "stalled", "wait", "active", "stalled-check", "meta", "paused")
        keys = self._named("marker", "events", "repeat")
        limits = (max(max_stalls, foreign), self.base, now_ms, 1, max_stalls, foreign)
        return ("DEL", self._keys["stalled-check"]), (*head, *keys, *limits)

    def log(self, raw: str, line: str, kept: int) -> Command:
        """Add a line to the job's log, and forget all but the last `kept`; answers how many there are, or -1."""
        key = self.base + raw
        return (*self._head("addLog"), key, f"{key}:logs", raw, line, kept)

    def progress(self, raw: str, value: str | bytes) -> Command:
        """Set the job's progress (JSON text) and tell subscribers, whoever holds it; answers 0 or an error code."""
        head = (*self._head("updateProgress"), self.base + raw, *self._named("events", "meta"))
        return (*head, raw, value)

    def schedule(
        self, scheduler: str, raw: str, data: str, options: Options, *, next_ms: int | None, why_not: str, now_ms: int
    ) -> Command:
        """Add the job that follows this one of a job scheduler; without `next_ms` the scheduler's period says when.

        `data` (JSON text) is this job's, `options` are the next one's. Answers its id; None if there is nothing to add;
        `[why]` if nothing can be added here, for one because the caller says `why_not`.
        """
        keys = self._named("delayed", "wait", "paused", "meta", "prioritized", "marker", "id", "events", "pc")
        moment = "" if next_ms is None else next_ms
        head = (*self._head("updateJobScheduler", "repeat"), *keys, self.job(raw), self._keys["active"])
        return (*head, moment, scheduler, data, _pack(options), now_ms, self.base, raw, why_not)

    def add_scheduler(
        self,
        scheduler: str,
        data: str | bytes,
        template: Options,
        recurs: Options,
        options: Options,
        *,
        next_ms: int,
        now_ms: int,
        seen: tuple[str, str, str],
    ) -> Command:
        """Store a job scheduler and its next job; answers `[id, delay]`, or an error code where a job has that id.

        `data` (JSON text) and `template` are those of its jobs, `options` are the next one's, and `recurs` says when,
        for a period relative to `now_ms`. Answers None, and changes nothing, unless the scheduler is as it was `seen`:
        when its next job is due, the options of its template, its removed version, as text, '' for none.
        """
        keys = self._named("delayed", "wait", "paused", "meta", "prioritized", "marker", "id", "events", "pc", "active")
        head = (*self._head("addJobScheduler", "repeat"), *keys, next_ms, _pack(recurs), scheduler)
        return (*head, data, _pack(template), _pack(options), now_ms, self.base, "", *seen)

    def remove_scheduler(self, scheduler: str) -> Command:
        """Remove a job scheduler, and its next job unless that is due; answers 1 if there is none."""
        return (*self._head("removeJobScheduler", "repeat", "delayed", "events"), scheduler, self.base)

    def declare_limits(self, version: int, concurrency: int | None, rate: tuple[int, int] | None) -> Command:
        """Limit the queue, in this version; `rate` is how many jobs may start in how many milliseconds."""
        counts = (concurrency, *(rate or (None, None)))
        head = self._head("declareLimits", "meta", LIMITS, "marker")
        return (*head, self.base, version, *("" if count is None else count for count in counts))

    def state(self, raw: str) -> Command:
        """Ask for BullMQ's name of the job's state, `unknown` if there is no job."""
        return (*self._state, raw, self.base + raw)

    def remove(self, raw: str) -> tuple[Command, Command]:
        """Remove a job from whatever state it is in; its children in a flow stay.

        The script leaves locked jobs alone, so a lock that was left behind is deleted first: the caller knows the
        state.
        """
        script = (*self._head("removeJob"), self.base + raw, self._keys["repeat"], raw, 0, self.base)
        return ("DEL", self.lock(raw)), script

    def remove_waiting(self, raws: Sequence[str]) -> Command:
        """Remove those of the jobs that wait and belong to no flow, schedule or deduplication; answers their ids."""
        lines = ("wait", "completed", "failed", "delayed", "prioritized", "events", "meta", "paused")
        return (*self._head("removeWaiting", *lines), self.base, *raws)

    def take(self, raw: str, token: str) -> tuple[Command, ...]:
        """Make a waiting or running job active, locked with this token; to be finished in the same transaction."""
        lines: tuple[Command, ...] = (
            *(("LREM", self._keys[name], 0, raw) for name in ("wait", "paused", "active")),
            *(("ZREM", self._keys[name], raw) for name in ("prioritized", "delayed", "waiting-children")),
        )
        return (*lines, ("LPUSH", self._keys["active"], raw), ("SET", self.lock(raw), token))

    def reprocess(self, raw: str) -> Command:
        """Queue a failed job again with fresh attempts; answers 1 or an error code."""
        keys = self._named("events", "failed", "wait", "meta", "active", "marker", "prioritized", "pc")
        arguments = (raw, "LPUSH", "failedReason", "failed", "1", "1")
        return (*self._head("reprocessJob"), self.base + raw, *keys, *arguments)

    def promote(self, raw: str) -> Command:
        """Make a delayed job claimable now; answers 0 or an error code."""
        head = self._head("promote", "delayed", "wait", "paused", "meta", "prioritized", "active", "pc", "events")
        return (*head, self._keys["marker"], self.base, raw)

    def pause(self) -> Command:
        return (*self._head("pause", "wait", "paused", "meta", "prioritized", "events", "delayed", "marker"), "paused")

    def resume(self) -> Command:
        return (*self._head("pause", "paused", "wait", "meta", "prioritized", "events", "delayed", "marker"), "resumed")

    def drain(self) -> Command:
        return (*self._head("drain", "wait", "paused", "delayed", "prioritized", "repeat"), self.base, "1")

    def clean(self, target: str, before_ms: int, limit: int) -> Command:
        """Remove up to `limit` jobs that finished before `before_ms`; answers their ids."""
        return (*self._head("cleanJobsInSet", target, "events", "repeat"), self.base, before_ms, limit, target)

    def _named(self, *names: str) -> tuple[str, ...]:
        return tuple(self._keys[name] for name in names)

    def _head(self, script: str, *keys: str) -> Command:
        found = scripts()[script]
        return ("EVALSHA", found.sha, found.key_count, *self._named(*keys))


def _flat(fields: Options) -> bytes | str:
    """Pack the job fields to set with a transition, as the scripts expect them."""
    if not fields:
        return ""
    packed: bytes = _pack([part for field in fields.items() for part in field])
    return packed
