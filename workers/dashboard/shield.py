"""What holds for every request and every answer, before any page is asked.

A request has to name the dashboard by one of its own names. Every answer tells the browser to run and to load nothing
but the dashboard's own files, and to show it in no other site's page: if a stranger's text ever got past the escaping,
it would still do nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.dashboard.access import host_of

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
    """ASGI middleware around the whole dashboard."""

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
