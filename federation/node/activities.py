"""Activities that others post to inboxes of our actors, on the node's own port."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from federation.activitypub.application import joined, target_of
from federation.activitypub.inbox import (
    BODY_TIMEOUT,
    MOST_OF_ACTIVITY,
    SHARED_INBOX,
    ActivitiesInbox,
    is_inbox,
    taken,
)
from federation.activitypub.refused import Refused
from federation.node.admission import Admit
from federation.node.clients import Source
from federation.node.front import Endpoint, Front
from federation.node.refusals import Refusal


class ActivitiesEndpoint:
    """Hands to *inbox* what *admit* lets in."""

    def __init__(self, inbox: ActivitiesInbox, *, admit: Admit) -> None:
        self._inbox = inbox
        self._admit_client = admit

    def on(self, front: Front) -> Endpoint:
        """Return the endpoint behind this front.

        A body over 64 KiB is read once the key is there by which it is said to be signed.
        """
        return front.endpoint_of_bytes(
            self._take,
            max_bytes=MOST_OF_ACTIVITY,
            admit=self._admit,
            vouch=self._vouch,
            timeout=BODY_TIMEOUT,
            counts=True,
            path=SHARED_INBOX,
        )

    async def _admit(self, request: Request) -> None:
        await self._admit_client(request)
        await self._or_refusal(self._inbox.check_head(joined(request.headers.raw)))

    async def _vouch(self, request: Request, source: Source) -> None:
        await self._or_refusal(self._inbox.vouch(joined(request.headers.raw), source))

    async def _take(self, request: Request, body: bytearray, source: Source) -> Response:
        await self._or_refusal(
            self._inbox.accept(
                method=request.method,
                target=target_of(request.scope),
                headers=joined(request.headers.raw),
                body=bytes(body),
                client=source,
            )
        )
        reply = taken()
        return Response(reply.body, status_code=reply.status, headers=dict(reply.headers))

    async def _or_refusal(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Refused as refused:
            self._inbox.refused(refused)
            raise Refusal(refused.status, refused.text, reason="ACTIVITY", headers=refused.headers) from None


class InboxesFirst:
    """An application that takes what is posted to an inbox by *endpoint*, and leaves all else to *others*."""

    def __init__(self, endpoint: Endpoint, others: ASGIApp) -> None:
        self._endpoint = endpoint
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_inbox(scope["method"], scope["path"]):
            response = await self._endpoint(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._others(scope, receive, send)
