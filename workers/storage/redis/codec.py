"""Values of this package as Redis holds them; `lua/queue.lua` has the same formats.

Times and durations are whole microseconds. A record that is written in parts has its variable parts at the end, each
preceded by its length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeAlias

import msgpack

from workers.deduplication import DeduplicationMode
from workers.errors import StorageError, UnknownDependency
from workers.jobs import (
    DROP,
    MESSAGE_CHARACTERS,
    STACK_CHARACTERS,
    AfterFailure,
    Cancelled,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobRecord,
    JobState,
    JobStatus,
    NewJob,
    Retention,
    Retried,
    Settlement,
)
from workers.limits import fair_key_of, limit_key_of, ordering_key_of
from workers.metadata import decode_meta, encode_meta
from workers.retry import RetryPolicy
from workers.storage.failures import decode_failures, noted_failure
from workers.storage.on_redis.messages import STATES, duration, moment, pack, unpack
from workers.storage.on_redis.wire import Reply
from workers.storage.rules import dependency_error, stalled_error

Packed: TypeAlias = Sequence[object]

_MODES: Final = {DeduplicationMode.SIMPLE: 1, DeduplicationMode.THROTTLE: 2, DeduplicationMode.DEBOUNCE: 3}

_POLICIES: Final = {AfterFailure.FAIL: 1, AfterFailure.RUN: 2}
_REFUSED: Final = -1

_PLAIN_RECORD: Final = 1
_LINKED_RECORD: Final = 2
"""The record of a later link of a chain; the number of the link follows the record's head."""

CORRUPT: Final = ErrorInfo(
    type="CorruptRecord", message="what Redis has in place of the job is no record of this queue; remove it"
)
UNREADABLE: Final = "unreadable"
"""The name of a job whose record cannot be read."""
KEPT_UNREAD: Final = timedelta(hours=1)

SECRET_BYTES: Final = 12
_TOKEN_BYTES: Final = SECRET_BYTES + 2

_REST: Final = struct.Struct(">IIQQ")  # priority, max attempts, keep completed, keep failed
_HEAD: Final = struct.Struct(">BQQIIQQ")  # version, place and creation in front of that
_RUN: Final = struct.Struct(f">BBIIHQQQ{_TOKEN_BYTES}s")
_BACKOFF: Final = struct.Struct(">dddd")
_LENGTH: Final = struct.Struct(">H")
_LONG_LENGTH: Final = struct.Struct(">I")
_LINK: Final = struct.Struct(">I")
_UNSIGNED: Final = (1 << 31) - 1
_ABOVE_ALL: Final = 1 << 30
_HAS_PROGRESS: Final = 2
_META_ALONE, _META_BEHIND = b"\1", b"\2"

_PLAIN, _EXHAUSTED, _STALLED, _BECAUSE_OF = b"\0", b"\1", b"\2", b"\3"


@lru_cache(256)
def encode_retention(value: Retention) -> int:
    """Return the retention in microseconds, 0 for `DROP`."""
    return 0 if value is DROP else duration(value) or 1


@lru_cache(256)
def _decoded_retention(value: int) -> Retention:
    return DROP if value == 0 else timedelta(microseconds=value)


@lru_cache(256)
def _decoded_lease(microseconds: int) -> timedelta:
    return timedelta(microseconds=microseconds)


def encode_job(job: NewJob) -> Packed:
    """Return the job as `add.lua` takes it."""
    name, key = job.name.encode(), (job.holding_key or "").encode()
    rest = b"".join(
        (
            _REST.pack(
                job.priority & _UNSIGNED,  # as `lua/queue.lua` says
                min(job.max_attempts, 0xFFFFFFFF),
                encode_retention(job.keep_completed),
                encode_retention(job.keep_failed),
            ),
            *(_LENGTH.pack(len(name)), name, _LENGTH.pack(len(key)), key),
            _LINK.pack(job.chain_index) if job.chain_index else b"",
            _encode_extras(job),
            job.payload,
        )
    )
    version = _LINKED_RECORD if job.chain_index else _PLAIN_RECORD
    packed = (job.id.encode(), name, key, job.priority, duration(job.delay), version, rest)
    if job.after:
        after = (_POLICIES[job.after_failure], [bytes_of(one) for one in job.after])
        return (*packed, _encode_deduplication(job) or False, after)
    return packed if job.deduplication is None else (*packed, _encode_deduplication(job))


def _encode_deduplication(job: NewJob) -> Packed | None:
    if job.deduplication is None:
        return None
    ttl = job.deduplication.ttl
    mode = _MODES[job.deduplication.mode]
    return (job.deduplication.key.encode(), mode, 0 if ttl is None else duration(ttl), len(job.payload))


def _encode_extras(job: NewJob) -> bytes:
    """Return what most jobs have none of, in front of the payload: the back-off, and behind a mark the metadata too."""
    policy, extras = job.backoff, b""
    if policy is not None:
        values = (policy.initial.total_seconds(), policy.multiplier, policy.maximum.total_seconds(), policy.jitter)
        extras = _BACKOFF.pack(*values)
    if job.meta:
        extras = (_META_BEHIND if extras else _META_ALONE) + extras + encode_meta(job.meta).encode()
        extras += b" " if len(extras) == _BACKOFF.size else b""  # that long is a back-off alone
    return _LENGTH.pack(len(extras)) + extras


def enqueue_results(jobs: Sequence[NewJob], answer: Sequence[Reply]) -> list[EnqueueResult]:
    """Return the results for what the scripts that enqueue answer.

    Raises:
        UnknownDependency: they refused a job that is to follow unknown ones.
    """
    if answer and answer[0] == _REFUSED:
        raise UnknownDependency(jobs[answer[1] - 1].id, [text_of(one) for one in answer[2]])
    return [enqueue_result(job, found) for job, found in zip(jobs, answer, strict=True)]


def enqueue_result(job: NewJob, found: Reply) -> EnqueueResult:
    """Return the result that `add.lua` answers for the job."""
    if found == 0:
        return EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
    state, *result = found
    if len(result) > 1:  # another job has the deduplication key
        existing = STATES.get(state)
        return EnqueueResult(id=text_of(result[1]), status=EnqueueStatus.DUPLICATE, existing_state=existing)
    if STATES[state] is JobState.COMPLETED:
        return EnqueueResult(id=job.id, status=EnqueueStatus.COMPLETED, existing_state=STATES[state], result=result[0])
    return EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=STATES[state])


class RedisRecord(NamedTuple):
    """A job's record, up to what was sent of it."""

    place: int
    created: int
    priority: int
    max_attempts: int
    keep_completed: int
    keep_failed: int
    name: bytes
    key: bytes
    chain_index: int
    finish: int


def decode_record(record: bytes) -> RedisRecord:
    """Decode the head of the record."""
    version, place, created, priority, max_attempts, keep_completed, keep_failed = _HEAD.unpack_from(record)
    if priority >= _ABOVE_ALL:
        priority -= _UNSIGNED + 1
    at = _HEAD.size
    finish = at + 2 + _LENGTH.unpack_from(record, at)[0]
    name = record[at + 2 : finish]
    at = finish
    finish += 2 + _LENGTH.unpack_from(record, at)[0]
    key = record[at + 2 : finish]
    chain_index = 0
    if version == _LINKED_RECORD:
        chain_index = _LINK.unpack_from(record, finish)[0]
        finish += _LINK.size
    return RedisRecord(
        place, created, priority, max_attempts, keep_completed, keep_failed, name, key, chain_index, finish
    )


def decode_new_job(job_id: str, packed: bytes) -> NewJob:
    """Return the job as it was enqueued, without its delay and its deduplication key.

    Raises:
        ValueError: it is no job that anybody could enqueue.
        struct.error: the record breaks off.
    """
    record = decode_record(packed)
    backoff, meta, payload = _decode_body(packed, record.finish)
    key = record.key.decode() or None
    return NewJob(
        id=job_id,
        name=record.name.decode(),
        payload=payload,
        max_attempts=record.max_attempts,
        keep_completed=_decoded_retention(record.keep_completed),
        keep_failed=_decoded_retention(record.keep_failed),
        priority=record.priority,
        ordering_key=ordering_key_of(key),
        limit_key=limit_key_of(key),
        fair_key=fair_key_of(key),
        backoff=backoff,
        chain_index=record.chain_index,
        meta=meta,
    )


def decode_claims(worker_id: str, secret: bytes, answer: Sequence[Reply]) -> Iterator[Claim]:
    """Yield the claims in what `claim.lua` answers."""
    start = secret.hex()
    for number, at in enumerate(range(0, len(answer), 5), 1):
        job_id, packed, attempt, lease, error = answer[at : at + 5]
        claim = partial(
            Claim,
            job_id=text_of(job_id),
            token=f"{start}{number:04x}",
            worker_id=worker_id,
            lease=_decoded_lease(lease),
            attempt=attempt,
            last_error=decode_error(error),
        )
        try:
            yield _decoded_claim(claim, packed)
        except (ValueError, OverflowError, struct.error):  # the part that scripts do not read is not ours
            yield claim(
                name=UNREADABLE,
                payload=b"",
                max_attempts=attempt,
                created_at=moment(0),
                keep_completed=KEPT_UNREAD,
                keep_failed=KEPT_UNREAD,
                stalled=CORRUPT,
            )


def _decoded_claim(claim: Callable[..., Claim], packed: bytes) -> Claim:
    record = decode_record(packed)
    backoff, meta, payload = _decode_body(packed, record.finish)
    return claim(
        name=_decoded_name(record.name),
        payload=payload,
        max_attempts=record.max_attempts,
        created_at=moment(record.created),
        keep_completed=_decoded_retention(record.keep_completed),
        keep_failed=_decoded_retention(record.keep_failed),
        priority=record.priority,
        backoff=backoff,
        chain_index=record.chain_index,
        meta=meta,
    )


def _decode_body(packed: bytes, at: int) -> tuple[RetryPolicy | None, dict[str, str], bytes]:
    if packed[at : at + 2] == b"\0\0":
        return None, {}, packed[at + 2 :]
    at += _LENGTH.size
    end = at + _LENGTH.unpack_from(packed, at - _LENGTH.size)[0]
    extras, payload, meta = packed[at:end], packed[end:], b""
    if len(extras) != _BACKOFF.size:
        kind, extras = extras[:1], extras[1:]
        start = _BACKOFF.size if kind == _META_BEHIND else 0
        extras, meta = extras[:start], extras[start:]
    if not extras:
        return None, decode_meta(meta) if meta else {}, payload
    initial, multiplier, maximum, jitter = _BACKOFF.unpack(extras)
    policy = RetryPolicy(
        initial=timedelta(seconds=initial), multiplier=multiplier, maximum=timedelta(seconds=maximum), jitter=jitter
    )
    return policy, decode_meta(meta) if meta else {}, payload


@lru_cache(1024)
def _decoded_name(name: bytes) -> str:
    return text_of(name)


def bytes_of(text: str) -> bytes:
    """Return an id or a name as Redis has it."""
    return text.encode(errors="surrogateescape")


def text_of(raw: bytes) -> str:
    """Return the id or name for its bytes in Redis, whichever bytes another program wrote."""
    return raw.decode(errors="surrogateescape")


def token_of(claim: Claim) -> bytes:
    """Return the token as Redis has it; for a token that was not made here, one that matches none."""
    try:
        token = bytes.fromhex(claim.token)
    except ValueError:
        token = b""
    return token if len(token) == _TOKEN_BYTES else b"-"


def encode_settlement(settlement: Settlement) -> Packed:
    """Return the settlement as `settle.lua` takes it."""
    claim = settlement.claim
    head = (bytes_of(claim.job_id), token_of(claim))
    match settlement:
        case Completed():
            keep = claim.keep_completed if settlement.keep is None else settlement.keep
            end = (*head, 1, encode_retention(keep), settlement.result)
            return end if settlement.then is None else (*end, encode_job(settlement.then))
        case Retried():
            delay, error = duration(settlement.delay), encode_error(settlement.error)
            return (*head, 2, delay, error, settlement.counted, settlement.snoozed, noted_failure(settlement))
        case Failed():
            keep = claim.keep_failed if settlement.keep is None else settlement.keep
            return (*head, 3, encode_retention(keep), encode_error(settlement.error), noted_failure(settlement))
        case Cancelled():
            keep = claim.keep_failed if settlement.keep is None else settlement.keep
            return (*head, 6, encode_retention(keep))
        case Continued():
            return (*head, 5, encode_job(settlement.then))
        case _:
            return (*head, 4)


def encode_error(error: ErrorInfo) -> bytes:
    """Encode the error after a byte for its kind, so that a script can mark it as the last attempt's."""
    texts = (error.type, error.message[:MESSAGE_CHARACTERS], error.stack[-STACK_CHARACTERS:])
    packed: bytes = pack(texts)
    return (_EXHAUSTED if error.exhausted else _PLAIN) + packed


def decode_error(packed: bytes) -> ErrorInfo | None:
    """Decode the error, None for an empty value."""
    if not packed:
        return None
    try:
        return _decoded_error(packed)
    except (ValueError, TypeError):
        return ErrorInfo(type="CorruptRecord", message="the stored error was changed by somebody else")


def _decoded_error(packed: bytes) -> ErrorInfo:
    if packed[:1] == _STALLED:
        worker, attempts, max_attempts, stalls, max_stalls = unpack(packed[1:])
        return stalled_error(
            worker=text_of(worker),
            attempts=attempts,
            max_attempts=max_attempts,
            stalls=stalls,
            max_stalls=max_stalls,
        )
    if packed[:1] == _BECAUSE_OF:
        dependency, code, cause = unpack(packed[1:])
        return dependency_error(text_of(dependency), STATES.get(code), _decoded_cause(cause))
    kind, message, stack = msgpack.unpackb(packed[1:], unicode_errors="surrogatepass")
    return ErrorInfo(type=str(kind), message=str(message), stack=str(stack), exhausted=packed[:1] == _EXHAUSTED)


def _decoded_cause(packed: bytes) -> ErrorInfo | None:
    """Decode the beginning of the error of a job that another followed."""
    if packed[:1] != _PLAIN:
        return decode_error(packed)
    kind, message = unpack(packed[1:])
    return ErrorInfo(type=kind.decode(errors="replace"), message=message.decode(errors="replace"))


def decode_status(job_id: str, found: Sequence[Reply]) -> JobStatus:
    """Return the status in what `show.lua` makes of a job.

    Raises:
        StorageError: the job is in a state that this version does not know.
    """
    code, head, run, *waits_for = found
    if code not in STATES:
        raise StorageError(f"job {job_id!r} is in a state that this version does not know; update every worker")
    state, record = STATES[code], decode_record(head)
    attempts, place, finished, worker, error, progress = (
        _decode_run(run) if run else (0, record.place, 0, b"", b"", None)
    )
    return JobStatus(
        id=job_id,
        name=_decoded_name(record.name),
        state=state,
        attempt=attempts,
        max_attempts=record.max_attempts,
        created_at=moment(record.created),
        priority=record.priority,
        chain_index=record.chain_index,
        next_run_at=moment(place) if state in (JobState.SCHEDULED, JobState.FAILING) else None,
        finished_at=moment(finished) if state.is_final else None,
        worker_id=text_of(worker) or None,
        last_error=decode_error(error),
        encoded_progress=progress,
        waits_for=waits_for[0] if waits_for else 0,
    )


def decode_whole(job_id: str, found: Sequence[Reply]) -> JobRecord:
    """Return the job in what `whole.lua` answers; a payload that cannot be read is none.

    Raises:
        StorageError: the job is in a state that this version does not know.
    """
    shown, packed, last = found
    status, payload, meta = decode_status(job_id, shown), None, dict[str, str]()
    completed = status.state is JobState.COMPLETED
    with suppress(ValueError, OverflowError, struct.error):
        _, meta, payload = _decode_body(packed, decode_record(packed).finish)
    return JobRecord(
        status=status,
        payload=None if completed else payload,
        result=last if completed else None,
        meta=meta,
        failures=() if completed else decode_failures(last.decode(errors="replace")),
    )


def _decode_run(run: bytes) -> tuple[int, int, int, bytes, bytes, bytes | None]:
    _, flags, attempts, _, _, place, finished, _, _ = _RUN.unpack_from(run)
    at = _RUN.size
    end = at + 2 + _LENGTH.unpack_from(run, at)[0]
    start = end + _LONG_LENGTH.size
    stop = start + _LONG_LENGTH.unpack_from(run, end)[0]
    progress = run[stop + _LENGTH.size :] if flags & _HAS_PROGRESS else None
    return attempts, place, finished, run[at + 2 : end], run[start:stop], progress
