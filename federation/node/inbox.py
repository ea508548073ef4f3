"""A sealed delivery on its way in: it is opened and read, its sender is verified, and it is acknowledged.

The acknowledgment has the form that the sender understands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Final, Generic, TypeAlias, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response

from federation.node.admission import BlacklistGate, PerOrigin
from federation.node.front import Inbound
from federation.node.heavy import HeavyWork
from federation.node.refusals import FrameworkRefusal, Refusal, json_response
from federation.protocol.acks import ack_response
from federation.protocol.activities import (
    ActivityMethod,
    DeliveryRequest,
    FollowActivity,
    PostActivity,
    UnfollowActivity,
)
from federation.protocol.errors import EnvelopeError, KeyMaterialError, NotJson, ProtocolError, UrlError
from federation.protocol.keys import KeyRing, OwnKeys, decode_key, verify_signature
from federation.protocol.relaying import ORIGIN_HEADER
from federation.protocol.sealing import Envelope, open_with_any
from federation.protocol.skimming import read_model
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.registry import KnownServer, Registry

UNKNOWN_SERVER = "UNKNOWN_FEDERATION_SERVER_INTERACTION"
INVALID_SIGNATURE = "INVALID_SIGNATURE"
BLACKLISTED_SERVER = "BLACKLISTED_FEDERATION_SERVER"

LOOKS_PER_SECOND: Final = 20

_ORIGIN_HEADERS = ("x-federation-origin", "origin")

Activity = TypeVar("Activity", bound=FollowActivity | UnfollowActivity | PostActivity)

Malformed: TypeAlias = Callable[[str, str], Refusal]
"""Makes the refusal of a malformed request, given the place at fault and what is wrong there."""

HeardOf: TypeAlias = Callable[[str], Awaitable[object]]
"""Called with a server that has proved to be there, so that it is probed if something is held for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[Activity]):
    """An activity signed by *sender*.

    It was sealed to the pair `opened_with`, by which the sender knew us when it wrote.
    """

    sender: KnownServer
    activity: Activity
    opened_with: OwnKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened(Generic[Activity]):
    """An activity as anybody may have sealed it to us.

    If `verified_with` is set, that key has verified the signature.
    """

    text: str = field(repr=False)
    signature: str = field(repr=False)
    activity: Activity
    opened_with: OwnKeys
    verified_with: str | None = None

    def is_signed_by(self, sender: KnownServer) -> bool:
        if self.verified_with == sender.public_key:
            return True
        return verify_signature(self.text, self.signature, sender.public_key)


class Inbox:
    """Opens deliveries sealed to our keys and signs their acknowledgments."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        registry: Registry,
        gate: BlacklistGate,
        heard: HeardOf,
        per_origin: PerOrigin,
        heavy: HeavyWork,
    ) -> None:
        self._keys = keys
        self._registry = registry
        self._gate = gate
        self._heard = heard
        self._per_origin = per_origin
        self._heavy = heavy
        self._looks_until = 0.0

    async def open(
        self, inbound: Inbound, models: Mapping[ActivityMethod, type[Activity]], malformed: Malformed
    ) -> Received[Activity]:
        """Open the activity in *inbound*, and check that the registered server which it names as its author signed it.

        *models* are the methods accepted here.

        Raises:
            Refusal: 415 no JSON by its header; the one of *malformed* if the body, envelope or plaintext is no such
                activity; 403 unknown or blacklisted server, or not signed by it; 429 too often.
        """
        _require_json(inbound.headers)
        if inbound.is_heavy:
            opened = await self._open_heavy(inbound, models, malformed)
        else:
            opened = self._unseal(inbound.value, models, malformed)
        author = opened.activity.federation_url
        await self._gate.check([author])
        sender = await self.registered(author)
        _require_same_origin(inbound.headers, sender)
        received = await self._verified(opened, sender)
        await self._heard(sender.url)
        return received

    async def vouch(self, headers: Headers) -> None:
        """Check that the server that *headers* name is registered, so that it may send more than 64 KiB.

        Raises:
            Refusal: 403 it is not, or none is named.
        """
        await self.registered(_claimed_origin(headers))

    async def open_relayed(
        self,
        value: object,
        models: Mapping[ActivityMethod, type[Activity]],
        malformed: Malformed,
        *,
        sender: KnownServer,
    ) -> Received[Activity]:
        """Open a body that a relay brought in the name of *sender*, who has to be its author; otherwise as `open`.

        Raises:
            Refusal: the one of *malformed*, or 403 not by that author: no server publishes in the name of another.
        """
        opened = self._unseal(value, models, malformed)
        if _origin_or_none(opened.activity.federation_url) != sender.url:
            text = f"The signed federationUrl names another server than the inner {ORIGIN_HEADER}"
            raise Refusal(403, text, code=INVALID_SIGNATURE)
        return await self._verified(opened, sender)

    async def require_welcome(self, url: str) -> None:
        """Check that the server which *url* names is not blacklisted.

        Raises:
            Refusal: 403 it is, with the code that requests to `/proxy` get, unlike others.
        """
        try:
            await self._gate.check([url])
        except Refusal:
            raise Refusal(403, "The server is blacklisted here", code=BLACKLISTED_SERVER) from None

    async def registered(self, url: str) -> KnownServer:
        """Return the registered server that *url* names in any spelling.

        Raises:
            Refusal: 403 there is none.
        """
        try:
            origin = canonical_origin(url)
        except UrlError:
            raise unknown_server() from None
        server = await self._registry.known(origin) or await self._look_again(origin)
        if server is None:
            raise unknown_server()
        return server

    async def _look_again(self, url: str) -> KnownServer | None:
        """Return the server as it is now: another process may have changed it since this one read it.

        Each look costs as much as the rest of a refusal. So during a flood, whether of strangers or in a server's name,
        it returns what was known a few seconds ago.
        """
        now = monotonic()
        self._looks_until = max(self._looks_until, now - 1) + 1 / LOOKS_PER_SECOND
        if self._looks_until > now:
            self._looks_until -= 1 / LOOKS_PER_SECOND
            return await self._registry.known(url)
        return await self._registry.find(url)

    def unseal(self, envelope: Envelope) -> tuple[str, OwnKeys]:
        """Return the text that is sealed to one of our key pairs, and that pair.

        Raises:
            EnvelopeError: it does not open.
        """
        return open_with_any(envelope, self._keys)

    def acknowledge(self, received: Received[Activity], plaintext: str, *, accepted: bool | None = None) -> Response:
        """Build the answer that carries *plaintext*, sealed to the sender, in all places where releases look for it.

        It is signed by the pair that the delivery was sealed to: the sender read our key when it began, and may have
        learned another since. Call this before committing what it acknowledges.

        Raises:
            Refusal: 409 the sender's registered key cannot be sealed to; only an earlier version let such a key in.
        """
        sender = received.sender
        key = decode_key(sender.encryption_public_key, what=f"registered encryption key of {sender.url}")
        secret = received.opened_with.signing.secret
        try:
            return json_response(ack_response(plaintext, recipient_key=key, signing_secret=secret, accepted=accepted))
        except KeyMaterialError:
            raise Refusal(409, "The registered encryption key is unusable", reason="KEY_MATERIAL") from None

    async def _verified(self, opened: _Opened[Activity], sender: KnownServer) -> Received[Activity]:
        if not opened.is_signed_by(sender):
            # Another process may have registered new keys of the server in the seconds since this one looked.
            current = await self._look_again(sender.url)
            if current is None or current.public_key == sender.public_key or not opened.is_signed_by(current):
                raise _not_signed()
            sender = current
        await self._per_origin(sender.url)
        return Received(sender=sender, activity=opened.activity, opened_with=opened.opened_with)

    async def _open_heavy(
        self, inbound: Inbound, models: Mapping[ActivityMethod, type[Activity]], malformed: Malformed
    ) -> _Opened[Activity]:
        """Do the same as `_unseal`, off the event loop. Only what the server in the headers signed is read."""
        claimed = await self.registered(_claimed_origin(inbound.headers))
        signer = await self._look_again(claimed.url) or claimed
        return await self._heavy.run(partial(self._unseal, inbound.value, models, malformed, signer))

    def _unseal(
        self,
        value: object,
        models: Mapping[ActivityMethod, type[Activity]],
        malformed: Malformed,
        signer: KnownServer | None = None,
    ) -> _Opened[Activity]:
        request = _parse(value, malformed)
        model = models.get(request.method)
        if model is None:
            raise malformed("body.method", f"expected {' or '.join(models)}")
        try:
            text, pair = self.unseal(request.payload)
            if signer is not None and not verify_signature(text, request.signature, signer.public_key):
                raise _not_signed()
            activity = read_model(model, text)
            return _Opened(
                text=text,
                signature=request.signature,
                activity=activity,
                opened_with=pair,
                verified_with=signer.public_key if signer is not None else None,
            )
        except ProtocolError as error:
            raise malformed("body.payload", str(error)) from None


def unknown_server() -> Refusal:
    """Return the refusal of a server that is not in the registry."""
    return Refusal(403, "The sending server is not registered here; POST /discover first", code=UNKNOWN_SERVER)


def _not_signed() -> Refusal:
    return Refusal(403, "The signature is not the sending server's", code=INVALID_SIGNATURE)


def _claimed_origin(headers: Headers) -> str:
    return next((claimed for name in _ORIGIN_HEADERS if (claimed := headers.get(name))), "")


def _require_json(headers: Headers) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise FrameworkRefusal(415, "Send the body as application/json", code="UNSUPPORTED_MEDIA_TYPE")


def _parse(value: object, malformed: Malformed) -> DeliveryRequest:
    if isinstance(value, NotJson):
        raise malformed("body", str(value))
    try:
        return DeliveryRequest.from_wire(value)
    except EnvelopeError as error:
        raise malformed("body.payload", str(error)) from None
    except ProtocolError as error:
        raise malformed("body", str(error)) from None


def _require_same_origin(headers: Headers, sender: KnownServer) -> None:
    """Refuse a delivery whose headers name another server than its author. They may also be left out.

    The signature alone decides who the author is. A header that contradicts it means that somebody forwards what was
    sealed for others, or that the sender's configuration names two servers.
    """
    for name in _ORIGIN_HEADERS:
        claimed = headers.get(name)
        if claimed is not None and _origin_or_none(claimed) != sender.url:
            text = f"The {name} header names another server than the signed federationUrl"
            raise Refusal(403, text, code=INVALID_SIGNATURE)


def _origin_or_none(url: str) -> str | None:
    try:
        return canonical_origin(url)
    except UrlError:
        return None
