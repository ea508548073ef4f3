"""A dashboard as a whole: its pages behind one door, the same menu around each, one reader for what changes.

A part brings pages, actions and live topics. The queues are one part. A package that knows more than queues adds parts
of its own, whose templates may extend those here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.dashboard.access import Access, Visitor, host_of
from workers.dashboard.api import METHODS, ROOT, Api, Teller
from workers.dashboard.cookies import BrowserSession
from workers.dashboard.door import Door
from workers.dashboard.feed import INTERVAL, EventStream, Feed, LiveSource, gone
from workers.dashboard.rendering import STATIC_TYPES, MenuItem, Templates, static_file
from workers.dashboard.throttle import LoginThrottle
from workers.dashboard.visit import (
    SEE_OTHER,
    ActionTaken,
    Fields,
    PageCode,
    Record,
    Refusal,
    Visit,
    check_storable,
    read_form,
    read_upload,
)

PAGE_PATIENCE: Final = timedelta(seconds=20)
"""What a page reads has bounds of its own, which say what does not answer; this one is for what they miss."""
ACTION_PATIENCE: Final = timedelta(minutes=2)
CORE_TEMPLATES: Final = "workers.dashboard"

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePart:
    """What one package adds to a dashboard. `templates` is the package whose folder of that name has its templates."""

    menu: Sequence[MenuItem] = ()
    pages: Mapping[str, PageCode] = field(default_factory=dict)
    """By path; whoever may look sees them."""
    actions: Mapping[str, PageCode] = field(default_factory=dict)
    """By path; only forms of ours, sent by an operator, reach them."""
    uploads: Mapping[str, PageCode] = field(default_factory=dict)
    """Actions whose form carries a file."""
    live: Mapping[str, Callable[[Templates], LiveSource]] = field(default_factory=dict)
    calls: Sequence[BaseRoute] = ()
    """What programs ask of it: the routes of `api.calls`."""
    gives: Sequence[object] = ()
    """What calls are about, one of each type: `api.given` passes it to them."""
    templates: str | None = None


async def log_action(done: ActionTaken) -> None:
    """Record an action in the log of the process."""
    told = "dashboard_action by=%r action=%r subject=%r affected=%d problem=%r"
    log.info(told, done.by, done.action, done.subject[:200], done.affected, done.problem)


class Site:
    """Answers requests for the parts' pages. `app` is the ASGI application, `close` ends what is open."""

    def __init__(
        self,
        parts: Sequence[SitePart],
        *,
        title: str,
        access: Access,
        teller: Teller,
        record: Record = log_action,
        throttle: LoginThrottle | None = None,
        interval: timedelta = INTERVAL,
    ) -> None:
        self._door = Door(access, throttle=throttle)
        self._teller = teller
        self._record = record
        self._notes: dict[str, str] = {}
        packages = [part.templates for part in reversed(parts) if part.templates is not None]
        self._templates = Templates(
            [*packages, CORE_TEMPLATES],
            title=title,
            menu=[item for part in parts for item in part.menu],
            shows_only=access.is_open and not access.allow_actions,
        )
        calls = [call for part in parts for call in part.calls]
        given = {type(each): each for part in parts for each in part.gives}
        self._api = Api(calls, title=title, accounts=access.accounts, teller=teller, record=record, given=given)
        self._live = {name: make(self._templates) for part in parts for name, make in part.live.items()}
        self.feed = Feed(self._live, tell=self._trouble, interval=interval)
        self.app: ASGIApp = Shield(self._application(parts), hosts=access.hosts)

    async def close(self) -> None:
        """End every stream."""
        await self.feed.close()

    def _application(self, parts: Sequence[SitePart]) -> Starlette:
        seen = {path: code for part in parts for path, code in part.pages.items()}
        acted = {path: code for part in parts for path, code in part.actions.items()}
        sent = {path: code for part in parts for path, code in part.uploads.items()}
        routes = [
            Route("/static/{tag}/{name}", _static, methods=["GET"]),
            Route("/live", self._stream, methods=["GET"]),
            Route(ROOT + "{path:path}", self._api.app, methods=[*METHODS]),
            Route("/login", self._page(self._login_page, needs_visitor=False), methods=["GET"]),
            Route("/login", self._action(self._log_in, needs_operator=False), methods=["POST"]),
            Route("/logout", self._action(self._log_out, needs_operator=False), methods=["POST"]),
            *(Route(path, self._page(code), methods=["GET"]) for path, code in seen.items()),
            *(Route(path, self._action(code), methods=["POST"]) for path, code in acted.items()),
            *(Route(path, self._action(code, takes_file=True), methods=["POST"]) for path, code in sent.items()),
        ]
        nothing_here = self._page(_not_found)
        return Starlette(routes=[*routes, Route("/{path:path}", nothing_here, methods=["GET"])])

    def _page(self, code: PageCode, *, needs_visitor: bool = True) -> Endpoint:
        async def answer(request: Request) -> Response:
            session = self._door.session(request)
            visitor = self._door.visitor(request, session)
            if visitor is None and needs_visitor:
                return RedirectResponse(f"/login?next={quote(_address(request))}", status_code=SEE_OTHER)
            visit = self._visit(request, session, visitor)

            async def checked(visit: Visit) -> Response:
                check_storable(visit.query.values())
                return await code(visit)

            return self._kept(visit, session, await self._answered(visit, checked, PAGE_PATIENCE))

        return answer

    def _action(self, code: PageCode, *, needs_operator: bool = True, takes_file: bool = False) -> Endpoint:
        async def answer(request: Request) -> Response:
            session = self._door.session(request)
            visitor = self._door.visitor(request, session)
            visit = self._visit(request, session, visitor)

            async def checked(visit: Visit) -> Response:
                may_act = visitor is not None and visitor.acts
                if takes_file and may_act:  # a file is read for nobody else
                    visit.form, visit.file = await read_upload(request)
                elif not takes_file:
                    visit.form = await read_form(request)
                self._door.check_form(request, session, visit.form)
                if needs_operator and not may_act:
                    raise Refusal(403, "You may look, and not act.")
                return await code(visit)

            return self._kept(visit, session, await self._answered(visit, checked, ACTION_PATIENCE))

        return answer

    def _visit(
        self, request: Request, session: BrowserSession | None, visitor: Visitor | None, form: Fields = ()
    ) -> Visit:
        own = session or BrowserSession.begin()
        return Visit(
            request=request,
            visitor=visitor,
            session=own,
            templates=self._templates,
            record_action=self._record,
            form_token=self._door.form_token(own),
            notes=self._notes,
            form=form,
        )

    async def _answered(self, visit: Visit, code: PageCode, patience: timedelta) -> Response:
        """Return what the code of a page returns, or a page that says why it does not."""
        try:
            async with asyncio.timeout(patience.total_seconds()):
                return await code(visit)
        except Refusal as refusal:
            headers = {"retry-after": "30"} if refusal.status == 429 else {}
            return visit.page("refused.html", {"told": refusal.told}, status=refusal.status, headers=headers)
        except Exception as error:
            told = "This page does not answer in time." if isinstance(error, TimeoutError) else self._teller(error)
            if told is None:
                log.exception("dashboard_page_failed")
                told = "This page has a fault: see the dashboard's log."
                return visit.page("refused.html", {"told": told}, status=500)
            again = visit.request.method == "GET"
            return visit.page("away.html", {"told": told, "again": again}, status=503)

    def _kept(self, visit: Visit, session: BrowserSession | None, response: Response) -> Response:
        if visit.session is not session:
            self._door.give(response, visit.request, visit.session)
        return response

    async def _stream(self, request: Request) -> ASGIApp:
        if self._door.visitor(request, self._door.session(request)) is None:
            return PlainTextResponse("log in first\n", status_code=401)
        topic = request.query_params.get("topic", "")
        if topic not in self._live:
            return PlainTextResponse("there is no such topic\n", status_code=404)
        chosen = sorted((name, value[:300]) for name, value in request.query_params.items() if name != "topic")[:8]
        try:
            check_storable(value for _, value in chosen)
        except Refusal as refusal:
            return PlainTextResponse(f"{refusal.told}\n", status_code=refusal.status)
        return EventStream(self.feed.listen(topic, tuple(chosen)))

    def _trouble(self, error: Exception) -> str | None:
        if isinstance(error, Refusal):
            told: str | None = error.told
        else:
            late = "What this page shows does not answer in time."
            told = late if isinstance(error, TimeoutError) else self._teller(error)
        return None if told is None else self._templates.render("parts/trouble.html", told=told)

    async def _login_page(self, visit: Visit) -> Response:
        if not self._door.has_login:
            if visit.visitor is None:
                raise Refusal(403, "The proxy before this dashboard has to say who you are.")
            return RedirectResponse("/", status_code=SEE_OTHER)
        return visit.page("login.html", {"goes_on": _local(visit.query.get("next", "/")), "problem": None})

    async def _log_in(self, visit: Visit) -> Response:
        goes_on = _local(visit.field("next", "/"))
        client = self._door.client(visit.request)
        name, secret = visit.field("name"), visit.field("secret")
        session = await self._door.log_in(client, name, secret, gone=partial(gone, visit.request.receive))
        if session is None:
            log.warning("dashboard_login_failed address=%s", client)
            problem = "The name or the password is wrong."
            return visit.page("login.html", {"goes_on": goes_on, "problem": problem}, status=401)
        self._door.end(visit.session)
        visit.session = session
        return RedirectResponse(goes_on, status_code=SEE_OTHER)

    async def _log_out(self, visit: Visit) -> Response:
        self._door.end(visit.session)
        visit.session = BrowserSession.begin()
        return RedirectResponse("/login", status_code=SEE_OTHER)


async def _not_found(_visit: Visit) -> Response:
    raise Refusal(404, "There is no such page.")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    content = static_file(name)
    if content is None:
        return PlainTextResponse("not found\n", status_code=404)
    kept = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(content, media_type=STATIC_TYPES[name.rpartition(".")[2]], headers=kept)


def _address(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _local(address: str) -> str:
    """Return the address if it is one of ours: nobody is sent to another site after a login."""
    is_path = address.startswith("/") and not address.startswith(("//", "/\\"))
    return address if is_path and address.isprintable() else "/"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Of every answer that does not say otherwise itself."""


class Shield:
    """ASGI middleware around the whole dashboard: what holds for every request and answer, before any page is asked.

    A request has to name the dashboard by one of its own names. Every answer tells the browser to run and to load
    nothing but the dashboard's own files, and to show it in no other site's page: if a stranger's text ever got past
    the escaping, it would still do nothing.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it names one of our hosts."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        named = host_of(Headers(scope=scope).get("host", ""))
        if named in self._hosts:
            await self._app(scope, receive, sent)
            return
        told = "This dashboard is not called that. Its own name is set where it is started.\n"
        await PlainTextResponse(told, status_code=421)(scope, receive, sent)
