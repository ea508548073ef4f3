"""Another server with an actor, over a real socket: it shows a key, and signs what it sends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_der_private_key

from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.keys import make_private_key, public_pem
from federation.activitypub.signatures import SignatureKind, SigningKey, sign
from tests.misbehaving import Behaviour, MisbehavingServer, respond

BOB: Final = "/users/bob"


@cache
def private_key(number: int = 0) -> bytes:
    """The same for all tests: one takes its time to make."""
    return make_private_key(2048)


@cache
def loaded(key: bytes) -> rsa.RSAPrivateKey:
    """Return the key itself, which takes longer to check than to use."""
    private = load_der_private_key(key, password=None)
    assert isinstance(private, rsa.RSAPrivateKey)
    return private


def shows(document: object, kind: str = ACTIVITY_JSON) -> Behaviour:
    """Shows this JSON."""
    return respond(headers={"Content-Type": kind}, body=json.dumps(document).encode())


@dataclass(slots=True)
class RemoteActor:
    """An actor at *server*, whose document is there unless a test puts another in its place."""

    server: MisbehavingServer
    path: str = BOB
    key: bytes = field(default_factory=private_key, repr=False)

    def __post_init__(self) -> None:
        self.server.routes[self.path] = shows(self.document())

    @property
    def id(self) -> str:
        return self.server.url + self.path

    @property
    def key_id(self) -> str:
        return f"{self.id}#main-key"

    def shown_key(self, **members: object) -> dict[str, object]:
        return {"id": self.key_id, "owner": self.id, "publicKeyPem": public_pem(self.key), **members}

    def document(self, **members: object) -> dict[str, object]:
        return {"id": self.id, "type": "Person", "publicKey": self.shown_key(), **members}

    def activity(self, number: int = 1, **members: object) -> dict[str, Any]:
        return {"id": f"{self.id}/{number}", "type": "Create", "actor": self.id, "object": {"type": "Note"}, **members}

    def signed(
        self,
        url: str,
        body: bytes,
        at: datetime,
        *,
        kind: SignatureKind = SignatureKind.CAVAGE,
        key_id: str | None = None,
        content_type: str = ACTIVITY_JSON,
    ) -> dict[str, str]:
        """The headers of a POST of *body* to *url*."""
        key = SigningKey(key_id or self.key_id, loaded(self.key))
        return sign(kind, method="POST", url=url, body=body, content_type=content_type, at=at, key=key)
