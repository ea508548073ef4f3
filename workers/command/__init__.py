"""The command `python -m workers`: runs the workers of an application's queues, and looks after their jobs."""

from workers.command.main import main

__all__ = ["main"]
