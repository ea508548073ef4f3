"""What runs jobs: claims, handlers and what wraps them, leases, settlements, recovery, the stop."""

from workers.worker.reaper import Reaper
from workers.worker.worker import Worker

__all__ = ["Reaper", "Worker"]
