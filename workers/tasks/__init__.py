"""Named background tasks, on a queue of this package or any other."""

from workers.tasks.declared import Task
from workers.tasks.enqueuing import EnqueuedTasks
from workers.tasks.in_memory import InMemory
from workers.tasks.tasks import Tasks
from workers.tasks.typed import EnqueuedTask, SyncEnqueuedTask, SyncTask, TypedTask
from workers.tasks.unique import Unique

__all__ = [
    "EnqueuedTask",
    "EnqueuedTasks",
    "InMemory",
    "SyncEnqueuedTask",
    "SyncTask",
    "Task",
    "Tasks",
    "TypedTask",
    "Unique",
]
