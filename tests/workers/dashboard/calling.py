"""A program that calls the API of a dashboard, and takes the OpenAPI document at its word."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from tests.workers.dashboard.browsing import BASE
from workers.dashboard.accounts import Account, Role, make_token

ROOT: Final = "/api/v1"
OPERATOR, _operators_hash = make_token()
VIEWER, _viewers_hash = make_token()
WITH_TOKENS: Final = (
    Account(name="robot", role=Role.OPERATOR, hash=_operators_hash),
    Account(name="wall", role=Role.VIEWER, hash=_viewers_hash),
)


class Program:
    """Every answer has to be one that the document describes."""

    def __init__(self, app: ASGIApp, token: str | None = OPERATOR) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        self.client = httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers)
        self._document: dict[str, Any] | None = None
        self.called: set[tuple[str, str]] = set()

    async def document(self) -> dict[str, Any]:
        if self._document is None:
            self._document = (await self.client.get(f"{ROOT}/openapi.json")).json()
        assert self._document is not None
        return self._document

    async def gets(self, path: str, *, status: int = 200, **parameters: str) -> Any:
        """The answer, as its schema has it."""
        address = path if path.startswith(ROOT) else f"{ROOT}{path}"
        return await self._fits("get", await self.client.get(address, params=parameters or None), status)

    async def posts(self, path: str, *, status: int = 200, **body: object) -> Any:
        sent = self.client.post(f"{ROOT}{path}", content=json.dumps(body), headers={"content-type": "application/json"})
        return await self._fits("post", await sent, status)

    async def uploads(self, path: str, content: bytes, *, kind: str, status: int = 200, **parameters: str) -> Any:
        sent = self.client.post(f"{ROOT}{path}", params=parameters, content=content, headers={"content-type": kind})
        return await self._fits("post", await sent, status)

    async def _fits(self, method: str, answer: httpx.Response, status: int) -> Any:
        assert answer.status_code == status, answer.text
        assert answer.text.isascii()
        path = urlsplit(str(answer.url)).path
        operation = (await self.document())["paths"].get(path, {}).get(method)
        told = answer.json()
        if status == 200:
            assert operation is not None, path
            assert answer.headers["content-type"] == "application/json"
            self.called.add((method, path))
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        else:
            assert answer.headers["content-type"] == "application/problem+json"
            assert told["status"] == status
            described = {} if operation is None else operation["responses"]["default"]["content"]
            schema = described["application/problem+json"]["schema"] if described else {}
        components = (await self.document())["components"]
        checker = Draft202012Validator.FORMAT_CHECKER
        Draft202012Validator({**schema, "components": components}, format_checker=checker).validate(told)
        return told
