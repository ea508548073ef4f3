"""A hypothesis state machine that drives a storage and the transition table side by side.

    class MyMachine(StorageMachine):
        def open_harness(self) -> Harness:
            return MyHarness()

    TestMyStorage = MyMachine.TestCase

After each call, everything that can be read is compared with what should be there. The harness must be able to move its
clock: on a real clock nobody can say beforehand on which side of a deadline a call arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import UnknownDependency
from workers.jobs import (
    DROP,
    AfterFailure,
    Cancelled,
    Claim,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    JobState,
    NewJob,
    ProgressReport,
    Released,
    Retention,
    Retried,
    Settlement,
)
from workers.testing.compared import compare_errors, compare_record, compare_status
from workers.testing.expected import FINISHED
from workers.testing.expected_dependents import ExpectedGraph
from workers.testing.harness import Harness

T = TypeVar("T")
Call: TypeAlias = tuple[str, Mapping[str, object]]

IDS: Final = ("a", "b", "c", "d")
MINUTE: Final = timedelta(minutes=1)
TICK: Final = timedelta(seconds=1)
"""The shortest time that passes: storages that number jobs by time may be off by some milliseconds in a run."""
NOW: Final = timedelta(0)
ERROR: Final = ErrorInfo(type="ValueError", message="the handler said no", stack="line 1\nline 2")


def _deduplication(key: str, mode: DeduplicationMode, ttl: timedelta) -> Deduplication:
    return Deduplication(key=key, mode=mode, ttl=None if mode is DeduplicationMode.SIMPLE else ttl)


_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4)
_id = st.sampled_from(IDS)
_names = st.sampled_from(("work", "work", "other"))
_delays = st.sampled_from((NOW, NOW, NOW, TICK, MINUTE, timedelta(minutes=30)))
_leases = st.sampled_from((MINUTE, timedelta(hours=1)))
_retentions: st.SearchStrategy[Retention] = st.sampled_from((DROP, MINUTE, timedelta(hours=2)))
_priorities = st.sampled_from((0, 0, 0, 1, -1))
_keys = st.sampled_from((None, None, None, "key"))
_deduplications = st.builds(
    _deduplication,
    key=st.sampled_from(("key", "key", "key", "key", "other")),
    mode=st.sampled_from(DeduplicationMode),
    ttl=st.sampled_from((TICK, TICK, MINUTE)),
)
_attempts = st.integers(min_value=1, max_value=4)
_results = st.sampled_from((b"null", b"", b"1"))
_picks = st.integers(min_value=0, max_value=7)
"""Which claim to pick: up to 4, a live one, if there is any; otherwise any of the last."""


def _call(weight: int, verb: str, /, **arguments: st.SearchStrategy[object]) -> list[st.SearchStrategy[Call]]:
    return [st.tuples(st.just(verb), st.fixed_dictionaries(arguments)) for _ in range(weight)]


_calls: Final = st.one_of(
    *_call(
        4,
        "enqueue",
        ids=_ids,
        name=_names,
        delay=_delays,
        keep=_retentions,
        priority=_priorities,
        ordering_key=_keys,
        max_attempts=_attempts,
        deduplication=st.none(),
    ),
    *_call(
        10,
        "enqueue",
        ids=st.lists(_id, min_size=1, max_size=2),
        name=st.just("work"),
        delay=st.sampled_from((NOW, NOW, TICK)),
        keep=_retentions,
        priority=_priorities,
        ordering_key=_keys,
        max_attempts=_attempts,
        deduplication=_deduplications,
    ),
    *_call(
        3,
        "enqueue_after",
        ids=st.lists(_id, min_size=1, max_size=2, unique=True),
        after=st.lists(st.sampled_from((*IDS, *IDS, "nobody")), min_size=1, max_size=2),
        with_them=st.sampled_from((True, True, False)),
        after_failure=st.sampled_from(AfterFailure),
        delay=_delays,
        keep=_retentions,
        ordering_key=_keys,
        deduplication=st.none() | _deduplications,
    ),
    *_call(
        6,
        "claim",
        worker=st.sampled_from(("one", "two")),
        names=st.sampled_from((("*",), ("*",), ("work",), ("other", "*"))),
        lease=_leases,
        limit=st.integers(min_value=1, max_value=4),
    ),
    *_call(
        3,
        "complete",
        pick=_picks,
        result=_results,
        keep=st.none() | _retentions,
        then=st.none() | _id,
        delay=_delays,
    ),
    *_call(
        3,
        "go_on",
        pick=_picks,
        name=_names,
        delay=_delays,
        keep=_retentions,
        priority=_priorities,
        ordering_key=_keys,
        max_attempts=_attempts,
    ),
    *_call(2, "fail", pick=_picks, keep=st.none() | _retentions),
    *_call(2, "retry_later", pick=_picks, delay=_delays, how=st.sampled_from(("counted", "uncounted", "snoozed"))),
    *_call(1, "stop", pick=_picks, keep=st.none() | _retentions),
    *_call(2, "release", pick=_picks),
    *_call(1, "settle_again"),
    *_call(1, "renew", picks=st.lists(_picks, min_size=1, max_size=4)),
    *_call(1, "progress", picks=st.lists(_picks, min_size=1, max_size=4), value=st.sampled_from((b"1", b"2"))),
    *_call(2, "recover", limit=st.sampled_from((1, 100)), max_stalls=st.integers(min_value=0, max_value=2)),
    *_call(2, "cancel", job_id=_id),
    *_call(1, "manage", verb=st.sampled_from(("retry", "promote")), ids=_ids),
    *_call(1, "remove", ids=_ids, running=st.booleans()),
    *_call(1, "complete_from_outside", job_id=_id, result=_results, keep=st.none() | _retentions),
    *_call(1, "update_result_ttl", job_id=_id, ttl=st.sampled_from((MINUTE, timedelta(hours=2)))),
    *_call(1, "clean", state=st.sampled_from(FINISHED), older_than=_delays),
    *_call(1, "sweep", limit=st.sampled_from((1, 100))),
    *_call(1, "pause_or_resume", paused=st.sampled_from((False, False, True))),
    *_call(3, "let_time_pass", by=st.sampled_from((TICK, TICK, MINUTE, MINUTE, timedelta(hours=1)))),
)
# One rule for all of them, because hypothesis leaves whole rules out of a run, and a run without claims shows nothing.


class StorageMachine(RuleBasedStateMachine):
    """One storage, from the first call to the last; see the module."""

    @abstractmethod
    def open_harness(self) -> Harness:
        """Make a new harness for each run of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.harness = self.open_harness()
        assert self.harness.moves_time, f"{type(self.harness).__name__} cannot move its clock"
        self.run(self.harness.__aenter__())
        self.storage = self.run(self.harness.open())
        self.expected = ExpectedGraph(self.harness.now(), fresh_retries=self.harness.limits.fresh_retries)
        self.claims: list[Claim] = []
        self.last: Settlement | None = None
        self.payloads = 0

    def run(self, call: Coroutine[object, object, T]) -> T:
        """Run the call and return its answer."""
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.run(self.harness.__aexit__(None, None, None))
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()

    @rule(call=_calls)
    def call(self, call: Call) -> None:
        verb, arguments = call
        getattr(self, verb)(**arguments)

    # Calls

    def enqueue(
        self,
        ids: list[str],
        name: str,
        delay: timedelta,
        keep: Retention,
        priority: int,
        ordering_key: str | None,
        max_attempts: int,
        deduplication: Deduplication | None,
    ) -> None:
        jobs = [self.new_job(job_id, name, delay, keep, priority, ordering_key, max_attempts) for job_id in ids]
        if self.harness.limits.deduplication:
            jobs = [replace(new, deduplication=deduplication) for new in jobs]
        self._enqueue(jobs)

    def enqueue_after(
        self,
        ids: list[str],
        after: list[str],
        with_them: bool,
        after_failure: AfterFailure,
        delay: timedelta,
        keep: Retention,
        ordering_key: str | None,
        deduplication: Deduplication | None,
    ) -> None:
        if not self.harness.limits.dependencies:
            return
        # Mostly those to follow are enqueued with them, or there would rarely be one that has not ended.
        first = [one for one in after if one not in (*ids, "nobody")] if with_them else []
        jobs = [self.new_job(one, "work", NOW, keep, 0, None, 2) for one in first]
        for job_id in ids:
            new = self.new_job(job_id, "work", delay, keep, 0, ordering_key, 2)
            others = tuple(one for one in after if one != job_id)
            jobs.append(replace(new, deduplication=deduplication, after=others, after_failure=after_failure))
        self._enqueue(jobs)

    def _enqueue(self, jobs: Sequence[NewJob]) -> None:
        if self.expected.refuses(jobs):
            with contextlib.suppress(UnknownDependency):
                told = self.run(self.storage.enqueue(jobs))
                raise AssertionError(f"{jobs} should have been refused, not {told}")
            return
        told, expected = self.run(self.storage.enqueue(jobs)), self.expected.enqueue(jobs)
        assert told == expected, f"{told}, expected {expected}"

    def new_job(
        self,
        job_id: str,
        name: str,
        delay: timedelta,
        keep: Retention,
        priority: int,
        ordering_key: str | None,
        max_attempts: int,
    ) -> NewJob:
        """Make a job of a kind that the storage can take."""
        return NewJob(
            id=job_id,
            name=name,
            payload=self.new_payload(),
            delay=delay,
            keep_completed=keep,
            keep_failed=keep,
            priority=self.allowed_priority(priority),
            ordering_key=ordering_key if self.harness.limits.ordering_keys else None,
            max_attempts=max_attempts,
        )

    def allowed_priority(self, priority: int) -> int:
        """Return the priority, or 0 if the storage does not keep it."""
        limits = self.harness.limits
        return priority if limits.priority_order and (priority >= 0 or limits.urgent_priorities) else 0

    def new_payload(self) -> bytes:
        """Make a payload that no other job has."""
        self.payloads += 1
        return f"{self.payloads}".encode()

    def claim(self, worker: str, names: Sequence[str], lease: timedelta, limit: int) -> None:
        leases = {name: lease if name == "*" else 2 * lease for name in names}
        claims = self.run(self.storage.claim(worker, leases=leases, limit=limit))
        self.expected.claimed(claims, worker, leases, limit)
        self.claims += claims

    def complete(self, pick: int, result: bytes, keep: Retention | None, then: str | None, delay: timedelta) -> None:
        following = None if then is None else NewJob(id=then, name="work", payload=self.new_payload(), delay=delay)
        for held in self.picked(pick):
            self.settle(Completed(claim=held, result=result, keep=keep, then=following))

    def go_on(
        self,
        pick: int,
        name: str,
        delay: timedelta,
        keep: Retention,
        priority: int,
        ordering_key: str | None,
        max_attempts: int,
    ) -> None:
        for held in self.picked(pick):
            then = self.new_job(held.job_id, name, delay, keep, priority, ordering_key, max_attempts)
            self.settle(Continued(claim=held, then=replace(then, chain_index=held.chain_index + 1)))

    def fail(self, pick: int, keep: Retention | None) -> None:
        for held in self.picked(pick):
            self.settle(Failed(claim=held, error=ERROR, keep=keep))

    def stop(self, pick: int, keep: Retention | None) -> None:
        for held in self.picked(pick):
            self.settle(Cancelled(claim=held, keep=keep))

    def retry_later(self, pick: int, delay: timedelta, how: str) -> None:
        for held in self.picked(pick):
            self.settle(
                Retried(claim=held, delay=delay, error=ERROR, counted=how == "counted", snoozed=how == "snoozed")
            )

    def release(self, pick: int) -> None:
        for held in self.picked(pick):
            self.settle(Released(claim=held))

    def settle_again(self) -> None:
        if self.last is not None:
            self.settle(self.last)

    def settle(self, settlement: Settlement) -> None:
        """Settle, and compare the storage's answer with the table's."""
        self.last = settlement
        (told,) = self.run(self.storage.settle([settlement]))
        self.expected.settled(settlement, told)

    def picked(self, *picks: int) -> list[Claim]:
        """Return claims, live, settled or lost; none if there was none."""
        live = [held for held in self.claims if self.expected.holds(held)]
        choices = [live if live and pick <= 4 else self.claims[-8:] for pick in picks]
        return [choice[-1 - pick % len(choice)] for choice, pick in zip(choices, picks, strict=True) if choice]

    def renew(self, picks: list[int]) -> None:
        claims = self.picked(*picks)
        renewal, expected = self.run(self.storage.renew(claims)), self.expected.renew(claims)
        assert (dict(renewal.lost), renewal.cancel_requested) == (expected.lost, expected.cancel_requested)

    def progress(self, picks: list[int], value: bytes) -> None:
        reports = [ProgressReport(claim=held, value=value) for held in self.picked(*picks)]
        self.run(self.storage.progress(reports))
        self.expected.progress(reports)

    def recover(self, limit: int, max_stalls: int) -> None:
        self.expected.recovered(self.run(self.storage.recover(limit, max_stalls=max_stalls)), limit, max_stalls)

    def cancel(self, job_id: str) -> None:
        assert self.run(self.storage.cancel(job_id)) is self.expected.cancel(job_id)

    def manage(self, verb: str, ids: list[str]) -> None:
        assert self.run(getattr(self.storage, verb)(ids)) == getattr(self.expected, verb)(ids)

    def remove(self, ids: list[str], running: bool) -> None:
        running = running and self.harness.limits.outside_endings
        assert self.run(self.storage.remove(ids, running=running)) == self.expected.remove(ids, running=running)

    def complete_from_outside(self, job_id: str, result: bytes, keep: Retention | None) -> None:
        if self.harness.limits.outside_endings:
            told = self.run(self.storage.complete(job_id, result, keep=keep))
            assert told is self.expected.complete(job_id, result, keep)

    def update_result_ttl(self, job_id: str, ttl: timedelta) -> None:
        if self.harness.limits.result_ttl_updates:
            told = self.run(self.storage.update_result_ttl(job_id, ttl))
            assert told == self.expected.update_result_ttl(job_id, ttl)

    def clean(self, state: JobState, older_than: timedelta) -> None:
        assert self.run(self.storage.clean(state, older_than=older_than)) == self.expected.clean(state, older_than)

    def sweep(self, limit: int) -> None:
        assert self.run(self.storage.sweep(limit)) <= limit

    def pause_or_resume(self, paused: bool) -> None:
        self.run(self.storage.pause() if paused else self.storage.resume())
        assert self.run(self.storage.is_paused()) is paused
        self.expected.paused = paused

    def let_time_pass(self, by: timedelta) -> None:
        self.run(self.harness.advance(by))
        self.expected.pass_time(by)

    # What must hold after each of them

    @invariant()
    def every_job_is_as_expected(self) -> None:
        for job_id, found in zip(IDS, self.run(self.storage.status(IDS)), strict=True):
            job = self.expected.jobs.get(job_id)
            assert (found is None) == (job is None), f"{job_id!r}: {found}, expected {job}"
            if found is not None and job is not None:
                compare_status(found, job, self.harness.clock_slack)
                assert found.waits_for == len(self.expected.left.get(job_id, ())), f"{job_id!r}: {found}"

    @invariant()
    def every_outcome_is_as_expected(self) -> None:
        for job_id in IDS:
            found, expected = self.run(self.storage.result(job_id)), self.expected.outcome(job_id)
            assert (found is None) == (expected is None), f"{job_id!r}: {found}, expected {expected}"
            if found is not None and expected is not None:
                assert (found.kind, found.result) == (expected.kind, expected.result)
                compare_errors(found.error, expected.error)

    @invariant()
    def every_record_is_as_expected(self) -> None:
        for job_id, found in zip(IDS, self.run(self.storage.read(IDS)), strict=True):
            job = self.expected.jobs.get(job_id)
            if found is not None and job is not None:
                compare_record(found, job)

    @invariant()
    def every_state_is_counted(self) -> None:
        assert self.run(self.storage.counts()) == self.expected.counts()
