"""Whether a worker may rely on its storage's server."""

from __future__ import annotations

from workers.errors import ServerUnfit
from workers.storage.abilities import Examined, Severity
from workers.storage.base import Storage


async def connect_if_fit(storage: Storage) -> None:
    """Connect the storage, and leave it again if its server is set up so that it may lose acknowledged jobs.

    Raises:
        ServerUnfit: it is.
    """
    await storage.connect()
    faults = storage.faults() if isinstance(storage, Examined) else []
    grave = [fault for fault in faults if fault.severity is Severity.ERROR]
    if grave:
        await storage.disconnect()
        raise ServerUnfit(f"{grave[0].found}; {grave[0].advice}, or allow it: `allow_eviction`")
