"""At-least-once background jobs with leases, for idempotent handlers, on a storage of your choice."""

from workers.chains import Chain, Continuation, continue_with
from workers.checks import new_id
from workers.clock import Clock, ManualClock, SystemClock
from workers.deduplication import Deduplication, DeduplicationMode
from workers.errors import (
    CorruptPayloadError,
    ForeignLoop,
    HandlerTimeout,
    JobCancelledError,
    JobEndedError,
    JobFailedError,
    JobGoneError,
    JobTimeoutError,
    LeaseLost,
    LossReason,
    MaxRetriesError,
    Retry,
    StalledError,
    StorageDamaged,
    StorageError,
    StorageUnavailable,
    TransactionError,
    UnknownJobError,
    UnrecoverableError,
    Unsupported,
    WorkersError,
)
from workers.jobs import (
    DROP,
    CancelResult,
    Claim,
    EnqueueStatus,
    ErrorInfo,
    JobOutcome,
    JobState,
    JobStatus,
    NewJob,
    Repaired,
    RepairOutcome,
    SetAside,
)
from workers.kv import ConditionalKvStore, KvStore, MemoryKvStore
from workers.management import Management
from workers.queue import Queue, content_id
from workers.retry import RetryPolicy
from workers.serde import Encoded, JsonSerde, Serde
from workers.specs import Enqueued, JobSpec
from workers.storage.base import Limits, Storage
from workers.tasks import EnqueuedTasks, Task, Tasks
from workers.tasks.queue import EnqueueOptions, QueueTasks, TaskMessage, TaskQueue
from workers.worker import Worker
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind
from workers.worker.handlers import AttemptContext, Handler, Job, Middleware, Signal, SignalReason
from workers.worker.reaper import Reaper

__all__ = [
    "DROP",
    "AttemptContext",
    "CancelResult",
    "Chain",
    "Claim",
    "Clock",
    "ConditionalKvStore",
    "Continuation",
    "CorruptPayloadError",
    "Deduplication",
    "DeduplicationMode",
    "Encoded",
    "EnqueueOptions",
    "EnqueueStatus",
    "Enqueued",
    "EnqueuedTasks",
    "ErrorInfo",
    "ForeignLoop",
    "Handler",
    "HandlerTimeout",
    "Job",
    "JobCancelledError",
    "JobEndedError",
    "JobFailedError",
    "JobGoneError",
    "JobOutcome",
    "JobSpec",
    "JobState",
    "JobStatus",
    "JobTimeoutError",
    "JsonSerde",
    "KvStore",
    "LeaseLost",
    "Limits",
    "LossReason",
    "Management",
    "ManualClock",
    "MaxRetriesError",
    "MemoryKvStore",
    "Middleware",
    "NewJob",
    "Observer",
    "Queue",
    "QueueTasks",
    "Reaper",
    "RepairOutcome",
    "Repaired",
    "Retry",
    "RetryPolicy",
    "Serde",
    "SetAside",
    "Signal",
    "SignalReason",
    "StalledError",
    "Storage",
    "StorageDamaged",
    "StorageError",
    "StorageUnavailable",
    "SystemClock",
    "Task",
    "TaskMessage",
    "TaskQueue",
    "Tasks",
    "TransactionError",
    "UnknownJobError",
    "UnrecoverableError",
    "Unsupported",
    "Worker",
    "WorkerEvent",
    "WorkerEventKind",
    "WorkersError",
    "content_id",
    "continue_with",
    "new_id",
]
