"""Ids, payloads, options and errors as BullMQ keeps them, and back; pure.

Any producer may have written what is read here: junk never raises, it reads as if it were not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import lru_cache
from typing import Final

from bullmq.queue_keys import QueueKeys

from workers.errors import Unsupported
from workers.jobs import DROP, NewJob, Retention
from workers.metadata import TRACE_NAMES, encode_meta, read_meta
from workers.retry import AT_ONCE, NamedBackoff, RetryPolicy
from workers.storage.on_redis import node_values
from workers.storage.on_redis.node_values import (
    FOREVER,
    MAX_NUMBER,
    encode_bytes,
    from_ms,
    json_object,
    number,
    to_ms,
    whole,
)

# Fields of a job's hash that are ours. Node BullMQ reads its own fields by name and ignores these.
SETTLED_FIELD: Final = "workers:settled"
"""The token of the claim that last settled the job, which tells a repeated settle from a late one.

A job that completes and has none gets none: nobody has claimed it since, so `pb` still holds the token.
"""
UNCOUNTED_FIELD: Final = "workers:uncounted"
"""Uncounted retries in a row."""
CANCEL_FIELD: Final = "workers:cancel"
"""Set when a cancel was requested. The value is `ats - stc` then, which settling changes and a crash does not."""
STOPPED_FIELD: Final = "workers:stopped"
"""When the job was cancelled: it is so for as long as BullMQ has that for its end, and Node has not run it again."""
KEEP_FIELD: Final = "workers:keep"
"""How many milliseconds the finished record lasts, if the settlement said so."""
FAILURES_FIELD: Final = "workers:failures"
"""The failed attempts, as in `workers.storage.failures`."""
OWN_KEYS: Final = "workers"
"""Our keys are named `<prefix>:<queue>:workers:...`; no job id leads to such a key."""

RESERVED_IDS: Final = frozenset(QueueKeys().getKeys("")) | {"dn", "metrics", "priority", "added", OWN_KEYS}
"""Names of the other keys of a queue; a job with such an id would destroy the queue."""

_CHAIN_OPTION: Final = "chainIndex"
_META_OPTION: Final = "workersMeta"
_TELEMETRY_OPTION: Final = "tm"
"""Where BullMQ keeps what its `telemetry` says of a job: JSON, in which the trace context goes by W3C's names."""
_OURS_OPTION: Final = "workers"
"""In the options of each job that we enqueued: a lost lease is an attempt of it. In BullMQ it is none; see `is_ours`
in `lua/origin.lua`. Versions before 1.0 did not write it, and their jobs read as those of another producer.
"""
_REWRITTEN: Final = frozenset(
    (
        "attempts",
        "jobId",
        "removeOnComplete",
        "removeOnFail",
        "delay",
        "priority",
        _CHAIN_OPTION,
        _META_OPTION,
        _OURS_OPTION,
    )
)
"""What the options of a chain's next link say anew; whatever else a job's options hold stays."""
_SHARED_CHARACTERS: Final = 1_000
_NAMELESS: Final = '"jobId":""'
LOGS_KEPT: Final = 1_000
"""How many log lines a job keeps at most; BullMQ's own default is all of them."""


def encode_id(job_id: str) -> str:
    """Return the id in Redis.

    A UUID is unchanged, and so is a plain word that is no key of BullMQ; any other id is `~` and its base64url. BullMQ
    takes ids of digits for its own counter, splits at colons, drops `0:...` as a marker, and does not protect the names
    of its keys.
    """
    return node_values.encode_id(job_id, RESERVED_IDS)


def decode_id(raw: str) -> str:
    """Return the id that a job in Redis goes by; one that `encode_id` did not make reads as it is."""
    return node_values.decode_id(raw, RESERVED_IDS)


def raw_ids(job_id: str) -> tuple[str, ...]:
    """Return where a job of this id may be: as we would store it, and as another producer may have stored it."""
    encoded = encode_id(job_id)
    if encoded == job_id or job_id in RESERVED_IDS or job_id.startswith(f"{OWN_KEYS}:"):
        return (encoded,)
    return encoded, job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class BullMQJobOptions:
    """What a claim needs of a job's `opts`; `remove_on_*` are as BullMQ's `keepJobs` says it.

    `written` is all of it, for what we do not know, though its `jobId` may be missing. `ours`: this package enqueued
    the job.
    """

    ours: bool = False
    max_attempts: int = 1
    chain_index: int = 0
    backoff: RetryPolicy | None = None
    named_backoff: NamedBackoff | None = None
    remove_on_complete: Mapping[str, object] = field(default_factory=lambda: keep_limits(None))
    remove_on_fail: Mapping[str, object] = field(default_factory=lambda: keep_limits(None))
    keep_completed: Retention = FOREVER
    keep_failed: Retention = FOREVER
    logs_kept: int = LOGS_KEPT
    stacks_kept: int | None = None
    meta: Mapping[str, str] = field(default_factory=dict, repr=False)
    written: Mapping[str, object] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullMQJob(NewJob):
    """A job with options that only BullMQ has, for `BullMQStorage.enqueue`; other storages take it for a plain one.

    `options` are written beside those of every job, and win over them; their names are those in Redis (`kl`, `de`).
    `created_ms` replaces the time of the enqueue. `parent` is what the record says of the parent in a flow, as BullMQ
    writes it. `ours`: this package enqueued the job, at first.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    created_ms: int | None = None
    parent: Mapping[str, object] | None = None
    ours: bool = True


def encode_options(job: NewJob, raw: str) -> dict[str, object]:
    """Return the job's options as Node BullMQ writes them."""
    options: dict[str, object] = {
        _OURS_OPTION: 1,
        "attempts": job.max_attempts,
        "jobId": raw,
        "removeOnComplete": _remove_option(job.keep_completed),
        "removeOnFail": _remove_option(job.keep_failed),
    }
    if job.backoff is not None:
        options["backoff"] = _encode_backoff(job.backoff)
    if job.delay:
        options["delay"] = max(1, to_ms(job.delay))
    if job.priority:
        options["priority"] = job.priority
    if job.chain_index:
        options[_CHAIN_OPTION] = job.chain_index
    if job.meta:
        options.update(_encode_meta(job.meta))
    if isinstance(job, BullMQJob):
        options.update(job.options)
        if not job.ours:
            del options[_OURS_OPTION]
    return options


def decode_options(options: Mapping[str, object]) -> BullMQJobOptions:
    """Decode options written by any producer; an `attempts` of 0, or none, means one attempt in BullMQ."""
    attempts, stacks = number(options.get("attempts")), number(options.get("stackTraceLimit"))
    backoff = _decode_backoff(options.get("backoff"), ours=_OURS_OPTION in options)
    logs = whole(options.get("kl")) or whole(options.get("keepLogs"))
    return BullMQJobOptions(
        ours=_OURS_OPTION in options,
        max_attempts=max(1, int(attempts)) if attempts is not None else 1,
        chain_index=whole(options.get(_CHAIN_OPTION)),
        backoff=backoff if isinstance(backoff, RetryPolicy) else None,
        named_backoff=backoff if isinstance(backoff, NamedBackoff) else None,
        remove_on_complete=keep_limits(options.get("removeOnComplete")),
        remove_on_fail=keep_limits(options.get("removeOnFail")),
        keep_completed=retention_of(options.get("removeOnComplete")),
        keep_failed=retention_of(options.get("removeOnFail")),
        logs_kept=min(logs or LOGS_KEPT, LOGS_KEPT),
        stacks_kept=None if stacks is None else int(stacks),
        meta=_decode_meta(options),
        written=options,
    )


def _encode_meta(meta: Mapping[str, str]) -> dict[str, object]:
    own = {name: value for name, value in meta.items() if name not in TRACE_NAMES}
    trace = {name: meta[name] for name in TRACE_NAMES if name in meta}
    return ({_META_OPTION: own} if own else {}) | ({_TELEMETRY_OPTION: encode_meta(trace)} if trace else {})


def _decode_meta(options: Mapping[str, object]) -> dict[str, str]:
    """Return the metadata, with the trace context of whichever program's telemetry."""
    told = options.get(_TELEMETRY_OPTION)
    if told is None and _META_OPTION not in options:
        return {}
    telemetry = json_object(told if isinstance(told, str) else None)
    found = read_meta(options.get(_META_OPTION))
    for name in TRACE_NAMES:  # each alone: a state that is too long leaves the other
        found.update(read_meta(telemetry, [name]))
    return found


def read_options(text: str | None, raw: str) -> BullMQJobOptions:
    """Decode the options in a job's record. What many jobs say, all but their ids, is decoded once."""
    if text is None or len(text) > _SHARED_CHARACTERS:
        return decode_options(json_object(text))
    nameless = text.replace(f'"jobId":"{raw}"', _NAMELESS, 1)
    options = _read_options(nameless)
    if nameless == text or options.written.get("jobId") == "":
        return options
    return decode_options(json_object(text))  # it was the `jobId` of something within the options


@lru_cache(maxsize=256)
def _read_options(text: str) -> BullMQJobOptions:
    return decode_options(json_object(text))


def link_fields(job: NewJob, raw: str, before: Mapping[str, object]) -> dict[str, object]:
    """Return the hash fields of a job that becomes the next link of its chain; `before`: its options until now."""
    # A retention that stays is left in the words it has, which may say more than ours, such as a count.
    wanted = {"removeOnComplete": job.keep_completed, "removeOnFail": job.keep_failed}
    kept = {
        name: before[name] for name, keep in wanted.items() if name in before and retention_of(before[name]) == keep
    }
    return {
        "name": job.name,
        "data": encode_bytes(job.payload).decode(),
        "opts": json.dumps({**_lasting(before), **encode_options(job, raw), **kept}, separators=(",", ":")),
        "priority": str(job.priority),
        **dict.fromkeys(("atm", "ats", "stc"), "0"),
    }


def _lasting(options: Mapping[str, object]) -> dict[str, object]:
    """Return what a job's options say beside what `encode_options` writes; a custom back-off is none of ours."""
    backoff = _decode_backoff(options.get("backoff"), ours=True)
    rewritten = _REWRITTEN if isinstance(backoff, NamedBackoff) else _REWRITTEN | {"backoff"}
    return {name: value for name, value in options.items() if name not in rewritten}


def _remove_option(keep: Retention) -> object:
    if keep is DROP:
        return True
    seconds = keep.total_seconds()
    return {"age": int(seconds) if seconds.is_integer() else seconds}


def retention_of(remove: object) -> Retention:
    """Return how long a record lasts by BullMQ's `removeOn...`; a limit by count alone reads as for ever."""
    if remove is True:
        return DROP
    if isinstance(remove, dict):
        if number(remove.get("count")) == 0:
            return DROP
        age = number(remove.get("age"))
        return FOREVER if age is None else _lasting_seconds(age)
    return DROP if number(remove) == 0 else FOREVER


@lru_cache(maxsize=64)  # the jobs of a queue mostly say the same
def _lasting_seconds(age: float) -> Retention:
    return timedelta(seconds=min(age, FOREVER.total_seconds())) or DROP


def keep_limits(remove: object) -> dict[str, object]:
    """Return BullMQ's `keepJobs` for its `removeOn...`: what is to be kept of the queue's finished jobs."""
    if isinstance(remove, dict):
        limits = {name: number(remove.get(name)) for name in ("age", "count", "limit")}
        return {name: value for name, value in limits.items() if value is not None}
    if remove is True:
        return {"count": 0}
    count = number(remove)
    return {"count": -1 if count is None else count}


def keep_jobs(keep: Retention | None, own: Mapping[str, object]) -> Mapping[str, object]:
    """Return what BullMQ is to keep of the queue's finished jobs, `own` as the job's option says.

    If a settlement says otherwise with `keep`, only its own record is affected: it goes at once, or stays for a sweep.
    """
    return own if keep is None else {"count": 0 if keep is DROP else -1}


def _encode_backoff(policy: RetryPolicy) -> dict[str, object]:
    """Encode the policy for BullMQ.

    BullMQ's `delay` is the longest of a jittered range, ours the middle. What BullMQ has no word for goes beside it.
    """
    longest = to_ms(policy.initial * (1 + policy.jitter))
    backoff: dict[str, object] = {"type": "fixed" if policy.multiplier == 1 else "exponential", "delay": longest}
    if policy.jitter:
        backoff["jitter"] = round(2 * policy.jitter / (1 + policy.jitter), 9)
    if policy.multiplier not in (1, 2):
        backoff["multiplier"] = policy.multiplier
    if policy.maximum < FOREVER:
        backoff["maximum"] = to_ms(policy.maximum)
    return backoff


def _decode_backoff(value: object, *, ours: bool) -> RetryPolicy | NamedBackoff | None:
    """Decode the policy of a built-in strategy, or the name of a custom one; None for the worker's own policy.

    To other producers no back-off, and one without a delay, means at once.
    """
    if not value:
        return None if ours and value is None else AT_ONCE
    backoff = value if isinstance(value, dict) else {"type": "fixed", "delay": value}
    delay, kind = number(backoff.get("delay")), backoff.get("type")
    if kind not in ("fixed", "exponential"):
        return NamedBackoff(type=kind, delay=from_ms(delay or 0)) if isinstance(kind, str) and kind else None
    if not delay:
        return AT_ONCE
    spread = min(number(backoff.get("jitter")) or 0.0, 1.0) / 2
    multiplier = 1.0 if kind == "fixed" else max(1.0, number(backoff.get("multiplier")) or 2.0)
    return _policy(delay, spread, multiplier, number(backoff.get("maximum")))


@lru_cache(maxsize=64)  # the jobs of a queue mostly say the same
def _policy(delay: float, spread: float, multiplier: float, maximum: float | None) -> RetryPolicy:
    return RetryPolicy(
        initial=from_ms(round(delay * (1 - spread))),
        multiplier=multiplier,
        maximum=FOREVER if maximum is None else from_ms(maximum),
        jitter=round(spread / (1 - spread), 6),
    )


_FATES: Final = {
    "failParentOnFailure": "fpof",
    "continueParentOnFailure": "cpof",
    "ignoreDependencyOnFailure": "idof",
    "removeDependencyOnFailure": "rdof",
}
"""What the failure of a job means to its parent, and BullMQ's short names for it."""
_SHORT: Final = {**_FATES, "keepLogs": "kl", "deduplication": "de", "debounce": "de"}
_PLAIN: Final = frozenset(
    ("timestamp", "lifo", "stackTraceLimit", "backoff", "removeOnComplete", "removeOnFail", "parent")
)
_COUNTS: Final = ("timestamp", "keepLogs", "stackTraceLimit")
_MODES: Final = frozenset(("id", "ttl", "extend", "replace", "keepLastIfActive"))


def bullmq_job(job: NewJob, options: Mapping[str, object]) -> BullMQJob:
    """See `TakesNodeOptions.with_node_options`."""
    unknown = options.keys() - _SHORT.keys() - _PLAIN - {"telemetry"}
    if unknown:
        raise Unsupported(f"job options {sorted(unknown)} are unknown to BullMQ")
    _check(options)
    written = {_SHORT.get(name, name): value for name, value in options.items() if name in _PLAIN | _SHORT.keys()}
    own = {one.name: getattr(job, one.name) for one in fields(NewJob)}
    created = number(options.get("timestamp"))
    return BullMQJob(
        **own,
        options={**written, **_telemetry(options.get("telemetry"))},
        created_ms=None if created is None else int(created),
        parent=_parent(options),
    )


def _check(options: Mapping[str, object]) -> None:
    for name in _COUNTS:
        if name in options and (isinstance(options[name], str) or number(options[name]) is None):
            raise ValueError(f"job option {name!r} must be a number from 0 to {MAX_NUMBER}, not {options[name]!r}")
    fates = sorted(_FATES.keys() & options.keys())
    if len(fates) > 1:
        raise ValueError(f"job options {fates} exclude each other")
    unique = options.get("deduplication", options.get("debounce"))
    if unique is None:
        return
    if not isinstance(unique, Mapping) or not _is_text(unique.get("id")) or unique.keys() - _MODES:
        raise ValueError(f"job option 'deduplication' must have an id, and besides only {sorted(_MODES)}")
    if number(unique.get("ttl", 0)) is None:
        raise ValueError(f"job option 'deduplication.ttl' must be a number of milliseconds, not {unique['ttl']!r}")
    if "parent" in options:
        raise ValueError("job options 'deduplication' and 'parent' exclude each other")


def _parent(options: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return what the job's record says of its parent."""
    parent = options.get("parent")
    if parent is None:
        return None
    if not isinstance(parent, Mapping) or not _is_text(parent.get("id")) or not _is_text(parent.get("queue")):
        raise ValueError("job option 'parent' must have an id, and a queue as `<prefix>:<name>`")
    fates = {short: True for name, short in _FATES.items() if name in options}
    return {"id": parent["id"], "queueKey": parent["queue"], **fates}


def _telemetry(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or value.keys() - {"metadata", "omitContext"}:
        raise ValueError(f"job option 'telemetry' has metadata and omitContext, not {value!r}")
    words = {"metadata": "tm", "omitContext": "omc"}
    return {words[name]: said for name, said in value.items() if said is not None}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
