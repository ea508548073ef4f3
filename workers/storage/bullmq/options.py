"""A job with options that only BullMQ has, from the words of Node's `add` into those of its records; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from workers.errors import Unsupported
from workers.jobs import NewJob
from workers.storage.bullmq.codec import BullMQJob
from workers.storage.on_redis.node_values import MAX_NUMBER, number

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
