"""What the doctor says about the server of the queues."""

from __future__ import annotations

from federation.admin.doctor.checks import Found, Verdict, ok
from federation.app import Federation
from federation.base.reach import connect
from workers.storage.abilities import Examined, Severity

VERDICTS = {Severity.ERROR: Verdict.FAILURE, Severity.WARNING: Verdict.WARNING, Severity.NOTE: Verdict.NOTE}


async def queue_server(federation: Federation) -> Found:
    """Check that the queues' server keeps the jobs that it acknowledges."""
    storage = federation.delivery_queue.storage
    if not isinstance(storage, Examined):
        return ok("the queues lie in a database or in files")
    await connect(federation.delivery_queue)
    faults = storage.faults()
    if not faults:
        return ok("the queues' server evicts nothing, and keeps jobs on disk")
    gravest = faults[0]
    allow = ", or FEDERATION_ALLOW_EVICTION to true" if gravest.severity is Severity.ERROR else ""
    found = "; ".join(fault.found for fault in faults)
    return Found(verdict=VERDICTS[gravest.severity], found=found, advice=f"{gravest.advice}{allow}")
