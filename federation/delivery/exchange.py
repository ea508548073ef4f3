"""One exchange with the server of a delivery: find its keys, seal, sign, post, and read the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeAlias

import structlog

from db import AttemptNote
from federation.base.jobs import FOLLOW_JOB, POST_JOB, FederationDeliveryJob
from federation.delivery.ack_checks import AckChecks, Answer
from federation.delivery.codes import FailureClass, class_of_status
from federation.delivery.entries import FollowAnswer, Series
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.follow_ack import read_follow_ack
from federation.delivery.original import has_no_receiver, is_stored_already, received_follow
from federation.delivery.post_ack import NO_KEY, post_ack_mismatch
from federation.delivery.sealer import Sealer
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError
from federation.http.gates import FederationFetch, Fetched
from federation.http.guard import AddressGuard
from federation.http.response import Response
from federation.protocol.acks import Ack, find_ack, is_unsigned_follow_ack, parse_ack_body
from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers, parse_method
from federation.protocol.errors import AckMissing, KeyMaterialError, NotJson, PayloadError, UrlError
from federation.protocol.keys import KeyRing, OwnKeys, pair_known_by
from federation.protocol.refusals import refusal_code
from federation.protocol.signing import sign_message
from federation.servers.discovery import (
    INTRODUCTION_PATIENCE,
    DiscoveryError,
    DiscoveryPage,
    DiscoveryRefused,
    ServerRests,
    SharedDiscovery,
)
from federation.servers.link_rules import SHORTEST_REST, Link
from federation.servers.profiles import Profile
from federation.servers.registry import KnownServer, Registry
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

DELIVERY_TIMEOUT: Final = timedelta(seconds=15)
PAGE_PATIENCE: Final = timedelta(hours=24)
"""How long a page may stand at the `/discover` of a server that was never registered, until deliveries to it fail."""
_UNKNOWN_SIGNER: Final = frozenset({401, 403})


@dataclass(slots=True)
class Report:
    """What one attempt has learned so far.

    `started_at` and `started` say when it began, by the wall clock and by the loop's clock; `attempt` is its number in
    its job. `link` is what was known of the server; `acknowledged`: it has acknowledged a delivery before; `profile`:
    what it runs, as an operator said. `begun`: the attempt may go on, and belongs to `series` if there is a row.
    `first_byte`: how long the server may take to begin its answer; `answered`: whether it did, None if it was not
    asked; `waited`: for how many seconds it was waited for; `answerer`: who was at the other end of the connection.
    `note`: what the attempt's record is to say beside its outcome.
    """

    delivery: FederationDeliveryJob
    started_at: datetime
    started: float
    payload: str = field(default="", repr=False)
    attempt: int = 1
    link: Link | None = None
    acknowledged: bool = False
    profile: Profile | None = None
    begun: bool = False
    series: Series | None = None
    method: ActivityMethod | None = None
    cached_public_key: str | None = None
    status: int | None = None
    remote_code: str | None = None
    first_byte: timedelta | None = None
    answered: bool | None = None
    waited: float | None = None
    peer: str | None = None
    answerer: bytes = field(default=b"", repr=False)
    note: AttemptNote | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    checked: float = 0.0

    @property
    def is_repeat(self) -> bool:
        """Whether an attempt at the delivery was made before, so that the server may have the activity."""
        return self.attempt > 1 or (self.series is not None and self.series.attempts > 1)


ReadAck: TypeAlias = Callable[[Ack, Report], Awaitable[FollowAnswer | None]]


class Exchange:
    """Callable with a job's name and the report of its attempt.

    Returns the answer to a follow, if the job asked for one.

    `own_url` and `keys` may be None: nothing can be sent then. `timeout` covers the whole request.

    Raises:
        PermanentFailure, RetryableFailure: what went wrong.
    """

    def __init__(
        self,
        *,
        own_url: str | None,
        keys: KeyRing | None,
        registry: Registry,
        discover: SharedDiscovery,
        guard: AddressGuard,
        fetch: FederationFetch,
        timeout: timedelta = DELIVERY_TIMEOUT,
        clock: Clock | None = None,
        ack_checks: AckChecks | None = None,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._registry = registry
        self._discover = discover
        self._guard = guard
        self._fetch = fetch
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._sealer = Sealer()
        self._ack_checks = ack_checks or AckChecks()
        self._ack_readers: Mapping[str, ReadAck] = {
            FOLLOW_JOB: self._read_follow_ack,
            POST_JOB: self._check_post_ack,
        }

    async def __call__(self, job_name: str, report: Report) -> FollowAnswer | None:
        report.method = _method_of(report.payload)
        server = await self._find_server(report)
        pair = self._own_pair(server)
        fetched = await self._post(report, *self._prepare(report, server, pair))
        if _may_not_know(fetched):
            fetched = await self._as_another(report, server, pair) or fetched
        _require_taken(report, fetched.response, self._clock.now(), ours=self._own_url)
        await self._note_health(server, fetched)
        ack = _acknowledgment(report, fetched.response)
        if ack is None:
            return received_follow(report.payload, report.delivery.server_url) if job_name == FOLLOW_JOB else None
        read_ack = self._ack_readers.get(job_name)
        return await read_ack(ack, report) if read_ack else None

    async def refuse_blacklisted(self, delivery: FederationDeliveryJob) -> None:
        """Refuse the delivery if its server or its target is blacklisted. In another producer's job these may differ.

        Raises:
            PermanentFailure: one of them is blacklisted.
        """
        for url in (delivery.server_url, delivery.target_url):
            if await self._registry.is_blacklisted(url):
                raise PermanentFailure("BLACKLISTED", f"{url} is blacklisted")

    async def _find_server(self, report: Report) -> KnownServer:
        delivery = report.delivery
        try:
            target = self._guard.check_url(delivery.target_url)
            if target.origin != delivery.server_url:  # our own producers never do this, others may
                log.warning("delivery_target_elsewhere", server_url=delivery.server_url, target=target.origin)
            known = await self._registry.known(delivery.server_url)
            if known is not None:
                if known.created_at <= self._clock.now() < known.created_at + INTRODUCTION_PATIENCE:
                    await self._discover.until_introduced(known.url)
                report.cached_public_key = known.public_key
                return known
            server = await self._discover(delivery.server_url)
        except BlockedUrl as error:
            raise PermanentFailure("BLOCKED_URL", f"the target may not be contacted: {error}") from error
        except ServerRests as error:  # whoever asked has noted for how long
            raise RetryableFailure(
                "HTTP_429", str(error), failure_class=FailureClass.REST, at_least=SHORTEST_REST
            ) from error
        except DiscoveryPage as error:
            if self._is_no_server(report):
                problem = f"{error}; a page stands there for a day: is the name right?"
                raise RetryableFailure("DISCOVERY_REFUSED", problem) from error
            raise RetryableFailure("FOREIGN_ANSWER", str(error)) from error
        except DiscoveryRefused as error:
            raise RetryableFailure("DISCOVERY_REFUSED", str(error)) from error
        except (DiscoveryError, NetworkError) as error:
            report.answered = False
            raise RetryableFailure("DISCOVERY", str(error)) from error
        await self.refuse_blacklisted(delivery)  # a discovery may take long enough for an administrator to act
        return server

    def _is_no_server(self, report: Report) -> bool:
        """Tell whether a page has stood so long where nobody knows a server that its name may be mistyped."""
        link = report.link
        is_known = link is None or link.acknowledged or link.reason != "FOREIGN_ANSWER"
        return not is_known and link is not None and self._clock.now() - link.since >= PAGE_PATIENCE

    def _own_pair(self, server: KnownServer) -> OwnKeys:
        """Return the key pair of ours that the server knows."""
        if self._keys is None:
            raise PermanentFailure("NO_OWN_KEYS", "FEDERATION_PRIVATE_KEY is not set: nothing to sign with")
        pair = pair_known_by(self._keys, server.knows_key)
        if pair is None:
            problem = f"{server.url} knows this node by keys that this process has not: is it to be restarted?"
            raise PermanentFailure("NO_OWN_KEYS", problem)
        return pair

    async def _as_another(self, report: Report, server: KnownServer, pair: OwnKeys) -> Fetched | None:
        """Send the same delivery signed by our other key pair, if we have one.

        Return the answer if the server accepted it. The confirmation of a rotation may have been lost on its way to us,
        or have come while the delivery was under way.
        """
        assert self._keys is not None  # nothing was sent without them
        for other in self._keys.pairs(now=True):
            if other.signing.public == pair.signing.public:
                continue
            fetched = await self._post(report, *self._prepare(report, server, other))
            if fetched.response.ok:
                if not fetched.proxied:  # a relay's word is no proof
                    await self._registry.note_knows(server.url, other.signing.public_text)
                return fetched
        return None

    def _prepare(self, report: Report, server: KnownServer, pair: OwnKeys) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of the request."""
        delivery, method = report.delivery, report.method
        assert method is not None
        try:
            envelope = self._sealer.seal(report.payload, server.encryption_public_key)
        except KeyMaterialError as error:
            raise RetryableFailure("KEY_MATERIAL", f"the registered key of {server.url} is unusable: {error}") from None
        if self._own_url is None:
            raise PermanentFailure("NO_OWN_URL", "BETTER_AUTH_URL is not set: this node has no name")
        signature = sign_message(report.payload, pair.signing.secret)
        try:
            headers = delivery_headers(own_url=self._own_url, target_url=delivery.target_url)
        except UrlError as error:
            raise PermanentFailure("BLOCKED_URL", str(error)) from error
        body = DeliveryRequest(method=method, payload=envelope, signature=signature).to_bytes()
        report.request_bytes = len(body)
        return body, headers

    async def _post(self, report: Report, body: bytes, headers: Mapping[str, str]) -> Fetched:
        delivery, started = report.delivery, monotonic()
        try:
            fetched = await self._fetch(
                delivery.target_url,
                method="POST",
                headers=headers,
                body=body,
                timeout=self._timeout,
                first_byte=report.first_byte,
                proxy_fallback=True,
                server_url=delivery.server_url,
            )
        except NetworkError as error:
            report.answered = False
            raise RetryableFailure(error.code, str(error)) from error
        except BodyTooLarge as error:
            report.answered = True
            raise PermanentFailure("BODY_TOO_LARGE", str(error)) from error
        finally:
            report.waited = monotonic() - started
        report.answered = not fetched.proxied
        report.status = fetched.response.status
        report.response_bytes = len(fetched.response.body)
        report.peer = fetched.peer
        report.answerer = fetched.response.answerer
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

    async def _read_follow_ack(self, ack: Ack, report: Report) -> FollowAnswer:
        assert self._keys is not None  # nothing was sent without them
        server_url = report.delivery.server_url
        return await read_follow_ack(
            ack,
            server_url,
            keys=self._keys,
            cached_public_key=report.cached_public_key,
            find_public_key=lambda: self._registered_key(server_url),
        )

    async def _check_post_ack(self, ack: Ack, report: Report) -> None:
        """Put on record that an acknowledgment is not the server's, if it is one of those that are checked.

        The post is delivered all the same: nothing here depends on it.
        """
        assert self._keys is not None  # nothing was sent without them
        server_url, proved = report.delivery.server_url, None
        empty = ack.data is None or ack.signature is None
        since = report.link.since if report.link is not None else None
        answer = Answer(server_url=server_url, since=since, answerer=report.answerer, is_empty=empty)
        if not self._ack_checks.wants(answer):
            return
        try:
            key = report.cached_public_key or await self._registered_key(server_url)
            mismatch = post_ack_mismatch(ack, server_url, payload=report.payload, keys=self._keys, public_key=key)
            proved = None if mismatch == NO_KEY else mismatch is None
        except Exception as error:  # whatever it is, it must not repeat a delivery that has arrived
            mismatch = type(error).__name__
        if self._ack_checks.is_forged(answer, proved=proved):
            report.note = AttemptNote.FORGED_ACK
        if mismatch is not None:
            delivery_id = report.delivery.delivery_job_id
            log.warning("post_ack_mismatch", server_url=server_url, delivery_id=delivery_id, mismatch=mismatch)

    async def _registered_key(self, server_url: str) -> str | None:
        server = await self._registry.find(server_url)
        return server.public_key if server else None


def _may_not_know(fetched: Fetched) -> bool:
    """Tell whether the refusal may be about the key that signed."""
    if fetched.response.status not in _UNKNOWN_SIGNER:
        return False
    return refusal_code(fetched.response.body)[1] in (None, "INVALID_SIGNATURE")


def _method_of(payload: str) -> ActivityMethod:
    try:
        return parse_method(payload)
    except PayloadError as error:
        raise PermanentFailure("INVALID_PAYLOAD", str(error)) from None


def _require_taken(report: Report, response: Response, now: datetime, *, ours: str | None) -> None:
    """Raise unless the server has the activity, from this attempt or an earlier one. `ours` is our own URL."""
    if response.ok:
        return
    is_json, report.remote_code = refusal_code(response.body)
    is_original = report.profile is Profile.ORIGINAL
    if is_original and report.is_repeat and is_stored_already(report.method, response.status, report.remote_code):
        return
    pause = response.retry_after(now)
    kind = class_of_status(
        response.status,
        asks_to_wait=pause is not None,
        is_json=is_json,
    )
    moved_to = response.moved_to(report.delivery.target_url, ours=ours)
    named = f" and names {moved_to}" if moved_to else ""
    said = f": {report.remote_code}" if report.remote_code else response.still_encoded
    problem = f"the server answered {response.status}{named}{said}"
    if is_original and kind is FailureClass.REJECTED and has_no_receiver(report.method, response.status):
        raise PermanentFailure("NO_RECEIVER", f"the server takes no unfollows: {problem}")
    raise RetryableFailure(
        f"HTTP_{response.status}",
        problem,
        failure_class=kind,
        at_least=pause if kind is FailureClass.REST else None,
        moved_to=moved_to,
    )


def _acknowledgment(report: Report, response: Response) -> Ack | None:
    """Return the server's proof that it has the activity, or None if the answer is known to prove nothing."""
    if not response.ok:  # the server has had the activity since an earlier attempt
        return None
    body: object = None
    try:
        body = parse_ack_body(response.body)
        return find_ack(body)
    except (NotJson, AckMissing) as error:
        # An unsigned acknowledgment is the server's own answer, even if it has signed others before. It is no hoster's
        # page, and does not pass by itself.
        is_unsigned = report.method is ActivityMethod.FEDERATE and is_unsigned_follow_ack(body)
        if is_unsigned and report.profile is Profile.ORIGINAL:
            return None
        said = f"{error}{response.still_encoded}"
        if not isinstance(body, dict):
            problem = f"something else than a server of this protocol answered, such as a proxy: {said}"
            raise RetryableFailure("FOREIGN_ANSWER", problem) from None
        if report.acknowledged and not is_unsigned:
            problem = f"something else than the server answered, which has acknowledged deliveries before: {said}"
            raise RetryableFailure("FOREIGN_ANSWER", problem) from None
        hint = "; the profile `original` of a server makes its unsigned answer count" if is_unsigned else ""
        raise PermanentFailure("NO_ACK", f"{error}{hint}") from None
