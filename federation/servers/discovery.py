"""Getting to know a server: its keys from its own `/discover`, and ours to it in return."""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Protocol

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from federation.http.errors import BlockedUrl, OutboundError
from federation.http.gates import FederationFetch, Fetched
from federation.protocol.discovery import DiscoverDocument, parse_discover_document, register_request
from federation.protocol.errors import ProtocolError, UrlError
from federation.protocol.keys import OwnKeys
from federation.protocol.urls import canonical_origin
from federation.servers.registry import KeysTaken, KnownServer, Registry
from federation.servers.single_flight import SingleFlight

log = structlog.get_logger(__name__)

DISCOVERY_TIMEOUT: Final = timedelta(seconds=10)


class DiscoveryError(Exception):
    """The server could not be discovered now; worth another try."""


class ServerBlacklisted(DiscoveryError):
    """The server is blacklisted here, and was not asked."""


class Discover(Protocol):
    """Makes a server known."""

    async def __call__(self, server_url: str) -> KnownServer: ...


class Discovery:
    """Callable as `discover_and_register(server_url)`; concurrent calls for one server share one discovery.

    Without keys and a URL of its own a node can still learn others' keys, but not register with them.
    """

    def __init__(
        self, *, own_url: str | None, keys: OwnKeys | None, fetch: FederationFetch, registry: Registry
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._fetch = fetch
        self._registry = registry
        self._running: SingleFlight[KnownServer] = SingleFlight()

    async def __call__(self, server_url: str) -> KnownServer:
        """The server is in the registry with the keys its `/discover` shows, and was asked to register us.

        That registration may fail; it is only logged. A server known with another signing key is not touched: it may
        have rotated unannounced, or be somebody else.

        Raises:
            DiscoveryError: no usable answer, other keys than before, or keys that belong to another server.
            ServerBlacklisted: a kind of it; the server was not asked.
            BlockedUrl: the guard refuses the URL; trying again cannot help.
        """
        return await self._running.run(server_url, lambda: self._discover(server_url))

    async def close(self) -> None:
        """No discovery is under way any more."""
        await self._running.close()

    async def learn(self, server_url: str) -> DiscoverDocument:
        """The keys the server's `/discover` shows; nothing is written, so a caller may do that in its own transaction.

        Raises:
            DiscoveryError, ServerBlacklisted, BlockedUrl: as the call itself.
        """
        if await self._registry.is_blacklisted(server_url):
            raise ServerBlacklisted(f"{server_url} is blacklisted")
        document = await self._ask(server_url)
        known = await self._registry.find(server_url)
        if known is not None and known.public_key != document.public_key:
            raise DiscoveryError(
                f"{server_url} shows another signing key than the registered one: it rotated, or is an impostor"
            )
        return document

    async def _discover(self, server_url: str) -> KnownServer:
        await self.register(server_url, await self.learn(server_url))
        await self.introduce_ourselves(server_url, registered=True)
        found = await self._registry.find(server_url)
        if found is None:
            raise DiscoveryError(f"{server_url} was removed from the registry while it was being discovered")
        return found

    async def _ask(self, server_url: str) -> DiscoverDocument:
        try:
            origin = canonical_origin(server_url)
        except UrlError as error:
            raise BlockedUrl(f"the server URL is not acceptable: {error}") from error
        try:
            # Whoever is asked here is not registered: there is no health to update.
            fetched = await self._fetch(f"{origin}/discover", timeout=DISCOVERY_TIMEOUT, skip_health_update=True)
        except BlockedUrl:
            raise
        except OutboundError as error:
            raise DiscoveryError(f"{origin}/discover could not be fetched: {error}") from error
        return _document(origin, fetched)

    async def register(
        self, server_url: str, document: DiscoverDocument, *, session: AsyncSession | None = None
    ) -> None:
        """The server is in the registry with what `learn` told; see `Registry.register`.

        Raises:
            DiscoveryError: another server is registered with one of its keys.
        """
        try:
            await self._registry.register(
                url=server_url,
                public_key=document.public_key,
                encryption_public_key=document.encryption_public_key,
                session=session,
            )
        except KeysTaken as error:
            raise DiscoveryError(str(error)) from error

    async def introduce_ourselves(self, server_url: str, *, registered: bool) -> None:
        """The server was asked to register us; whatever goes wrong is logged, it will ask for itself in time.

        Its health is written only if it is `registered`: a caller in a transaction of its own has to register it yet.
        """
        if self._own_url is None or self._keys is None:
            return
        body = register_request(url=self._own_url, keys=self._keys)
        try:
            fetched = await self._fetch(
                f"{canonical_origin(server_url)}/discover",
                method="POST",
                headers={"Content-Type": "application/json", "Origin": self._own_url},
                body=body,
                timeout=DISCOVERY_TIMEOUT,
                server_url=server_url,
                skip_health_update=not registered,
            )
            # The answer's echo of the server's own entry is not read: it could only repeat what we just fetched from
            # `/discover`, or put another server's name to these keys.
            if not fetched.response.ok:
                log.warning("register_refused", server_url=server_url, status=fetched.response.status)
        except OutboundError as error:
            log.warning("register_failed", server_url=server_url, error=type(error).__name__)


def _document(origin: str, fetched: Fetched) -> DiscoverDocument:
    if not fetched.response.ok:
        raise DiscoveryError(f"{origin}/discover answered with status {fetched.response.status}")
    try:
        document = parse_discover_document(fetched.response.body)
    except ProtocolError as error:
        raise DiscoveryError(f"{origin}/discover: {error}") from error
    if document.origin != origin:
        raise DiscoveryError(f"{origin}/discover names another server as itself")
    return document
