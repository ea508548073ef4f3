"""Named background tasks, on a queue of this package or any other."""

from workers.tasks.tasks import EnqueuedTasks, Task, Tasks

__all__ = ["EnqueuedTasks", "Task", "Tasks"]
