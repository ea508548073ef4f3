"""Gate 1 of `federation_fetch`: a request that cannot reach its server goes through a peer that can.

Theory of operation. The request is sealed to its server as a whole, so the peer learns who writes to whom and how much,
and nothing else. A peer's answer is only its own claim: it may refuse, lie, hang or never end. So its answer counts
only if it has the form of an acknowledgment, and each peer but the last gets half of the time that is left. Two peers
may both have passed a request on; receivers recognise it by its id.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

import structlog

from federation.base.logs import crash
from federation.base.meter import NO_METER, Meter
from federation.http.client import FederationClient, Fetched, OutboundRequest
from federation.http.errors import NetworkError, OutboundError, RelayFailed
from federation.http.guard import parse_target
from federation.http.messages import Response
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.protocol.acks import find_ack, parse_ack_body
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import KeyRing, decode_key, pair_known_by
from federation.protocol.relaying import MAX_RELAYED_BYTES, RELAY_PATH, proxy_request, relayed_request
from federation.sealed.peers.registry import Registry
from workers.clock import Clock, SystemClock, monotonic

log = structlog.get_logger(__name__)

_BAD_GATEWAY: Final = 502
_ASKS_TO_WAIT: Final = frozenset({429, 503})
_MAX_RESTING: Final = 1000
_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class Peers(Protocol):
    """Knows which peers may relay to a target: their origins, best first, few enough to try them all."""

    async def healthy(self, target: str, *, without: Sequence[str]) -> Sequence[str]: ...

    async def sweep(self, target: str) -> Sequence[str]: ...


class PeerRelay:
    """Callable as a `SendThroughPeer`: it asks up to three peers, one after the other."""

    def __init__(
        self,
        *,
        own_url: str,
        keys: KeyRing,
        client: FederationClient,
        registry: Registry,
        peers: Peers,
        meter: Meter = NO_METER,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._client = client
        self._registry = registry
        self._peers = peers
        self._meter = meter
        self._clock = clock or SystemClock()
        # Peers that asked to be left alone, and until when.
        self._resting: dict[str, float] = {}

    async def __call__(self, request: OutboundRequest, remaining: timedelta) -> Fetched:
        helped = False
        try:
            fetched = await self._within(remaining, request)
            helped = True
        finally:
            self._meter.relay(helped=helped)
        return fetched

    async def _within(self, remaining: timedelta, request: OutboundRequest) -> Fetched:
        deadline = monotonic() + remaining.total_seconds()
        try:
            async with asyncio.timeout(remaining.total_seconds()):
                return await self._relay(request, deadline)
        except TimeoutError:
            raise RelayFailed("no time is left") from None

    async def _relay(self, request: OutboundRequest, deadline: float) -> Fetched:
        target = parse_target(request.url).origin
        text, key = await self._content(request)
        peers = await self._peers.healthy(target, without=self._at_rest()) or await self._peers.sweep(target)
        failures: list[str] = []
        for later, peer in zip(reversed(range(len(peers))), peers, strict=True):
            left = max(deadline - monotonic(), 0)
            share = timedelta(seconds=left / 2 if later else left)
            try:
                body = await self._sealed(text, key, target=target, peer=peer)
                return Fetched(response=await self._ask(peer, target, body, share), peer=peer)
            except RelayFailed as failure:
                failures.append(str(failure))
                self._meter.relay_refused(failure.code or "")
        raise RelayFailed("; ".join(failures) or "no peer is healthy")

    async def _content(self, request: OutboundRequest) -> tuple[str, bytes]:
        """Return the text to be sealed, and the target's key."""
        content = request.body or b""
        if len(content) > MAX_RELAYED_BYTES:
            raise _too_large(len(content))
        server = (await self._registry.standing(request.server_url)).server
        if server is None:
            raise RelayFailed("the server is not registered here, so nothing can be sealed to it")
        try:
            key = decode_key(server.encryption_public_key, what="registered encryption key")
            text = relayed_request(
                url=request.url, method=request.method, headers=request.headers, body=content.decode()
            )
        except (ProtocolError, UnicodeDecodeError) as error:
            raise RelayFailed(f"the request cannot be sealed: {error}") from None
        return text, key

    async def _sealed(self, text: str, key: bytes, *, target: str, peer: str) -> bytes:
        """Build the body for that peer, signed with the keys of ours that it knows."""
        relay = (await self._registry.standing(peer)).server
        keys = pair_known_by(self._keys, relay.knows_key if relay else None) or self._keys.pairs()[0]
        try:
            body = proxy_request(text, target=target, target_key=key, keys=keys)
        except ProtocolError as error:
            raise RelayFailed(f"the request cannot be sealed: {error}") from None
        if len(body) > MAX_RELAYED_BYTES:
            raise _too_large(len(body))
        return body

    async def _ask(self, peer: str, target: str, body: bytes, timeout: timedelta) -> Response:
        headers = {
            "Content-Type": "application/json",
            "Origin": self._own_url,
            "X-Federation-Origin": self._own_url,
        }
        try:
            response = await self._client.fetch(
                peer + RELAY_PATH, method="POST", headers=headers, body=body, timeout=timeout
            )
        except NetworkError as error:
            await self._note_failure(peer, error.code)
            raise _refused(peer, target, error.code) from error
        except OutboundError as error:
            raise _refused(peer, target, type(error).__name__) from error
        if not response.ok:
            self._let_rest(peer, response)
            raise _refused(peer, target, _code(response.status), **_reasons(response.body))
        if not _is_acknowledgment(response.body):
            raise _refused(peer, target, "NO_ACK", **({"encoding": response.encoding} if response.encoding else {}))
        return response

    async def _note_failure(self, peer: str, code: NetworkErrorCode) -> None:
        """Mark the peer as unhealthy, unless the failure may be its target's, or is ours and would never be cleared."""
        if code is NetworkErrorCode.TIMEOUT or not get_threat_policy(code).direct_health_checkable:
            return
        try:
            await self._registry.mark_unhealthy(peer, code)
        except Exception as error:
            log.error("server_mark_unhealthy_failed", server_url=peer, code=code, **crash(error))

    def _let_rest(self, peer: str, response: Response) -> None:
        # A relay counts refused requests, too: if we went on asking, it would stay closed to us for ever.
        pause = response.retry_after(self._clock.now()) if response.status in _ASKS_TO_WAIT else None
        if pause is not None and len(self._resting) < _MAX_RESTING:
            self._resting[peer] = monotonic() + pause.total_seconds()

    def _at_rest(self) -> list[str]:
        now = monotonic()
        self._resting = {peer: until for peer, until in self._resting.items() if until > now}
        return list(self._resting)


def _too_large(size: int) -> RelayFailed:
    return RelayFailed(f"{size} bytes are too large to relay, the most is {MAX_RELAYED_BYTES}")


def _refused(peer: str, target: str, code: str, **reasons: object) -> RelayFailed:
    """Log the failure of one peer, and return it as an exception."""
    log.warning("relay_refused", relayed_by=peer, target=target, code=code, **reasons)
    told = ", ".join(f"{name} {value}" for name, value in reasons.items())
    return RelayFailed(f"{peer}: {code}" + (f" ({told})" if told else ""), code=code)


def _reasons(body: bytes) -> dict[str, object]:
    """Return what a relay says of its own refusal and of the target's. Only codes: texts could quote what was sent."""
    try:
        refusal = parse_json(body, limit=MAX_RELAYED_BYTES)
    except ProtocolError:
        return {}
    if not isinstance(refusal, dict):
        return {}
    details = refusal.get("details")
    told = {"relay_code": refusal.get("code"), "network_code": refusal.get("federationError")}
    if isinstance(details, dict):
        told |= {"target_code": details.get("code"), "target_status": details.get("status")}
    return {name: value for name, value in told.items() if _is_fit_for_a_log(value)}


def _code(status: int) -> str:
    return NetworkErrorCode.INVALID_RESPONSE_FROM_TARGET.value if status == _BAD_GATEWAY else f"HTTP_{status}"


def _is_fit_for_a_log(value: object) -> bool:
    if isinstance(value, str):
        return _CODE.fullmatch(value) is not None
    return type(value) is int and 100 <= value <= 599


def _is_acknowledgment(body: bytes) -> bool:
    try:
        find_ack(parse_ack_body(body))
    except ProtocolError:
        return False
    return True
