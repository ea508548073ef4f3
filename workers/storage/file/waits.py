"""The entries of a journal about jobs that wait for others: `codec` has their format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.jobs import AfterFailure
from workers.storage.file.frames import Entry
from workers.storage.file.values import text_of
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


def wait_entry(job: StoredJob, left: Iterable[str]) -> Entry:
    return ("d", job.new.id, job.new.after_failure.value, list(left))


def shortened_entry(job_id: str, dependency: str) -> Entry:
    return ("e", job_id, dependency)


def read_wait(values: Iterator[object]) -> WaitBegun:
    job_id, policy, left = text_of(next(values)), AfterFailure(text_of(next(values))), next(values)
    if not isinstance(left, list):
        raise TypeError("no list")
    return WaitBegun(id=job_id, after_failure=policy, left=tuple(map(text_of, left)))


def read_shortened(values: Iterator[object]) -> WaitShortened:
    return WaitShortened(id=text_of(next(values)), dependency=text_of(next(values)))
