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
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.crons import Cron
from workers.deduplication import Deduplication
from workers.errors import UnknownDependency
from workers.jobs import (
    FAILURES_KEPT,
    AfterFailure,
    Cancelled,
    Claim,
    Completed,
    Continued,
    ErrorInfo,
    Failed,
    JobOutcome,
    JobRecord,
    JobRef,
    JobState,
    JobStatus,
    NewJob,
    ProgressReport,
    Released,
    Retention,
    Retried,
    Settlement,
)
from workers.limits import HeldBack, Limit
from workers.storage.abilities import ContinuesFromOutside, KeepsCrons, KeepsLimits, KnowsDependencies
from workers.testing.calls import IDS, MINUTE, THEMES, HoldingKeys, JobKind
from workers.testing.expected import ExpectedJob
from workers.testing.expected_crons import DrivenCrons
from workers.testing.expected_limits import ExpectedLimitedQueue
from workers.testing.harness import Harness

T = TypeVar("T")
HOUR: Final = timedelta(hours=1)
MORE_CLAIMS: Final = 6
"""So many claims find what the first one only parked, or let come up."""
ERROR: Final = ErrorInfo(type="ValueError", message="the handler said no", stack="line 1\nline 2")


class StorageMachine(RuleBasedStateMachine):
    """One storage, from the first call to the last; see the module. Each run of calls has one of the `themes`."""

    themes: Sequence[str] = tuple(THEMES)

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
        self.expected = ExpectedLimitedQueue(self.harness.now(), fresh_retries=self.harness.capabilities.fresh_retries)
        self.crons = DrivenCrons(self.storage, self.expected) if isinstance(self.storage, KeepsCrons) else None
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

    @initialize(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        self.theme = data.draw(st.sampled_from(self.themes))

    # One rule, because hypothesis leaves whole rules out of a run, and a run without claims shows nothing.
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        verb, arguments = data.draw(THEMES[self.theme])
        getattr(self, verb)(**arguments)

    # Calls

    def enqueue(self, ids: list[str], kind: JobKind, deduplication: Deduplication | None) -> None:
        jobs = [self.new_job(job_id, kind) for job_id in ids]
        if self.harness.capabilities.deduplication:
            jobs = [replace(new, deduplication=deduplication) for new in jobs]
        self._enqueue(jobs)

    def enqueue_after(
        self,
        ids: list[str],
        after: list[str],
        with_them: bool,
        after_failure: AfterFailure,
        kind: JobKind,
        deduplication: Deduplication | None,
    ) -> None:
        if not self.harness.capabilities.dependencies:
            return
        # Mostly those to follow are enqueued with them, or there would rarely be one that has not ended.
        first = [one for one in after if one not in (*ids, "nobody")] if with_them else []
        jobs = [self.new_job(one, JobKind(keep=kind.keep)) for one in first]
        for job_id in ids:
            new = self.new_job(job_id, kind)
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

    def new_job(self, job_id: str, kind: JobKind) -> NewJob:
        """Make a job of a kind that the storage can take."""
        return NewJob(
            id=job_id,
            name=kind.name,
            payload=self.new_payload(),
            delay=kind.delay,
            keep_completed=kind.keep,
            keep_failed=kind.keep,
            priority=self.allowed_priority(kind.priority),
            **self.kept(kind.keys)._asdict(),
            max_attempts=kind.max_attempts,
            meta={"number": str(self.payloads)} if self.payloads % 3 == 0 else {},
        )

    def allowed_priority(self, priority: int) -> int:
        """Return the priority, or 0 if the storage does not keep it."""
        capabilities = self.harness.capabilities
        return priority if capabilities.priority_order and (priority >= 0 or capabilities.urgent_priorities) else 0

    def kept(self, keys: HoldingKeys) -> HoldingKeys:
        """Return those of the keys that the storage can keep."""
        capabilities = self.harness.capabilities
        if not capabilities.ordering_keys:
            keys = keys._replace(ordering_key=None)
        return keys if capabilities.limit_keys else HoldingKeys(keys.ordering_key)

    def new_payload(self) -> bytes:
        """Make a payload that no other job has."""
        self.payloads += 1
        return f"{self.payloads}".encode()

    def claim(self, worker: str, names: Sequence[str], lease: timedelta, limit: int) -> None:
        leases = {name: lease if name == "*" else 2 * lease for name in names}
        for _ in range(MORE_CLAIMS):
            claims = self.run(self.storage.claim(worker, leases=leases, limit=limit))
            self.expected.claimed(claims, worker, leases, limit)
            self.claims += claims
            limit -= len(claims)
            if not limit or not (owed := self.expected.owed(leases)):
                return
        raise AssertionError(f"{owed} are kept back by nothing, and never handed out")

    def complete(self, pick: int, result: bytes, keep: Retention | None, then: str | None, delay: timedelta) -> None:
        following = None if then is None else NewJob(id=then, name="work", payload=self.new_payload(), delay=delay)
        for held in self.picked(pick):
            self.settle(Completed(claim=held, result=result, keep=keep, then=following))

    def go_on(self, pick: int, kind: JobKind) -> None:
        for held in self.picked(pick):
            then = self.new_job(held.job_id, kind)
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
        running = running and self.harness.capabilities.outside_endings
        assert self.run(self.storage.remove(ids, running=running)) == self.expected.remove(ids, running=running)

    def complete_from_outside(self, job_id: str, result: bytes, keep: Retention | None) -> None:
        if self.harness.capabilities.outside_endings:
            told = self.run(self.storage.complete(job_id, result, keep=keep))
            assert told is self.expected.complete(job_id, result, keep)

    def continue_from_outside(self, job_id: str, kind: JobKind) -> None:
        if self.harness.capabilities.outside_continuations:
            known = self.expected.jobs.get(job_id)
            link = 1 if known is None else known.new.chain_index + 1
            then = self.new_job(job_id, kind)
            then = replace(then, chain_index=link)
            told = self.run(cast("ContinuesFromOutside", self.storage).continue_job(then))
            assert told is self.expected.continue_job(then)

    def update_result_ttl(self, job_id: str, ttl: timedelta) -> None:
        if self.harness.capabilities.result_ttl_updates:
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

    # Limits

    def declare_limit(self, name: str, limit: Limit) -> None:
        if isinstance(self.storage, KeepsLimits):
            self.run(self.storage.declare_limits({name: limit}))
            self.expected.limits.declare({name: limit}, self.expected.now)
            self.look_at_limits()

    def remove_limit(self, name: str) -> None:
        if isinstance(self.storage, KeepsLimits):
            assert self.run(self.storage.remove_limit(name)) is self.expected.limits.remove(name)

    def look_at_limits(self) -> None:
        if isinstance(self.storage, KeepsLimits):
            assert self.run(self.storage.declared_limits()) == self.expected.limits.declared
            for job_id, found in zip(IDS, self.run(self.storage.held_back(IDS)), strict=True):
                compare_held_back(job_id, found, *self.expected.held_back(job_id), self.harness.clock_slack)

    # What recurs

    def store_cron(self, cron: Cron) -> None:
        if self.crons is not None:
            self.run(self.crons.store(cron))

    def change_cron(self, verb: str, name: str) -> None:
        if self.crons is not None:
            self.run(self.crons.change(verb, name))

    def tick(self, late: bool) -> None:
        if self.crons is not None:
            self.run(self.crons.tick_late() if late else self.crons.tick())

    # Time

    def end_all(self) -> None:
        """Let all jobs end: once the queue is not paused and time passes, nothing is stuck."""
        self.pause_or_resume(False)
        patience = 10 + 2 * len(self.expected.jobs)  # hours, of which a limit may take one for each start
        while any(not job.state.is_final for job in self.expected.jobs.values()):
            assert patience, f"never ended: {self.expected.jobs}"
            patience -= 1
            self.recover(100, max_stalls=2)
            before = len(self.claims)
            self.claim("one", ("*",), MINUTE, 4)
            for held in self.claims[before:]:
                self.settle(Completed(claim=held, result=b"1"))
            self.let_time_pass(HOUR)

    def let_time_pass(self, by: timedelta) -> None:
        self.run(self.harness.advance(by))
        self.expected.pass_time(by)

    # What must hold after each of them

    @invariant()
    def every_job_is_as_expected(self) -> None:
        ids = tuple(dict.fromkeys([*IDS, *self.expected.jobs]))
        for job_id, found in zip(ids, self.run(self.storage.status(ids)), strict=True):
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
    def every_job_reads_how_those_before_it_ended(self) -> None:
        for job in self.expected.jobs.values() if isinstance(self.storage, KnowsDependencies) else ():
            if job.state is not JobState.COMPLETED:
                told = self.run(cast("KnowsDependencies", self.storage).outcomes(job.new.id))
                compare_told(told, self.expected.told[job.new.id])

    @invariant()
    def every_record_is_as_expected(self) -> None:
        for job_id, found in zip(IDS, self.run(self.storage.read(IDS)), strict=True):
            job = self.expected.jobs.get(job_id)
            if found is not None and job is not None:
                compare_record(found, job)

    @invariant()
    def every_state_is_counted(self) -> None:
        assert self.run(self.storage.counts()) == self.expected.counts()


def compare_status(found: JobStatus, job: ExpectedJob, slack: timedelta) -> None:
    waits = job.state in (JobState.SCHEDULED, JobState.FAILING)
    told = (found.state, found.attempt, found.max_attempts, found.name, found.priority, found.worker_id)
    expected = (job.state, job.attempts, job.new.max_attempts, job.new.name, job.new.priority, job.worker_id)
    assert told == expected, f"{found.id!r}: {told}, expected {expected}"
    assert found.chain_index == job.new.chain_index
    times = (found.created_at, found.next_run_at, found.finished_at)
    expected_times = (job.created_at, job.run_at if waits else None, job.finished_at)
    near = all(map(partial(_near, slack), times, expected_times))
    assert near, f"{found.id!r}: {times}, expected {expected_times}"
    assert found.encoded_progress == job.progress
    if job.state in (JobState.FAILING, JobState.FAILED):
        compare_errors(found.last_error, job.error)


def compare_record(found: JobRecord, job: ExpectedJob) -> None:
    """Compare what is kept beside the status; of a completed job payload and failures may be gone."""
    completed = job.state is JobState.COMPLETED
    assert found.payload == job.new.payload or (completed and found.payload is None), f"{found.status.id!r}: {found}"
    assert found.result == (job.result if completed else None)
    assert found.meta == job.new.meta
    failures = tuple(one.attempt for one in found.failures)
    assert failures == job.failures[-FAILURES_KEPT:] or (completed and not failures), f"{found.status.id!r}: {failures}"


def compare_held_back(
    job_id: str, found: HeldBack | None, best: HeldBack | None, worst: HeldBack | None, slack: timedelta
) -> None:
    """Compare what keeps a job back, where that is certain."""
    if best != worst:
        return
    keys, times = zip(*[(None, None) if one is None else (one[:2], one.until) for one in (found, best)], strict=True)
    assert keys[0] == keys[1], f"{job_id!r} is kept back {found}, expected {best}"
    assert _near(slack, *times), f"{job_id!r} is kept back {found}, expected {best}"


def _near(slack: timedelta, one: datetime | None, other: datetime | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) <= slack)


def compare_errors(found: ErrorInfo | None, expected: ErrorInfo | None) -> None:
    """Compare errors; a storage chooses its own words for a job that it gave up."""
    if expected is None or expected.type not in ("StalledError", "DependencyFailed"):
        assert found == expected
    else:
        assert found is not None
        assert (found.type, found.exhausted) == (expected.type, expected.exhausted)


def compare_told(found: Mapping[JobRef, JobOutcome | None], expected: Mapping[str, ExpectedJob | None]) -> None:
    """Compare what a job reads of those that it came after with how these ended."""
    assert {one.id for one in found} == set(expected)
    for ref, outcome in found.items():
        job = expected[ref.id]
        assert (outcome is None) == (job is None), f"{ref}: {outcome}, expected {job}"
        if outcome is not None and job is not None:
            completed = job.state is JobState.COMPLETED
            assert (outcome.kind.value, outcome.result) == (job.state.value, job.result if completed else None)
            compare_errors(outcome.error, job.error if job.state is JobState.FAILED else None)
