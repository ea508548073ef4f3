"""Where actors of other servers take activities, as their documents say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

from federation.activitypub.answers import followed
from federation.activitypub.documents import ACTIVITY_JSON, LD_JSON
from federation.activitypub.handlers import id_of, is_of, one_of
from federation.activitypub.key_documents import PAGE, is_activity
from federation.activitypub.outbound import Recipient
from federation.http.client import FederationClient
from federation.http.errors import BlockedUrl, BodyTooLarge
from federation.http.guard import parse_target
from federation.http.messages import REDIRECTS, Response
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError
from workers.clock import monotonic

SignGet: TypeAlias = Callable[[str], Awaitable[Mapping[str, str]]]
"""Returns the headers of a GET of that URL."""

PATIENCE: Final = timedelta(seconds=5)
MOST_BYTES: Final = 256 * 1024
MOST_REDIRECTS: Final = 2
_GONE: Final = frozenset({403, 404, 410})
"""Without 401: so Mastodon answers who signs, while it cannot fetch the key of that."""


class ActorUnavailable(Exception):
    """An actor's server did not show it now."""


async def unsigned(_: str) -> Mapping[str, str]:
    """Return the headers of a GET that nobody signs."""
    return {"Accept": f"{ACTIVITY_JSON}, {LD_JSON}"}


class RemoteActors:
    """Asks for the documents of actors, through the guarded client."""

    def __init__(self, client: FederationClient, *, sign: SignGet = unsigned) -> None:
        self._client = client
        self._sign = sign

    async def recipient(self, actor: str) -> Recipient | None:
        """Return an actor and its inboxes, if they are on its own origin: nobody may have us post to a third party.

        A shared one elsewhere is left out. None: its own is elsewhere, or there is no such actor.

        Raises:
            ActorUnavailable, NetworkError: the server does not show it now.
        """
        try:
            response = await self._response(actor)
        except (BlockedUrl, BodyTooLarge):
            return None
        if response.status in _GONE:
            return None
        if response.status != 200:
            raise ActorUnavailable(f"its server answered {response.status}")
        kind = response.headers.get("content-type", "")
        if kind.startswith(PAGE):
            raise ActorUnavailable("its server shows a page in place of the actor")
        return recipient_of(response.body, actor) if is_activity(kind) else None  # else it may be an uploaded file

    async def _response(self, actor: str) -> Response:
        """Return what is shown at an actor's URL, or where its server leads from there on the same origin."""
        url, until = str(parse_target(actor).url), monotonic() + PATIENCE.total_seconds()
        response = await self._ask(url, until)
        for _ in range(MOST_REDIRECTS):
            further = followed(response, url, by=REDIRECTS)
            if further is None or not is_of(further, actor):
                break
            url = str(parse_target(further).url)
            response = await self._ask(url, until)
        return response

    async def _ask(self, url: str, until: float) -> Response:
        left = timedelta(seconds=max(until - monotonic(), 0))
        return await self._client.fetch(url, headers=await self._sign(url), timeout=left, max_bytes=MOST_BYTES)


def recipient_of(body: bytes, actor: str) -> Recipient | None:
    """Return the actor as its document shows it; None if that is another's, or its inbox is on another origin."""
    try:
        document: Any = parse_json(body, limit=MOST_BYTES)
    except ProtocolError:
        return None
    return recipient_in(document, actor) if isinstance(document, dict) else None


def recipient_in(document: Mapping[str, Any], actor: str) -> Recipient | None:
    """Return the actor as this says; None if it is about another, or the inbox is on another origin."""
    if document.get("id") != actor:
        return None
    inbox, endpoints = _inbox(document.get("inbox"), actor), one_of(document.get("endpoints"))
    shared = endpoints.get("sharedInbox") if isinstance(endpoints, dict) else None
    return None if inbox is None else Recipient(id=actor, inbox=inbox, shared_inbox=_inbox(shared, actor))


def _inbox(told: object, actor: str) -> str | None:
    """Return the URL of an inbox as it is sent to; None if it is not on the actor's own origin."""
    url = id_of(one_of(told))
    if url is None or not is_of(url, actor):
        return None
    try:
        return str(parse_target(url).url)
    except BlockedUrl:
        return None
