"""The options of a job as Bull 1.x keeps them, and back; pure. Junk reads as if it were not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import lru_cache
from typing import Final

from workers.errors import Unsupported
from workers.jobs import DROP, NewJob, Retention
from workers.metadata import read_meta
from workers.retry import AT_ONCE, RetryPolicy
from workers.storage.on_redis.node_values import FOREVER, from_ms, number, to_ms, whole

_CACHED_BYTES: Final = 2_048
"""The longest options whose parsed form is cached."""


_REWRITTEN: Final = frozenset(
    ("jobId", "attempts", "workers", "removeOnComplete", "delay", "timeout", "lifo", "backoff")
)
"""What our options say anew when a job of any producer is written again; whatever else there was stays."""


LONGEST_DELAY: Final = timedelta(days=24)
"""Node's timers overflow beyond 2^31 ms: a longer one would fire at once, or make every process spin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BullJob(NewJob):
    """A job with options that only Bull has, for `BullStorage.enqueue`; other storages take it for a plain one.

    `timeout` bounds each run, in Node as here: one that takes longer fails with "operation timed out". `lifo` lets the
    job run before those that wait already, and again so after a retry without delay. `others` are options that are kept
    for Node, unknown as they are.

    Raises:
        ValueError: a timeout that is not above 0 and up to 24 days; and as `NewJob`.
    """

    timeout: timedelta | None = None
    lifo: bool = False
    others: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        NewJob.__post_init__(self)  # not `super()`, which does not know the class that `slots` makes
        if self.timeout is not None and not timedelta(0) < self.timeout <= LONGEST_DELAY:
            raise ValueError(
                f"job {self.id!r}: a timeout is above 0 and up to {LONGEST_DELAY.days} days, which is as far as Node's"
                f" timers go, not {self.timeout}"
            )


def bull_job(job: NewJob, options: Mapping[str, object]) -> BullJob:
    """See `TakesNodeOptions.with_node_options`; of those that are not every storage's, Bull 1.x has `lifo`."""
    if unknown := sorted(options.keys() - {"lifo"}):
        raise Unsupported(f"job options {unknown} cannot be kept by BullStorage, but by BullMQ")
    return BullJob(**{one.name: getattr(job, one.name) for one in fields(NewJob)}, lifo="lifo" in options)


class BullBackoff(RetryPolicy):
    """Bull's exponential back-off: `(2^n - 1) * delay` after the n-th failed run, without jitter or cap."""

    def delay(self, attempt: int, error: BaseException | None = None, **_: object) -> timedelta:
        milliseconds = self.initial / timedelta(milliseconds=1)
        return from_ms(round((2.0 ** min(attempt, 1_000) - 1) * milliseconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class BullJobOptions:
    """What a claim needs of a job's `opts`."""

    keep_completed: Retention = FOREVER
    remove_on_complete: bool = False
    """Overrides `keep_completed` where Bull knows the option."""
    keep_failed: Retention = FOREVER
    priority: int = 0
    chain_index: int = 0
    meta: Mapping[str, str] = field(default_factory=dict)
    backoff: RetryPolicy | None = None
    timeout: timedelta | None = None
    corrupt: bool = False
    others: Mapping[str, object] = field(default_factory=dict)


def write_options(job: NewJob, raw: str | None, others: Mapping[str, object]) -> bytes:
    """Return the options in JSON, with the id in front where Node keeps one there; `others` are not known to us."""
    timeout, lifo = (job.timeout, job.lifo) if isinstance(job, BullJob) else (None, False)
    kept = (job.keep_completed, job.keep_failed)
    options = _own_options(
        job.max_attempts, job.delay, *kept, job.priority, job.chain_index, job.backoff, timeout, lifo=lifo
    )
    if job.meta:
        written = json.loads(options)
        written["workers"]["meta"] = dict(job.meta)
        options = json.dumps(written, separators=(",", ":")).encode()
    if others:
        options = json.dumps({**others, **json.loads(options)}, separators=(",", ":")).encode()
    return options if raw is None else b'{"jobId":"%b",%b' % (raw.encode(), options[1:])


@lru_cache(512)
def _own_options(
    attempts: int,
    delay: timedelta,
    keep_completed: Retention,
    keep_failed: Retention,
    priority: int,
    chain_index: int,
    backoff: RetryPolicy | None,
    timeout: timedelta | None,
    *,
    lifo: bool,
) -> bytes:
    """Return our options, which follow the id.

    What Bull has no word for is in the member `workers`, which Node keeps as it is.
    """
    ours: dict[str, object] = {"keepCompleted": keep_ms(keep_completed), "keepFailed": keep_ms(keep_failed)}
    options: dict[str, object] = {"attempts": attempts, "workers": ours}
    if keep_completed is DROP:
        options["removeOnComplete"] = True
    if delay:
        options["delay"] = max(1, to_ms(delay))
    if timeout is not None:
        options["timeout"] = max(1, to_ms(timeout))
    if lifo:
        options["lifo"] = True
    if priority:
        ours["priority"] = priority
    if chain_index:
        ours["chainIndex"] = chain_index
    if backoff is not None:
        kind = "fixed" if backoff.multiplier == 1 else "exponential"
        options["backoff"] = {"type": kind, "delay": to_ms(backoff.initial)}
        ours["backoff"] = [to_ms(backoff.initial), backoff.multiplier, to_ms(backoff.maximum), backoff.jitter]
    return json.dumps(options, separators=(",", ":")).encode()


def keep_ms(keep: Retention) -> int:
    """Return the retention in milliseconds, 0 for `DROP`."""
    return 0 if keep is DROP else max(1, to_ms(keep))


def read_options(raw: bytes, text: bytes | None) -> BullJobOptions:
    """Parse the options of a job.

    Those of our jobs differ only by the id, which is in front, so the rest is cached.
    """
    head = b'{"jobId":"%b",' % raw
    if not text:
        return BullJobOptions(corrupt=True)
    rest = b"{" + text[len(head) :] if text.startswith(head) else text
    return _parsed(rest) if len(rest) <= _CACHED_BYTES else _parsed.__wrapped__(rest)


@lru_cache(1_024)
def _parsed(text: bytes) -> BullJobOptions:
    try:
        options = json.loads(text.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        return BullJobOptions(corrupt=True)
    found = options.get("workers")
    ours = found if isinstance(found, dict) else {}
    return BullJobOptions(
        keep_completed=_retention(ours.get("keepCompleted")),
        remove_on_complete=options.get("removeOnComplete") is True,
        keep_failed=_retention(ours.get("keepFailed")),
        priority=whole(ours.get("priority")),
        chain_index=whole(ours.get("chainIndex")),
        meta=read_meta(ours.get("meta")),
        backoff=_own_backoff(ours.get("backoff")) if ours else _node_backoff(options.get("backoff")),
        timeout=_timeout(options.get("timeout")),
        others={name: value for name, value in options.items() if name not in _REWRITTEN},
    )


def _retention(value: object) -> Retention:
    milliseconds = number(value)
    return FOREVER if milliseconds is None else from_ms(milliseconds) or DROP


def _timeout(value: object) -> timedelta | None:
    """Parse a timeout as Bull does, which has none for 0 and counts whole milliseconds.

    A value that is no number would fail every run there.
    """
    milliseconds = number(value)
    return from_ms(max(1, milliseconds)) if milliseconds else None


def _own_backoff(value: object) -> RetryPolicy | None:
    numbers = [number(one) for one in value] if isinstance(value, list) and len(value) == 4 else []
    initial, multiplier, maximum, jitter = numbers or (None,) * 4
    if initial is None or multiplier is None or maximum is None or jitter is None:
        return None
    return RetryPolicy(
        initial=from_ms(initial), multiplier=max(1.0, multiplier), maximum=from_ms(maximum), jitter=min(jitter, 1.0)
    )


def _node_backoff(value: object) -> RetryPolicy:
    """Parse a fixed number of milliseconds, or one of Bull's two kinds; anything else means at once in Bull 1.x."""
    backoff = value if isinstance(value, dict) else {"type": "fixed", "delay": value}
    delay = number(backoff.get("delay"))
    kinds = {"fixed": RetryPolicy, "exponential": BullBackoff}
    kind = kinds.get(str(backoff.get("type")))
    if kind is None or not delay:
        return AT_ONCE
    return kind(initial=from_ms(delay), multiplier=1.0, maximum=FOREVER, jitter=0)
