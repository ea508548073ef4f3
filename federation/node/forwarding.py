"""`PROXY`: somebody else's sealed request, passed on once.

Theory of operation. We cannot read what we pass on, and the keys that a sender shows are public, so nothing here proves
who asks. Other things limit the harm. Only an envelope leaves, to the one path that opens envelopes, at a server that
the guard lets us contact. Few requests are under way at once, and fewer to one target and for one client. And a target
never relays what it gets: a relayed request is relayed once, whatever its senders write. A target that is not known is
discovered, which counts as a registration does.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from time import monotonic
from typing import Final

import structlog
from starlette.responses import Response

from federation.http.client import FederationFetch
from federation.http.errors import BlockedUrl, NetworkError, OutboundError
from federation.http.messages import Response as Answer
from federation.http.threat_policy import NetworkErrorCode
from federation.node.admission import NewServers, PerRelayingOrigin
from federation.node.clients import Source
from federation.node.inbox import Inbox
from federation.node.refusals import Refusal, invalid_proxy_data, try_later
from federation.node.shares import Places
from federation.protocol.acks import ACK_METHOD, MAX_ACK_BYTES
from federation.protocol.encodings import dump_json, parse_json
from federation.protocol.errors import NotJson, UrlError
from federation.protocol.relaying import RELAY_PATH, ProxyRequest, SealedPayload, relay_target, targeted_request
from federation.sealed.peers.discovery import DiscoverServer, DiscoveryError
from federation.sealed.peers.registry import KnownServer, Registry

log = structlog.get_logger(__name__)

FORWARD_TIMEOUT: Final = timedelta(seconds=10)
RELAY_TIMEOUT: Final = timedelta(seconds=15)
"""For everything, including a discovery of the target: the sender does not wait longer."""
MAX_FORWARDS: Final = 32
"""Of which one client has two."""
MAX_FORWARDS_PER_TARGET: Final = 4
MAX_ANSWER_BYTES: Final = MAX_ACK_BYTES - 1024
"""With what we add around it, the sender still accepts it."""

_MAX_DETAIL_BYTES: Final = 16 * 1024
_MAX_DETAIL_CHARACTERS: Final = 1000
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Forwarder:
    """Callable with a `PROXY` request; `inbox` knows senders, `discover` makes unknown targets known."""

    def __init__(
        self,
        *,
        own_url: str,
        inbox: Inbox,
        registry: Registry,
        discover: DiscoverServer,
        fetch: FederationFetch,
        admit: PerRelayingOrigin,
        admit_new: NewServers,
        timeout: timedelta = RELAY_TIMEOUT,
    ) -> None:
        self._own_url = own_url
        self._inbox = inbox
        self._registry = registry
        self._discover = discover
        self._fetch = fetch
        self._admit = admit
        self._admit_new = admit_new
        self._timeout = timeout
        self._places = Places(MAX_FORWARDS, full=_too_many)

    async def __call__(self, request: ProxyRequest, *, sender_url: str, source: Source) -> Response:
        """Pass the request on to its target in our name, and return the answer.

        Raises:
            Refusal: 400 the target may not be relayed to; 403 the sender is not registered with these keys, or one of
                the two is blacklisted; 429 too often in that sender's name by this client, or too many new servers;
                502 the target did not answer, or not with 2xx and JSON; 503 too many at once.
        """
        target = self._target(request.target_url)
        sender = await self._sender(request, sender_url)
        await self._admit(sender.url, source.client)
        if target == sender.url:
            raise invalid_proxy_data("targetUrl: the sender itself")
        await self._inbox.require_welcome(target)
        is_known = (await self._registry.standing(target)).server is not None
        if not is_known:
            await self._admit_new(source)
        deadline = monotonic() + self._timeout.total_seconds()
        # They share connections with deliveries, and a target that hangs must not take them all.
        async with self._places.place(source.holders, {target: MAX_FORWARDS_PER_TARGET}):
            answer = await self._forwarded(target, sender, request.payload, is_known=is_known, deadline=deadline)
        if not answer.ok:
            raise _failed(f"The target answered {answer.status}", details=_details(answer.body))
        body = _json_of(answer.body)
        log.info("relay_forwarded", sender=sender.url, target=target, status=answer.status)
        # Passed on unchanged: the parsed value might be readable, and yet impossible to write again.
        prefix = b'{"method":"%s","payload":' % ACK_METHOD.encode()
        return Response(prefix + body + b"}", media_type="application/json")

    def _target(self, url: str) -> str:
        try:
            target = relay_target(url)
        except UrlError as error:
            raise invalid_proxy_data(f"targetUrl: {error}") from None
        if target == self._own_url:
            raise invalid_proxy_data("targetUrl: the asked server's own; send it TARGETED")
        return target

    async def _sender(self, request: ProxyRequest, sender_url: str) -> KnownServer:
        await self._inbox.require_welcome(sender_url)
        sender = await self._inbox.registered(sender_url)
        shown = (request.public_signing_key, request.public_encryption_key)
        if shown != (sender.public_key, sender.encryption_public_key):
            raise Refusal(403, "The keys are not those the sender is registered with", code="INCORRECT_KEYS")
        return sender

    async def _forwarded(
        self, target: str, sender: KnownServer, payload: SealedPayload, *, is_known: bool, deadline: float
    ) -> Answer:
        try:
            async with asyncio.timeout(deadline - monotonic()):
                if not is_known:
                    await self._discover(target)
                left = timedelta(seconds=deadline - monotonic())
                return await self._post(target, sender, payload, min(FORWARD_TIMEOUT, left))
        except (DiscoveryError, OutboundError, TimeoutError) as error:
            # Not the error's text: it tells what a name resolves to inside our network.
            raise _failed("The target could not be asked", network_code=_network_code(error)) from None

    async def _post(self, target: str, sender: KnownServer, payload: SealedPayload, timeout: timedelta) -> Answer:
        headers = {
            "Content-Type": "application/json",
            "Origin": self._own_url,
            "X-Federation-Origin": self._own_url,
            "X-Federation-Sender": sender.url,
        }
        fetched = await self._fetch(
            target + RELAY_PATH,
            method="POST",
            headers=headers,
            body=targeted_request(payload),
            timeout=timeout,
            server_url=target,
            skip_health_update=True,
        )
        return fetched.response


def _too_many() -> Refusal:
    return try_later("Too much is being relayed", reason="FORWARDS")


def _failed(text: str, *, network_code: str | None = None, details: object = None) -> Refusal:
    members: dict[str, object] = {"method": ACK_METHOD}
    if network_code is not None:
        members["federationError"] = network_code
    if details is not None:
        members["details"] = details
    return Refusal(502, text, code="FAILED_TO_PROXY_REQUEST", members=members)


def _network_code(error: BaseException | None) -> str | None:
    """Return the code of the network failure behind *error*, if there is one."""
    if isinstance(error, TimeoutError):
        return NetworkErrorCode.TIMEOUT
    while error is not None and not isinstance(error, NetworkError | BlockedUrl):
        error = error.__cause__
    return error.code if isinstance(error, NetworkError) else None


def _json_of(body: bytes) -> bytes:
    """Return the text of *body*, which has to be one JSON value.

    Raises:
        Refusal: it is none, or too long.
    """
    try:
        parse_json(body, limit=MAX_ANSWER_BYTES)
    except NotJson as error:
        raise _failed("The target did not answer with JSON", details=str(error)) from None
    return body.removeprefix(_BYTE_ORDER_MARK)


def _details(body: bytes) -> object:
    """Return what the target said, for the sender's log: a JSON value if it is one of moderate size, else the text."""
    try:
        value = parse_json(body, limit=_MAX_DETAIL_BYTES)
        dump_json(value).encode("utf-8")
    except (ValueError, RecursionError):  # no JSON, or JSON that we cannot write
        return body[: 4 * _MAX_DETAIL_CHARACTERS].decode("utf-8", errors="replace")[:_MAX_DETAIL_CHARACTERS]
    return value
