"""What a process tells those who watch it: its metrics, whether it lives, and whether its storages answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from workers.errors import WorkersError
from workers.queue import Queue
from workers.supervisor.http_port import HttpAnswer
from workers.worker.handlers import Middleware

ANSWERS_WITHIN: Final = 2.0
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Probes:
    """Answers by path. `middlewares` are what measures attempts; there are none, and no metrics, without the extra."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues = queues
        self.middlewares: Sequence[Middleware] = _measuring()

    async def __call__(self, path: str) -> HttpAnswer | None:
        """Answer a GET, or return None if there is nothing at that path."""
        if path == "/healthz":  # any answer shows that the event loop turns
            return _json(200, {"status": "ok"})
        if path == "/readyz":
            return await self._ready()
        if path == "/metrics":
            return _metrics()
        return None

    async def _ready(self) -> HttpAnswer:
        checks = {queue.storage.queue: await _check(queue) for queue in self._queues}
        fine = all(check == "ok" for check in checks.values())
        return _json(200 if fine else 503, {"status": "ok" if fine else "fail", "checks": checks})


async def _check(queue: Queue) -> str:
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            await queue.counts()
    except (WorkersError, TimeoutError):
        return "fail"
    return "ok"


def _measuring() -> Sequence[Middleware]:
    try:
        from workers.middlewares.metrics import measure_attempts
        from workers.middlewares.prometheus import PrometheusMetrics
    except ModuleNotFoundError:
        return ()
    try:
        return (measure_attempts(PrometheusMetrics()),)
    except ValueError:  # the application's queue measures them itself
        return ()


def _metrics() -> HttpAnswer | None:
    try:
        from prometheus_client import generate_latest
    except ModuleNotFoundError:
        return None
    return HttpAnswer(status=200, content_type=_METRICS_TYPE, body=generate_latest())


def _json(status: int, value: object) -> HttpAnswer:
    return HttpAnswer(status=status, content_type="application/json", body=json.dumps(value).encode())
