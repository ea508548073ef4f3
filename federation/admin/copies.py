"""What copies of a database leave behind: the application's tasks, which are only in the queue."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL

from federation.base.queues.queue import TASKS_QUEUE_NAME
from workers import StorageError
from workers.storage.sql import SqlStorage


async def tasks_in(file: Path) -> int:
    """Count the application's tasks that have not ended in the queues of an SQLite database; 0 if it has no queues."""
    storage = SqlStorage(URL.create("sqlite", database=str(file)), TASKS_QUEUE_NAME)
    try:
        await storage.connect()
    except StorageError:  # it has no tables of queues
        return 0
    try:
        counts = await storage.counts()
    finally:
        await storage.disconnect()
    return sum(number for state, number in counts.items() if not state.is_final)
