"""Who we are in every world: our name, the actor in whose name activities are signed, and who asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_der_private_key

from federation.activitypub.keys import make_private_key, public_pem

OWN_URL: Final = "https://own.example"
OWN_HOST: Final = "own.example"
ACTOR: Final = f"{OWN_URL}/users/alice"
KEY_ID: Final = f"{ACTOR}#main-key"


@dataclass(slots=True)
class OwnActor:
    """Our actor as others see it: `looks` are those of our own processes at it, with their times of the loop."""

    is_hidden: Callable[[], bool]
    looks: list[tuple[int, float]] = field(default_factory=list)


@cache
def private_key() -> bytes:
    """The actor's key, the same in every world of an operating system's process."""
    return make_private_key(2048)


@cache
def public_key() -> rsa.RSAPublicKey:
    key = load_der_private_key(private_key(), password=None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return key.public_key()


@cache
def actor_document() -> bytes:
    """What others see of the actor."""
    shown = {"id": KEY_ID, "owner": ACTOR, "publicKeyPem": public_pem(private_key())}
    return json.dumps({"id": ACTOR, "type": "Person", "publicKey": shown}).encode()
