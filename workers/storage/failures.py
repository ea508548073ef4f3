"""The failed attempts of a job as storages keep them: a text of one line each, oldest first; pure.

A line is the time at which the attempt ended, in milliseconds since 1970, then a space and a JSON list: the attempt,
its worker, how long it ran in milliseconds, the type of its error and the beginning of the message. The client writes
the list, and whoever has the clock the time. Junk never raises: what cannot be read is left out.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Final

from workers.jobs import DROP, FAILURES_KEPT, Failed, FailedAttempt, Retried, Settlement

MESSAGE_QUOTED: Final = 200
"""How many characters of a message are kept: the whole of the last one is in the job's last error."""
TYPE_QUOTED: Final = 100

_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def noted_failure(settlement: Settlement) -> str | None:
    """Return what to keep of the attempt if it counts.

    None: it did not fail, nobody ran it, or no record is left of its job.
    """
    claim = settlement.claim
    if not isinstance(settlement, Retried | Failed) or claim.stalled is not None:
        return None
    if settlement.snoozed if isinstance(settlement, Retried) else _leaves_nothing(settlement):
        return None
    ran = None if settlement.duration is None else max(0, settlement.duration // _MILLISECOND)
    return _note(claim.attempt, claim.worker_id, ran, settlement.error.type, settlement.error.message)


def _leaves_nothing(settlement: Failed) -> bool:
    keep = settlement.claim.keep_failed if settlement.keep is None else settlement.keep
    return keep is DROP


def lost_attempt(attempt: int, worker_id: str | None) -> str:
    """Return what to keep of an attempt whose worker vanished."""
    return _note(attempt, worker_id, None, "StalledError", "its worker vanished or lost its lease")


def _note(attempt: int, worker_id: str | None, ran_ms: int | None, kind: str, message: str) -> str:
    """Return the list that a line holds behind its time; ASCII, so that every storage can hold it."""
    return json.dumps([attempt, worker_id, ran_ms, kind[:TYPE_QUOTED], message[:MESSAGE_QUOTED]])


def with_failure(before: str | None, noted: str | None, now: datetime) -> str | None:
    """Return the text with one more line, if there is one to note; the oldest lines are dropped."""
    if noted is None:
        return before
    lines = [*(before or "").splitlines(), f"{(now - _EPOCH) // _MILLISECOND} {noted}"]
    return "\n".join(lines[-FAILURES_KEPT:])


def decode_failures(kept: str | None) -> tuple[FailedAttempt, ...]:
    """Return the failed attempts in the text."""
    found = (_decoded(line) for line in (kept or "").splitlines())
    return tuple(one for one in found if one is not None)


def _decoded(line: str) -> FailedAttempt | None:
    at, _, noted = line.partition(" ")
    try:
        attempt, worker_id, ran_ms, kind, message = json.loads(noted)
        ended_at = _EPOCH + int(at) * _MILLISECOND
        return FailedAttempt(
            attempt=int(attempt),
            worker_id=None if worker_id is None else str(worker_id),
            started_at=None if ran_ms is None else ended_at - int(ran_ms) * _MILLISECOND,
            ended_at=ended_at,
            error_type=str(kind),
            message=str(message),
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
