"""What the answers of BullMQ's scripts to settlements mean."""

from __future__ import annotations

from typing import Final

from workers.errors import LossReason, StorageError
from workers.jobs import SettleOutcome, SettleStatus
from workers.storage.bullmq.server import Reply

APPLIED: Final = SettleOutcome(status=SettleStatus.APPLIED)

NOT_HELD: Final = frozenset({-1, -2, -6})
"""Codes of the scripts: no such job, no lock, another claim's lock."""
NOT_ACTIVE: Final = -3
NO_CHILD_LEFT: Final = 1
"""The answer to a job that wants to wait for its children, when none of them is unfinished."""
REFUSALS: Final = {-4: "children of the job in a flow are unfinished", -9: "a child of the job in a flow has failed"}


def code_outcome(code: Reply) -> SettleOutcome | None:
    """Return what a script's answer means; None if the claim does not hold its job: its record tells why."""
    if isinstance(code, StorageError):
        return SettleOutcome(status=SettleStatus.ERROR, detail=str(code))
    if not isinstance(code, int) or code >= 0:
        return APPLIED
    if code in NOT_HELD:
        return None
    if code == NOT_ACTIVE:  # another program moved the job without looking at its lock
        return SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN)
    detail = REFUSALS.get(code, f"BullMQ answered with the unknown code {code}")
    return SettleOutcome(status=SettleStatus.ERROR, detail=detail)
