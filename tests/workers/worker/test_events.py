"""Observers hear of everything, and can break nothing."""

from __future__ import annotations

import logging

import pytest

from tests.workers.running import Recorder, done, outcome, running
from workers.errors import ForeignQueue, StorageError
from workers.jobs import OutcomeKind
from workers.storage.memory import MemoryStorage
from workers.testing import steps
from workers.worker import Worker
from workers.worker.events import Emitter, WorkerEvent
from workers.worker.events import WorkerEventKind as Kind

EVENT = WorkerEvent(kind=Kind.READY, queue="mail", worker_id="w1")


def _fail(event: WorkerEvent) -> None:
    raise LookupError(f"cannot count {event.kind}")


def test_an_observer_that_fails_does_not_hide_the_event_from_others(caplog: pytest.LogCaptureFixture) -> None:
    """Its exception is logged with the event's name; the observers after it are called."""
    recorder = Recorder()
    Emitter([_fail, recorder], queue="mail", worker_id="w1").emit(Kind.READY)
    assert recorder.events == [EVENT]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "on event 'ready'" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is LookupError


def test_that_the_queue_is_anothers_is_told_once() -> None:
    """Every call meets it from then on; other errors are told each time."""
    recorder = Recorder()
    emitter = Emitter([recorder], queue="mail", worker_id="w1")
    for error in (ForeignQueue("theirs"), ForeignQueue("by another sign"), StorageError("no"), StorageError("no")):
        emitter.report(error)
    assert [str(event.error) for event in recorder.events] == ["theirs", "no", "no"]


async def test_a_worker_with_a_failing_observer_works(caplog: pytest.LogCaptureFixture) -> None:
    """Jobs complete, leases are dropped and the worker stops, whatever its observers raise."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("job"))
    worker = Worker(storage, {"work": done}, observers=[_fail, recorder])
    async with running(worker):
        assert (await outcome(storage, "job")).kind is OutcomeKind.COMPLETED
        await recorder.seen(Kind.DRAINED)
        assert worker.running == 0
    assert recorder.story() == [Kind.READY, Kind.ACTIVE, Kind.COMPLETED, Kind.DRAINED, Kind.STOPPING, Kind.STOPPED]
    assert len(caplog.records) == len(recorder.events)


async def test_events_of_an_attempt_carry_its_claim() -> None:
    """Id, name, attempt and token of the job can be read from each of them; the others carry none."""
    storage, recorder = MemoryStorage(), Recorder()
    await steps.enqueue(storage, steps.job("job", name="mail"))
    async with running(Worker(storage, {"mail": done}, observers=[recorder])):
        await recorder.seen(Kind.DRAINED)
    claims = [event.claim for event in recorder.events]
    assert [claim is not None for claim in claims] == [False, True, True, False, False, False]
    assert claims[1] is claims[2]
    assert claims[1] is not None
    assert (claims[1].job_id, claims[1].name, claims[1].attempt) == ("job", "mail", 1)
