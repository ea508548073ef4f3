"""What the values refuse, and how ids and errors are made."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from workers.checks import (
    MAX_ATTEMPTS,
    MAX_DELAY,
    MAX_PRIORITY,
    MAX_PROGRESS_BYTES,
    MIN_PRIORITY,
    check_progress,
    new_id,
)
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import Retry
from workers.jobs import (
    DROP,
    MESSAGE_CHARACTERS,
    STACK_CHARACTERS,
    EnqueueResult,
    EnqueueStatus,
    ErrorInfo,
    JobOutcome,
    NewJob,
    OutcomeKind,
    check_retention,
)
from workers.queue import JobSpec
from workers.testing.steps import job


@pytest.mark.parametrize("text", ["x", "é" * 256, "x" * 512, "a:b/../c", "\x00", " ", "👩‍🚀"])
def test_any_text_up_to_512_bytes_is_an_id(text: str) -> None:
    """Ids, names and ordering keys are any non-empty text of at most 512 bytes."""
    accepted = job(job_id=text, name=text, ordering_key=text)
    assert (accepted.id, accepted.name, accepted.ordering_key) == (text, text, text)


@pytest.mark.parametrize("text", ["", "x" * 513, "é" * 257, "\ud800"], ids=["empty", "513", "514", "surrogate"])
def test_other_text_is_refused(text: str) -> None:
    """Empty, longer or unencodable text is refused, and the message says which field it was."""
    with pytest.raises(ValueError, match="job id"):
        job(job_id=text)
    with pytest.raises(ValueError, match="job name"):
        job(name=text)
    with pytest.raises(ValueError, match="ordering key"):
        job(ordering_key=text)


def test_limits_of_numbers_are_inclusive() -> None:
    """The smallest and largest priority and delay are accepted."""
    assert job(priority=MIN_PRIORITY).priority == -1_000
    assert job(priority=MAX_PRIORITY).priority == 2_097_151
    assert job(delay=MAX_DELAY).delay == MAX_DELAY
    assert job(max_attempts=1).max_attempts == 1
    assert job(max_attempts=MAX_ATTEMPTS).max_attempts == MAX_ATTEMPTS


def test_numbers_outside_are_refused() -> None:
    """A priority, delay or number of attempts outside its range is refused with the job's id."""
    for priority in (MIN_PRIORITY - 1, MAX_PRIORITY + 1, True, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"'id': priority must be a whole number from -1000 to .*, not {priority}"):
            job("id", priority=priority)  # type: ignore[arg-type]  # as a careless caller might
    for delay in (timedelta(microseconds=-1), MAX_DELAY + timedelta(seconds=1), timedelta.max, timedelta.min):
        with pytest.raises(ValueError, match="job 'id': delay must be from 0 to 100 years"):
            job("id", delay=delay)
    for attempts in (0, MAX_ATTEMPTS + 1, True, 2.5):
        with pytest.raises(ValueError, match=f"job 'id': max_attempts must be a whole number .*, not {attempts}"):
            job("id", max_attempts=attempts)  # type: ignore[arg-type]  # as a careless caller might


def test_values_of_other_types_are_refused() -> None:
    """Text that is not `str` and payloads that are not bytes are a `TypeError` that says which field it was."""
    with pytest.raises(TypeError, match="job id must be text, not int"):
        job(job_id=1)  # type: ignore[arg-type]  # as a careless caller might
    with pytest.raises(TypeError, match="job name must be text, not bytes"):
        job(name=b"work")  # type: ignore[arg-type]  # as above
    for payload in (None, "text", bytearray(b"{}")):
        with pytest.raises(TypeError, match="job 'id': payload must be bytes"):
            job("id", payload=payload)  # type: ignore[arg-type]  # as above


def test_a_retention_is_drop_or_positive() -> None:
    """`DROP` and positive durations are retentions; zero, negative and endless ones are not."""
    assert job(keep=DROP).keep_failed is DROP
    assert job(keep=timedelta(milliseconds=1)).keep_completed == timedelta(milliseconds=1)
    for wrong in (timedelta(0), timedelta(seconds=-1), timedelta.max):
        with pytest.raises(ValueError, match="a retention is DROP or a duration"):
            check_retention(wrong)
        with pytest.raises(ValueError, match="a retention is DROP or a duration"):
            job(keep=wrong)


def test_progress_is_small() -> None:
    """4 KiB are the most a storage is asked to keep of it."""
    check_progress(b"x" * MAX_PROGRESS_BYTES)
    with pytest.raises(ValueError, match="not 4097"):
        check_progress(b"x" * (MAX_PROGRESS_BYTES + 1))


def test_ids_are_unique_version_7_uuids() -> None:
    """10 000 ids made in a row are different, and each is a UUID of version 7."""
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == 10_000
    assert {uuid.UUID(made).version for made in ids} == {7}
    assert {uuid.UUID(made).variant for made in ids} == {uuid.RFC_4122}


def test_ids_sort_by_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id made in a later millisecond sorts after every earlier one, as text."""
    moments = [0, 1, 255, 256, 1_700_000_000_000, 1_700_000_000_001, 2**47, 2**48 - 1]
    ids = []
    for milliseconds in moments:
        monkeypatch.setattr("workers.checks.time.time_ns", lambda now=milliseconds: now * 1_000_000)
        ids.append(new_id())
    assert ids == sorted(ids)
    assert [int(made.replace("-", "")[:12], 16) for made in ids] == moments


def test_an_error_keeps_type_message_and_stack() -> None:
    """The stored form of an exception says what it was, where it was raised, and whether it was the last attempt."""
    info = ErrorInfo.of(_raised("broken"), exhausted=True)
    assert (info.type, info.message, info.exhausted) == ("RuntimeError", "broken", True)
    assert "in _raised" in info.stack
    assert info.stack.endswith("RuntimeError: broken\n")


def test_long_errors_are_cut() -> None:
    """Message and stack are cut to 2 000 and 8 000 characters; of the stack the end stays."""
    info = ErrorInfo.of(_raised("x" * 50_000))
    assert info.message == "x" * MESSAGE_CHARACTERS
    assert len(info.stack) == STACK_CHARACTERS
    assert info.stack.endswith("xxx\n")


def test_a_deep_stack_is_cut() -> None:
    """A recursion a thousand frames deep is stored with its last frames."""

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        raise RuntimeError("deep")

    with pytest.raises(RuntimeError) as caught:
        dive(500)
    info = ErrorInfo.of(caught.value)
    assert len(info.stack) < STACK_CHARACTERS
    assert info.stack.endswith("RuntimeError: deep\n")


def test_a_retry_has_no_stack() -> None:
    """A `Retry` is a decision and not a failure: only its reason is stored."""
    info = ErrorInfo.of(Retry("the server is busy"))
    assert (info.type, info.message, info.stack) == ("Retry", "the server is busy", "")


def _raised(message: str) -> Exception:
    try:
        raise RuntimeError(message)
    except RuntimeError as error:
        return error


def test_reprs_show_no_payload_and_no_result() -> None:
    """What users put into a queue does not end up in a log by way of a repr."""
    job = NewJob(id="a", name="b", payload=b"secret")
    result = EnqueueResult(id="a", status=EnqueueStatus.COMPLETED, result=b"secret")
    outcome = JobOutcome(kind=OutcomeKind.COMPLETED, result=b"secret")
    spec = JobSpec(payload="secret")
    assert "secret" not in f"{job!r} {result!r} {outcome!r} {spec!r}"


@pytest.mark.parametrize(
    ("mode", "ttl", "error"),
    [
        (DeduplicationMode.SIMPLE, timedelta(seconds=1), ValueError),
        (DeduplicationMode.THROTTLE, None, TypeError),
        (DeduplicationMode.DEBOUNCE, 1.5, TypeError),
        (DeduplicationMode.THROTTLE, timedelta(0), ValueError),
        (DeduplicationMode.DEBOUNCE, timedelta(seconds=-1), ValueError),
        (DeduplicationMode.DEBOUNCE, MAX_DELAY + timedelta(1), ValueError),
        (DeduplicationMode.THROTTLE, timedelta.max, ValueError),
        (DeduplicationMode.THROTTLE, float("inf"), TypeError),
        (DeduplicationMode.DEBOUNCE, 10**400, TypeError),
        (DeduplicationMode.DEBOUNCE, None, TypeError),
        (DeduplicationMode.SIMPLE, 0, ValueError),
        ("nonsense", None, ValueError),
    ],
)
def test_a_time_that_no_mode_takes_is_refused(mode: DeduplicationMode, ttl: timedelta, error: type[Exception]) -> None:
    """`simple` has no time, the other modes one above 0 and up to 100 years."""
    with pytest.raises(error):
        Deduplication(key="key", mode=mode, ttl=ttl)


@pytest.mark.parametrize("key", ["", "x" * 513, "\ud800"], ids=["empty", "long", "surrogate"])
def test_an_impossible_deduplication_key_is_refused(key: str) -> None:
    """Keys are 1 to 512 bytes of UTF-8."""
    with pytest.raises(ValueError, match="deduplication key"):
        Deduplication(key=key)


@pytest.mark.parametrize("key", [b"bob", 7, None, ("a", "b")], ids=["bytes", "number", "none", "tuple"])
def test_a_deduplication_key_is_text(key: Any) -> None:
    """Anything else is a `TypeError` that says so."""
    with pytest.raises(TypeError, match="deduplication key"):
        Deduplication(key=key)


def test_a_mode_may_be_spelled() -> None:
    """As what comes from a configuration: it is the mode of that name."""
    spelled: Any = "debounce"
    deduplication = Deduplication(key="key", mode=spelled, ttl=MAX_DELAY)
    assert deduplication.mode is DeduplicationMode.DEBOUNCE
    assert replace(job(), deduplication=deduplication).delay == MAX_DELAY


def test_a_job_takes_no_bare_key() -> None:
    """A key without its mode is a `TypeError` that says what to pass."""
    with pytest.raises(TypeError, match="Deduplication, not 'bob'"):
        replace(job(), deduplication="bob")
