"""`/healthz`, `/readyz` and `/metrics` on the node's own port, where the whole world may ask.

The first two reveal nothing of use and cost nothing. `/metrics` answers only clients that the settings name: a
connection from loopback proves nothing if a proxy runs on the same machine, unless that says whom it forwards.
"""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from federation.monitoring.endpoints import HEALTH_PATH, METRICS_PATH, READY_PATH, Endpoints
from federation.node.clients import Clients, Network


class MonitoringRoutes:
    """Adds the routes to an application; `/metrics` is for clients in the networks *readers*."""

    def __init__(self, endpoints: Endpoints, *, clients: Clients, readers: Collection[Network]) -> None:
        self._endpoints = endpoints
        self._clients = clients
        self._readers = tuple(readers)

    def add_to(self, app: FastAPI) -> None:
        app.add_route(HEALTH_PATH, self._answer, methods=["GET"])
        app.add_route(READY_PATH, self._answer, methods=["GET"])
        if self._readers:
            app.add_route(METRICS_PATH, self._answer_readers, methods=["GET"])

    async def _answer(self, request: Request) -> Response:
        answer = await self._endpoints(request.scope["path"])
        if answer is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "no-store"}
        return Response(answer.body, status_code=answer.status, media_type=answer.content_type, headers=headers)

    async def _answer_readers(self, request: Request) -> Response:
        client = self._clients.asker(request)
        if client is None or not any(client in network for network in self._readers):
            raise HTTPException(404)
        return await self._answer(request)
