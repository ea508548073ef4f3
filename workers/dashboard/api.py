"""The API for programs: `/api/v1`, by token only, described by the OpenAPI document beside it.

An account's token lets in, as a viewer or an operator; a browser's cookie, and what a proxy says, do not. So nothing
that a browser sends by itself reaches a call, and no form token is needed. Tokens have 256 random bits, and are not
guessed however often somebody tries; a wrong one says nothing else.

A call is a function on a router of `calls()`: FastAPI checks what it takes, writes what it returns, and describes both.
Before that a `Call` asks who calls, and bounds what is read. What goes wrong is told as RFC 9457 has it
(`application/problem+json`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Body
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import Message

from workers.dashboard.accounts import Account, Accounts, Role
from workers.dashboard.visit import LARGEST_UPLOAD, UNSTORABLE, ActionTaken, Record, Refusal, read_body

T = TypeVar("T")

ROOT: Final = "/api/v1"
DESCRIPTION: Final = f"{ROOT}/openapi.json"
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""What the API refuses in its own words, where it does not take it."""
PATIENCE: Final = timedelta(minutes=2)
LARGEST_BODY: Final = 256 * 1024
LONGEST_TEXT: Final = 3_000
MOST_ITEMS: Final = 1_000
MOST_LISTED: Final = 200
LISTED: Final = 50
JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
TOKENLESS: Final = "Send `Authorization: Bearer TOKEN`, with the token of an account of this dashboard."

Teller: TypeAlias = Callable[[Exception], str | None]
"""Says in a sentence what is wrong with what is read; None for what is a fault of the dashboard's own."""
Code: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]

log = logging.getLogger(__name__)


def _storable(text: str) -> str:
    if UNSTORABLE.search(text):
        raise ValueError("it has characters that no database stores")
    return text


Text: TypeAlias = Annotated[str, Field(max_length=LONGEST_TEXT), AfterValidator(_storable)]
Id: TypeAlias = Annotated[Text, Query(alias="id")]
Ids: TypeAlias = Annotated[Sequence[Text], Field(max_length=MOST_ITEMS)]
Limit: TypeAlias = Annotated[
    int, Query(ge=1, le=MOST_LISTED, description="The most items of a page; it may have fewer and go on.")
]
After: TypeAlias = Annotated[Text | None, Query(description="Where the page before ended; its `next` has it.")]


class ApiOrder(BaseModel):
    """The body of a call: nothing in it is taken for something else, and nothing that is not known."""

    model_config = ConfigDict(extra="forbid", strict=True)


ANSWERED: Final = ConfigDict(ser_json_timedelta="float", json_schema_serialization_defaults_required=True)
"""An answer has all its members, and durations in seconds."""


class ApiAnswer(BaseModel):
    """What a call returns."""

    model_config = ANSWERED


class Listing(ApiAnswer, Generic[T]):
    """Part of a list."""

    items: tuple[T, ...]
    next: Annotated[str | None, Field(description="The address of the next page; null at the end.")] = None


def goes_on(request: Request, **after: str | None) -> str | None:
    """Return the address of the page that begins there; None at the end."""
    further = {**request.query_params, **after}
    return None if None in after.values() else f"{request.url.path}?{urlencode(further)}"


class Problem(ApiAnswer):
    """What went wrong."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Ascii(JSONResponse):
    """JSON in which what is not ASCII is written as an escape: nothing in it can turn or control a terminal."""

    def render(self, content: object) -> bytes:
        """Write the content."""
        return json.dumps(content, allow_nan=False).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Whoever calls, by the token of an account."""

    account: Account
    record_action: Record

    @property
    def name(self) -> str:
        return self.account.name

    async def record(self, action: str, subject: str, affected: int, *, problem: str | None = None) -> None:
        """Write to the log what the caller has done."""
        done = ActionTaken(
            by=self.name, action=action, subject=subject, affected=affected, problem=problem, by_api=True
        )
        await self.record_action(done)


async def _caller(request: Request) -> Program:
    found: Program = request.state.caller
    return found


Caller: TypeAlias = Annotated[Program, Depends(_caller)]


def given(kind: type) -> Any:  # Any: FastAPI's own type of a dependency says nothing
    """Return what makes FastAPI pass the object of that type which a part of the site brought."""

    async def found(request: Request) -> object:
        return request.app.state.api.given[kind]

    return Depends(found)


class Call(APIRoute):
    """One thing that can be asked. `POST` changes something, and takes an operator."""

    def get_route_handler(self) -> Code:
        """Return what answers a request."""
        code = super().get_route_handler()

        async def called(request: Request) -> Response:
            if request.method == "POST" and request.state.caller.account.role is not Role.OPERATOR:
                raise Refusal(403, "The token of a viewer looks, and does not act.")
            return await code(await self._read(request))

        async def answer(request: Request) -> Response:
            api: Api = request.app.state.api
            return await api.answer(request, called)

        return answer

    async def _read(self, request: Request) -> Request:
        """Return the request with its body, which FastAPI would read whatever its length."""
        body_field = self.body_field.field_info if self.body_field is not None else None
        takes = body_field.media_type if isinstance(body_field, Body) else None
        if takes != JSON:
            self._check_names(request)
        if takes is None:
            return request
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != takes:
            raise Refusal(415, f"The body has to be of the type {takes}.")
        body = await read_body(request, LARGEST_BODY if takes == JSON else LARGEST_UPLOAD)

        async def again() -> Message:
            return {"type": "http.request", "body": body}

        return Request(request.scope, again)

    def _check_names(self, request: Request) -> None:
        known = [each.alias for each in self.dependant.query_params]
        pairs = request.query_params.multi_items()
        if unknown := [name for name, _ in pairs if name not in known]:
            told = f"{unknown[0][:100]!r} is not known here; known are: {', '.join(known) or 'nothing'}."
            raise Refusal(400, told)
        if len(pairs) != len(dict(pairs)):
            raise Refusal(400, "A parameter is there twice.")


def _operation_id(route: APIRoute) -> str:
    method = min(route.methods or ())
    return f"{method.lower()}_{route.path.removeprefix(f'{ROOT}/').replace('-', '_').replace('/', '_')}"


def calls() -> APIRouter:
    """Return a router that calls are added to; a `SitePart` has its routes."""
    problem = {"schema": Problem.model_json_schema(mode="serialization")}
    return APIRouter(
        prefix=ROOT,
        route_class=Call,
        default_response_class=Ascii,
        responses={"default": {"description": "What went wrong.", "content": {PROBLEM: problem}}},
        dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))],  # describes what `Api` asks for
        generate_unique_id_function=_operation_id,
    )


class Api:
    """Answers calls: `app` is the ASGI application. `given` has by type what calls are about."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        *,
        title: str,
        accounts: Sequence[Account],
        teller: Teller,
        record: Record,
        given: Mapping[type, object],
    ) -> None:
        self._accounts = Accounts(accounts)
        self._teller = teller
        self._record = record
        self.given = given
        self.app = FastAPI(
            title=title,
            version="1",
            description="What the dashboard shows and does, for programs.",
            openapi_url=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            routes=[*routes],
        )
        self.app.state.api = self
        self.app.add_route(ROOT + "{path:path}", self._no_call, methods=[*METHODS], include_in_schema=False)

    async def answer(self, request: Request, code: Code) -> Response:
        """Return what the code answers to whoever has a token, or what is wrong."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        account = self._accounts.of_token(token.strip()) if scheme.lower() == "bearer" else None
        if account is None:
            return _problem(401, TOKENLESS, **{"www-authenticate": "Bearer"})
        request.state.caller = Program(account=account, record_action=self._record)
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                return await code(request)
        except Refusal as refusal:
            return _problem(refusal.status, refusal.told)
        except RequestValidationError as error:
            return _problem(400, _sentence(error))
        except HTTPException:
            return _problem(400, "The body is no JSON.")
        except Exception as error:
            return self._failed(request, error)

    def _failed(self, request: Request, error: Exception) -> Response:
        told = "This is not answered in time." if isinstance(error, TimeoutError) else self._teller(error)
        if told is None:
            log.exception("dashboard_call_failed")
            return _problem(500, "This call has a fault: see the dashboard's log.")
        if request.method == "POST":
            return _problem(503, f"{told} Whether it had an effect is not known: look before you repeat it.")
        return _problem(503, told, **{"retry-after": "5"})

    async def _no_call(self, request: Request) -> Response:
        async def code(request: Request) -> Response:
            methods = [
                method
                for each in self.app.routes
                if isinstance(each, Call) and each.path == request.url.path
                for method in each.methods or ()
            ]
            if not methods:
                raise Refusal(404, f"There is no such call; {DESCRIPTION} has those that there are.")
            return _problem(405, f"This takes {' and '.join(methods)}.", allow=", ".join(methods))

        return await self.answer(request, code)


def _problem(status: int, told: str, **headers: str) -> Response:
    said = Problem(title=HTTPStatus(status).phrase, status=status, detail=told)
    return Ascii(said.model_dump(), status_code=status, media_type=PROBLEM, headers=headers)


def _sentence(error: RequestValidationError) -> str:
    """Say what is wrong first with what was sent, without quoting it."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "The body is no JSON."
    at = ".".join(str(each) for each in first["loc"][1:]) or first["loc"][0]
    if first["type"] == "missing":
        return f"{at!r} is missing."
    return f"{at[:100]!r}: {first['msg'].removeprefix('Value error, ')}."
