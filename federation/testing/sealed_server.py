"""A remote server of the sealed wire: it introduces itself, opens what is sealed to it, and acknowledges it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from db import new_id
from federation.protocol.acks import ack_response, follow_ack, post_ack
from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers, follow_activity
from federation.protocol.discovery import own_document, register_request
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import OwnKeys, generate_own_keys, sign_message, verify_signature
from federation.protocol.possession import DECRYPT_FAILED, names_first, pong
from federation.protocol.relaying import PING, RELAY_PATH, TARGETED
from federation.protocol.sealing import Envelope, open_envelope, seal
from federation.sealed.outbound.activities import FOLLOWS_PATH, POSTS_PATH
from federation.testing.door import NotTaken, ask_node
from federation.testing.loopback import RemoteAnswer, RemoteRequest, Trouble
from federation.testing.node import LocalNode
from federation.testing.server import LocalServer, status_of

DISCOVER_PATH: Final = "/discover"
FOLLOWER: Final = "bob"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedArrival:
    """What was sent to a remote server by the sealed wire.

    `activity` is what was sealed; empty if it could not be opened. `refused` says why the server does not believe it,
    and is None if it does. `status` is that of its answer, None if it gave none.
    """

    method: str
    activity: Mapping[str, Any]
    refused: str | None
    status: int | None

    @property
    def is_taken(self) -> bool:
        """Whether it was believed, and acknowledged."""
        return self.refused is None and self.status == 200


class SealedServer(LocalServer):
    """What a `FakeSealedRemote` is, but for what waits."""

    def __init__(self, node: LocalNode) -> None:
        super().__init__(node)
        self.requests: list[SealedArrival] = []
        """All that was sent to it, also what it did not believe or take."""
        self.accepts_follows: bool = True
        """Whether its users accept who wants to follow them; if not, a follow is acknowledged, and waits."""
        self._keys = generate_own_keys()
        self._is_introduced = False

    @property
    def received(self) -> list[SealedArrival]:
        """What it has taken, in the order of its arrival."""
        return [each for each in self.requests if each.is_taken]

    async def _introduce(self) -> None:
        """Ask the node to register this server, which it does once it has seen that the keys are its own."""
        if not self._is_introduced:
            headers = {"Content-Type": "application/json", "Origin": self.url}
            await self._post(DISCOVER_PATH, headers, register_request(url=self.url, keys=self._keys))
            self._is_introduced = True

    async def _follow(self, followed: str, by: str) -> None:
        """Have a user of this server follow one of the node's."""
        text = follow_activity(
            federation_url=self.url,
            follow_id=new_id(),
            created_at=self._node.clock.now(),
            follower_id=by,
            following_id=followed,
            follower_server_url=self._node.url,
        )
        await self._send(ActivityMethod.FEDERATE, FOLLOWS_PATH, text)

    async def _send(self, method: ActivityMethod, path: str, text: str) -> None:
        """Seal a text to the node, sign it, and post it."""
        await self._introduce()
        keys = self._keys_of_node
        request = DeliveryRequest(
            method=method,
            payload=seal(text, keys.encryption.public),
            signature=sign_message(text, self._keys.signing.secret),
        )
        headers = delivery_headers(own_url=self.url, target_url=self._node.url + path)
        await self._post(path, headers, request.to_bytes())

    async def _post(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        answer = await ask_node(self._node.engine.node, target=path, headers=headers, body=body)
        if not 200 <= answer.status <= 299:
            raise NotTaken(answer.status, answer.body.decode(errors="replace")[:500])

    @property
    def _keys_of_node(self) -> OwnKeys:
        keys = self._node.settings.own_keys()
        assert keys is not None, "a node under test has keys"
        return keys

    async def _respond(self, request: RemoteRequest) -> RemoteAnswer | Trouble:
        match request.method, request.path:
            case "GET", "/discover":
                return _json(self._document())
            case "POST", "/discover":
                return _json({"message": "Server registered", "echo": self._document()})
            case "POST", path if path == RELAY_PATH:
                return self._proved(request)
            case "POST", path if path in (FOLLOWS_PATH, POSTS_PATH):
                return self._delivered(request)
        return _json({"error": "Not found"}, 404)

    def _document(self) -> dict[str, object]:
        return {**own_document(self.url, self._keys), "peers": []}

    def _proved(self, request: RemoteRequest) -> RemoteAnswer:
        """Prove to the node that the keys are this server's: it asks by a ping, which only their owner can open."""
        body = json.loads(request.body)
        if body.get("method") != TARGETED:
            return _json({"error": "This server relays nothing", "code": "NO_RELAY"}, 404)
        try:
            content = json.loads(self._opened(body.get("payload")))
        except ProtocolError:
            return _json({"error": "", "code": DECRYPT_FAILED}, 400)
        nonce = str(content.get("nonce"))
        if content.get("method") != PING or not names_first(nonce, self.url):
            return _json({"error": "", "code": "INVALID_TARGETED_DATA"}, 400)
        return _json(pong(nonce, self._keys.signing.secret))

    def _opened(self, payload: object) -> str:
        return open_envelope(Envelope.from_wire(payload), self._keys.encryption.secret)

    def _delivered(self, request: RemoteRequest) -> RemoteAnswer | Trouble:
        """Read a delivery, and acknowledge it."""
        delivery, text, refused = self._read(request)
        activity = json.loads(text) if text else {}
        usual = _json({"error": refused, "code": "INVALID_SIGNATURE"}, 403) if refused else self._acknowledged(activity)
        answer = self._told_or(usual)
        method = "" if delivery is None else delivery.method
        self.requests.append(SealedArrival(method=method, activity=activity, refused=refused, status=status_of(answer)))
        return answer

    def _read(self, request: RemoteRequest) -> tuple[DeliveryRequest | None, str, str | None]:
        delivery = None
        try:
            delivery = DeliveryRequest.from_wire(json.loads(request.body))
            text = self._opened(delivery.payload.to_wire())
        except (ProtocolError, ValueError) as error:
            return delivery, "", str(error) or type(error).__name__
        is_signed = verify_signature(text, delivery.signature, self._keys_of_node.signing.public_text)
        return delivery, text, None if is_signed else "it is not signed by the node's key"

    def _acknowledged(self, activity: Mapping[str, Any]) -> RemoteAnswer:
        accepted = None
        if "post" in activity:
            post_id = str(activity["post"]["id"])
            text = post_ack(own_url=self.url, post_id=f"copy-of-{post_id}", federation_post_id=post_id)
        else:
            following, accepted = activity["following"], self.accepts_follows
            text = follow_ack(
                sender_url=self._node.url,
                follow_id=new_id(),
                created_at=self._node.clock.now() - timedelta(seconds=1),
                follower_id=following["followerId"],
                following_id=following["followingId"],
                accepted=accepted,
            )
        made = ack_response(
            text,
            recipient_key=self._keys_of_node.encryption.public,
            signing_secret=self._keys.signing.secret,
            accepted=accepted,
        )
        return _json(made)


def _json(value: Mapping[str, object], status: int = 200) -> RemoteAnswer:
    return RemoteAnswer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())
