"""`DISCOVER`: a server asks whether we hold the keys it has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue
from sqlalchemy import select
from sqlmodel import col
from starlette.responses import Response

from db import Database, Server
from federation.http.errors import BlockedUrl
from federation.http.guard import AddressGuard
from federation.node.blacklist import BlacklistGate
from federation.node.callback import Callback, no_document
from federation.node.refusals import Refusal, invalid_member, json_response
from federation.protocol.discovery import SealingKeyText, SigningKeyText, parse_discover_document
from federation.protocol.errors import EnvelopeError, NotJson, PayloadError, UrlError
from federation.protocol.keys import KeyRing, decode_key, fingerprint
from federation.protocol.models import Text, WireModel, parse_model, validate
from federation.protocol.sealing import Envelope, open_with_any
from federation.protocol.urls import canonical_origin


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

    async def __call__(self, request: object) -> Response:
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
        same = _same_keys(submitted, await self._callback(origin), origin)
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
