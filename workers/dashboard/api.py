"""The API for programs: `/api/v1`, by token only, described by the OpenAPI document beside it.

An account's token lets in, as a viewer or an operator; a browser's cookie, and what a proxy says, do not. So nothing
that a browser sends by itself reaches a call, and no form token is needed. Tokens have 256 random bits, and are not
guessed however often somebody tries; a wrong one says nothing else.

What goes wrong is told as RFC 9457 has it (`application/problem+json`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Final, TypeAlias
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from workers.dashboard.accounts import Account, Accounts, Role
from workers.dashboard.calls import AnyCall, Caller, Listing
from workers.dashboard.shapes import Schema, Schemas, ShapeError, from_text, needed_in, shaped
from workers.dashboard.visit import LARGEST_UPLOAD, Record, Refusal, read_body
from workers.jsonable import jsonable

ROOT: Final = "/api/v1"
DESCRIPTION: Final = "/openapi.json"
PATIENCE: Final = timedelta(minutes=2)
LARGEST_BODY: Final = 256 * 1024
PROBLEM: Final = "application/problem+json"
TOKENLESS: Final = "Send `Authorization: Bearer TOKEN`, with the token of an account of this dashboard."

Teller: TypeAlias = Callable[[Exception], str | None]
"""Says in a sentence what is wrong with what is read; None for what is a fault of the dashboard's own."""

log = logging.getLogger(__name__)


class Api:
    """Answers calls."""

    def __init__(
        self, calls: Sequence[AnyCall], *, title: str, accounts: Sequence[Account], teller: Teller, record: Record
    ) -> None:
        self._calls: dict[tuple[str, str], AnyCall] = {(call.path, call.method): call for call in calls}
        self._accounts = Accounts(accounts)
        self._teller = teller
        self._record = record
        self._document = json.dumps(document(calls, title=title)).encode()

    async def answer(self, request: Request) -> Response:
        """Answer a request to a path below `ROOT`."""
        path = request.path_params["path"]
        if path == DESCRIPTION and request.method == "GET":
            return Response(self._document, media_type="application/json")
        try:
            return await self._called(request, path)
        except Refusal as refusal:
            return _problem(refusal.status, refusal.told)
        except ShapeError as error:
            return _problem(400, _sentence(str(error)))
        except Exception as error:
            told = "This is not answered in time." if isinstance(error, TimeoutError) else self._teller(error)
            if told is None:
                log.exception("dashboard_call_failed")
                return _problem(500, "This call has a fault: see the dashboard's log.")
            if request.method == "POST":
                return _problem(503, f"{told} Whether it had an effect is not known: look before you repeat it.")
            return _problem(503, told, **{"retry-after": "5"})

    async def _called(self, request: Request, path: str) -> Response:
        account = self._account(request)
        if account is None:
            return _problem(401, TOKENLESS, **{"www-authenticate": "Bearer"})
        call = self._calls.get((path, request.method))
        if call is None:
            return self._no_call(path)
        if call.method == "POST" and account.role is not Role.OPERATOR:
            raise Refusal(403, "The token of a viewer looks, and does not act.")
        async with asyncio.timeout(PATIENCE.total_seconds()):
            uploaded = b"" if call.takes is None else await _file(request, call.takes)
            given = await _asked(request, call)
            caller = Caller(account=account, record_action=self._record, uploaded=uploaded)
            answered = await call.code(caller, shaped(call.asks, given))
        return _json(_listed(answered, request) if isinstance(answered, Listing) else answered)

    def _account(self, request: Request) -> Account | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._accounts.of_token(token.strip()) if scheme.lower() == "bearer" else None

    def _no_call(self, path: str) -> Response:
        methods = [method for each, method in self._calls if each == path]
        if not methods:
            raise Refusal(404, f"There is no such call; {ROOT}{DESCRIPTION} has those that there are.")
        return _problem(405, f"This takes {' and '.join(methods)}.", allow=", ".join(methods))


async def _asked(request: Request, call: AnyCall) -> object:
    """Return what the request asks for, as it is written there."""
    if call.is_asked_by_address:
        pairs = request.query_params.multi_items()
        if len(pairs) != len(dict(pairs)):
            raise Refusal(400, "A parameter is there twice.")
        return from_text(call.asks, dict(pairs))
    _check_type(request, "application/json")
    body = await read_body(request, LARGEST_BODY)
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is no JSON.") from None


async def _file(request: Request, media_type: str) -> bytes:
    _check_type(request, media_type)
    return await read_body(request, LARGEST_UPLOAD)


def _check_type(request: Request, media_type: str) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != media_type:
        raise Refusal(415, f"The body has to be of the type {media_type}.")


def _listed(listing: Listing, request: Request) -> Mapping[str, object]:
    goes_on = None
    if listing.after is not None:
        goes_on = f"{request.url.path}?{urlencode({**request.query_params, **listing.after})}"
    return {"items": listing.items, "next": goes_on}


def _json(value: object, *, status: int = 200, media_type: str = "application/json", **headers: str) -> Response:
    # What is not ASCII is written as an escape: nothing in it can turn or control a terminal.
    body = json.dumps(jsonable(value), allow_nan=False).encode()
    return Response(body, status_code=status, media_type=media_type, headers=headers)


def _problem(status: int, told: str, **headers: str) -> Response:
    said = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": told}
    return _json(said, status=status, media_type=PROBLEM, **headers)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def document(calls: Sequence[AnyCall], *, title: str) -> Schema:
    """Return the OpenAPI document of the calls."""
    schemas = Schemas()
    paths: dict[str, dict[str, object]] = {}
    for call in calls:
        paths.setdefault(f"{ROOT}{call.path}", {})[call.method.lower()] = _operation(call, schemas)
    problem = {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
        },
        "required": ["type", "title", "status", "detail"],
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": "What the dashboard shows and does, for programs."},
        "paths": paths,
        "components": {
            "schemas": {**schemas.components, "Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(call: AnyCall, schemas: Schemas) -> Schema:
    answer = schemas.of(call.answers)
    if call.lists:
        answer = {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": answer},
                "next": {
                    "anyOf": [{"type": "string"}, {"type": "null"}],
                    "description": "The address of the next page; null at the end.",
                },
            },
            "required": ["items", "next"],
        }
    problem = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    name = "_".join(call.path.strip("/").replace("-", "_").split("/"))
    operation: Schema = {
        "operationId": f"{call.method.lower()}_{name}",
        "summary": call.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "What went wrong.", "content": problem},
        },
    }
    asked = schemas.object_of(call.asks, needed=needed_in(call.asks))
    if call.is_asked_by_address:
        operation["parameters"] = _parameters(asked)
    else:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": asked}}}
    if call.takes is not None:
        operation["requestBody"] = {"required": True, "content": {call.takes: {}}}
    return operation


def _parameters(asked: Schema) -> list[Schema]:
    properties, needed = asked["properties"], asked["required"]
    assert isinstance(properties, dict)
    assert isinstance(needed, list)
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": schema}
        for name, schema in properties.items()
    ]
