"""ActivityPub's wire: sign in the actor's name, post to the inbox, knock once more if need be, and read the status.

Theory of operation. An attempt is one request, or two where a server may want the other kind of signature, or a few
more where it redirects to itself; all of them within one deadline, each signed anew. What got through by the second
knock is remembered by the server's link, so that it is the first one from then on. A server that refuses both may have
been unable to fetch our key: once a delivery has used up its attempts we look at our own actor, by our public name as
others do. If the key is not to be seen there, the fault is ours. If it is, receivers may still remember that they could
not fetch it, so the delivery gets a few more series of attempts.

No relay carries this traffic, no registry of servers is asked or told, and there is nothing to ask a server but by a
delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Final

import msgspec

from db import Database
from federation.activitypub.activities import JOB, WIRE, check_id, check_types, parse
from federation.activitypub.answers import (
    ABOUT_SIGNATURES,
    MOST_OF_BODY,
    Knock,
    counted,
    failure_of,
    first_kind,
    followed,
    is_page,
    reason_of,
    second_kind,
    understood,
)
from federation.activitypub.codes import ALLOWS_HTTP, CODES, GONE, NOT_FOUND, is_taken
from federation.activitypub.inboxes import Inboxes, InboxForgotten
from federation.activitypub.keys import ActorKeys, KeyUnreadable, NoActorKey
from federation.activitypub.signatures import SignatureKind, SigningKey, sign
from federation.base.cache import LoadingCache
from federation.base.meter import NO_METER, Meter
from federation.delivery.error_codes import STORED_ALREADY, FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.wire import DELIVERY_TIMEOUT, Sending
from federation.http.client import FederationClient
from federation.http.errors import BlockedUrl, NetworkError, OutboundError
from federation.http.guard import AddressGuard
from federation.http.messages import Response
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError, UrlError
from federation.protocol.urls import canonical_origin
from federation.servers.links import Links
from workers.clock import Clock, monotonic
from workers.version import version

ACTIVITY_JSON: Final = "application/activity+json"
MOST_REDIRECTS: Final = 2
LOOK_INTERVAL: Final = timedelta(minutes=10)
"""How often a process looks at one of our own keys."""
LOOK_TIMEOUT: Final = timedelta(seconds=5)
MOST_OF_DOCUMENT: Final = 256 * 1024


class _Named(msgspec.Struct):
    """What is read of an activity's text."""

    id: str
    actor: str
    type: str | list[str]


_NAMED: Final = msgspec.json.Decoder(_Named)


@dataclass(slots=True)
class _Attempt:
    """One delivery on its way. `until` is its deadline, by the loop's clock."""

    sending: Sending
    key: SigningKey
    until: float
    body: bytes = field(repr=False)


class ActivityWire:
    """The wire that posts activities.

    `own_url` is ours, for `User-Agent`; `own_client` returns what may ask us, too, by our public name. `first_knock` is
    how to sign where nothing is remembered. With `allow_http`, inboxes may be on plain http; those of hosts that the
    guard allows by name may in any case. Close it.
    """

    name: Final = WIRE
    job_names: Final[Collection[str]] = (JOB,)
    codes: Final = CODES

    def __init__(
        self,
        *,
        own_url: str,
        keys: ActorKeys,
        links: Links,
        client: FederationClient,
        own_client: Callable[[], FederationClient],
        guard: AddressGuard,
        database: Database,
        first_knock: SignatureKind,
        allow_http: bool,
        clock: Clock,
        meter: Meter = NO_METER,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._links = links.of(WIRE)
        self._client = client
        self._own_client = own_client
        self._guard = guard
        self._first_knock = first_knock
        self._allow_http = allow_http
        self._clock = clock
        self._meter = meter
        self.inboxes = Inboxes(database, clock=clock)
        self._headers = {"Accept": ACTIVITY_JSON, "User-Agent": user_agent(own_url)}
        self._shown = LoadingCache(self._look, ttl=LOOK_INTERVAL)

    def check(self, payload: str) -> None:
        """Check that the text is an activity.

        Raises:
            ValueError: it is none; the message names the member.
        """
        parse(payload)

    async def name_of(self, server_url: str) -> str:
        """Return the server's canonical URL."""
        try:
            return canonical_origin(server_url)
        except UrlError:
            return server_url  # the guard will say what is wrong with it

    async def send(self, sending: Sending) -> InboxForgotten | None:
        """Post the activity. Return the effect of an inbox that takes it although something was wrong with it."""
        activity = _named(sending)
        url = self._permitted(sending.target_url)
        attempt = _Attempt(
            sending=sending,
            key=await self._signing_key(activity.actor),
            until=monotonic() + DELIVERY_TIMEOUT.total_seconds(),
            body=sending.payload.encode(),
        )
        sending.seen.request_bytes = len(attempt.body)
        remembered = sending.link.signature
        first = await self._knock(attempt, url, first_kind(remembered, self._first_knock))
        counts, other = first, second_kind(first, remembered)
        if other is not None and monotonic() < attempt.until:
            counts = await self._knock_again(attempt, url, other, first)
        _note(attempt, counts)
        if is_taken(counts.response.status):
            return await self._taken(sending, counts, is_news=counts is not first)
        raise await self._not_taken(sending, counts)

    async def may_recover(self, sending: Sending, code: str) -> bool:
        """Look, after a 401, whether our key is to be seen.

        Raises:
            RetryableFailure: it is not, or the refusal may be one of the past.
        """
        if code != "HTTP_401":
            return False
        key = await self._keys.served(_named(sending).actor)
        if key is None:
            return False
        if await self._shown.get(f"{key.key_id} {key.public_pem}"):
            problem = "the server answered 401, although our key is to be seen: it may not have fetched it yet"
            raise RetryableFailure("HTTP_401", problem, failure_class=FailureClass.OURS, tried_later=True)
        problem = f"the server answered 401, and {key.key_id} does not show the actor's key by our public name"
        raise RetryableFailure("OWN_ACTOR_UNREACHABLE", problem)

    async def is_well(self, server_url: str) -> None:
        """Return None: only a delivery can tell."""

    async def close(self) -> None:
        """End what is being read."""
        await self.inboxes.close()
        await self._shown.close()

    def _permitted(self, url: str) -> str:
        """Return the URL in its canonical spelling, which is what is signed.

        Raises:
            PermanentFailure: it may not be contacted.
        """
        try:
            target = self._guard.check_url(url)
        except BlockedUrl as error:
            raise PermanentFailure("BLOCKED_URL", f"the inbox may not be contacted: {error}") from error
        if target.url.scheme == "http" and not self._allow_http and not self._guard.exempts(target):
            raise PermanentFailure("PLAIN_HTTP", f"{target.origin} is on plain http; {ALLOWS_HTTP}")
        return str(target.url)

    async def _signing_key(self, actor: str) -> SigningKey:
        try:
            return await self._keys.signing_key(actor)
        except (NoActorKey, KeyUnreadable) as error:
            raise PermanentFailure("NO_OWN_KEYS", str(error)) from error

    async def _knock(self, attempt: _Attempt, url: str, kind: SignatureKind) -> Knock:
        """Post by one kind of signature, to where the server redirects to itself if it does."""
        attempt.sending.seen.knocks += 1
        response = await self._post(attempt, url, kind)
        for _ in range(MOST_REDIRECTS):
            further = followed(response, url)
            if further is None:
                break
            try:
                url = self._permitted(further)
            except PermanentFailure:  # the inbox may be contacted, and has answered
                break
            response = await self._post(attempt, url, kind)
        return Knock(kind=kind, url=url, response=response)

    async def _knock_again(self, attempt: _Attempt, url: str, kind: SignatureKind, first: Knock) -> Knock:
        """Return the answer that counts: the first one where this knock gets none, as the server is there."""
        try:
            return counted(first, await self._knock(attempt, url, kind))
        except RetryableFailure:
            attempt.sending.seen.answered = True
            return first

    async def _post(self, attempt: _Attempt, url: str, kind: SignatureKind) -> Response:
        sending, seen, started = attempt.sending, attempt.sending.seen, monotonic()
        signed = sign(
            kind,
            method="POST",
            url=url,
            body=attempt.body,
            content_type=ACTIVITY_JSON,
            at=self._clock.now(),
            key=attempt.key,
        )
        self._meter.signed(monotonic() - started)
        try:
            response = await self._client.fetch(
                url,
                method="POST",
                headers={**self._headers, **signed},
                body=attempt.body,
                timeout=timedelta(seconds=max(attempt.until - started, 0)),
                first_byte=sending.first_byte,
                max_bytes=MOST_OF_BODY,
                head_decides=True,
            )
        except NetworkError as error:
            seen.answered = False
            raise RetryableFailure(error.code, str(error)) from error
        finally:
            seen.waited = (seen.waited or 0.0) + monotonic() - started
        seen.answered = True
        return understood(response)

    async def _taken(self, sending: Sending, knock: Knock, *, is_news: bool) -> InboxForgotten | None:
        """Remember by which kind of signature, if that is news.

        Raises:
            RetryableFailure: a page took it, where the server took the first one without.
        """
        if is_page(knock.response) and not await self._links.may_answer_by_page(sending.server_url):
            problem = "a page took it, and the server has taken others without one: somebody else may answer there"
            raise RetryableFailure("FOREIGN_ANSWER", problem)
        if knock.response.status == STORED_ALREADY and not sending.link.acknowledged:
            # It took the activity by an answer that was lost, and that may have been a page, as the next ones may be.
            await self._links.may_answer_by_page(sending.server_url)
        if is_news:
            await self._links.set_signature(sending.server_url, knock.kind)
        return await self.inboxes.taken(sending.target_url)

    async def _not_taken(self, sending: Sending, knock: Knock) -> PermanentFailure | RetryableFailure:
        """Return what that means, and note what it says of the inbox."""
        reason = sending.seen.remote_code = reason_of(knock.response.body)
        inbox = (sending.target_url, sending.server_url)
        if knock.response.status == NOT_FOUND:
            await self.inboxes.missing(*inbox, delivery_id=sending.delivery_id)
        elif knock.response.status == GONE:
            await self.inboxes.gone(*inbox, delivery_id=sending.delivery_id)
        return failure_of(knock.response, knock.url, self._clock.now(), reason=reason, ours=self._own_url)

    async def _look(self, key: str) -> bool:
        """Tell whether our own actor shows the key. This is remembered per process, for `LOOK_INTERVAL`."""
        key_id, _, public_pem = key.partition(" ")
        return await shows_key(self._own_client(), key_id, public_pem, headers=self._headers)


async def shows_key(client: FederationClient, key_id: str, public_pem: str, *, headers: Mapping[str, str]) -> bool:
    """Tell whether the document of an actor of ours shows the key, to whoever asks by our public name as we do."""
    url = key_id.partition("#")[0]
    try:
        response = await client.fetch(url, headers=headers, timeout=LOOK_TIMEOUT, max_bytes=MOST_OF_DOCUMENT)
        document = parse_json(response.body, limit=MOST_OF_DOCUMENT)
    except (OutboundError, ProtocolError):
        return False
    shown = document.get("publicKey") if response.ok and isinstance(document, dict) else None
    if not isinstance(shown, dict) or shown.get("id") != key_id:
        return False
    return str(shown.get("publicKeyPem")).split() == public_pem.split()


@cache
def user_agent(own_url: str) -> str:
    """Return how requests name this program, and whom to ask about it."""
    return f"federation-delivery/{version() or 'unknown'} (+{own_url})"


def _named(sending: Sending) -> _Named:
    """Read the activity, and note what it is called."""
    try:
        activity = _NAMED.decode(sending.payload)
        check_id("actor", activity.actor)
        activity_id, kinds = check_id("id", activity.id), check_types(activity.type)
    except ValueError as error:
        problem = "its text is no activity" if isinstance(error, UnicodeError) else f"its text is no activity: {error}"
        raise PermanentFailure("INVALID_PAYLOAD", problem) from None
    sending.seen.method, sending.seen.activity_id = kinds[0], activity_id
    return activity


def _note(attempt: _Attempt, knock: Knock) -> None:
    """Note the answer that counts, and the kind of signature, if it was not that which was refused."""
    seen, status = attempt.sending.seen, knock.response.status
    seen.status, seen.response_bytes = status, len(knock.response.body)
    seen.signature = None if status in ABOUT_SIGNATURES else knock.kind
