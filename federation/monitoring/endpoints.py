"""The endpoints for those who watch a process: `/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from federation.base.meter import Metrics
from federation.monitoring.readiness import Readiness

METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/healthz"
READY_PATH: Final = "/readyz"

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response, independent of what sends it."""

    status: int
    content_type: str
    body: bytes


class Endpoints:
    """Answers by path. Without `metrics` there is no `/metrics`."""

    def __init__(self, readiness: Readiness, metrics: Metrics | None) -> None:
        self._readiness = readiness
        self._metrics = metrics

    async def __call__(self, path: str) -> Answer | None:
        """Answer a GET, or return None if there is nothing at that path."""
        if path == HEALTH_PATH:  # any answer shows that the event loop turns
            return _json(200, {"status": "ok"})
        if path == READY_PATH:
            return await self._ready()
        if path == METRICS_PATH and self._metrics is not None:
            return Answer(status=200, content_type=_METRICS_TYPE, body=self._metrics.render())
        return None

    async def _ready(self) -> Answer:
        verdict = await self._readiness()
        checks = {name: "ok" if passed else "fail" for name, passed in verdict.checks.items()}
        status, text = (200, "ok") if verdict.ready else (503, "fail")
        problems = {"problems": dict(verdict.problems)} if verdict.problems else {}
        return _json(status, {"status": text, "checks": checks, **problems})


def _json(status: int, value: object) -> Answer:
    return Answer(status=status, content_type=_JSON_TYPE, body=json.dumps(value).encode())
