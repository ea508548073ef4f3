"""What others send to our actors: verified at the door, and kept once, before it is acknowledged.

Theory of operation. A request passes some steps, and each may end it: what its headers say; its signatures, as far as
they can be checked without a key; its activity; the key, which may have to be fetched; the signature; and whether the
activity is the owner's of that key. What is kept then is kept with its job in one transaction, and only after that
answered with 202. So whatever is not answered is sent again, and known by its hash.

Nothing is fetched for a request that could not be valid whatever its key was. News of the end of an actor of whom we
know nothing is not worth a fetch either, which could only fail: servers send them to everybody they know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final, Protocol

import structlog
from sqlalchemy import bindparam, exists, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import ActivityFollow, Database, RemoteActorKey
from db.errors import is_outage
from federation.activitypub.activities import WIRE
from federation.activitypub.key_documents import KeyGone, KeyRefused, is_on_origin, is_posted
from federation.activitypub.posted import NoActivity, PostedActivity, read_posted
from federation.activitypub.refused import Admit, AdmitFetch, Anybody, Asker, Refused, Why, everybody
from federation.activitypub.remote_keys import KeyUnavailable, RemoteKey, RemoteKeys
from federation.activitypub.replies import RETRY_SECONDS, Reply, problem
from federation.activitypub.signature_fields import BadSignature
from federation.activitypub.signatures import Requested, SignatureClaim, SignatureKind, claims_in
from federation.base.logs import crash
from federation.base.meter import NO_METER, Meter
from federation.protocol.errors import UrlError
from federation.protocol.urls import MAX_URL_CHARACTERS, canonical_origin
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from workers import StorageUnavailable
from workers.clock import Clock

log = structlog.get_logger(__name__)

MOST_OF_ACTIVITY: Final = 1024 * 1024
BODY_TIMEOUT: Final = timedelta(seconds=10)
KEY_RETRY_SECONDS: Final = 60
SHARED_INBOX: Final = "/inbox"
"""All inboxes count as this one, where requests are counted by path: anybody makes up others."""
NOT_HIS: Final = 422
"""The answer to who signs what is not his to send, such as what he forwards. Mastodon sends again for days what gets
401; for 403 clients are barred, but forwarding is no fault."""
NAMED_ALIKE: Final = frozenset({"Follow", "Undo"})
"""Misskey names all Follows of one actor by another alike, and so their Undos: a later one is another activity."""
SAME_IF_SAME_TEXT: Final = frozenset({"Accept", "Reject", "Update"})
"""Mastodon names alike all that an actor rejects at once, or accepts once more; Friendica all Updates of one post."""
LISTING: Final = frozenset({"Add", "Remove"})
"""Mastodon gives those of what it pins no id: what is pinned again is written as it was before."""

_HOPES: Final = (401, NOT_HIS)
"""Of several refusals one counts that may pass, such as 503, before what may not."""

_KNOWN: Final = select(
    or_(
        exists().where(col(RemoteActorKey.owner) == bindparam("actor")),
        exists().where(col(ActivityFollow.remote_actor) == bindparam("actor")),
    )
)


class KeepActivity(Protocol):
    """Stores an activity and its job, from the end of the call on. Returns False if it is known.

    Raises:
        SQLAlchemyError, StorageUnavailable: nothing is stored.
    """

    async def __call__(
        self,
        *,
        activity_hash: str,
        activity_id: str | None,
        type: str,  # noqa: A002 - as the column
        actor: str,
        text: str,
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that came at `began`, and the actor whose activity it brings, which may be the news of his end."""

    requested: Requested
    actor: str
    began: datetime
    is_its_end: bool

    def check(self, claim: SignatureClaim, key: RemoteKey) -> None:
        """Check that the actor's own key made the signature."""
        if key.owner != self.actor:
            raise Refused(Why.OWNER, NOT_HIS, "The activity's actor is not the owner of the key")
        claim.check_key(self.requested, key.public)


class _Errand:
    """The fetch of one key, which a request may have us make, however many signatures it has. *admit* counts it.

    Of a server that is known it counts for the client; if that is not, then for the server, and not for all others.
    """

    def __init__(self, admit: AdmitFetch, asker: Asker, key_id: str) -> None:
        self.client = asker.client
        self._admit = admit
        self._asker = asker
        self._key_id = key_id
        self._is_done = False

    async def admit(self, is_known: bool) -> None:
        if self._is_done:
            raise Refused(Why.KEY, 401, "For one request one key is fetched")
        self._is_done = True
        is_nobody = is_known and self.client is None
        await self._admit(Anybody(f"unknown:{canonical_origin(self._key_id)}") if is_nobody else self._asker, is_known)


class ActivitiesInbox:
    """Takes what is sent to the node that serves as *own_url*, in canonical form, signed *window* ago at most.

    *keep* stores it; *admit* is asked before a key is fetched; *meter* is told what becomes of each.
    """

    def __init__(
        self,
        *,
        own_url: str,
        database: Database,
        keys: RemoteKeys,
        blacklist: Blacklist,
        links: Links,
        keep: KeepActivity,
        admit: AdmitFetch,
        window: timedelta,
        clock: Clock,
        meter: Meter = NO_METER,
    ) -> None:
        self._own_url = own_url
        self._database = database
        self._keys = keys
        self._blacklist = blacklist
        self._links = links.of(WIRE)
        self._keep = keep
        self._admit = admit
        self._window = window
        self._clock = clock
        self._meter = meter

    async def take(
        self,
        *,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        client: Asker,
        admit: Admit = everybody,
    ) -> Reply:
        """Answer a request: 202 once it is stored. Whatever goes wrong is an answer, too.

        *target* is the path with its query, as it was sent. Several headers of one name are one, with commas. *admit*
        is asked first.
        """
        try:
            await admit(client)
            await self.check_head(headers)
            await self.accept(method=method, target=target, headers=headers, body=body, client=client)
        except Refused as refused:
            return self.refused(refused)
        except Exception as error:
            return failed(target, error)
        return taken()

    def refused(self, refused: Refused) -> Reply:
        """Count a refusal, and return its answer."""
        self._meter.activity_refused(refused.why.value)
        return refused.reply()

    async def check_head(self, headers: Mapping[str, str]) -> None:
        """Check what can be, before a byte of the body is read.

        Raises:
            Refused: 403 blacklisted, 415 no activity by its type, or encoded, 401 not signed.
            SQLAlchemyError: the blacklist was never read, and cannot be read now.
        """
        given = {name.lower(): value.strip() for name, value in headers.items()}
        try:
            claims, unsigned = claims_in(headers), None
        except BadSignature as error:
            claims, unsigned = [], error
        for claim in claims:
            if await self._is_blacklisted(claim.key_id):
                raise Refused(Why.BLACKLISTED, 403, "Your server has been blacklisted")
        if not is_posted(given.get("content-type", "")):
            raise Refused(Why.TYPE, 415, "An activity is application/activity+json")
        if given.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise Refused(Why.TYPE, 415, "An activity has no Content-Encoding")
        if unsigned is not None:
            raise Refused(Why.SIGNATURE, 401, f"The request is not signed as it must be: {unsigned}")

    async def vouch(self, headers: Mapping[str, str], client: Asker) -> None:
        """Check that some key by which the request is said to be signed is there, and fetch it if need be.

        Raises:
            Refused: it is not.
            SQLAlchemyError: the database failed.
        """
        claim = claims_in(headers)[0]
        await self._found(claim, _Errand(self._admit, client, claim.key_id))

    async def accept(self, *, method: str, target: str, headers: Mapping[str, str], body: bytes, client: Asker) -> None:
        """Store the activity of a request whose head has passed.

        Raises:
            Refused: it is not taken.
            SQLAlchemyError: the database failed; it may have been stored.
        """
        began = self._clock.now()
        requested = self._requested(method, target, headers, body)
        claims = self._claims(requested, began)
        activity = _read(body)
        actor = activity.actor_id
        if activity.ends_its_actor and not await self._knows(actor):
            self._meter.activity_received(activity.kind, "ignored")
            return
        claims = _of_its_origin(claims, activity)
        sent = _Sent(requested, actor, began, activity.ends_its_actor)
        claim, key = await self._verified(sent, claims, _Errand(self._admit, client, claims[0].key_id))
        await self._keys.believe(key)
        await self._store(activity, actor, body, _told_apart(activity, body, claim, requested))
        await self._links.look_soon(canonical_origin(key.key_id))

    def _requested(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Requested:
        """Return the request as we are known: whatever was signed for another host does not verify."""
        url = self._own_url + target
        if len(url) > MAX_URL_CHARACTERS:
            raise Refused(Why.TARGET, 414, f"The URL has more than {MAX_URL_CHARACTERS} characters")
        if not target.startswith("/") or not target.isascii() or not target.isprintable() or " " in target:
            raise Refused(Why.TARGET, 400, "The target is not a path in ASCII")
        if len(body) > MOST_OF_ACTIVITY:
            raise Refused(Why.SIZE, 413, f"An activity has at most {MOST_OF_ACTIVITY} bytes")
        return Requested.of(method, url, headers, body)

    def _claims(self, requested: Requested, now: datetime) -> Sequence[SignatureClaim]:
        """Return the signatures that need no more than their keys."""
        claims, unfit = [], BadSignature("there is none")
        try:
            for claim in claims_in(requested.headers):
                try:
                    claim.check_form(requested, now, self._window)
                except BadSignature as error:
                    unfit = error
                else:
                    claims.append(claim)
        except BadSignature as error:
            unfit = error
        if not claims:
            raise Refused(Why.SIGNATURE, 401, f"The signature does not count: {unfit}")
        return claims

    async def _verified(
        self, sent: _Sent, claims: Sequence[SignatureClaim], errand: _Errand
    ) -> tuple[SignatureClaim, RemoteKey]:
        """Return one of the signatures that verifies, and the actor's key by which it does."""
        refusals: list[Refused] = []
        for claim in claims:
            try:
                return claim, await self._by_key(claim, sent, errand)
            except BadSignature as error:
                refusals.append(Refused(Why.SIGNATURE, 401, f"The signature does not count: {error}"))
            except Refused as refused:
                refusals.append(refused)
        raise min(refusals, key=lambda it: _HOPES.index(it.status) if it.status in _HOPES else -1)

    async def _by_key(self, claim: SignatureClaim, sent: _Sent, errand: _Errand) -> RemoteKey:
        key = await self._found(claim, errand, even_gone=sent.is_its_end)
        try:
            sent.check(claim, key)
        except BadSignature:
            if key.fetched_at >= sent.began:
                raise
            key = await self._found(claim, errand, refetch=True)  # it may have been replaced under its name
            sent.check(claim, key)
        return key

    async def _found(
        self, claim: SignatureClaim, errand: _Errand, *, refetch: bool = False, even_gone: bool = False
    ) -> RemoteKey:
        """Return the key of a signature. *even_gone*: as it was last, if it has gone with its owner."""
        try:
            try:
                return await self._keys.key(claim.key_id, refetch=refetch, admit=errand.admit, client=errand.client)
            except KeyGone:
                last = await self._keys.last(claim.key_id) if even_gone else None
                if last is None:
                    raise
                return last
        except KeyRefused as error:
            raise Refused(Why.KEY, 401, f"The key is not believed: {error}") from None
        except KeyUnavailable as error:
            raise Refused(
                Why.KEY_AWAY, 503, f"The key cannot be had: {error}", retry_seconds=KEY_RETRY_SECONDS
            ) from None

    async def _is_blacklisted(self, key_id: str) -> bool:
        try:
            return await self._blacklist.covering(canonical_origin(key_id)) is not None
        except UrlError:
            return False

    async def _knows(self, actor: str) -> bool:
        return bool((await self._database.rows(_KNOWN, {"actor": actor}))[0][0])

    async def _store(self, activity: PostedActivity, actor: str, body: bytes, apart: bytes) -> None:
        named = body if activity.id is None else activity.id.encode()
        named += b"\n" + apart if apart else b""
        try:
            is_new = await self._keep(
                activity_hash=sha256(actor.encode() + b"\n" + named).hexdigest(),
                activity_id=activity.id,
                type=activity.kind,
                actor=actor,
                text=body.decode(),
            )
        except StorageUnavailable as error:
            log.error("inbound_queue_unavailable", error=type(error).__name__)
            raise Refused(Why.QUEUE, 503, "The queue is unavailable", retry_seconds=RETRY_SECONDS) from None
        self._meter.activity_received(activity.kind, "stored" if is_new else "known")


def is_inbox(method: str, path: str) -> bool:
    """Tell whether a request is for an inbox: that of an actor, below whatever URL it has, or the shared one."""
    return method == "POST" and path.endswith("/inbox")


def taken() -> Reply:
    """Return the answer to what is stored."""
    return Reply(202, {"Content-Length": "0"}, b"")


def failed(target: str, error: Exception) -> Reply:
    """Return the answer where something of ours went wrong, and log it."""
    path = target.partition("?")[0]
    if isinstance(error, SQLAlchemyError) and is_outage(error):
        log.error("inbound_database_unavailable", path=path, error=type(error).__name__)
        return problem(503, "The database is unavailable", {"Retry-After": str(RETRY_SECONDS)})
    log.error("inbound_failed", path=path, **crash(error))
    return problem(500, "Internal error")


def _of_its_origin(claims: Sequence[SignatureClaim], activity: PostedActivity) -> Sequence[SignatureClaim]:
    """Return the signatures by keys of the origin of the actor, which is the activity's, too."""
    try:
        origin = canonical_origin(activity.actor_id)
    except UrlError:
        origin = ""
    if activity.id is not None and not is_on_origin(activity.id, origin):
        raise Refused(Why.OWNER, NOT_HIS, "The activity's id is not on its actor's origin")
    fit = [claim for claim in claims if is_on_origin(claim.key_id, origin)]
    if not fit:
        raise Refused(Why.OWNER, NOT_HIS, "The key is not on the actor's origin")
    return fit


def _told_apart(activity: PostedActivity, body: bytes, claim: SignatureClaim, requested: Requested) -> bytes:
    """Return by what an activity is told from others of its name, if such mean something else; or else nothing."""
    if activity.kind in NAMED_ALIKE or (activity.kind in LISTING and activity.id is None):
        return _made(claim, requested).encode()
    return body if activity.kind in SAME_IF_SAME_TEXT and activity.id is not None else b""


def _made(claim: SignatureClaim, requested: Requested) -> str:
    """Return when a signature that verified was made, as it says by what it covers."""
    is_told = claim.kind is SignatureKind.RFC9421 or "(created)" in claim.covered
    return str(claim.parameters["created"]) if is_told else requested.headers["date"]


def _read(body: bytes) -> PostedActivity:
    try:
        return read_posted(body)
    except NoActivity as error:
        raise Refused(Why.MALFORMED, 400, str(error)) from None
