"""Getting to know a server: reading its keys from its `/discover`, and registering ours with it in return."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import structlog
from sqlalchemy.orm import Session

from federation.base.cache import SingleFlight
from federation.http.client import NO_HEADERS, FederationFetch, Fetched
from federation.http.errors import BlockedUrl, NetworkError, OutboundError
from federation.http.messages import NOT_JUDGED, Response, asks_for_rest
from federation.http.threat_policy import NetworkErrorCode
from federation.protocol.discovery import (
    MAX_DISCOVER_BYTES,
    DiscoverDocument,
    parse_discover_document,
    register_request,
)
from federation.protocol.encodings import is_json_object
from federation.protocol.errors import ProtocolError, UrlError
from federation.protocol.possession import DECRYPT_FAILED, NO_PROOF, Proof
from federation.protocol.relaying import ORIGIN_HEADER
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.claims import Claims, ShowsOurKeys
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.possession import PING_TIMEOUT
from federation.sealed.peers.registry import KeysTaken, KnownServer, Registry
from federation.servers.links import Links
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

T = TypeVar("T")

DISCOVERY_TIMEOUT: Final = timedelta(seconds=10)
INTRODUCTION_PATIENCE: Final = timedelta(seconds=2)
UNKNOWN_SERVER: Final = "UNKNOWN_FEDERATION_SERVER_INTERACTION"
"""The code with which a server refuses us that does not know who we are."""
ABOUT_KEYS: Final = frozenset({DECRYPT_FAILED, "INVALID_SIGNATURE"})
"""The codes of a server that could not read what was sealed to it, or did not recognise our signature."""


class DiscoveryError(Exception):
    """The server could not be discovered now; another try may succeed."""


class DiscoveryRefused(DiscoveryError):
    """The server answered, and its answer cannot be used: other keys than before, another's name, or a refusal."""


class DiscoveryPage(DiscoveryError):
    """Something answered that is no server of this protocol, such as a proxy whose server is away."""


class ServerRests(DiscoveryError):
    """The server asked to be left alone."""


class ServerBlacklisted(DiscoveryError):
    """The server is blacklisted here, and was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a server shows of itself at its `/discover`; `proved` says that it has also proved to hold these keys."""

    document: DiscoverDocument
    proved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """How introducing ourselves ended, and what the server then proved of its keys."""

    code: NetworkErrorCode | None
    proof: Proof


class DiscoverServer(Protocol):
    """Makes a server known to the registry."""

    async def __call__(self, server_url: str) -> KnownServer: ...


class SharedDiscovery(DiscoverServer, Protocol):
    """Discovers for deliveries."""

    async def until_introduced(self, server_url: str) -> None:
        """Wait a short time for the end of a discovery under way.

        The server is in the registry before it has registered us, and until then it refuses deliveries.
        """


class Discovery:
    """Callable as `discover_and_register(server_url)`; concurrent calls for one server share one discovery.

    Without keys and a URL of its own, a node can still learn others' keys, but not register with them.
    """

    def __init__(
        self,
        *,
        own_url: str | None,
        identity: OwnIdentity | None,
        fetch: FederationFetch,
        registry: Registry,
        links: Links,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._identity = identity
        self._fetch = fetch
        self._registry = registry
        self._links = links
        self._clock = clock or SystemClock()
        self._claims = Claims(
            own_url=own_url, ring=identity.ring if identity else None, registry=registry, fetch=fetch, clock=clock
        )
        self._introducing: set[asyncio.Task[object]] = set()
        self._running: SingleFlight[KnownServer] = SingleFlight()

    async def __call__(self, server_url: str) -> KnownServer:
        """Register the server with the keys that its `/discover` shows, and ask it to register us.

        That request may fail, which is only logged. A server that is registered with another signing key is not
        touched: it may have rotated unannounced, or be somebody else. Once it knows us, the server is asked to prove
        that it holds its keys. If they are taken it has to prove it; otherwise it only must not fail.

        Raises:
            DiscoveryError: no usable answer, other keys than before, or keys that belong to another server or to us.
            ServerBlacklisted: a kind of `DiscoveryError`; the server was not asked.
            BlockedUrl: the guard refuses the URL; trying again cannot help.
        """
        return await self._running.run(server_url, lambda: self._discover(server_url))

    async def for_a_relay(self, server_url: str) -> KnownServer:
        """Do the same as the call itself, for a target that somebody named whom we cannot identify.

        It gets two requests at most, and nobody else one: it is not asked to prove its keys, and takes no other
        server's. It is asked when it registers, or claims a key of another.
        """
        return await self._running.run(f"relay {server_url}", lambda: self._discover(server_url, asks_proof=False))

    async def until_introduced(self, server_url: str) -> None:
        """Wait for the discovery under way, if there is one, which has registered the server and not ended yet."""
        await self._running.join(server_url)

    async def close(self) -> None:
        """Cancel all discoveries, and the introductions that nobody waited for, and wait for their end."""
        await self._running.close()
        for task in self._introducing:
            task.cancel()
        await asyncio.gather(*self._introducing, return_exceptions=True)

    async def learn(self, server_url: str) -> DiscoverDocument:
        """Return the keys that the server's `/discover` shows.

        Nothing is written, so that a caller may do that in its own transaction.

        Raises:
            DiscoveryError, ServerBlacklisted, BlockedUrl: as the call itself.
        """
        if await self._registry.is_blacklisted(server_url):
            raise ServerBlacklisted(f"{server_url} is blacklisted")
        document = await self._ask(server_url)
        known = await self._registry.find(server_url)
        as_registered = document if known is None else await self._as_registered(known, document)
        if as_registered is None:
            raise DiscoveryRefused(
                f"{server_url} shows another signing key than the registered one: it rotated, or is an impostor"
            )
        try:
            self._claims.require_not_ours(server_url, as_registered)
        except ShowsOurKeys as error:
            raise DiscoveryRefused(str(error)) from error
        return as_registered

    async def meet(self, server_url: str) -> Shown:
        """Ask an unknown server what it shows, to register us, and to prove its keys. Nothing is written.

        If one of its keys is registered for another server, the owner is found out in the background, which does write.

        Raises:
            DiscoveryError, ServerBlacklisted, BlockedUrl: as the call itself.
        """
        document = await self.learn(server_url)
        if await self._claims.holders(server_url, document):
            self._start(self._discover_quietly(server_url), name="claim")
            raise DiscoveryRefused(f"{server_url}: one of its keys is registered for another server")
        met = await self._introduce(server_url, document, patience=INTRODUCTION_PATIENCE)
        if met.proof.opened is False:
            raise _not_proved(server_url)
        return Shown(document=document, proved=met.proof.opened is True)

    async def _discover(self, server_url: str, *, asks_proof: bool = True) -> KnownServer:
        document = await self.learn(server_url)
        is_new = await self._registry.find(server_url) is None
        try:
            await self._registry.register(
                url=server_url,
                public_key=document.public_key,
                encryption_public_key=document.encryption_public_key,
            )
        except KeysTaken as error:
            if not asks_proof:
                raise DiscoveryRefused(str(error)) from error
            await self._claim(server_url, document)
        else:
            await self._be_met(server_url, document, is_new=is_new, asks_proof=asks_proof)
        found = await self._registry.find(server_url)
        if found is None:
            raise DiscoveryError(f"{server_url} was removed from the registry while it was being discovered")
        return found

    async def _discover_quietly(self, server_url: str) -> None:
        with suppress(DiscoveryError, BlockedUrl):
            await self(server_url)

    async def _be_met(self, server_url: str, document: DiscoverDocument, *, is_new: bool, asks_proof: bool) -> None:
        """Introduce ourselves to a server that is registered now, and wait a short time for the result.

        Raises:
            DiscoveryRefused: it is new, and failed to prove its keys. Its registration is withdrawn.
        """
        meeting = self._start(
            self._introduce_registered(server_url, document, asks_proof=asks_proof), name="introduction"
        )
        # A peer refuses deliveries from strangers, but one that registers us slowly must not delay them for long.
        # A late result is ignored: by then the server may have accepted deliveries.
        await asyncio.wait([meeting], timeout=INTRODUCTION_PATIENCE.total_seconds())
        if not meeting.done():
            return
        met = meeting.result()
        if met.code is not None:
            await self._registry.mark_unhealthy(server_url, met.code)
        if met.proof.opened is False and is_new:
            await self._claims.withdraw(server_url, document)
            raise _not_proved(server_url)

    async def _introduce_registered(self, server_url: str, document: DiscoverDocument, *, asks_proof: bool) -> _Met:
        if not asks_proof or await self._claims.has_proved(server_url):
            return _Met(code=await self.introduce_ourselves(server_url), proof=NO_PROOF)
        met = await self._introduce(server_url, document)
        if met.proof.opened:
            await self._claims.note_proved(server_url, document.public_key, document.encryption_public_key)
        return met

    async def _introduce(
        self, server_url: str, document: DiscoverDocument, *, patience: timedelta = PING_TIMEOUT
    ) -> _Met:
        """Ask the server to register us, and then to prove its keys: it answers only servers that it knows."""
        code = await self.introduce_ourselves(server_url)
        proof = NO_PROOF if code is not None else await self._claims.ask(server_url, document, timeout=patience)
        if proof.opened is False:
            log.warning("keys_not_proved", server_url=server_url)
        return _Met(code=code, proof=proof)

    async def _claim(self, server_url: str, document: DiscoverDocument) -> None:
        """Register the server, although another one was registered with its keys.

        Raises:
            DiscoveryRefused: they are not proved to be this one's.
        """
        met = await self._introduce(server_url, document)
        with _keys_taken():
            await self._claims.register(server_url, document, met.proof)

    def _start(self, work: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._introducing.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[object]) -> None:
        self._introducing.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not complain if nobody waits for it any more

    async def _as_registered(self, known: KnownServer, shown: DiscoverDocument) -> DiscoverDocument | None:
        """Return what the server shows us, if that is the registered signing key.

        A server that is changing its keys shows everybody the pair that most others know. To a server that names
        itself, it shows the pair which that server knows.
        """
        if shown.public_key != known.public_key and self._own_url is not None:
            with suppress(DiscoveryError, BlockedUrl):
                shown = await self._ask(known.url, named=True)
        return shown if shown.public_key == known.public_key else None

    async def _ask(self, server_url: str, *, named: bool = False) -> DiscoverDocument:
        try:
            origin = canonical_origin(server_url)
        except UrlError as error:
            raise BlockedUrl(f"the server URL is not acceptable: {error}") from error
        try:
            # A server that is asked here is not registered: there is no health to update.
            headers = {ORIGIN_HEADER: self._own_url} if named and self._own_url is not None else NO_HEADERS
            fetched = await self._fetch(
                f"{origin}/discover", headers=headers, timeout=DISCOVERY_TIMEOUT, skip_health_update=True
            )
        except BlockedUrl:
            raise
        except OutboundError as error:
            raise DiscoveryError(f"{origin}/discover could not be fetched: {error}") from error
        await self._note_rest(server_url, fetched.response)
        return _document(origin, fetched, ours=self._own_url)

    async def _note_rest(self, server_url: str, response: Response) -> None:
        pause = response.retry_after(self._clock.now())
        if asks_for_rest(response.status, with_pause=pause is not None):
            # A follow is requested within its user's transaction, and there is no other inside of it: whoever asks
            # the server next notes the rest.
            if not self._registry.database.is_in_transaction:
                await self._links.rests(server_url, pause)
            raise ServerRests(f"{server_url} asked to be left alone (status {response.status})")

    async def look_again(self, server_url: str, remote_code: str | None) -> bool:
        """Look at a server that refused us with `remote_code`. Return whether its refusals may end.

        They may if it shows another signing key than the registered one, or if it says that it does not know us; then
        it is asked to register us anew. They may also if it could not use a key that it shows now: it may have had
        others until a moment ago.
        """
        known = await self._registry.find(server_url)
        try:
            shown = await self._ask(server_url)
        except (DiscoveryError, BlockedUrl):
            return False
        if known is not None and await self._as_registered(known, shown) is None:
            await self._links.mismatched(server_url)
            return True
        if remote_code == UNKNOWN_SERVER:
            await self.introduce_ourselves(server_url)
        return remote_code == UNKNOWN_SERVER or remote_code in ABOUT_KEYS

    def register_within(self, session: Session, server_url: str, shown: Shown) -> None:
        """Register the server with what `meet` returned, within the caller's transaction.

        Raises:
            DiscoveryError: another server is registered with one of its keys.
        """
        keys = shown.document.public_key, shown.document.encryption_public_key
        with _keys_taken():
            self._registry.register_within(session, url=server_url, public_key=keys[0], encryption_public_key=keys[1])
        if shown.proved:
            self._claims.note_proved_within(session, server_url, *keys)

    async def introduce_ourselves(self, server_url: str) -> NetworkErrorCode | None:
        """Ask the server to register us. Return the code if the network failed.

        Whatever goes wrong is only logged: the server will ask for our keys itself when it needs them. Nothing is
        written here.
        """
        if self._own_url is None or self._identity is None:
            return None
        shown = await self._identity.shown()
        body = register_request(url=self._own_url, keys=shown)
        try:
            fetched = await self._fetch(
                f"{canonical_origin(server_url)}/discover",
                method="POST",
                headers={"Content-Type": "application/json", "Origin": self._own_url},
                body=body,
                timeout=DISCOVERY_TIMEOUT,
                server_url=server_url,
                skip_health_update=True,
            )
            # The answer's echo of the server's own entry is not read: it could only repeat what we just fetched from
            # `/discover`, or put another server's name to these keys.
            if fetched.response.ok and len(self._identity.ring.pairs()) > 1:
                await self._registry.note_knows(server_url, shown.signing.public_text)
            if not fetched.response.ok:
                log.warning("register_refused", server_url=server_url, status=fetched.response.status)
        except OutboundError as error:
            log.warning("register_failed", server_url=server_url, error=type(error).__name__)
            return error.code if isinstance(error, NetworkError) else None
        return None


def _not_proved(server_url: str) -> DiscoveryRefused:
    return DiscoveryRefused(f"{server_url} does not hold the keys that it shows")


@contextmanager
def _keys_taken() -> Iterator[None]:
    try:
        yield
    except KeysTaken as error:
        raise DiscoveryRefused(str(error)) from error


def _refusal(status: int, body: bytes) -> type[DiscoveryError]:
    if not 400 <= status <= 499 or status in NOT_JUDGED:
        return DiscoveryError
    return DiscoveryRefused if is_json_object(body, limit=MAX_DISCOVER_BYTES) else DiscoveryPage


def _document(origin: str, fetched: Fetched, *, ours: str | None) -> DiscoverDocument:
    status, body = fetched.response.status, fetched.response.body
    if not fetched.response.ok:
        moved_to = fetched.response.moved_to(origin, ours=ours)
        named = f" and names {moved_to}" if moved_to else fetched.response.still_encoded
        raise _refusal(status, body)(f"{origin}/discover answered with status {status}{named}")
    try:
        document = parse_discover_document(body)
    except ProtocolError as error:
        problem = f"{origin}/discover: {error}{fetched.response.still_encoded}"
        is_page = not is_json_object(body, limit=MAX_DISCOVER_BYTES)
        raise (DiscoveryPage if is_page else DiscoveryRefused)(problem) from error
    if document.origin != origin:
        raise DiscoveryRefused(f"{origin}/discover names another server as itself")
    return document
