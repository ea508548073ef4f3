"""`/discover`: who we are and whom we know, and the two questions that other servers may ask us."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue
from sqlalchemy import select
from sqlmodel import col
from starlette.responses import Response

from db import Database, Server
from federation.http.errors import BlockedUrl
from federation.http.guard import AddressGuard
from federation.node.admission import BlacklistGate
from federation.node.callback import Callback, no_document
from federation.node.clients import Source
from federation.node.front import Inbound
from federation.node.refusals import Refusal, invalid_member, json_response
from federation.node.registration import Registration
from federation.protocol.discovery import SealingKeyText, SigningKeyText, own_document, parse_discover_document
from federation.protocol.encodings import Text, WireModel, parse_model, validate
from federation.protocol.errors import EnvelopeError, NotJson, PayloadError, UrlError
from federation.protocol.keys import KeyRing, decode_key, fingerprint
from federation.protocol.relaying import ORIGIN_HEADER
from federation.protocol.sealing import Envelope, open_with_any
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.own_identity import OwnIdentity

MAX_DISCOVER_REQUEST_BYTES: Final = 16 * 1024

# Keeps the document below the 256 KiB that peers read, even if every host name has the greatest length.
MAX_PEERS: Final = 500


class Discover:
    """Answers GET and POST `/discover`; *identity* provides the document's part about us."""

    def __init__(
        self,
        *,
        own_url: str,
        identity: OwnIdentity,
        database: Database,
        registration: Registration,
        key_check: KeyCheck,
    ) -> None:
        self._own_url = own_url
        self._identity = identity
        self._database = database
        self._registration = registration
        self._key_check = key_check

    async def show(self, inbound: Inbound) -> Response:
        """Answer with our URL, our keys, and the servers that we believe healthy, those seen last first.

        The keys are those by which the server knows us that names itself as asking.
        """
        query = (
            select(col(Server.url))
            .where(col(Server.is_healthy))
            .order_by(col(Server.last_seen).desc())
            .limit(MAX_PEERS)
        )
        async with self._database.read() as session:
            urls = (await session.execute(query)).scalars().all()
        return json_response(
            {
                **own_document(self._own_url, await self._identity.shown(_asker(inbound))),
                "peers": [{"url": url, "isHealthy": True} for url in urls],
            }
        )

    async def answer(self, inbound: Inbound) -> Response:
        """Do what `REGISTER` or `DISCOVER` asks for.

        Raises:
            Refusal: it is not done.
        """
        match inbound.value:
            case {"method": "REGISTER"}:
                return await self._registration(inbound.value, source=inbound.source)
            case {"method": "DISCOVER"}:
                return await self._key_check(inbound.value, source=inbound.source)
            case NotJson():
                raise Refusal(400, "Invalid JSON", code="INVALID_JSON")
            case _:
                raise Refusal(400, "Invalid method", reason="INVALID_METHOD")


def _asker(inbound: Inbound) -> str | None:
    """Return the server that names itself as asking."""
    try:
        return canonical_origin(inbound.headers.get(ORIGIN_HEADER, ""))
    except UrlError:
        return None


class SubmittedKeys(WireModel):
    """A `DISCOVER` request. Whether *envelope* really is an envelope shows when it is opened."""

    method: Literal["DISCOVER"]
    public_key: SigningKeyText
    encryption_public_key: SealingKeyText
    envelope: JsonValue = None


class Fingerprints(WireModel):
    """The plaintext of the envelope. Peers require `url`, but do not compare it with anything."""

    url: Annotated[Text, Field(min_length=1)]
    public_key_fingerprint: str
    encryption_public_key_fingerprint: str


class KeyCheck:
    """Callable with the JSON object of a `DISCOVER` request."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        database: Database,
        callback: Callback,
        guard: AddressGuard,
        gate: BlacklistGate,
    ) -> None:
        self._keys = keys
        self._database = database
        self._callback = callback
        self._guard = guard
        self._gate = gate

    async def __call__(self, request: object, *, source: Source) -> Response:
        """Answer that we hold the server's signing key, and whether the server's own `/discover` shows both keys.

        Raises:
            Refusal: malformed, an unknown key, or the server cannot be asked.
        """
        try:
            submitted = validate(SubmittedKeys, request)
        except PayloadError as error:
            raise invalid_member("", str(error)) from None
        _require_match(submitted, self._open(submitted.envelope))
        origin = await self._registered_origin(submitted.public_key)
        same = _same_keys(submitted, await self._callback(origin, source.holders), origin)
        return json_response({"sameKeyOnServer": True, "sameKeyOnFetch": same})

    def _open(self, envelope: JsonValue) -> Fingerprints:
        try:
            return parse_model(Fingerprints, open_with_any(Envelope.from_wire(envelope), self._keys)[0])
        except (EnvelopeError, PayloadError) as error:
            raise invalid_member("envelope", f"Invalid envelope: {error}") from None

    async def _registered_origin(self, public_key: str) -> str:
        query = select(col(Server.url)).where(col(Server.public_key) == public_key)
        async with self._database.read() as session:
            url: str | None = (await session.execute(query)).scalar_one_or_none()
        if url is None:
            raise Refusal(404, "No server is registered with this signing key", reason="UNKNOWN_KEY")
        await self._gate.check([url])
        try:
            origin = canonical_origin(url)
            self._guard.check_url(origin)
        except (UrlError, BlockedUrl):
            raise Refusal(400, "Stored server URL is blocked", reason="BLOCKED_URL") from None
        return origin


def _require_match(submitted: SubmittedKeys, claimed: Fingerprints) -> None:
    for member, key, claim in (
        ("publicKeyFingerprint", submitted.public_key, claimed.public_key_fingerprint),
        ("encryptionPublicKeyFingerprint", submitted.encryption_public_key, claimed.encryption_public_key_fingerprint),
    ):
        if fingerprint(decode_key(key, what=member)) != claim:
            raise invalid_member(member, "not the fingerprint of the submitted key")


def _same_keys(submitted: SubmittedKeys, answer: bytes, origin: str) -> bool:
    try:
        shown = parse_discover_document(answer)
    except NotJson:
        raise no_document(origin) from None
    except PayloadError:
        return False
    return (shown.public_key, shown.encryption_public_key) == (submitted.public_key, submitted.encryption_public_key)
