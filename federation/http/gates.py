"""`federation_fetch`: a direct request, the record of its failure, and a relay if one may help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import structlog

from federation.base.logs import crash
from federation.http.client import DEFAULT_TIMEOUT, NO_HEADERS, FederationClient
from federation.http.errors import NetworkError, RelayFailed
from federation.http.guard import parse_target
from federation.http.messages import Response
from federation.http.threat_policy import NO_OVERRIDES, NetworkErrorCode, PolicyOverride, get_threat_policy
from workers.clock import monotonic

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRequest:
    """One request to the registered server `server_url`, as it goes out directly, or sealed through a relay."""

    url: str
    server_url: str
    method: str
    headers: Mapping[str, str]
    body: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A response, and the peer that relayed it, which is None if it came directly."""

    response: Response
    peer: str | None = None

    @property
    def proxied(self) -> bool:
        """Whether a peer relayed the response."""
        return self.peer is not None


class MarkUnhealthy(Protocol):
    """Records that *server_url* failed with *code*."""

    async def __call__(self, server_url: str, code: NetworkErrorCode) -> object: ...


class SendThroughPeer(Protocol):
    """Sends *request* through a peer within *remaining*.

    Raises:
        RelayFailed: no peer passed it on.
    """

    async def __call__(self, request: OutboundRequest, remaining: timedelta) -> Fetched: ...


class FederationFetch:
    """Callable that behaves as `federation_fetch`; there is one per process."""

    def __init__(
        self,
        client: FederationClient,
        *,
        mark_unhealthy: MarkUnhealthy,
        relay: SendThroughPeer | None = None,
        policy_overrides: Mapping[NetworkErrorCode, PolicyOverride] = NO_OVERRIDES,
    ) -> None:
        self._client = client
        self._mark_unhealthy = mark_unhealthy
        self._relay = relay
        self._policy_overrides = policy_overrides

    async def __call__(
        self,
        url: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        first_byte: timedelta | None = None,
        proxy_fallback: bool = False,
        server_url: str | None = None,
        skip_health_update: bool = False,
    ) -> Fetched:
        """Fetch *url* directly or, with *proxy_fallback*, through a peer, within *timeout* altogether.

        A direct response has to begin within *first_byte*, if that is given.

        On a network error *server_url* (default: the origin of *url*) is marked unhealthy with its code, unless
        *skip_health_update* is set; a failure to record that is only logged. A success is not recorded. A relay is
        tried if the code's policy allows it; its failure is logged.

        Raises:
            NetworkError: the direct request failed, and no relay helped. The code is that of the direct failure in any
                case; if a relay was tried, its failure is the cause, and the message has both.
            BodyTooLarge, BlockedUrl: as `FederationClient.fetch`; the server's health is left alone.
        """
        started = monotonic()
        server = server_url or parse_target(url).origin
        try:
            response = await self._client.fetch(
                url, method=method, headers=headers, body=body, timeout=timeout, first_byte=first_byte
            )
        except NetworkError as error:
            if not skip_health_update:
                await self._record(server, error.code)
            remaining = timeout - timedelta(seconds=monotonic() - started)
            if not proxy_fallback or not self._may_relay(error, remaining):
                raise
            request = OutboundRequest(url=url, server_url=server, method=method, headers=headers, body=body)
            return await self._relayed(request, error, remaining)
        return Fetched(response=response)

    async def _record(self, server_url: str, code: NetworkErrorCode) -> None:
        try:
            await self._mark_unhealthy(server_url, code)
        except Exception as error:
            log.error("server_mark_unhealthy_failed", server_url=server_url, code=code, **crash(error))

    def _may_relay(self, error: NetworkError, remaining: timedelta) -> bool:
        allowed = get_threat_policy(error.code, self._policy_overrides).relay_eligible
        return self._relay is not None and allowed and remaining > timedelta()

    async def _relayed(self, request: OutboundRequest, error: NetworkError, remaining: timedelta) -> Fetched:
        assert self._relay is not None
        try:
            return await self._relay(request, remaining)
        except RelayFailed as failure:
            log.warning("relay_failed", server_url=request.server_url, code=error.code, error=str(failure))
            raise NetworkError(error.code, error.origin, f"{error.detail}; relay: {failure}") from error
        except Exception as exc:  # for example a database in trouble: the result of the direct request counts
            log.warning("relay_failed", server_url=request.server_url, code=error.code, error=type(exc).__name__)
            raise error from error.__cause__
