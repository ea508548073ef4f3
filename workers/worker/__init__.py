"""The running of jobs: claims, handlers and middlewares, leases, settlements, recovery, the stop."""

from workers.worker.maintenance import Reaper
from workers.worker.options import WorkerOptions
from workers.worker.worker import Worker

__all__ = ["Reaper", "Worker", "WorkerOptions"]
