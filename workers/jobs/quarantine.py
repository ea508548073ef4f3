"""What a storage has set aside because no worker can run it, and what became of it in a repair."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A job, or a key, that another program wrote and that no worker can use. Nobody runs it until `repair`."""

    id: str
    reason: str
    at: datetime


class RepairOutcome(StrEnum):
    """What became of one thing that was set aside.

    `requeued`: it is in line again, with fresh attempts if it had been set aside; `moved`: it was in the way of the
    queue and has been set aside; `kept`: it stays in quarantine, where it can be looked at; `dropped`: it is gone.
    """

    REQUEUED = "requeued"
    MOVED = "moved"
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The outcome for one thing that was set aside, or for a key that was in the way."""

    id: str
    reason: str
    outcome: RepairOutcome
