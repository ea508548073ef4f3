"""Which settlements a server takes although its memory is full.

Theory of operation. A full server has to let go of jobs, and must not grow by that without bound: what waits may be
millions of jobs, each with a result larger than its payload. So a settlement is taken if it stores no more than it
frees, up to a few hundred bytes per job. The payload of a job that completes is freed. Copies of
the result for jobs that came after it (65 536 bytes each at most) are not counted. Errors lose their stack, which
the worker has reported. What needs more has to wait for room, with its lease renewed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from workers.jobs import DROP, Completed, Continued, ErrorInfo, Failed, Retried, Settlement

SMALL_BYTES: Final = 256
"""A result or a next link's payload of this size is always taken, and so much of an error's message."""
RECORD_BYTES: Final = 512
"""What a job takes beside its payload, at least."""


def fits(settlement: Settlement) -> bool:
    """Tell whether the settlement stores hardly more than it frees."""
    freed = len(settlement.claim.payload)
    match settlement:
        case Completed(then=None):
            return _keep(settlement) is DROP or len(settlement.result) <= max(freed, SMALL_BYTES)
        case Completed(then=then) if then is not None:
            kept = 0 if _keep(settlement) is DROP else RECORD_BYTES + len(settlement.result)
            return kept + len(then.payload) <= freed
        case Continued(then=then):
            return len(then.payload) <= max(freed, SMALL_BYTES)
    return True


def _keep(settlement: Completed) -> object:
    return settlement.claim.keep_completed if settlement.keep is None else settlement.keep


def briefly(settlement: Settlement) -> Settlement:
    """Return the settlement with as little of an error as says what it was."""
    if isinstance(settlement, Failed | Retried):
        return replace(settlement, error=_brief(settlement.error))
    return settlement


def _brief(error: ErrorInfo) -> ErrorInfo:
    return replace(error, message=error.message[:SMALL_BYTES], stack="")
