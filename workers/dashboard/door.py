"""The door of a dashboard: who comes in, and which forms are theirs.

Three things protect a form, and each would do: its token, which only pages of the same session have; the session's
cookie, which browsers do not send with a request that begins on another site; and what the browser says about where the
request began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from workers.dashboard.access import Access, Visitor
from workers.dashboard.accounts import Accounts
from workers.dashboard.cookies import LIFETIME, BrowserSession, Signer
from workers.dashboard.throttle import LoginThrottle, Try
from workers.dashboard.visit import FORM_TOKEN, Fields, Refusal
from workers.forwarded import forwarded_client, read_address, subscriber

CHECKS_AT_ONCE: Final = 2
"""Passwords that are checked at the same time: each takes a core and 64 MB for a moment."""
FOREIGN: Final = "This form did not come from a page of this dashboard. Go back, reload the page, and try again."


Gone: TypeAlias = Callable[[], Awaitable[object]]
"""Returns when nobody waits for the answer any more."""


class Door:
    """Knows the sessions, and lets people in by the rules of `access`."""

    def __init__(self, access: Access, *, throttle: LoginThrottle | None = None) -> None:
        self._access = access
        self._accounts = Accounts(access.accounts)
        self._signer = Signer()
        self._throttle = throttle or LoginThrottle()
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)

    @property
    def has_login(self) -> bool:
        """Whether there is anybody who could log in."""
        return bool(self._accounts)

    def session(self, request: Request) -> BrowserSession | None:
        """Return the session that the browser has."""
        return self._signer.read(request.cookies.get(self._cookie(request)))

    def visitor(self, request: Request, session: BrowserSession | None) -> Visitor | None:
        """Return whom the request comes from; None for somebody who has to log in first."""
        if self._access.proxy is not None and (named := self._access.proxy.visitor(request)):
            return named
        if session is not None and session.name is not None:
            account = self._accounts.named(session.name)
            return None if account is None else Visitor(name=account.name, role=account.role, logs_in=True)
        return self._access.open_visitor() if self._access.is_open else None

    def form_token(self, session: BrowserSession) -> str:
        """Return what each form on a page of this session carries."""
        return self._signer.form_token(session)

    def check_form(self, request: Request, session: BrowserSession | None, form: Fields) -> None:
        """Check that a page of this session sent the form.

        Raises:
            Refusal: another site did, or the session is over.
        """
        token = next((value for name, value in form if name == FORM_TOKEN), "")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        is_foreign = origin is not None and _authority(origin) != request.headers.get("host")
        if session is None or not self._signer.is_form_token(session, token):
            raise Refusal(403, FOREIGN)
        if is_foreign or site not in (None, "same-origin"):
            raise Refusal(403, FOREIGN)

    def client(self, request: Request) -> str:
        """Return whom logins count for: the address, for IPv6 its network, that a named proxy forwards for."""
        peer = read_address(request.client.host if request.client else "")
        if peer is None:
            return ""
        told = forwarded_client(request.headers, self._access.is_proxy) if self._access.is_proxy(peer) else None
        return subscriber(told or peer)

    async def log_in(self, client: str, name: str, secret: str, *, gone: Gone) -> BrowserSession | None:
        """Return a new session if this is the account's password or token. After failures it takes a while.

        Raises:
            Refusal: too many are being tried at once, most of them by this client; or it was *gone* before its turn.
        """
        # Counted before the check: a hundred guesses sent at once are a hundred.
        begun = self._throttle.begin(name, client)
        leaving = asyncio.create_task(_refuse_when(gone, begun))
        try:
            await _wait(begun)
        finally:
            leaving.cancel()
            self._throttle.looked_at(begun)
        async with self._checks:
            account = await asyncio.to_thread(self._accounts.check, name, secret)
        if account is None:
            return None
        self._throttle.succeeded(begun)
        return BrowserSession.begin(account.name)

    def end(self, session: BrowserSession) -> None:
        """Let nobody use the session any more."""
        self._signer.end(session)

    def give(self, response: Response, request: Request, session: BrowserSession) -> None:
        """Make the browser keep the session."""
        response.set_cookie(
            self._cookie(request),
            self._signer.written(session),
            max_age=round(LIFETIME.total_seconds()),
            path="/",
            secure=self._access.is_https,
            httponly=True,
            samesite="strict",
        )

    def _cookie(self, request: Request) -> str:
        """Return the cookie's name. Browsers do not tell ports apart: dashboards on two ports need two names."""
        port = request.url.port
        prefix = "__Host-" if self._access.is_https else ""
        return f"{prefix}dashboard{f'-{port}' if port else ''}"


async def _wait(begun: Try) -> None:
    try:
        async with asyncio.timeout(begun.wait.total_seconds()):
            await begun.refused.wait()
    except TimeoutError:
        return
    raise Refusal(429, "Too many logins are being tried. Try again in 30 s.")


async def _refuse_when(gone: Gone, begun: Try) -> None:
    await gone()
    begun.refused.set()


def _authority(origin: str) -> str:
    """Return the host and port of an `Origin` header; nothing of one that is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
