"""The specification of a job by an application, and the answer to its enqueue."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypedDict

from workers.checks import NO_TIME, as_duration, check_text, new_id
from workers.deduplication import Deduplication
from workers.follow_ups import NextJob
from workers.jobs import AfterFailure, EnqueueStatus, JobRef, JobState, JobStatus, NewJob, Retention
from workers.jobs.job import by_queue
from workers.limits import LimitKey
from workers.retention import KEEP_FAILED
from workers.retry import RetryPolicy, stored_policy
from workers.serde import Encoded, JsonSerde, Serde

DEFAULT_NAME: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job to enqueue; a field that is None takes the queue's default.

    Give `delay`, a timedelta or seconds, or `at` (aware), not both. `result_ttl` says how long a completed job is
    kept: a timedelta or whole milliseconds, above zero; `keep_completed` says the same, or `DROP`. `keep_failed` is
    for failed and cancelled jobs. `after` has the ids of the jobs to follow, and as `JobRef` those of other queues,
    where `capabilities.dependencies_across_queues` says so. `after_failure` says what becomes of the job if one of them
    does not complete: it fails, or runs all the same. Of two jobs the one of lower `priority` runs first, from
    -1 000 to 2 097 151; see `capabilities.urgent_priorities`. A `limit_key` is a key of the limit that is called as the
    job, or a `LimitKey`; without one the limit of that name counts, where the queue has one. `fair_key`: see `NewJob`.
    `meta` has a few short texts that stay with the job and mean nothing to the queue, see `workers.metadata`.
    """

    payload: object = field(repr=False)
    id: str | None = None
    name: str = DEFAULT_NAME
    delay: timedelta | float | None = None
    at: datetime | None = None
    max_attempts: int | None = None
    result_ttl: timedelta | int | None = None
    keep_completed: Retention | None = None
    keep_failed: Retention | None = None
    priority: int = 0
    ordering_key: str | None = None
    limit_key: LimitKey | str | None = None
    fair_key: str | None = None
    backoff: RetryPolicy | None = None
    deduplication: Deduplication | None = None
    after: Iterable[str | JobRef] = ()
    after_failure: AfterFailure | Literal["fail", "run"] = AfterFailure.FAIL
    meta: Mapping[str, str] | None = field(default=None, repr=False)


class JobOptions(TypedDict, total=False):
    """The options of a `JobSpec` as keyword arguments: all fields but its name and payload."""

    id: str | None
    delay: timedelta | float | None
    at: datetime | None
    max_attempts: int | None
    result_ttl: timedelta | int | None
    keep_completed: Retention | None
    keep_failed: Retention | None
    priority: int
    ordering_key: str | None
    limit_key: LimitKey | str | None
    fair_key: str | None
    backoff: RetryPolicy | None
    deduplication: Deduplication | None
    after: Iterable[str | JobRef]
    after_failure: AfterFailure | Literal["fail", "run"]
    meta: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """The outcome of one enqueue; see `EnqueueResult`. For a completed job `result` is its decoded result."""

    id: str
    status: EnqueueStatus
    existing_state: JobState | None = None
    result: object = field(default=None, repr=False)


def check_spec(spec: JobSpec) -> JobSpec:
    """Return it.

    Raises:
        TypeError: it is none, perhaps a payload alone.
    """
    if not isinstance(spec, JobSpec):
        raise TypeError(
            "a job to enqueue is a JobSpec, as"
            f" {'task.spec(...)' if hasattr(spec, 'spec') else 'JobSpec(payload=...)'}, not {type(spec).__name__}"
        )
    return spec


def link_spec(link: NextJob, status: JobStatus, meta: Mapping[str, str]) -> JobSpec:
    """Return the next link of the chain that stands like this."""
    return JobSpec(
        payload=link.payload,
        name=link.name,
        id=status.id,
        delay=link.delay,
        max_attempts=status.max_attempts if link.max_attempts is None else link.max_attempts,
        priority=status.priority if link.priority is None else link.priority,
        ordering_key=link.ordering_key,
        backoff=link.backoff,
        meta=meta,
    )


def new_job(
    spec: JobSpec,
    serde: Serde,
    *,
    queue: str,
    max_attempts: int = 3,
    result_ttl: timedelta = timedelta(hours=1),
    keep_failed: Retention = KEEP_FAILED,
    limits: Container[str] = (),
) -> NewJob:
    """Return the job of this queue that is meant, with these defaults, and the limit of its name if it is in `limits`.

    Raises:
        ValueError: an option out of its range, or a payload the serde cannot encode.
        TypeError: a payload of a type the serde does not know.
    """
    ttl = result_ttl if spec.result_ttl is None else as_ttl(spec.result_ttl)
    after, elsewhere = by_queue(spec.after, queue)
    return NewJob(
        id=new_id() if spec.id is None else spec.id,
        name=spec.name,
        payload=spec.payload.data if isinstance(spec.payload, Encoded) else serde.dumps(spec.payload),
        delay=delay_until(spec.delay, spec.at),
        max_attempts=max_attempts if spec.max_attempts is None else spec.max_attempts,
        keep_completed=ttl if spec.keep_completed is None else spec.keep_completed,
        keep_failed=keep_failed if spec.keep_failed is None else spec.keep_failed,
        priority=spec.priority,
        ordering_key=spec.ordering_key,
        limit_key=as_limit_key(spec, limits),
        fair_key=spec.fair_key,
        backoff=stored_policy(spec.backoff),
        deduplication=spec.deduplication,
        after=after,
        after_elsewhere=elsewhere,
        after_failure=as_after_failure(spec.after_failure),
        meta={} if spec.meta is None else spec.meta,
    )


def as_limit_key(spec: JobSpec, limits: Container[str]) -> LimitKey | None:
    """Return the key of the limit that the job waits for.

    Raises:
        ValueError: it has another key, although there is a limit on all jobs of its name.
        TypeError: the key is no text.
    """
    if isinstance(spec.limit_key, LimitKey):
        return spec.limit_key
    if spec.limit_key is not None:
        check_text("limit key", spec.limit_key)
        return LimitKey(spec.name, spec.limit_key)
    if spec.name not in limits:
        return None
    if spec.ordering_key is not None or spec.fair_key is not None:
        raise ValueError(f"jobs named {spec.name!r} have a limit, and so no ordering key and no fair key")
    return LimitKey(spec.name)


def as_after_failure(value: AfterFailure | str) -> AfterFailure:
    """Return what is meant; an enumeration takes longer to look itself up than all other options of a job."""
    return value if isinstance(value, AfterFailure) else AfterFailure(value)


def as_ttl(value: timedelta | int) -> timedelta:
    """Return the retention given as a timedelta or as whole milliseconds.

    Raises:
        ValueError: anything else, or not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | timedelta):
        raise ValueError(f"result_ttl is a timedelta or whole milliseconds, not {value!r}")
    try:
        ttl = value if isinstance(value, timedelta) else timedelta(milliseconds=value)
    except OverflowError:
        raise ValueError(f"result_ttl is out of range: {value} ms") from None
    if ttl <= NO_TIME:
        raise ValueError(f"result_ttl must be above zero, not {value!r}")
    return ttl


def delay_until(delay: timedelta | float | None, at: datetime | None) -> timedelta:
    """Return how long from now a job is to wait that has one of them.

    Raises:
        ValueError: it has both `delay` and `at`, or an `at` without a time zone.
        TypeError: one of them is no time.
    """
    if at is None:
        return NO_TIME if delay is None else as_duration("delay", delay)
    if delay is not None:
        raise ValueError("a job takes delay or at, not both")
    if not isinstance(at, datetime):
        raise TypeError(f"at is an aware datetime, not {at!r}")
    if at.tzinfo is None:
        raise ValueError(f"at must be an aware datetime, not {at!r}")
    return max(at - datetime.now(UTC), NO_TIME)


def content_id(payload: object, *, serde: Serde | None = None) -> str:
    """Return an id that is the same for the same payload: SHA-256 over its encoding (JSON with sorted keys), in hex."""
    return hashlib.sha256((serde or JsonSerde(sort_keys=True)).dumps(payload)).hexdigest()
