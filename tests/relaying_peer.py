"""A peer that also serves `/proxy`: it relays to the peers it reaches, and takes what is relayed to it."""

from __future__ import annotations

import json

from federation.protocol.acks import ACK_METHOD
from federation.protocol.keys import OwnKeys
from federation.protocol.relaying import RELAY_PATH, ProxyRequest, RelayedRequest, TargetedRequest, targeted_request
from federation.protocol.sealing import Envelope, open_envelope
from tests.federation.protocol.vectors import B
from tests.misbehaving import Canned, Received, respond_with
from tests.peer import Peer, Recipient, json_answer


class Relaying(Recipient):
    """Relays to the nodes in `reaches`, by origin; what it was asked to relay is in `relayed`."""

    def __init__(self, keys: OwnKeys) -> None:
        super().__init__(keys)
        self.reaches: dict[str, Relaying] = {}
        self.relayed: list[ProxyRequest] = []
        self.targeted: list[RelayedRequest] = []

    def proxy(self, request: Received) -> Canned:
        """The answer to a request to `/proxy`."""
        if (answer := self.ping(request)) is not None:
            return answer
        body = json.loads(request.body)
        if body["method"] == "TARGETED":
            return self._take(TargetedRequest.model_validate(body), request)
        return self._relay(ProxyRequest.model_validate(body), request)

    def _relay(self, proxied: ProxyRequest, request: Received) -> Canned:
        sender = self.senders.get(request.headers["x-federation-origin"])
        if sender is None:
            return json_answer({"error": "", "code": "UNKNOWN_FEDERATION_SERVER_INTERACTION"}, 403)
        if (proxied.public_signing_key, proxied.public_encryption_key) != (
            sender.public_key,
            sender.encryption_public_key,
        ):
            return json_answer({"error": "", "code": "INCORRECT_KEYS"}, 403)
        self.relayed.append(proxied)
        failed = {"method": ACK_METHOD, "error": "", "code": "FAILED_TO_PROXY_REQUEST"}
        target = self.reaches.get(proxied.target_url.removesuffix(RELAY_PATH))
        if target is None:
            return json_answer({**failed, "federationError": "DNS_BLOCKED"}, 502)
        passed_on = Received(
            method="POST",
            path=RELAY_PATH,
            headers={"x-federation-origin": self.url},
            body=targeted_request(proxied.payload),
        )
        answer = target.proxy(passed_on)
        if answer.status != 200:
            return json_answer({**failed, "details": json.loads(answer.body)}, 502)
        return json_answer({"method": ACK_METHOD, "payload": json.loads(answer.body)})

    def _take(self, sealed: TargetedRequest, request: Received) -> Canned:
        text = open_envelope(Envelope.from_wire(sealed.payload.to_wire()), self.keys.encryption.secret)
        inner = RelayedRequest.model_validate_json(text)
        self.targeted.append(inner)
        headers = {name.lower(): value for name, value in inner.headers.items()}
        return self.answer(Received(method="POST", path=inner.target_url, headers=headers, body=inner.body.encode()))


class RelayingPeer(Relaying, Peer):
    """One on loopback, under the name *host*."""

    def __init__(self, keys: OwnKeys = B.keys, *, host: str = "127.0.0.1") -> None:
        super().__init__(keys)
        self._host = host
        self.server.routes[RELAY_PATH] = respond_with(self.proxy)

    @property
    def url(self) -> str:
        return self.server.url_for(self._host)
