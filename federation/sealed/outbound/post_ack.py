"""The acknowledgment of a post: checks that it is what the server should send, for the record only."""

from __future__ import annotations

from typing import Final

from federation.protocol.acks import Ack, PostAck
from federation.protocol.activities import NamedPostActivity
from federation.protocol.errors import EnvelopeError, PayloadError, UrlError
from federation.protocol.keys import KeyRing
from federation.protocol.models import parse_model
from federation.protocol.urls import canonical_origin

NO_KEY: Final = "key"
"""There is nothing to check the acknowledgment with."""


def post_ack_mismatch(ack: Ack, server_url: str, *, payload: str, keys: KeyRing, public_key: str | None) -> str | None:
    """Return what is wrong with the acknowledgment of the post in `payload`, or None if nothing is.

    `data`: it is not sealed to us. `key`: there is no key to check its signature with. `signature`: it is not signed by
    the server. `content`: it acknowledges no post. `post`: it acknowledges another post. `server`: it names another
    server.

    Raises:
        PayloadError: the payload is no post.
    """
    try:
        plaintext = ack.open(keys)
    except EnvelopeError:
        return "data"
    if public_key is None:
        return NO_KEY
    if not ack.is_signed(plaintext, public_key):
        return "signature"
    try:
        content = parse_model(PostAck, plaintext)
    except PayloadError:
        return "content"
    if content.post.federation_post_id != parse_model(NamedPostActivity, payload).post.id:
        return "post"
    return None if _is_name_of(content.federation_url, server_url) else "server"


def _is_name_of(url: str, server_url: str) -> bool:
    """Tell whether both URLs name one server; peers may spell theirs with a slash at the end."""
    try:
        return url == server_url or canonical_origin(url) == canonical_origin(server_url)
    except UrlError:
        return False
