"""The endpoints for those who watch a process: `/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

import json
from typing import Final

from federation.base.meter import Metrics
from federation.monitoring.readiness import Readiness
from workers.supervisor.http_port import HttpAnswer

METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON_TYPE: Final = "application/json"


class Endpoints:
    """Answers by path. Without `metrics` there is no `/metrics`."""

    def __init__(self, readiness: Readiness, metrics: Metrics | None) -> None:
        self._readiness = readiness
        self._metrics = metrics

    async def __call__(self, path: str) -> HttpAnswer | None:
        """Answer a GET, or return None if there is nothing at that path."""
        if path == HEALTH_PATH:  # any answer shows that the event loop turns
            return _json(200, {"status": "ok"})
        if path == READY_PATH:
            return await self._ready()
        if path == METRICS_PATH and self._metrics is not None:
            return HttpAnswer(status=200, content_type=_METRICS_TYPE, body=self._metrics.render())
        return None

    async def _ready(self) -> HttpAnswer:
        verdict = await self._readiness()
        checks = {name: "ok" if passed else "fail" for name, passed in verdict.checks.items()}
        status, text = (200, "ok") if verdict.ready else (503, "fail")
        problems = {"problems": dict(verdict.problems)} if verdict.problems else {}
        return _json(status, {"status": text, "checks": checks, **problems})


def _json(status: int, value: object) -> HttpAnswer:
    return HttpAnswer(status=status, content_type=_JSON_TYPE, body=json.dumps(value).encode())
