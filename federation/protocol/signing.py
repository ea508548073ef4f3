"""Detached Ed25519 signatures over the UTF-8 bytes of a text, exactly as it was sealed."""

from __future__ import annotations

from nacl import bindings
from nacl.exceptions import CryptoError

from federation.protocol.base64_text import decode_base64_sized, encode_base64
from federation.protocol.errors import KeyMaterialError
from federation.protocol.json_text import encode_text
from federation.protocol.keys import PUBLIC_KEY_BYTES, SIGNING_SECRET_BYTES

SIGNATURE_BYTES = 64


def sign_message(text: str, secret: bytes) -> str:
    """Sign *text* with *secret*, 64 bytes in NaCl's layout, and return the signature in base64.

    Raises:
        KeyMaterialError: the secret has another size.
        PayloadError: the text has lone surrogates and therefore no UTF-8 form.
    """
    if len(secret) != SIGNING_SECRET_BYTES:
        raise KeyMaterialError([f"signing secret: expected {SIGNING_SECRET_BYTES} bytes, got {len(secret)}"])
    return encode_base64(bindings.crypto_sign(encode_text(text), secret)[:SIGNATURE_BYTES])


def verify_signature(text: str, signature: object, public_key: str | bytes) -> bool:
    """Tell whether *signature* is *public_key*'s over *text*. Malformed values simply do not verify.

    *signature* and a textual key are strict base64; a key in bytes is raw.
    """
    try:
        raw_signature = decode_base64_sized(signature, SIGNATURE_BYTES)
        raw_key = public_key if isinstance(public_key, bytes) else decode_base64_sized(public_key, PUBLIC_KEY_BYTES)
        if len(raw_key) != PUBLIC_KEY_BYTES:  # libsodium would read past the end
            return False
        bindings.crypto_sign_open(raw_signature + encode_text(text), raw_key)
    except (ValueError, CryptoError):
        return False
    return True
