"""The entries of a journal about jobs that wait for others: `codec` has their format."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.jobs import AfterFailure, JobOutcome, OutcomeKind
from workers.storage.file.frames import Entry
from workers.storage.file.values import error_of, optional_text_of, text_of, value_of_error
from workers.storage.memory.lines import StoredJob


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitBegun:
    """A job waits for those in `left` to end."""

    id: str
    after_failure: AfterFailure
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitShortened:
    """A job does not wait for that one any more."""

    id: str
    dependency: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeLearned:
    """How one ended that a job came after, as the job is told."""

    id: str
    dependency: str
    outcome: JobOutcome | None


def wait_entry(job: StoredJob, left: Iterable[str]) -> Entry:
    return ("d", job.new.id, job.new.after_failure.value, list(left))


def shortened_entry(job_id: str, dependency: str) -> Entry:
    return ("e", job_id, dependency)


def outcome_entry(job_id: str, dependency: str, outcome: JobOutcome | None) -> Entry:
    if outcome is None:
        return ("o", job_id, dependency)
    result = None if outcome.result is None else base64.b64encode(outcome.result).decode()
    return ("o", job_id, dependency, outcome.kind.value, value_of_error(outcome.error), result)


def read_wait(values: Iterator[object]) -> WaitBegun:
    job_id, policy, left = text_of(next(values)), AfterFailure(text_of(next(values))), next(values)
    if not isinstance(left, list):
        raise TypeError("no list")
    return WaitBegun(id=job_id, after_failure=policy, left=tuple(map(text_of, left)))


def read_shortened(values: Iterator[object]) -> WaitShortened:
    return WaitShortened(id=text_of(next(values)), dependency=text_of(next(values)))


def read_outcome(values: Iterator[object]) -> OutcomeLearned:
    job_id, dependency, kind = text_of(next(values)), text_of(next(values)), optional_text_of(next(values, None))
    if kind is None:
        return OutcomeLearned(id=job_id, dependency=dependency, outcome=None)
    error, result = error_of(next(values)), optional_text_of(next(values))
    outcome = JobOutcome(
        kind=OutcomeKind(kind), result=None if result is None else base64.b64decode(result), error=error
    )
    return OutcomeLearned(id=job_id, dependency=dependency, outcome=outcome)
