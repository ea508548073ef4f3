"""Known answers, agreed by tweetnacl, node:crypto and PyNaCl: two servers' keys and three sealed, signed texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from federation.protocol.keys import OwnKeys

_DATA = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One of the two servers: its environment and fingerprints."""

    env: dict[str, str]
    signing_fingerprint: str
    encryption_fingerprint: str

    @property
    def keys(self) -> OwnKeys:
        return own_keys(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One text on its way from *sender* to *recipient*, with every intermediate value in hex."""

    name: str
    sender: Server
    recipient: Server
    plaintext: str
    sha256: str
    ephemeral_secret: str
    point: str
    shared: str
    aes: str
    signature: str
    envelope: dict[str, str]


def own_keys(env: dict[str, str]) -> OwnKeys:
    return OwnKeys.from_base64(
        signing_public=env["FEDERATION_PUBLIC_KEY"],
        signing_secret=env["FEDERATION_PRIVATE_KEY"],
        encryption_public=env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
        encryption_secret=env["FEDERATION_ENCRYPTION_PRIVATE_KEY"],
    )


def _server(data: dict[str, str]) -> Server:
    return Server(
        env={name: value for name, value in data.items() if name.startswith("FEDERATION_")},
        signing_fingerprint=data["signingFingerprint"],
        encryption_fingerprint=data["encryptionFingerprint"],
    )


SERVERS = {name: _server(data) for name, data in _DATA["servers"].items()}
A, B = SERVERS["A"], SERVERS["B"]

MESSAGES = {
    name: Message(name=name, **{**data, "sender": SERVERS[data["sender"]], "recipient": SERVERS[data["recipient"]]})
    for name, data in _DATA["messages"].items()
}
FOLLOW, POST, FOLLOW_ACK = MESSAGES["follow"], MESSAGES["post"], MESSAGES["follow_ack"]
