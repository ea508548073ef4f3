"""What is written down of a world while it goes on: every request, and every change of a delivery's row and of a link.

Theory of operation. Triggers in the simulated database note each change together with the time of the loop, which
SQLite asks of the connection. So nothing of the code that is judged has a part in it, and what came and went between
two looks is known as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class MishapKind(StrEnum):
    """What of ours failed."""

    PROCESS = "a process died"
    FROZEN = "a process stood still"
    DATABASE = "the database was away"
    QUEUE = "the queue was away"
    LOSS = "the queue lost its data"
    CLOCK = "a clock was set"


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something of ours failed from `start` to `end`."""

    kind: MishapKind
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Request:
    """One request of the node; `job` is that of the delivery which it belongs to. `status` is None without an answer.

    `machine_at` is when it was sent by the clock of its process's machine, `rest` what the answer asked for.
    """

    at: float
    machine_at: datetime
    process: int
    server: str
    path: str
    job: str | None
    status: int | None = None
    answered_at: float | None = None
    rest: str | None = None
