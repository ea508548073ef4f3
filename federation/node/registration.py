"""`REGISTER`: a server introduces itself. It is believed if its `/discover` says the same and it holds the keys.

A server that answers no ping, as some cannot, is believed all the same if nobody else has one of the keys.
"""

from __future__ import annotations

from datetime import timedelta

import structlog
from starlette.responses import Response

from federation.http.errors import BlockedUrl
from federation.http.guard import AddressGuard
from federation.node.admission import NewServers
from federation.node.callback import Callback, no_document
from federation.node.clients import Source
from federation.node.inbox import HeardOf
from federation.node.refusals import Refusal, invalid_member, json_response
from federation.protocol.discovery import DiscoverDocument, own_document, parse_discover_document
from federation.protocol.encodings import validate
from federation.protocol.errors import NotJson, PayloadError, UrlError
from federation.protocol.possession import NO_PROOF, Proof
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.claims import Claims, ShowsOurKeys
from federation.sealed.peers.own_identity import OwnIdentity
from federation.sealed.peers.registry import KeysTaken, Registry
from workers.clock import monotonic

log = structlog.get_logger(__name__)


class Registration:
    """Callable with the JSON object of a `REGISTER` request; *identity* provides what we say of ourselves in return."""

    def __init__(
        self,
        *,
        own_url: str,
        identity: OwnIdentity,
        registry: Registry,
        claims: Claims,
        heard: HeardOf,
        callback: Callback,
        guard: AddressGuard,
        admit_new: NewServers,
    ) -> None:
        self._own_url = own_url
        self._identity = identity
        self._registry = registry
        self._claims = claims
        self._heard = heard
        self._callback = callback
        self._guard = guard
        self._admit_new = admit_new

    async def __call__(self, request: object, *, source: Source) -> Response:
        """Register the server under its canonical URL, as healthy.

        A known server keeps its registered keys; a new signing key needs the rotation flow. If another server has one
        of its keys, the key goes to whichever proves to hold it.

        Raises:
            Refusal: nothing was changed.
        """
        claimed = _claimed(request)
        origin = self._acceptable_origin(claimed.url)
        if await self._registry.find(origin) is None:
            await self._admit_new(source)
        async with self._callback.place(origin, source.holders) as end:
            shown = await self._shown(origin, end)
            if (shown.public_key, shown.encryption_public_key) != (claimed.public_key, claimed.encryption_public_key):
                text = f"Public keys do not match those {origin}/discover shows"
                raise Refusal(400, text, reason="KEYS_DO_NOT_MATCH")
            await self._store(origin, shown, end)
        return json_response(
            {"message": "Server registered", "echo": own_document(self._own_url, await self._identity.shown())}
        )

    def _acceptable_origin(self, url: str) -> str:
        try:
            origin = canonical_origin(url)
            self._guard.check_url(origin)
        except UrlError as error:
            raise Refusal(400, f"url: {error}", reason="BLOCKED_URL") from None
        except BlockedUrl:
            # The error's text is left out: it tells our operator what to set.
            raise Refusal(400, "url: not the address of a public server", reason="BLOCKED_URL") from None
        if origin == self._own_url:
            raise Refusal(400, "url: this is the asked server's own", reason="OWN_URL")
        return origin

    async def _shown(self, origin: str, end: float) -> DiscoverDocument:
        try:
            document = parse_discover_document(await self._callback.document(origin, end=end))
        except NotJson:
            raise no_document(origin) from None
        except PayloadError as error:
            raise Refusal(400, f"Invalid server: {origin}/discover: {error}", reason="INVALID_SERVER") from None
        if document.origin != origin:
            text = f"Invalid server: {origin}/discover names another server as itself"
            raise Refusal(400, text, reason="INVALID_SERVER")
        return document

    async def _store(self, origin: str, shown: DiscoverDocument, end: float) -> None:
        known = await self._registry.find(origin)
        if known is not None and known.public_key != shown.public_key:
            text = "This server is registered with another signing key; use the key rotation flow to change it"
            raise Refusal(400, text, reason="SIGNING_KEY_CHANGED")
        proof = await self._proof(origin, shown, is_new=known is None, end=end)
        try:
            await self._claims.register(origin, shown, proof, knows_key=await self._identity.known_from_now_on())
        except KeysTaken:
            raise Refusal(409, "Another server is registered with one of these keys", reason="KEYS_TAKEN") from None
        if known is not None and not known.is_healthy:
            await self._registry.mark_healthy(origin, reason="registered")
        await self._heard(origin)
        log.info("server_registered", server_url=origin, is_new=known is None, proved=proof.opened is True)

    async def _proof(self, origin: str, shown: DiscoverDocument, *, is_new: bool, end: float) -> Proof:
        """Ask the server to prove its keys, until *end* by `monotonic`.

        A server that has done so before is not asked.
        """
        try:
            self._claims.require_not_ours(origin, shown)
        except ShowsOurKeys:
            raise Refusal(409, "One of these keys is the asked server's own", reason="OWN_KEYS") from None
        if not is_new and await self._claims.has_proved(origin):
            return NO_PROOF
        proof = await self._claims.ask(origin, shown, timeout=timedelta(seconds=end - monotonic()))
        if is_new and proof.opened is False:
            text = f"{origin} does not hold the keys that its /discover shows"
            raise Refusal(400, text, reason="KEYS_NOT_PROVED")
        return proof


def _claimed(request: object) -> DiscoverDocument:
    try:
        return validate(DiscoverDocument, request)
    except PayloadError as error:
        raise invalid_member("", str(error)) from None
