"""Key rotation: how a server asks to have its keys replaced, and proves that it holds the old and the new ones."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import Field, JsonValue

from federation.protocol.discovery import MAX_DISCOVER_BYTES, SealingKeyText, SigningKeyText
from federation.protocol.encodings import ServerUrl, Text, WireModel, dump_json, parse_json, validate
from federation.protocol.errors import PayloadError
from federation.protocol.keys import KeyRing, OwnKeys, sign_message, verify_signature
from federation.protocol.sealing import Envelope, open_envelope, open_with_any, seal

ROTATE_INIT_PATH: Final = "/discover/rotate/init"
ROTATE_CONFIRM_PATH: Final = "/discover/rotate/confirm"

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

ChallengeText = Annotated[str, Field(pattern=rf"^{_UUID.pattern}$", max_length=36)]


class RotationRequest(WireModel):
    """The server `url` asks to be challenged for two new keys."""

    url: ServerUrl
    new_signing_public_key: SigningKeyText
    new_encryption_public_key: SealingKeyText


class ConfirmRequest(WireModel):
    """The proofs of `server_url`, in an envelope. Whether it really is one is checked when it is opened."""

    server_url: ServerUrl
    envelope: JsonValue = None


class Proofs(WireModel):
    """The plaintext of a confirmation's envelope."""

    signing_old_signature: Text
    signing_new_signature: Text
    encryption_old_plaintext: Text
    encryption_new_plaintext: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenges:
    """Four independent texts: two to be signed by the old and the new key, and two to be opened by them."""

    signing_old: str = field(repr=False)
    signing_new: str = field(repr=False)
    encryption_old: str = field(repr=False)
    encryption_new: str = field(repr=False)

    def to_wire(self, *, old_key: bytes, new_key: bytes) -> dict[str, object]:
        """Return the JSON object for the server with these raw encryption keys.

        Raises:
            KeyMaterialError: one of them is unusable.
        """
        return {
            "signingOldChallenge": self.signing_old,
            "signingNewChallenge": self.signing_new,
            "encryptionOldChallenge": seal(self.encryption_old, old_key).to_wire(),
            "encryptionNewChallenge": seal(self.encryption_new, new_key).to_wire(),
        }

    def met_by(self, proofs: Proofs, *, old_key: str, new_key: str) -> bool:
        """Tell whether whoever made *proofs* holds the secrets of both signing keys and could open both envelopes."""
        return all(
            (
                verify_signature(self.signing_old, proofs.signing_old_signature, old_key),
                verify_signature(self.signing_new, proofs.signing_new_signature, new_key),
                _same(self.encryption_old, proofs.encryption_old_plaintext),
                _same(self.encryption_new, proofs.encryption_new_plaintext),
            )
        )


def _same(text: str, other: str) -> bool:
    return hmac.compare_digest(text.encode(), other.encode())


class _ChallengeDocument(WireModel):
    """What a server answers to a `RotationRequest`."""

    signing_old_challenge: ChallengeText
    signing_new_challenge: ChallengeText
    encryption_old_challenge: JsonValue
    encryption_new_challenge: JsonValue


def rotation_request(own_url: str, new: OwnKeys) -> bytes:
    """Return the body that asks for a challenge."""
    body = {
        "url": own_url,
        "newSigningPublicKey": new.signing.public_text,
        "newEncryptionPublicKey": new.encryption.public_text,
    }
    return dump_json(body).encode()


def solved(body: bytes, *, new: OwnKeys, ring: KeyRing) -> Proofs:
    """Return the proofs that the challenges in *body*, a server's answer, ask for.

    The old pair is the one of *ring* that the server sealed to. Nothing but a UUID is signed or given back: a server
    might send an activity as a challenge, or an envelope that others sealed to us.

    Raises:
        ProtocolError: they are no challenges, or not sealed to us.
    """
    document = validate(_ChallengeDocument, parse_json(body, limit=MAX_DISCOVER_BYTES))
    opened, old = open_with_any(Envelope.from_wire(document.encryption_old_challenge), ring)
    renewed = open_envelope(Envelope.from_wire(document.encryption_new_challenge), new.encryption.secret)
    return Proofs(
        signingOldSignature=sign_message(document.signing_old_challenge, old.signing.secret),
        signingNewSignature=sign_message(document.signing_new_challenge, new.signing.secret),
        encryptionOldPlaintext=_challenge(opened),
        encryptionNewPlaintext=_challenge(renewed),
    )


def confirm_request(own_url: str, proofs: Proofs, recipient_key: bytes) -> bytes:
    """Return the body that confirms a rotation to the server with this raw encryption key.

    Raises:
        KeyMaterialError: the key is unusable.
    """
    envelope = seal(dump_json(proofs.model_dump(by_alias=True)), recipient_key)
    return dump_json({"serverUrl": own_url, "envelope": envelope.to_wire()}).encode()


def _challenge(text: str) -> str:
    if not _UUID.fullmatch(text):
        raise PayloadError("challenge: not a UUID")
    return text
