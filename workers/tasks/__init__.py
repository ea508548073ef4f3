"""Named background tasks, on a queue of this package or any other."""

from workers.tasks.declared import Task
from workers.tasks.in_memory import InMemory
from workers.tasks.tasks import EnqueuedTasks, Tasks
from workers.tasks.typed import EnqueuedTask, TypedTask

__all__ = ["EnqueuedTask", "EnqueuedTasks", "InMemory", "Task", "Tasks", "TypedTask"]
