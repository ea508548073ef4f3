"""What a delivering process tells Prometheus."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import pytest
from structlog.testing import capture_logs

from federation.errors import ConfigurationError
from federation.metrics import WorkerMetrics
from tests.servers import free_port
from workers import Job, Queue
from workers.storage.memory import MemoryStorage
from workers.testing.faults import faulty


async def test_attempts_and_waiting_jobs_are_counted() -> None:
    """Events by kind, durations by outcome, and jobs by state, as Prometheus reads them over HTTP."""
    metrics = WorkerMetrics()
    done = asyncio.Event()
    queue = Queue(MemoryStorage(queue="mail"), observers=[metrics])

    async def handle(job: Job) -> None:
        if job.payload == "last":
            done.set()

    queue.execute({"wanted": handle})
    async with queue:
        await queue.enqueue("first", name="wanted")
        await queue.enqueue("last", name="wanted")
        await queue.enqueue("nobody's", name="unwanted")
        await done.wait()
    watch = asyncio.create_task(metrics.watch([queue]))
    port = free_port()
    metrics.serve(port)
    async with asyncio.timeout(5):
        while 'state="completed"' not in (text := await asyncio.to_thread(fetch, port)):
            await asyncio.sleep(0.01)
    watch.cancel()
    metrics.close()
    await queue.stop()
    assert 'federation_worker_events_total{kind="completed",queue="mail"} 2.0' in text
    assert 'federation_attempt_seconds_count{outcome="completed",queue="mail"} 2.0' in text
    assert 'federation_jobs{queue="mail",state="queued"} 1.0' in text


async def test_an_outage_is_logged_and_leaves_the_last_numbers() -> None:
    """A queue that cannot be counted does not end the watch."""
    metrics = WorkerMetrics()

    storage, faults = faulty(MemoryStorage(queue="mail"))
    faults.requests_lost["counts"] = 1
    queue = Queue(storage)
    with capture_logs() as logs:
        watch = asyncio.create_task(metrics.watch([queue]))
        while not logs:
            await asyncio.sleep(0)
        watch.cancel()
    await queue.stop()
    assert [(entry["event"], entry["queue"]) for entry in logs] == [("queue_depth_unknown", "mail")]


def test_a_taken_port_is_told() -> None:
    """The command line says which option to change."""
    refused = pytest.raises(ConfigurationError, match="--metrics-port: cannot listen")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        WorkerMetrics().serve(taken.getsockname()[1])


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        body: bytes = response.read()
    return body.decode()
