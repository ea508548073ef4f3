"""Jobs, settlements and results as Bull 1.x keeps them, and back; pure. `lua/queue.lua` has the same formats.

Any producer may have written what is read here: junk never raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias, get_args

from workers.errors import Unsupported
from workers.jobs import (
    DROP,
    MESSAGE_CHARACTERS,
    STACK_CHARACTERS,
    Cancelled,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    EnqueueStatus,
    ErrorInfo,
    Failed,
    JobState,
    NewJob,
    Retention,
    Retried,
    Settlement,
)
from workers.storage.bull.options import (
    LONGEST_DELAY,
    BullJob,
    BullJobOptions,
    keep_ms,
    read_options,
    write_options,
)
from workers.storage.failures import noted_failure
from workers.storage.on_redis import node_values
from workers.storage.on_redis.messages import STATES, duration
from workers.storage.on_redis.node_values import MAX_NUMBER, encode_bytes, json_object, number, whole
from workers.storage.on_redis.wire import Reply
from workers.storage.rules import bounded

Dialect: TypeAlias = Literal["A", "B", "C"]
"""The version of the Node processes on the queue: Bull up to 1.0.0-rc3, up to 1.0.x, or 1.1.x. The oldest counts."""

RESERVED_IDS: Final = frozenset(
    [
        "id",
        "wait",
        "paused",
        "meta-paused",
        "active",
        "delayed",
        "completed",
        "failed",
        "jobs",
        "priority",
        "repeat",
        "stalled",
        "stalled-check",
        "workers",
    ]
)
"""Names of the other keys of a queue, also in later versions; a job with such an id would destroy the queue."""

DEFAULT_NAME: Final = "default"
"""The name given to Node's jobs, which have none in Bull 1.x; the same in `specs.DEFAULT_NAME` and `lua/claim.lua`."""

CORRUPT: Final = ErrorInfo(
    type="CorruptRecord",
    message="the job's options in Redis are no JSON object: remove the job, or repair them and retry it",
)

_LOCK: Final = ":lock"
"""The suffix that makes a job's key the key of its lock."""
_DIGITS: Final = re.compile(r"[0-9]+\Z", re.ASCII)
_DECIMAL: Final = re.compile(r"(?:0|[1-9][0-9]*)\Z", re.ASCII)
_FALSY_NUMBER: Final = re.compile(rb"-?[0-9.]+(?:[eE][+-]?[0-9]+)?\Z")
_TOKEN_HEAD_CHARACTERS: Final = 24
TOKEN_HEAD_BYTES: Final = _TOKEN_HEAD_CHARACTERS // 2


def known_dialect(dialect: str) -> Dialect:
    """Return the dialect of that letter.

    Raises:
        ValueError: there is no such dialect.
    """
    for known in get_args(Dialect):
        if dialect == known:
            found: Dialect = known
            return found
    raise ValueError(f"a dialect of Bull is one of {', '.join(get_args(Dialect))}, not {dialect[:40]!r}")


def encode_id(job_id: str, dialect: Dialect) -> str:
    """Return the id in Redis.

    In dialect C a plain word is unchanged, and any other text is `~` and its base64url. Node takes other text unchanged
    too, but a key joins names without escapes: the job `jobs:wait` of the queue `mail` would be where the queue
    `mail:jobs` has its line.

    Raises:
        Unsupported: beside dialect C a name of a key or lock, or a number, which are the counter's; beside A and B all
            but numbers, as Node takes every id for one, up to where it counts exactly.
    """
    if dialect == "C":
        _refuse_confusing(job_id)
        return node_values.encode_id(job_id, RESERVED_IDS)
    if _DECIMAL.match(job_id) and int(job_id) < MAX_NUMBER:
        return job_id
    raise Unsupported(
        f"job {job_id!r}: beside Bull 1.0 and older an id must be a decimal number below 2^53;"
        " take one from BullStorage.next_id(), or open the queue with dialect 'C' when all of Node is at 1.1"
    )


def _refuse_confusing(job_id: str) -> None:
    better = f"job-{job_id}"
    if job_id in RESERVED_IDS:
        raise Unsupported(f"job {job_id!r}: a queue of Bull has a key of that name; give it another id, as {better!r}")
    if _DIGITS.match(job_id):
        raise Unsupported(f"job {job_id!r}: Bull gives out numbers itself; give it another id, as {better!r}")
    if job_id.endswith(_LOCK):
        raise Unsupported(f"job {job_id!r}: Bull calls locks so; give it an id that does not end in {_LOCK!r}")


def decode_id(raw: bytes) -> str:
    """Return the id that a job in Redis goes by; one that `encode_id` did not make reads as it is."""
    return node_values.decode_id(raw.decode(errors="surrogateescape"), RESERVED_IDS)


def raw_ids(job_id: str, dialect: Dialect) -> list[bytes]:
    """Return where a job of this id may be: as we would store it, and as another producer may have stored it."""
    encoded = node_values.encode_id(job_id, RESERVED_IDS)
    plain = job_id.encode(errors="surrogatepass")
    if encoded == job_id or job_id in RESERVED_IDS or job_id.startswith("workers:") or not job_id:
        return [encoded.encode()]
    return [plain, encoded.encode()] if dialect != "C" else [encoded.encode(), plain]


def lease_ms(lease: timedelta) -> int:
    """Return how many milliseconds a lock lasts: at least one, because Redis refuses a shorter one."""
    return max(1, math.ceil(bounded(lease) / timedelta(milliseconds=1)))


def encode_job(job: NewJob, dialect: Dialect) -> Sequence[object]:
    """Return the job as `add.lua` takes it.

    Raises:
        Unsupported: the dialect has no such id, the delay is longer than Node keeps, or the job has an ordering key
            or a priority above 0.
    """
    raw = encode_id(job.id, dialect)
    others = job.others if isinstance(job, BullJob) else {}
    return raw.encode(), *_encode_content(job, raw if dialect == "C" else None, others)


def _encode_content(job: NewJob, raw: str | None, others: Mapping[str, object]) -> Sequence[object]:
    """Return everything but the id; `raw` is the id if the options name it, `others` are those that we do not know."""
    if job.follows:
        raise Unsupported(f"job {job.id!r}: Bull lets no job follow others; see BullStorage.capabilities")
    if job.holding_key is not None:
        raise Unsupported(f"job {job.id!r}: Bull has no ordering, limit or fair keys; see BullStorage.capabilities")
    if job.priority < 0:
        raise Unsupported(f"job {job.id!r}: Bull has no priority above 0; see BullStorage.capabilities")
    if job.delay > LONGEST_DELAY:
        raise Unsupported(
            f"job {job.id!r}: Bull 1.x breaks on delays of more than {LONGEST_DELAY.days} days;"
            " enqueue it nearer to its time, or in another storage"
        )
    content = (job.name.encode(), encode_bytes(job.payload), write_options(job, raw, others))
    return *content, job.max_attempts, duration(job.delay), isinstance(job, BullJob) and job.lifo


def enqueue_result(job: NewJob, found: Reply) -> EnqueueResult:
    """Return the result that `enqueue.lua` answers for the job, which is not `[0]`."""
    if found == 0:
        return EnqueueResult(id=job.id, status=EnqueueStatus.QUEUED)
    state = STATES[found[0]]
    if state is JobState.COMPLETED:
        result = decode_result(*found[1:])
        return EnqueueResult(id=job.id, status=EnqueueStatus.COMPLETED, existing_state=state, result=result)
    return EnqueueResult(id=job.id, status=EnqueueStatus.DUPLICATE, existing_state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullClaim(Claim):
    """A claim with its job's id in Redis; a claim whose public id was replaced is about another job.

    `others` are those of the job's options that we do not know.
    """

    key_id: bytes
    others: Mapping[str, object] = field(default_factory=dict, repr=False)

    def raw(self, dialect: Dialect) -> bytes:
        """Return the id in Redis."""
        return self.key_id if decode_id(self.key_id) == self.job_id else raw_ids(self.job_id, dialect)[0]


def decode_claims(worker_id: str, head: bytes, dialect: Dialect, answer: Sequence[Reply]) -> Iterator[BullClaim]:
    """Yield the claims in what `claim.lua` answers."""
    start = head.hex()
    for place, at in enumerate(range(0, len(answer), 12), 1):
        raw, name, data, opts, timestamp, attempts, made, stalls, reason, stacks, facts, lease = answer[at : at + 12]
        options = read_options(raw, opts)
        yield BullClaim(
            job_id=decode_id(raw),
            name=name.decode(errors="surrogateescape") if name else DEFAULT_NAME,
            payload=node_values.decode_bytes(data.decode(errors="surrogateescape")),
            token=f"{start}{place:04x}",
            worker_id=worker_id,
            lease=timedelta(milliseconds=lease),
            attempt=spent(name, made, stalls) + 1,
            max_attempts=max(1, count(attempts)),
            created_at=node_values.moment(count(timestamp)),
            keep_completed=keep_completed(options, dialect),
            keep_failed=options.keep_failed,
            priority=options.priority,
            backoff=options.backoff,
            timeout=options.timeout,
            chain_index=options.chain_index,
            meta=options.meta,
            last_error=decode_error(reason, stacks, facts, None, exhausted=False),
            stalled=CORRUPT if options.corrupt else None,
            key_id=raw,
            others=options.others,
        )


def keep_completed(options: BullJobOptions, dialect: Dialect) -> Retention:
    """Return how long the record of a completed job is kept: Bull 1.0 and older ignore `removeOnComplete`."""
    return DROP if options.remove_on_complete and dialect == "C" else options.keep_completed


def count(value: bytes | None) -> int:
    """Return a counter of the hash, 0 when missing."""
    return whole(value.decode(errors="replace")) if value else 0


def spent(name: bytes | None, made: bytes | None, stalls: bytes | None) -> int:
    """Return how many attempts are used: failed runs, and for our own jobs lost leases.

    To Node's producers a crash is no attempt.
    """
    return count(made) + (count(stalls) if name else 0)


def token_of(claim: Claim) -> bytes:
    """Return the token as Redis has it."""
    return claim.token.encode(errors="surrogatepass")


def encode_settlement(settlement: Settlement, raw: bytes, dialect: Dialect) -> Sequence[object]:
    """Return the settlement as `settle.lua` takes it; see `encode_job` for what it raises."""
    claim = settlement.claim
    head = (raw, token_of(claim))
    match settlement:
        case Completed():
            keep = claim.keep_completed if settlement.keep is None else settlement.keep
            end = (*head, 1, keep_ms(keep), *encode_result(settlement.result))
            return end if settlement.then is None else (*end, encode_job(settlement.then, dialect))
        case Retried():
            delay = min(duration(settlement.delay), duration(LONGEST_DELAY))
            if settlement.snoozed:
                return (*head, 7, delay)
            counting = (settlement.counted, keep_ms(claim.keep_failed))
            return (*head, 2, delay, *_failure(settlement.error), *counting, noted_failure(settlement))
        case Failed():
            keep = claim.keep_failed if settlement.keep is None else settlement.keep
            return (*head, 3, keep_ms(keep), *_failure(settlement.error), noted_failure(settlement))
        case Cancelled():
            keep = claim.keep_failed if settlement.keep is None else settlement.keep
            return (*head, 6, keep_ms(keep), *encode_cancel(claim.job_id))
        case Continued():
            others = claim.others if isinstance(claim, BullClaim) else {}
            return (*head, 5, (raw, *_encode_content(settlement.then, None, others)))
        case _:
            return (*head, 4)


def encode_cancel(job_id: str) -> tuple[bytes, bytes]:
    """Return the reason that Node reads, and the remaining facts."""
    error = node_values.cancelled_error(job_id)
    return error.message.encode(errors="surrogatepass"), node_values.error_facts(error).encode()


def _failure(error: ErrorInfo) -> tuple[bytes, bytes, bytes]:
    """Return the reason, one stack in JSON, and the remaining facts."""
    message, stack = error.message[:MESSAGE_CHARACTERS], error.stack[-STACK_CHARACTERS:]
    facts = node_values.error_facts(ErrorInfo(type=error.type, message=message, exhausted=error.exhausted))
    return message.encode(errors="surrogatepass"), json.dumps(stack or None).encode(), facts.encode()


def encode_result(result: bytes) -> tuple[bytes, bytes | Literal[False]]:
    """Return `returnvalue`, and the exact result if that cannot express it.

    Bull has no falsy results but the empty text.
    """
    value = result.strip()
    if value == b"null":
        return b"", False if result == value else result
    falsy = value in (b"false", b'""') or (_FALSY_NUMBER.match(value) is not None and number(value.decode()) == 0)
    return (b"", result) if falsy else (encode_bytes(result), False)


def decode_result(returnvalue: bytes | None, exact: bytes | None) -> bytes:
    """Return the result that `encode_result` took, or the JSON of a Node worker."""
    if exact:
        return exact
    return node_values.decode_bytes(returnvalue.decode(errors="surrogateescape")) if returnvalue else b"null"


def shown_progress(value: bytes) -> bytes:
    """Return what Node is to see of a report: its number, or that there is none."""
    parsed = number(value.decode()) if re.fullmatch(rb"[0-9]{1,15}(?:\.[0-9]{1,9})?", value) else None
    return value if parsed else b"0"


def decode_progress(shown: bytes | None, exact: bytes | None) -> bytes | None:
    """Return the last report: ours, unless Node's came later."""
    if exact and (shown or b"0") == shown_progress(exact):
        return exact
    return shown if shown and shown != b"0" else None


def decode_error(
    reason: bytes | None, stacks: bytes | None, facts: bytes | None, stall: ErrorInfo | None, *, exhausted: bool
) -> ErrorInfo | None:
    """Return the last failure."""
    if stall is not None:
        return stall
    why = _text(reason)
    if why is None:
        why = _reason_in(_text(stacks))
    error = node_values.decode_error(why, _text(stacks), _text(facts), exhausted=exhausted)
    if error is not None and error.message == NODE_STALLED and not json_object(_text(facts)):
        return ErrorInfo(type="StalledError", message=error.message, exhausted=exhausted)
    return error


def _reason_in(stacks: str | None) -> str | None:
    """Return the message in front of the last stack, which is all that Bull 1.0 keeps of it."""
    said, _, _ = node_values.last_text(stacks).partition("\n    at ")
    return said.partition(": ")[2] or said or None


NODE_STALLED: Final = "job stalled more than allowable limit"
"""The words with which Node fails a stalled job."""


def _text(value: bytes | None) -> str | None:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else None
