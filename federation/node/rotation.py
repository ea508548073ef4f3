"""A server replaces its keys: it is challenged, and has to show that it holds the old ones and the new.

Theory of operation. Anybody may ask for a challenge in a server's name, so a challenge that was begun with other keys
keeps the owner out for five minutes. With the same keys it is handed out again, which makes a rotation repeatable after
any interruption. Nothing is replaced before all four proofs are there, in the transaction that ends the challenge.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col
from starlette.responses import Response

from db import Database, RotateChallengeToken, Server, one_at_a_time
from federation.node.front import Inbound
from federation.node.inbox import HeardOf
from federation.node.limits import Limit, Windows
from federation.node.refusals import Refusal, invalid_member, json_response
from federation.protocol.encodings import ModelT, parse_model, validate
from federation.protocol.errors import EnvelopeError, KeyMaterialError, NotJson, PayloadError, UrlError
from federation.protocol.keys import KeyRing, decode_key
from federation.protocol.rotation import Challenges, ConfirmRequest, Proofs, RotationRequest
from federation.protocol.sealing import Envelope, open_with_any
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.registry import Registry
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

PER_SERVER: Final = Limit(requests=2, window=timedelta(minutes=1))
CHALLENGE_AGE: Final = timedelta(minutes=5)
ATTEMPTS: Final = 3


class RotationStart:
    """Answers `POST /discover/rotate/init`."""

    def __init__(self, *, keys: KeyRing, database: Database, windows: Windows, clock: Clock | None = None) -> None:
        self._keys = keys
        self._database = database
        self._windows = windows
        self._clock = clock or SystemClock()

    async def __call__(self, inbound: Inbound) -> Response:
        """Give the server a challenge: it has five minutes and three attempts to prove itself.

        Raises:
            Refusal: malformed, too often, not registered, no new keys, taken ones, or another rotation is pending.
        """
        request = _parsed(RotationRequest, inbound)
        origin = _origin("url", request.url)
        if not await self._windows.allows(f"rotate-init:{origin}", PER_SERVER):
            text = f"More than {PER_SERVER.requests} rotations in {PER_SERVER.window.total_seconds():.0f} seconds"
            raise Refusal(429, text, reason="RATE_LIMITED")
        async with self._database.transaction() as session:
            await one_at_a_time(session, "rotation", origin)
            server = await _registered(session, origin)
            await self._require_new(session, server, request)
            challenges = await self._challenge(session, request, origin)
        try:
            body = challenges.to_wire(
                old_key=decode_key(server.encryption_public_key, what="registered encryption key"),
                new_key=decode_key(request.new_encryption_public_key, what="newEncryptionPublicKey"),
            )
        except KeyMaterialError:  # only an earlier version let such a key in
            raise Refusal(409, "The registered encryption key is unusable", reason="KEY_MATERIAL") from None
        return json_response(body)

    async def _require_new(self, session: AsyncSession, server: Server, request: RotationRequest) -> None:
        new = (request.new_signing_public_key, request.new_encryption_public_key)
        if new == (server.public_key, server.encryption_public_key):
            raise Refusal(400, "These keys are already registered", reason="KEYS_ALREADY_REGISTERED")
        if any(new[0] == own.signing.public_text or new[1] == own.encryption.public_text for own in self._keys.pairs()):
            raise _keys_taken()
        query = select(col(Server.id)).where(
            col(Server.url) != server.url,
            (col(Server.public_key) == new[0]) | (col(Server.encryption_public_key) == new[1]),
        )
        if (await session.execute(query)).first() is not None:
            raise _keys_taken()

    async def _challenge(self, session: AsyncSession, request: RotationRequest, origin: str) -> Challenges:
        """Return the pending challenge if it is for these keys, otherwise a new one. Expired ones are deleted."""
        now = self._clock.now()
        over = delete(RotateChallengeToken).where(
            col(RotateChallengeToken.server_url) == origin, col(RotateChallengeToken.expires_at) <= now
        )
        await session.execute(over)
        pending = await _pending(session, origin)
        if pending is not None:
            same = (pending.new_signing_public_key, pending.new_encryption_public_key) == (
                request.new_signing_public_key,
                request.new_encryption_public_key,
            )
            if not same or pending.attempts_left <= 0:
                raise Refusal(409, "A rotation is already pending for this server", reason="ROTATION_PENDING")
            return _challenges(pending)
        token = RotateChallengeToken(
            signing_old_token=str(uuid.uuid4()),
            signing_new_token=str(uuid.uuid4()),
            encryption_old_token=str(uuid.uuid4()),
            encryption_new_token=str(uuid.uuid4()),
            new_signing_public_key=request.new_signing_public_key,
            new_encryption_public_key=request.new_encryption_public_key,
            server_url=origin,
            created_at=now,
            attempts_left=ATTEMPTS,
            expires_at=now + CHALLENGE_AGE,
        )
        session.add(token)
        return _challenges(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Confirmation:
    origin: str
    envelope: Envelope


class RotationConfirm:
    """Answers `POST /discover/rotate/confirm`; *heard* is called with a server whose keys have changed."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        database: Database,
        registry: Registry,
        heard: HeardOf,
        clock: Clock | None = None,
    ) -> None:
        self._keys = keys
        self._database = database
        self._registry = registry
        self._heard = heard
        self._clock = clock or SystemClock()

    async def __call__(self, inbound: Inbound) -> Response:
        """Register the server with its new keys. From now on only these sign for it.

        Raises:
            Refusal: malformed, no challenge is pending, or not everything was proven. The attempt is counted.
        """
        request = _parsed(ConfirmRequest, inbound)
        try:
            envelope = Envelope.from_wire(request.envelope)
        except EnvelopeError as error:
            raise invalid_member("envelope", str(error)) from None
        confirmation = _Confirmation(origin=_origin("serverUrl", request.server_url), envelope=envelope)
        async with self._database.transaction() as session:
            await one_at_a_time(session, "rotation", confirmation.origin)
            refusal = await self._judge(session, confirmation)
        if refusal is not None:  # raised after the commit: the attempt has been counted
            raise refusal
        self._registry.forget(confirmation.origin)
        log.info("server_keys_rotated", server_url=confirmation.origin)
        await self._heard(confirmation.origin)
        return json_response({"message": "The new keys are registered"})

    async def _judge(self, session: AsyncSession, confirmation: _Confirmation) -> Refusal | None:
        token = await _pending(session, confirmation.origin)
        if token is None:
            return Refusal(404, "No rotation is pending for this server", reason="NO_ROTATION")
        if token.expires_at <= self._clock.now():
            await session.delete(token)
            return Refusal(400, "The rotation has expired; begin again", reason="ROTATION_EXPIRED")
        if token.attempts_left <= 0:
            await session.delete(token)
            return Refusal(403, "The rotation was cancelled after too many attempts", reason="ROTATION_CANCELLED")
        proofs = self._open(confirmation.envelope)
        if proofs is None:
            return _counted(token, "The envelope does not open, or holds no proofs.", reason="INVALID_ENVELOPE")
        server = await _find(session, confirmation.origin)
        if server is None:
            return Refusal(404, "This server is not registered", reason="UNKNOWN_SERVER")
        if not _challenges(token).met_by(proofs, old_key=server.public_key, new_key=token.new_signing_public_key):
            return _counted(token, "Not all four proofs are right.", reason="INVALID_PROOFS")
        return await self._replace(session, token)

    def _open(self, envelope: Envelope) -> Proofs | None:
        try:
            return parse_model(Proofs, open_with_any(envelope, self._keys)[0])
        except (EnvelopeError, PayloadError):
            return None

    async def _replace(self, session: AsyncSession, token: RotateChallengeToken) -> Refusal | None:
        now = self._clock.now()
        replaced = (
            update(Server)
            .where(col(Server.url) == token.server_url)
            .values(
                public_key=token.new_signing_public_key,
                encryption_public_key=token.new_encryption_public_key,
                last_seen=now,
                updated_at=now,
            )
        )
        try:
            async with session.begin_nested():
                await session.execute(replaced)
        except IntegrityError:  # registered for another server since the rotation began
            await session.delete(token)
            return _keys_taken()
        await session.delete(token)
        return None


def _parsed(model: type[ModelT], inbound: Inbound) -> ModelT:
    if isinstance(inbound.value, NotJson) or not isinstance(inbound.value, dict):
        raise Refusal(400, "Invalid JSON", code="INVALID_JSON")
    try:
        return validate(model, inbound.value)
    except PayloadError as error:
        raise invalid_member("", str(error)) from None


def _origin(member: str, url: str) -> str:
    try:
        return canonical_origin(url)
    except UrlError as error:
        raise invalid_member(member, str(error)) from None


async def _find(session: AsyncSession, origin: str) -> Server | None:
    server: Server | None = (
        await session.execute(select(Server).where(col(Server.url) == origin).with_for_update())
    ).scalar_one_or_none()
    return server


async def _registered(session: AsyncSession, origin: str) -> Server:
    server = await _find(session, origin)
    if server is None:
        raise Refusal(404, "This server is not registered; POST /discover first", reason="UNKNOWN_SERVER")
    return server


async def _pending(session: AsyncSession, origin: str) -> RotateChallengeToken | None:
    """Return the server's challenge, locked. Another implementation may have left several; then it is the newest."""
    query = (
        select(RotateChallengeToken)
        .where(col(RotateChallengeToken.server_url) == origin)
        .order_by(col(RotateChallengeToken.created_at).desc(), col(RotateChallengeToken.id))
        .limit(1)
        .with_for_update()
    )
    token: RotateChallengeToken | None = (await session.execute(query)).scalar_one_or_none()
    return token


def _challenges(token: RotateChallengeToken) -> Challenges:
    return Challenges(
        signing_old=token.signing_old_token,
        signing_new=token.signing_new_token,
        encryption_old=token.encryption_old_token,
        encryption_new=token.encryption_new_token,
    )


def _counted(token: RotateChallengeToken, problem: str, *, reason: str) -> Refusal:
    token.attempts_left -= 1
    return Refusal(400, f"{problem} You have {token.attempts_left} attempt(s) left.", reason=reason)


def _keys_taken() -> Refusal:
    return Refusal(409, "Another server is registered with one of these keys", reason="KEYS_TAKEN")
