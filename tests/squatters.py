"""Servers that show keys of which they do not hold the secrets."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from federation.protocol.keys import OwnKeys, generate_own_keys
from tests.misbehaving import Canned, Received
from tests.peer import Peer, Pings, json_answer


class Pretence(Enum):
    """What a squatter does when it is asked to prove the keys it shows."""

    KNOWS_NO_PING = auto()
    """It seems to be a server that knows none."""
    HANDS_ON = auto()
    """It has the victim open what it cannot."""
    CANNOT = auto()
    """It says that it cannot open the ping."""


class Squatter(Peer):
    """Shows the victim's keys, or those of them that it is told to; holds others."""

    def __init__(self, victim: Peer, *, signing: bool = True, encryption: bool = True) -> None:
        own = generate_own_keys()
        self.shown = OwnKeys(
            signing=victim.keys.signing if signing else own.signing,
            encryption=victim.keys.encryption if encryption else own.encryption,
        )
        super().__init__(replace(own, encryption=self.shown.encryption) if not encryption else own)
        self.victim = victim
        self.pings = Pings.OPENS_ALL  # whoever signs shows that it is not its key
        self.pretence = Pretence.KNOWS_NO_PING

    def document(self) -> dict[str, object]:
        shown = {"publicKey": self.shown.signing.public_text, "encryptionPublicKey": self.shown.encryption.public_text}
        return {**super().document(), **shown}

    def ping(self, request: Received) -> Canned | None:
        if self.shown.encryption == self.keys.encryption:
            return super().ping(request)
        if request.path != "/proxy":
            return None
        self.pinged.append(request)
        match self.pretence:
            case Pretence.HANDS_ON:
                return self.victim.ping(replace(request, headers={"x-federation-origin": self.url}))
            case Pretence.CANNOT:
                return json_answer({"error": "", "code": "DECRYPT_FAILED"}, 400)
        return json_answer({}, 404)
