"""Where actors of other servers take activities, as their documents say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

from federation.activitypub.documents import ACTIVITY_JSON, LD_JSON
from federation.activitypub.handlers import is_of
from federation.activitypub.key_documents import is_activity
from federation.activitypub.outbound import Recipient
from federation.http.client import FederationClient
from federation.http.errors import BlockedUrl, BodyTooLarge
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError

SignGet: TypeAlias = Callable[[str], Awaitable[Mapping[str, str]]]
"""Returns the headers of a GET of that URL."""

PATIENCE: Final = timedelta(seconds=5)
MOST_BYTES: Final = 256 * 1024
_GONE: Final = frozenset({401, 403, 404, 410})


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
        """Return an actor and its inboxes, if both are on its own origin: nobody may have us post to a third party.

        None: they are not, or there is no such actor.

        Raises:
            ActorUnavailable, NetworkError: the server does not show it now.
        """
        try:
            response = await self._client.fetch(
                actor, headers=await self._sign(actor), timeout=PATIENCE, max_bytes=MOST_BYTES
            )
        except (BlockedUrl, BodyTooLarge):
            return None
        if response.status in _GONE:
            return None
        if response.status != 200:
            raise ActorUnavailable(f"its server answered {response.status}")
        is_document = is_activity(response.headers.get("content-type", ""))  # else it may be an uploaded file
        return recipient_of(response.body, actor) if is_document else None


def recipient_of(body: bytes, actor: str) -> Recipient | None:
    """Return the actor as its document shows it; None if that is another's, or its inboxes are on another origin."""
    try:
        document: Any = parse_json(body, limit=MOST_BYTES)
    except ProtocolError:
        return None
    if not isinstance(document, dict) or document.get("id") != actor:
        return None
    inbox: Any = document.get("inbox")
    endpoints = document.get("endpoints")
    shared = endpoints.get("sharedInbox") if isinstance(endpoints, dict) else None
    inboxes = [inbox] if shared is None else [inbox, shared]
    if not all(isinstance(each, str) and is_of(each, actor) for each in inboxes):
        return None
    return Recipient(id=actor, inbox=inbox, shared_inbox=shared)
