"""Named background tasks, on a queue of ours or any other."""

from workers.tasks.tasks import EnqueuedTasks, Task, Tasks

__all__ = ["EnqueuedTasks", "Task", "Tasks"]
