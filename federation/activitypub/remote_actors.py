"""Where actors of other servers take activities, as their documents say, and in whose name these are asked for.

Servers may show actors only to who signs: then an actor signs that stands for this node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import select
from sqlmodel import col

from db import ActivityActor, Database
from federation.activitypub.actors import Actors
from federation.activitypub.answers import followed
from federation.activitypub.documents import ACTIVITY_JSON, LD_JSON
from federation.activitypub.handlers import id_of, is_of, one_of
from federation.activitypub.key_documents import PAGE, is_activity
from federation.activitypub.keys import ActorKeys
from federation.activitypub.outbound import Recipient
from federation.activitypub.signatures import sign_get
from federation.activitypub.wire import user_agent
from federation.http.client import FederationClient
from federation.http.errors import BlockedUrl, BodyTooLarge
from federation.http.guard import parse_target
from federation.http.messages import REDIRECTS, Response
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError
from workers.clock import Clock, monotonic

SignGet: TypeAlias = Callable[[str], Awaitable[Mapping[str, str]]]
"""Returns the headers of a GET of that URL."""

PATIENCE: Final = timedelta(seconds=5)
MOST_BYTES: Final = 256 * 1024
MOST_REDIRECTS: Final = 2
_GONE: Final = frozenset({403, 404, 410})
"""Without 401: so Mastodon answers who signs, while it cannot fetch the key of that."""


INSTANCE_PATH: Final = "/actor"
"""Where it is made if the application has made none."""

_FIRST: Final = (
    select(col(ActivityActor.id))
    .where(col(ActivityActor.is_instance), col(ActivityActor.removed_at).is_(None))
    .order_by(col(ActivityActor.created_at), col(ActivityActor.id))
    .limit(1)
)


class InstanceSigner:
    """Signs GETs in the name of the node that serves as *own_url*, by its first instance actor."""

    def __init__(self, *, own_url: str, database: Database, actors: Actors, keys: ActorKeys, clock: Clock) -> None:
        self._own_url = own_url
        self._database = database
        self._actors = actors
        self._keys = keys
        self._clock = clock
        self._actor: str | None = None

    async def __call__(self, url: str) -> Mapping[str, str]:
        """Return the headers of a signed GET for an activity or actor.

        Raises:
            KeyUnreadable: this process cannot open the actor's key.
            NoActorKey: it has none in use.
            SQLAlchemyError: the database failed.
        """
        self._actor = self._actor or await self._first()
        signed = sign_get(url=url, at=self._clock.now(), key=await self._keys.signing_key(self._actor))
        return {"Accept": f"{ACTIVITY_JSON}, {LD_JSON}", "User-Agent": user_agent(self._own_url), **signed}

    async def _first(self) -> str:
        found = await self._database.rows(_FIRST)
        if found:
            return str(found[0][0])
        actor = f"{self._own_url}{INSTANCE_PATH}"
        async with self._database.transaction() as session:
            await session.run_sync(self._actors.add, actor, is_instance=True)
        return actor


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
