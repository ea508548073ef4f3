"""The metrics port as scrapers and strangers meet it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

import httpx
import pytest

from federation.base.errors import ConfigurationError
from federation.monitoring.endpoints import Endpoints
from federation.monitoring.monitor import MetricsListener, monitored
from federation.monitoring.prometheus import ProcessMetrics
from federation.runtime.composition import Federation
from tests.patience import PATIENCE_SECONDS, eventually
from tests.servers import free_port
from workers.supervisor.http_port import LIMITS, MAX_HEAD_BYTES, HttpAnswer


@pytest.fixture
def patience() -> timedelta:
    """The listener's with a client: as long as a test's, unless the test is about it."""
    return timedelta(seconds=PATIENCE_SECONDS)


@pytest.fixture
async def port(federation: Federation, patience: timedelta) -> AsyncIterator[int]:
    """The port of a listener with everything."""
    chosen = free_port()
    listener = MetricsListener(Endpoints(federation.readiness, ProcessMetrics()), timeout=patience)
    await listener.start("127.0.0.1", chosen)
    yield chosen
    await listener.close()


async def sent(port: int, data: bytes) -> bytes:
    """Everything that comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(data)
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_everything_is_served(port: int) -> None:
    """Metrics in Prometheus' text format, the process's own among them; liveness and readiness in JSON."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        metrics = await client.get("/metrics?name=x")
        alive = await client.get("/healthz")
        ready = await client.get("/readyz")
        head = await client.head("/readyz")
        nothing = await client.get("/")
        post = await client.post("/metrics", content=b"x")

    assert (metrics.status_code, metrics.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert "process_cpu_seconds_total" in metrics.text
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["checks"]["database"]) == (200, "ok")
    assert (head.status_code, head.content) == (200, b"")
    assert (nothing.status_code, post.status_code) == (404, 405)


@pytest.mark.parametrize(
    "data",
    [b"GET\r\n\r\n", b"\r\n\r\n", b"\xff" * 100 + b"\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n\r\n"],
    ids=["no-path", "empty", "bytes", "absolute"],
)
async def test_nonsense_is_refused(port: int, data: bytes) -> None:
    """With 400 and nothing of what was sent."""
    assert (await sent(port, data)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("patience", [timedelta(seconds=1)])
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES, b"GET /"], ids=["long", "slow"])
async def test_what_is_too_long_or_too_slow_is_cut(port: int, data: bytes) -> None:
    """Without an answer, and others are served on."""
    assert await sent(port, data) == b""
    assert (await sent(port, b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_connections_are_counted(federation: Federation) -> None:
    """Where all that a client may have are being answered, one more is cut; when they are gone, there is room again."""
    port = free_port()
    listener = MetricsListener(_endless)
    await listener.start("127.0.0.1", port)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.per_client)]
    for _, writer in held:
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
    request = b"GET /healthz HTTP/1.1\r\n\r\n"
    await eventually(lambda: sent(port, request), lambda answer: not answer)
    for _, writer in held:
        writer.transport.abort()
    await listener.close()

    listener = MetricsListener(Endpoints(federation.readiness, None))
    await listener.start("127.0.0.1", port)
    answer = await eventually(lambda: sent(port, request), bool)
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"status": "ok"}
    assert (await sent(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
    await listener.close()


async def _endless(path: str) -> HttpAnswer | None:
    if path == "/endless":
        await asyncio.Event().wait()
    return HttpAnswer(status=200, content_type="text/plain", body=b"well")


def watched(federation: Federation, metrics: ProcessMetrics, *, port: int) -> AbstractAsyncContextManager[None]:
    """The node's delivery queue and its database, watched on this port."""
    return monitored(
        metrics,
        readiness=federation.readiness,
        database=federation.database,
        queues=[federation.delivery_queue],
        recurring=(),
        address="127.0.0.1",
        port=port,
    )


async def test_a_taken_port_is_told(federation: Federation) -> None:
    """The command line says which option to change; nothing is left running."""
    refused = pytest.raises(ConfigurationError, match="--metrics-port, FEDERATION_METRICS_BIND: cannot listen")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        async with watched(federation, ProcessMetrics(), port=taken.getsockname()[1]):
            raise AssertionError("it listens")


async def test_a_process_is_monitored_while_the_block_runs(federation: Federation) -> None:
    """With gauges of its queues and its database; afterwards the port is free."""
    port, metrics = free_port(), ProcessMetrics()
    async with watched(federation, metrics, port=port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as own:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while 'source="database"' not in (text := (await own.get("/metrics")).text):
                await asyncio.sleep(0.01)
    assert 'federation_jobs{queue="federation-delivery",state="queued"} 0.0' in text
    with socket.create_server(("127.0.0.1", port)):
        pass
