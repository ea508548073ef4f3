"""At-least-once background jobs with leases, for idempotent handlers, on a storage of your choice.

What most programs need is here, and listed in README.md; all else is imported from its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workers.chains import continue_with
    from workers.deduplication import Deduplication, DeduplicationMode
    from workers.details import JobDetails
    from workers.errors import (
        JobCancelledError,
        JobFailedError,
        JobGoneError,
        JobTimeoutError,
        MaxRetriesError,
        Retry,
        Snooze,
        StorageError,
        StorageUnavailable,
        TransactionError,
        UnrecoverableError,
        Unsupported,
        WorkersError,
    )
    from workers.jobs import EnqueueStatus, JobEvent, JobEventKind, JobState, JobStatus
    from workers.limits import Limit
    from workers.options import QueueOptions
    from workers.queue import Queue
    from workers.retry import RetryPolicy
    from workers.specs import Enqueued, JobSpec
    from workers.storage import open_storage
    from workers.tasks import EnqueuedTask, Task, Tasks, TypedTask, Unique
    from workers.worker import Worker, WorkerOptions
    from workers.worker.handlers import Handler, Job

__all__ = [
    "Deduplication",
    "DeduplicationMode",
    "EnqueueStatus",
    "Enqueued",
    "EnqueuedTask",
    "Handler",
    "Job",
    "JobCancelledError",
    "JobDetails",
    "JobEvent",
    "JobEventKind",
    "JobFailedError",
    "JobGoneError",
    "JobSpec",
    "JobState",
    "JobStatus",
    "JobTimeoutError",
    "Limit",
    "MaxRetriesError",
    "Queue",
    "QueueOptions",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "StorageError",
    "StorageUnavailable",
    "Task",
    "Tasks",
    "TransactionError",
    "TypedTask",
    "Unique",
    "UnrecoverableError",
    "Unsupported",
    "Worker",
    "WorkerOptions",
    "WorkersError",
    "continue_with",
    "open_storage",
]

_HOMES: Final = {
    "workers.chains": ("continue_with",),
    "workers.deduplication": (
        "Deduplication",
        "DeduplicationMode",
    ),
    "workers.details": ("JobDetails",),
    "workers.errors": (
        "JobCancelledError",
        "JobFailedError",
        "JobGoneError",
        "JobTimeoutError",
        "MaxRetriesError",
        "Retry",
        "Snooze",
        "StorageError",
        "StorageUnavailable",
        "TransactionError",
        "UnrecoverableError",
        "Unsupported",
        "WorkersError",
    ),
    "workers.jobs": (
        "EnqueueStatus",
        "JobEvent",
        "JobEventKind",
        "JobState",
        "JobStatus",
    ),
    "workers.limits": ("Limit",),
    "workers.options": ("QueueOptions",),
    "workers.queue": ("Queue",),
    "workers.retry": ("RetryPolicy",),
    "workers.specs": (
        "Enqueued",
        "JobSpec",
    ),
    "workers.storage": ("open_storage",),
    "workers.tasks": (
        "EnqueuedTask",
        "Task",
        "Tasks",
        "TypedTask",
        "Unique",
    ),
    "workers.worker": (
        "Worker",
        "WorkerOptions",
    ),
    "workers.worker.handlers": (
        "Handler",
        "Job",
    ),
}
_MOVED: Final = {
    "workers.chains": (
        "Chain",
        "Continuation",
    ),
    "workers.checks": ("new_id",),
    "workers.clock": (
        "Clock",
        "ManualClock",
        "SystemClock",
    ),
    "workers.ends": ("EndedJob",),
    "workers.errors": (
        "ChildFailedError",
        "CorruptPayloadError",
        "DependencyFailed",
        "ForeignLoop",
        "ForeignQueue",
        "HandlerTimeout",
        "JobEndedError",
        "JobLockedError",
        "LeaseLost",
        "LossReason",
        "NotReplicated",
        "ServerUnfit",
        "StalledError",
        "StorageDamaged",
        "StorageFull",
        "UnknownDependency",
        "UnknownJobError",
        "WaitForChildren",
    ),
    "workers.flows": (
        "Children",
        "EnqueuedFlow",
        "FlowJob",
    ),
    "workers.jobs": (
        "AfterFailure",
        "CancelResult",
        "ChildFailure",
        "Claim",
        "DROP",
        "ErrorInfo",
        "FailedAttempt",
        "JobOutcome",
        "JobRef",
        "Moved",
        "NewJob",
        "RepairOutcome",
        "Repaired",
        "SetAside",
    ),
    "workers.kv": (
        "ConditionalKvStore",
        "KvStore",
        "MemoryKvStore",
    ),
    "workers.limits": (
        "HeldBack",
        "LimitKey",
    ),
    "workers.management": ("Management",),
    "workers.serde": (
        "Encoded",
        "JsonSerde",
        "Serde",
    ),
    "workers.specs": ("content_id",),
    "workers.storage.base": (
        "Capabilities",
        "Storage",
    ),
    "workers.tasks": (
        "EnqueuedTasks",
        "InMemory",
    ),
    "workers.tasks.queue": (
        "EnqueueOptions",
        "QueueTasks",
        "TaskMessage",
        "TaskQueue",
    ),
    "workers.worker.events": (
        "Observer",
        "WorkerEvent",
        "WorkerEventKind",
    ),
    "workers.worker.handlers": (
        "AttemptContext",
        "Middleware",
        "Signal",
        "SignalReason",
    ),
    "workers.worker.maintenance": ("Reaper",),
}
"""Names that were here, by their modules."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import names when they are first used: whoever needs a clock or an error does not wait for all of this.

        What was here until 0.3 comes with a warning that says where it is now.
        """
        if (home := _module_of(name, _HOMES)) is not None:
            value = globals()[name] = getattr(import_module(home), name)
            return value
        if (module := f"{__name__}.{name}") in _HOMES:  # as `workers.errors`, which programs reach by `import workers`
            return import_module(module)
        module = _module_of(name, _MOVED)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import warnings

        warnings.warn(
            f"import {name} from {module}; from workers it goes with the next minor version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(module), name)

    def _module_of(name: str, homes: Mapping[str, Sequence[str]]) -> str | None:
        return next((module for module, names in homes.items() if name in names), None)

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
