"""What happens to every request before and after its endpoint: bounded body, blacklist, errors, log.

No body is read before its headers have passed, and no more is built of it than its endpoint reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from db.errors import is_outage
from federation.base.errors import Unreachable
from federation.base.logs import crash
from federation.base.meter import NO_METER, Meter
from federation.node.admission import BODY_MEMBERS, Admit, BlacklistGate, everybody
from federation.node.bodies import BodyReader, TooLarge, framework_too_large
from federation.node.clients import Clients, ClientStanding, Source, turned_away
from federation.node.heavy import HEAVY_BYTES, HeavyWork
from federation.node.refusals import Refusal, incomplete_database, try_later
from federation.protocol.encodings import parse_json
from federation.protocol.errors import NotJson, UrlError
from federation.protocol.skimming import Leaf, Members, skim
from federation.protocol.urls import canonical_origin

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """A request that passed the gate: its headers, and the JSON value of its body, or why there is none.

    Nothing is verified. The body is parsed here once, for the gate and the endpoint. `is_heavy` says that it is over 64
    KiB, so that further work on it is heavy, too.
    """

    headers: Headers = field(repr=False)
    value: object | NotJson = field(repr=False)
    is_heavy: bool
    source: Source


Vouch: TypeAlias = Callable[[Headers], Awaitable[None]]
"""Raises a `Refusal` if the name that these headers give does not allow a body over 64 KiB."""


async def _for_anybody(_: Headers) -> None:
    pass


Work: TypeAlias = Callable[[Request, bytearray, Source], Awaitable[Response]]
VouchFor: TypeAlias = Callable[[Request, Source], Awaitable[None]]
"""Does what `Vouch` does, and is told where the request came from."""
Handler: TypeAlias = Callable[[Inbound], Awaitable[Response]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Gaps: TypeAlias = Callable[[], Awaitable[Sequence[str]]]


class Front:
    """Turns handlers into endpoints that answer any request with JSON.

    `gaps` is asked what the database lacks after it has refused a statement.
    """

    def __init__(
        self,
        *,
        gate: BlacklistGate,
        gaps: Gaps,
        clients: Clients,
        standing: ClientStanding,
        heavy: HeavyWork,
        meter: Meter = NO_METER,
    ) -> None:
        self._gate = gate
        self._gaps = gaps
        self._clients = clients
        self._standing = standing
        self._heavy = heavy
        self._meter = meter
        self._bodies = BodyReader(heavy=heavy)

    def endpoint(
        self,
        handler: Handler,
        *,
        max_bytes: int,
        admit: Admit = everybody,
        too_large: TooLarge = framework_too_large,
        reads: Members | None = None,
        vouch: Vouch = _for_anybody,
        counts: bool = False,
        proves: bool = False,
    ) -> Endpoint:
        """Make *handler* an endpoint for requests that *admit* lets in, with bodies of up to *max_bytes*.

        *reads* are the members of the body that it looks at, None for all. *vouch* is asked about bodies over 64 KiB.
        *counts*: clients that it refuses again and again are barred. *proves*: what it accepts was signed by a
        registered server. A `Refusal` becomes its response, an unreachable database 503 with `Retry-After`, a database
        without a table or column 503 with its name, any other exception 500. Senders try again after all of them.
        """
        members = None if reads is None else reads | _NAMES

        async def work(request: Request, body: bytearray, source: Source) -> Response:
            inbound = await self._inbound(request, body, members, source)
            await self._gate.check_body(inbound.value)
            return await handler(inbound)

        async def vouched(request: Request, _: Source) -> None:
            await vouch(request.headers)

        return self.endpoint_of_bytes(
            work, max_bytes=max_bytes, admit=admit, too_large=too_large, vouch=vouched, counts=counts, proves=proves
        )

    def endpoint_of_bytes(
        self,
        work: Work,
        *,
        max_bytes: int,
        admit: Admit,
        vouch: VouchFor,
        too_large: TooLarge = framework_too_large,
        timeout: timedelta | None = None,
        counts: bool = False,
        proves: bool = False,
        path: str | None = None,
    ) -> Endpoint:
        """Make *work* an endpoint, as `endpoint` does, that gets the body as it came.

        *timeout* is how long that may take. All paths of an endpoint that has many are metered as *path*.
        """

        async def answer(request: Request) -> Response:
            client, source = self._clients.name(request), self._clients.source(request)
            try:
                if counts and self._standing.turns_away(client):
                    return await self._turn_away(request)
                await self._admit(request, admit)
                async with self._bodies.read(
                    request,
                    limit=max_bytes,
                    too_large=too_large,
                    vouch=partial(vouch, request, source),
                    holders=source.holders,
                    timeout=timeout,
                ) as body:
                    response = await work(request, body, source)
                if proves:
                    self._standing.proved(client)
                return response
            except Refusal as refusal:
                if counts:
                    self._standing.refused(client, refusal.status)
                return _refused(request, refusal)
            except SQLAlchemyError as error:
                return await self._database_failed(request, error)
            except Exception as error:
                return _failed(request, error)

        async def metered(request: Request) -> Response:
            response = await answer(request)
            self._meter.inbound(path or _path(request), response.status_code)
            return response

        return metered

    async def _database_failed(self, request: Request, error: SQLAlchemyError) -> Response:
        try:
            names = None if is_outage(error) else await self._gaps()
        except Unreachable:  # it has become unreachable since it refused the statement
            names = None
        if names is None:
            log.error("inbound_database_unavailable", path=_path(request), error=type(error).__name__)
            return _refused(request, try_later("The database is unavailable", reason="DATABASE"))
        if not names:
            return _failed(request, error)
        log.error("inbound_tables_missing", path=_path(request), missing=list(names))
        return _refused(request, incomplete_database(names))

    async def _turn_away(self, request: Request) -> Response:
        """Answer a barred client. No line is logged: the log already has one about the client."""
        refusal = turned_away()
        await self._leave_unread(request, refusal)
        return refusal.response()

    async def _admit(self, request: Request, admit: Admit) -> None:
        try:
            await admit(request)
            await self._gate.check_headers(request.headers)
        except Refusal as refusal:
            await self._leave_unread(request, refusal)
            raise

    async def _leave_unread(self, request: Request, refusal: Refusal) -> None:
        if not await self._bodies.discard(request):
            refusal.headers = {**refusal.headers, "Connection": "close"}

    async def _inbound(self, request: Request, body: bytearray, members: Members | None, source: Source) -> Inbound:
        is_heavy = len(body) > HEAVY_BYTES
        read = partial(_json_value, body, members)
        value = await self._heavy.run(read) if is_heavy else read()
        body.clear()  # the value holds what is needed of it
        return Inbound(
            headers=request.headers,
            value=value,
            is_heavy=is_heavy,
            source=source,
        )


_NAMES = Members(shapes=dict.fromkeys(BODY_MEMBERS, Leaf.SCALAR))


def _json_value(body: bytearray, members: Members | None) -> object | NotJson:
    try:
        if members is not None:
            return skim(body, members, limit=len(body))
        return parse_json(bytes(body), limit=len(body))
    except NotJson as error:
        error.__context__ = None
        return error.with_traceback(None)  # the frames of both tracebacks hold the body


def _refused(request: Request, refusal: Refusal) -> Response:
    log.warning(
        "inbound_refused",
        path=_path(request),
        status=refusal.status,
        code=refusal.reason,
        detail=refusal.text,
        claimed_origin=_claimed_origin(request.headers),
    )
    return refusal.response()


def _failed(request: Request, error: Exception) -> Response:
    log.error("inbound_failed", path=_path(request), **crash(error))
    return Refusal(500, "Internal error", code="INTERNAL_SERVER_ERROR").response()


def _path(request: Request) -> str:
    return str(request.scope["path"])


def _claimed_origin(headers: Headers) -> str | None:
    try:
        return canonical_origin(headers.get("x-federation-origin", ""))
    except UrlError:
        return None
