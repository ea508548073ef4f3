"""What a storage has set aside because it is no job, or none that can be run, and what repairing came to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A job, or a key, that another program wrote and no worker can do anything with: nobody runs it until `repair`."""

    id: str
    reason: str
    at: datetime


class RepairOutcome(StrEnum):
    """`requeued`: it is a job again, with fresh attempts; `moved`: what was in the way of the queue has been set aside;
    `kept`: it stays in quarantine, where it can be looked at; `dropped`: it is gone.
    """

    REQUEUED = "requeued"
    MOVED = "moved"
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What became of one that was set aside, or of a key that was in the way."""

    id: str
    reason: str
    outcome: RepairOutcome
