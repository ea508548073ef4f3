"""The wire that seals: find the server's keys, seal, sign, post, and read the answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final

import structlog

from db import AttemptNote
from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB
from federation.delivery.error_codes import BLACKLISTED, FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.wire import DELIVERY_TIMEOUT, Sending
from federation.http.client import FederationFetch, Fetched
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError, OutboundError
from federation.http.guard import AddressGuard
from federation.protocol.acks import Ack
from federation.protocol.activities import DeliveryRequest, delivery_headers, parse_method
from federation.protocol.errors import KeyMaterialError, UrlError
from federation.protocol.keys import KeyRing, OwnKeys, decode_key, pair_known_by, sign_message
from federation.protocol.sealing import Envelope, SealingKey
from federation.protocol.urls import canonical_origin
from federation.sealed.codes import CODES, MAY_BE_ABOUT_KEYS
from federation.sealed.outbound.answers import (
    NO_KEY,
    AckChecks,
    Answer,
    Attempt,
    acknowledgment,
    may_not_know,
    method_of,
    post_ack_mismatch,
    profile_of,
    received_follow,
    require_taken,
)
from federation.sealed.outbound.follows import FollowAnswer, read_follow_ack
from federation.sealed.peers.discovery import (
    INTRODUCTION_PATIENCE,
    Discovery,
    DiscoveryError,
    DiscoveryPage,
    DiscoveryRefused,
    ServerBlacklisted,
    ServerRests,
    SharedDiscovery,
)
from federation.sealed.peers.probe import Probe
from federation.sealed.peers.registry import KnownServer, Registry
from federation.servers.link_rules import SHORTEST_REST
from federation.servers.links import Links
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

PAGE_PATIENCE: Final = timedelta(hours=24)
"""How long a page may stand at the `/discover` of a server that was never registered, until deliveries to it fail."""
LOOK_INTERVAL: Final = timedelta(minutes=10)
LOOK_TAKES: Final = timedelta(seconds=10)
"""How long a look at a server takes to have its effect: refused deliveries that were sent before get another try."""


class SealedWire:
    """The wire that sends sealed activities, and reads signed acknowledgments.

    `own_url` and `keys` may be None: nothing can be sent then. `discover` finds a server's keys for an attempt, where
    that is left to somebody else than `discovery`. `timeout` covers the whole request.
    """

    name: Final = "sealed"
    job_names: Final[Collection[str]] = ()
    codes: Final = CODES

    def __init__(
        self,
        *,
        own_url: str | None,
        keys: KeyRing | None,
        registry: Registry,
        links: Links,
        discovery: Discovery,
        probe: Probe,
        guard: AddressGuard,
        fetch: FederationFetch,
        discover: SharedDiscovery | None = None,
        timeout: timedelta = DELIVERY_TIMEOUT,
        clock: Clock | None = None,
        ack_checks: AckChecks | None = None,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._registry = registry
        self._links = links
        self._discovery = discovery
        self._discover = discover or discovery
        self._probe = probe
        self._guard = guard
        self._fetch = fetch
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._sealer = Sealer()
        self._ack_checks = ack_checks or AckChecks()

    def check(self, payload: str) -> None:
        """Check that the text is an activity that this wire delivers.

        Raises:
            PayloadError: it is none; the message names the member.
        """
        parse_method(payload)

    async def name_of(self, server_url: str) -> str:
        """Return the server's canonical URL, unless an adopted node's registry has the given spelling."""
        try:
            canonical = canonical_origin(server_url)
        except UrlError:
            return server_url  # the guard will say what is wrong with it
        if canonical == server_url or await self._registry.known(server_url):
            return server_url
        return canonical

    async def send(self, sending: Sending) -> FollowAnswer | None:
        """Deliver the activity, and return the answer to a follow, if the job asked for one."""
        method = method_of(sending.payload)
        sending.seen.method = method
        attempt = Attempt(sending, method, profile_of(sending.link.profile))
        server = await self._find_server(attempt)
        pair = self._own_pair(server)
        fetched = await self._post(attempt, *self._prepare(attempt, server, pair))
        if may_not_know(fetched):
            fetched = await self._as_another(attempt, server, pair) or fetched
            attempt.note(fetched)  # one answer counts, and is the one on record
        require_taken(attempt, fetched.response, self._clock.now(), ours=self._own_url)
        ack = acknowledgment(attempt, fetched.response)
        await self._note_health(server, fetched)
        if ack is None:
            return received_follow(sending.payload, sending.server_url) if sending.job_name == FOLLOW_JOB else None
        if sending.job_name == FOLLOW_JOB:
            return await self._read_follow_ack(ack, attempt)
        if sending.job_name == POST_JOB:
            await self._check_post_ack(ack, attempt)
        return None

    async def may_recover(self, sending: Sending, code: str) -> bool:
        """Tell whether the refusal may end once we know the server's new keys, or it knows ours.

        That takes a look at its `/discover`: every ten minutes one, by any process. Deliveries that were sent before a
        look had its effect get another try.
        """
        if code not in MAY_BE_ABOUT_KEYS:
            return False
        server_url = sending.server_url
        if await self._links.looked(server_url, interval=LOOK_INTERVAL, takes=LOOK_TAKES):
            may_end = await self._discovery.look_again(server_url, sending.seen.remote_code)
            await self._links.look_ended(server_url)
            return may_end
        looked_at = (await self._links.find(server_url)).looked_at
        return looked_at is not None and sending.started_at < looked_at + LOOK_TAKES

    async def is_well(self, server_url: str) -> bool:
        """Tell whether the server shows the registered key at `/discover`, or can be discovered if it has none."""
        server = await self._registry.find(server_url)
        if server is not None:
            seen = await self._probe.look(server)
            if seen.another_key:
                await self._links.mismatched(server_url)
            return seen.well
        try:
            await self._discovery(server_url)
        except (DiscoveryError, OutboundError) as error:
            log.info("link_probe", server_url=server_url, problem=str(error))
            return False
        return True

    async def _find_server(self, attempt: Attempt) -> KnownServer:
        delivery = attempt.sending
        try:
            target = self._guard.check_url(delivery.target_url)
            if target.origin != delivery.server_url:  # our own producers never do this, others may
                log.warning("delivery_target_elsewhere", server_url=delivery.server_url, target=target.origin)
            known = await self._registry.known(delivery.server_url)
            if known is not None:
                if known.created_at <= self._clock.now() < known.created_at + INTRODUCTION_PATIENCE:
                    await self._discover.until_introduced(known.url)
                attempt.public_key = known.public_key
                return known
            server = await self._discover(delivery.server_url)
        except BlockedUrl as error:
            raise PermanentFailure("BLOCKED_URL", f"the target may not be contacted: {error}") from error
        except (DiscoveryError, NetworkError) as error:
            raise self._not_found(attempt, error) from error
        await delivery.refuse_blacklisted()  # a discovery may take long enough for an administrator to act
        return server

    def _not_found(self, attempt: Attempt, error: Exception) -> PermanentFailure | RetryableFailure:
        """Return what it means for the delivery that its server was not discovered."""
        if isinstance(error, ServerBlacklisted):  # nobody was asked
            return PermanentFailure(BLACKLISTED, str(error))
        if isinstance(error, ServerRests):  # whoever asked has noted for how long
            return RetryableFailure("HTTP_429", str(error), failure_class=FailureClass.REST, at_least=SHORTEST_REST)
        if isinstance(error, DiscoveryPage) and self._is_no_server(attempt):
            problem = f"{error}; a page stands there for a day: is the name right?"
            return RetryableFailure("DISCOVERY_REFUSED", problem)
        if isinstance(error, DiscoveryPage):
            return RetryableFailure("FOREIGN_ANSWER", str(error))
        if isinstance(error, DiscoveryRefused):
            return RetryableFailure("DISCOVERY_REFUSED", str(error))
        attempt.seen.answered = False
        return RetryableFailure("DISCOVERY", str(error))

    def _is_no_server(self, attempt: Attempt) -> bool:
        """Tell whether a page has stood so long where nobody knows a server that its name may be mistyped."""
        link = attempt.sending.link
        is_known = link.acknowledged or link.reason != "FOREIGN_ANSWER"
        return not is_known and self._clock.now() - link.since >= PAGE_PATIENCE

    def _own_pair(self, server: KnownServer) -> OwnKeys:
        """Return the key pair of ours that the server knows."""
        if self._keys is None:
            raise PermanentFailure("NO_OWN_KEYS", "FEDERATION_PRIVATE_KEY is not set: nothing to sign with")
        pair = pair_known_by(self._keys, server.knows_key)
        if pair is None:
            problem = f"{server.url} knows this node by keys that this process has not: is it to be restarted?"
            raise PermanentFailure("NO_OWN_KEYS", problem)
        return pair

    async def _as_another(self, attempt: Attempt, server: KnownServer, pair: OwnKeys) -> Fetched | None:
        """Send the same delivery signed by our other key pair, if we have one.

        Return the answer if the server accepted it; else the first one counts, whatever else comes of it. The
        confirmation of a rotation may have been lost on its way to us, or have come while the delivery was under way.
        """
        assert self._keys is not None  # nothing was sent without them
        for other in self._keys.pairs(now=True):
            if other.signing.public == pair.signing.public:
                continue
            with suppress(RetryableFailure, PermanentFailure):
                fetched = await self._post(attempt, *self._prepare(attempt, server, other))
                if not fetched.response.ok:
                    continue
                if not fetched.proxied:  # a relay's word is no proof
                    await self._registry.note_knows(server.url, other.signing.public_text)
                return fetched
        return None

    def _prepare(self, attempt: Attempt, server: KnownServer, pair: OwnKeys) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of the request."""
        delivery, method = attempt.sending, attempt.method
        try:
            envelope = self._sealer.seal(attempt.sending.payload, server.encryption_public_key)
        except KeyMaterialError as error:
            raise RetryableFailure("KEY_MATERIAL", f"the registered key of {server.url} is unusable: {error}") from None
        if self._own_url is None:
            raise PermanentFailure("NO_OWN_URL", "BETTER_AUTH_URL is not set: this node has no name")
        signature = sign_message(attempt.sending.payload, pair.signing.secret)
        try:
            headers = delivery_headers(own_url=self._own_url, target_url=delivery.target_url)
        except UrlError as error:
            raise PermanentFailure("BLOCKED_URL", str(error)) from error
        body = DeliveryRequest(method=method, payload=envelope, signature=signature).to_bytes()
        attempt.seen.request_bytes = len(body)
        return body, headers

    async def _post(self, attempt: Attempt, body: bytes, headers: Mapping[str, str]) -> Fetched:
        delivery, started = attempt.sending, monotonic()
        try:
            fetched = await self._fetch(
                delivery.target_url,
                method="POST",
                headers=headers,
                body=body,
                timeout=self._timeout,
                first_byte=attempt.sending.first_byte,
                proxy_fallback=True,
                server_url=delivery.server_url,
            )
        except NetworkError as error:
            attempt.seen.answered = False
            raise RetryableFailure(error.code, str(error)) from error
        except BodyTooLarge as error:
            attempt.seen.answered = True
            raise PermanentFailure("BODY_TOO_LARGE", str(error)) from error
        finally:
            attempt.seen.waited = monotonic() - started
        attempt.note(fetched)
        return fetched

    async def _note_health(self, server: KnownServer, fetched: Fetched) -> None:
        """Mark a server as healthy that accepted a direct delivery.

        This holds whatever its last probe said, or a discovery meanwhile.
        """
        if fetched.proxied:
            return
        known = await self._registry.known(server.url)
        if known is not None and not known.is_healthy:
            await self._registry.mark_healthy(server.url, reason="delivered")

    async def _read_follow_ack(self, ack: Ack, attempt: Attempt) -> FollowAnswer:
        assert self._keys is not None  # nothing was sent without them
        server_url = attempt.sending.server_url
        return await read_follow_ack(
            ack,
            server_url,
            keys=self._keys,
            cached_public_key=attempt.public_key,
            find_public_key=lambda: self._registered_key(server_url),
        )

    async def _check_post_ack(self, ack: Ack, attempt: Attempt) -> None:
        """Put on record that an acknowledgment is not the server's, if it is one of those that are checked.

        The post is delivered all the same: nothing here depends on it.
        """
        assert self._keys is not None  # nothing was sent without them
        server_url, proved = attempt.sending.server_url, None
        empty = ack.data is None or ack.signature is None
        since = attempt.sending.link.since
        answer = Answer(server_url=server_url, since=since, answerer=attempt.answerer, is_empty=empty)
        if not self._ack_checks.wants(answer):
            return
        try:
            key = attempt.public_key or await self._registered_key(server_url)
            mismatch = post_ack_mismatch(
                ack, server_url, payload=attempt.sending.payload, keys=self._keys, public_key=key
            )
            proved = None if mismatch == NO_KEY else mismatch is None
        except Exception as error:  # whatever it is, it must not repeat a delivery that has arrived
            mismatch = type(error).__name__
        if self._ack_checks.is_forged(answer, proved=proved):
            attempt.seen.note = AttemptNote.FORGED_ACK
        if mismatch is not None:
            delivery_id = attempt.sending.delivery_id
            log.warning("post_ack_mismatch", server_url=server_url, delivery_id=delivery_id, mismatch=mismatch)

    async def _registered_key(self, server_url: str) -> str | None:
        server = await self._registry.find(server_url)
        return server.public_key if server else None


USED_FOR: Final = timedelta(minutes=1)
MAX_USES: Final = 10_000
"""Far below what random nonces allow: two of so many are equal with a probability of 2 to the power of -70."""
MAX_KEPT: Final = 1_000


class _Kept:
    """A key, until when it serves, and for how many more texts."""

    __slots__ = ("key", "left", "until")

    def __init__(self, recipient_key: str, until: float) -> None:
        self.key = SealingKey(decode_key(recipient_key, what="encryption key"))
        self.until = until
        self.left = MAX_USES


class Sealer:
    """Seals to servers by their encryption keys, in base64, to each with a one-time key pair that serves for a minute.

    Making such a pair, and what it shares with the recipient's key, costs as much as sealing thirty texts. So one pair
    serves for what a busy server gets within a minute, each envelope with a nonce of its own. Its secret half is not
    kept, and after that minute nothing else of it either, whether or not anything is sealed then.
    A recipient cannot tell: to it every envelope is complete. Keys are kept by the recipient's key, of 1 000 at most,
    so a server that has changed its key gets envelopes for the new one at once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the oldest first
        self._timer: asyncio.TimerHandle | None = None  # while any is kept

    def seal(self, text: str, recipient_key: str) -> Envelope:
        """Seal *text* to the server with that key.

        Raises:
            KeyMaterialError: the key is unusable.
            PayloadError: the text has lone surrogates and therefore no UTF-8 form.
        """
        now = monotonic()
        kept = self._kept.get(recipient_key)
        if kept is None or kept.until <= now or not kept.left:
            kept = self._renew(recipient_key, now)
        kept.left -= 1
        return kept.key.seal(text)

    def _renew(self, recipient_key: str, now: float) -> _Kept:
        self._kept.pop(recipient_key, None)
        while len(self._kept) >= MAX_KEPT:
            self._kept.popitem(last=False)
        kept = self._kept[recipient_key] = _Kept(recipient_key, now + USED_FOR.total_seconds())
        if self._timer is None:
            self._forget_at(kept.until)
        return kept

    def _forget_at(self, until: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(until, self._forget)

    def _forget(self) -> None:
        """Forget all whose time is over, and come back when it is over for the next one."""
        self._timer, now = None, monotonic()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until > now:
                self._forget_at(oldest.until)
                break
            self._kept.popitem(last=False)
