"""The text in which failed attempts are kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from workers.jobs import DROP, FAILURES_KEPT, Completed, ErrorInfo, Failed, Released, Retried
from workers.storage.failures import decode_failures, lost_attempt, noted_failure, with_failure
from workers.storage.memory import MemoryStorage
from workers.testing.steps import ERROR, claim_one, enqueue, job

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


@pytest.mark.parametrize("text", ["two\nlines", "\r\v\u2028", "\ud800", "\x00", '"', "ü" * 500])
def test_any_text_is_kept_in_one_line(text: str) -> None:
    """Whatever a worker's id or an error says, each attempt is one line of ASCII, and is read as it was."""
    kept = with_failure(with_failure(None, lost_attempt(1, text), NOW), lost_attempt(2, "w"), NOW)
    assert kept is not None
    assert kept.isascii()
    assert [(one.attempt, one.worker_id, one.ended_at) for one in decode_failures(kept)] == [
        (1, text, NOW),
        (2, "w", NOW),
    ]


async def test_only_what_failed_is_noted() -> None:
    """A retry that counts, or may, and a failure; but not of a job that nobody ran."""
    storage = MemoryStorage()
    await enqueue(storage, job("a"))
    held = await claim_one(storage)
    second = timedelta(seconds=1)
    retried = Retried(claim=held, delay=second, error=ERROR, duration=second)
    kept = with_failure(None, noted_failure(retried), NOW)
    [one] = decode_failures(kept)
    assert (one.started_at, one.ended_at, one.worker_id) == (NOW - second, NOW, held.worker_id)
    assert noted_failure(replace(retried, snoozed=True)) is None
    assert noted_failure(Completed(claim=held, result=b"")) is None
    assert noted_failure(Released(claim=held)) is None
    assert noted_failure(Failed(claim=replace(held, stalled=ERROR), error=ERROR)) is None
    assert noted_failure(Failed(claim=held, error=ERROR, keep=DROP)) is None
    assert noted_failure(Failed(claim=replace(held, keep_failed=DROP), error=ERROR)) is None
    assert noted_failure(Failed(claim=replace(held, keep_failed=DROP), error=ERROR, keep=second)) is not None
    assert with_failure(kept, None, NOW) == kept


def test_old_ones_are_forgotten() -> None:
    """The last ones stay."""
    kept: str | None = None
    for attempt in range(FAILURES_KEPT + 5):
        kept = with_failure(kept, lost_attempt(attempt, None), NOW)
    assert [one.attempt for one in decode_failures(kept)] == list(range(5, FAILURES_KEPT + 5))


JUNK = (
    *("", "x", "1", "1 []", "1 {}", "1 " + "[" * 100_000),
    *('x [1,null,null,"A","b"]', '1 ["x",null,null,"A","b"]', '1e999 [1,null,null,"A","b"]', '1 [1,null,1e99,"A","b"]'),
    "9" * 40 + " [1,null,null,1,1]",
)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_left_out(junk: str) -> None:
    """What somebody else wrote there hides no attempt, and is no error."""
    good = with_failure(None, lost_attempt(1, "w"), NOW)
    assert [one.attempt for one in decode_failures(f"{junk}\n{good}")] == [1]


async def test_a_long_error_is_cut() -> None:
    """Twenty attempts with any error fit into some kilobytes."""
    storage = MemoryStorage()
    await enqueue(storage, job("a"))
    error = ErrorInfo(type="T" * 10_000, message="x" * 10_000)
    noted = noted_failure(Failed(claim=await claim_one(storage), error=error))
    assert noted is not None
    assert len(noted) < 400
