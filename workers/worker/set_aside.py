"""Events for what a storage had to set aside."""

from __future__ import annotations

from workers.errors import StorageError
from workers.storage.abilities import Repairable
from workers.storage.base import Storage
from workers.worker.events import Emitter, WorkerEventKind


class SetAsideReporter:
    """Reports what one storage has set aside since it was last asked, as events."""

    def __init__(self, storage: Storage, events: Emitter) -> None:
        self._storage = storage if isinstance(storage, Repairable) else None
        self._events = events

    def tell(self) -> None:
        """Emit an event for each."""
        if self._storage is None:
            return
        for one in self._storage.news():
            error = StorageError(f"{one.id!r} was set aside: {one.reason}")
            self._events.emit(WorkerEventKind.SET_ASIDE, job_ids=(one.id,), error=error)
