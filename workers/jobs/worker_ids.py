"""The id that a worker takes for itself: its host, its process, and what tells it from others, `web-1:4711:0198c5...`.

So every storage, and every log, tells where a worker runs and since when, and none keeps more of it than its id.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from workers.checks import new_id

LONGEST_HOST: Final = 63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMED: Final = 7
"""The version of UUIDs that begin with the milliseconds of when they were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrigin:
    """Where a worker runs, and since when."""

    host: str
    pid: int
    since: datetime


def new_worker_id() -> str:
    """Make an id for a worker of this process."""
    host = "".join(each if each.isascii() and each.isprintable() else "?" for each in socket.gethostname())
    return f"{host[:LONGEST_HOST]}:{os.getpid()}:{new_id()}"


def origin_of(worker_id: str) -> WorkerOrigin | None:
    """Return what the id tells; None for one that an application has chosen, or another program."""
    try:
        host, pid, made = worker_id.rsplit(":", 2)
        unique = UUID(made)
        origin = WorkerOrigin(host=host, pid=int(pid), since=_EPOCH + timedelta(milliseconds=unique.int >> 80))
    except (ValueError, OverflowError):
        return None
    return origin if unique.version == _TIMED else None
