"""Proof of possession: a server proves that it holds the secrets of the keys that it shows.

Theory of operation. A nonce that names both servers is sealed to the shown key and sent as a ping; whoever can open it
sends it back. Only the server that the nonce names first sends it back, so nobody can have another server open it for
him; earlier versions send back every nonce, whoever asks. Opening says nothing about the signing key, so the nonce
comes back signed. Earlier versions do not sign it, and it is not asked of them.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final

from federation.protocol.acks import ACK_METHOD
from federation.protocol.encodings import dump_json, parse_json
from federation.protocol.errors import NotJson, UrlError
from federation.protocol.keys import sign_message, verify_signature
from federation.protocol.relaying import PING, targeted_request
from federation.protocol.sealing import seal
from federation.protocol.urls import canonical_origin

PONG: Final = "pong"
DECRYPT_FAILED: Final = "DECRYPT_FAILED"
"""The code of a server that could not open what was sealed to it."""
MAX_PONG_BYTES: Final = 16 * 1024

_PREFIX: Final = "possession:"
_URL: Final = r"https?://(?:\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+)(?::[0-9]{1,5})?"
_NONCE: Final = re.compile(rf"{_PREFIX}(?P<theirs>{_URL}):{_URL}:[^\s:]{{1,200}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a server has proved about its keys.

    `opened`: whether it can open what is sealed to its encryption key, None if it did not say. `signed`: it signs with
    its signing key.
    """

    opened: bool | None = None
    signed: bool = False


NO_PROOF: Final = Proof()
REFUTED: Final = Proof(opened=False)


def possession_nonce(theirs: str, ours: str) -> str:
    """Return a fresh nonce that only the server at *theirs* sends back, to us."""
    return f"{_PREFIX}{theirs}:{ours}:{secrets.token_hex(16)}"


def asks_for_possession(nonce: object) -> bool:
    """Tell whether a ping's nonce is one that not everybody may have opened."""
    return isinstance(nonce, str) and nonce.startswith(_PREFIX)


def names_first(nonce: str, own_url: str) -> bool:
    """Tell whether a nonce that asks for possession is well-formed, and asks the server at *own_url*."""
    found = _NONCE.fullmatch(nonce)
    try:
        return found is not None and canonical_origin(found["theirs"]) == own_url
    except UrlError:
        return False


def ping_request(nonce: str, recipient_key: bytes) -> bytes:
    """Return the body that asks the server with this raw encryption key to send the nonce back.

    Raises:
        KeyMaterialError: the key is unusable.
    """
    return targeted_request(seal(dump_json({"method": PING, "nonce": nonce}), recipient_key))


def pong(nonce: str, signing_secret: bytes) -> dict[str, object]:
    """Return the answer to a ping that asks us for possession."""
    return {
        "method": ACK_METHOD,
        "status": PONG,
        "nonce": nonce,
        "signature": sign_message(nonce, signing_secret),
    }


def read_pong(body: bytes, *, status: int, nonce: str, public_key: str) -> Proof:
    """Return what an answer to a ping proves; *public_key* is the signing key that the server shows."""
    try:
        answer = parse_json(body, limit=MAX_PONG_BYTES)
    except NotJson:
        return NO_PROOF
    if not isinstance(answer, dict):
        return NO_PROOF
    if status == 400 and answer.get("code") == DECRYPT_FAILED:
        return REFUTED
    if not 200 <= status <= 299 or (answer.get("method"), answer.get("status")) != (ACK_METHOD, PONG):
        return NO_PROOF
    if not _same(answer.get("nonce"), nonce):
        return REFUTED
    signature = answer.get("signature")
    if signature is None:
        return Proof(opened=True)
    return Proof(opened=True, signed=True) if verify_signature(nonce, signature, public_key) else REFUTED


def _same(answer: object, nonce: str) -> bool:
    return isinstance(answer, str) and hmac.compare_digest(answer.encode("utf-8", "replace"), nonce.encode())
