"""A peer node on loopback: opens and verifies what it is sent, applies each activity once, answers with signed acks.

It refuses what is no post, as our node does.

    async with Peer() as peer:
        await acquaint(federation, peer)           # both know the other's keys, without discovery
        peer.render = inline                       # another shape of acknowledgment
        peer.server.upcoming += [respond(500)]     # or none: the next requests misbehave, see `misbehaving`
        peer.server.upcoming += [peer.after_applying(hang())]

Without `acquaint` the peer learns a sender's keys from its REGISTER, as a stranger would. Pings of servers it knows it
answers as `pings` says, beside the script: they are in `pinged`, and not among the server's requests.
"""

from __future__ import annotations

import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from types import TracebackType
from typing import Self

from db import User, create_host_tables
from federation.protocol.acks import ACK_METHOD, ack_response, follow_ack, post_ack
from federation.protocol.activities import ActivityMethod, DeliveryRequest, PostActivity
from federation.protocol.encodings import parse_model
from federation.protocol.errors import EnvelopeError, PayloadError
from federation.protocol.keys import OwnKeys, decode_key, sign_message, verify_signature
from federation.protocol.possession import DECRYPT_FAILED, PONG, names_first, pong
from federation.protocol.relaying import PING, RELAY_PATH, TARGETED
from federation.protocol.sealing import Envelope, open_envelope, seal
from federation.runtime.composition import Federation
from tests.federation.protocol.vectors import A, B
from tests.misbehaving import Behaviour, Canned, Exchange, MisbehavingServer, Received, respond_with

DISCOVER_PATH = "/discover"
FOLLOWS_PATH = "/api/auth/social/follows"
POSTS_PATH = "/api/auth/social/posts"

NO_POST = "no post"
UNKNOWN_SENDER = "unknown sender"
BAD_SIGNATURE = "bad signature"
ANOTHER_KEY = "sealed to another key"
_CODES = {
    NO_POST: "INVALID_FEDERATED_POST_PAYLOAD",
    UNKNOWN_SENDER: "UNKNOWN_FEDERATION_SERVER_INTERACTION",
    BAD_SIGNATURE: "INVALID_SIGNATURE",
    ANOTHER_KEY: "INVALID_SIGNATURE",
}


class Pings(Enum):
    """What a node does with pings."""

    PROVES = auto()
    """It sends nonces back that name it, signed."""
    OPENS_ALL = auto()
    """It sends back every nonce, as nodes of earlier versions do."""
    UNKNOWN = auto()
    """It knows no pings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """A server the peer knows."""

    public_key: str
    encryption_public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """One delivery as the peer read it."""

    sender: str
    method: ActivityMethod
    activity_id: str
    plaintext: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An acknowledgment not yet rendered; `plaintext` is what `ack` seals and signs."""

    plaintext: str
    keys: OwnKeys
    recipient_key: bytes
    accepted: bool | None

    def ack(
        self, *, plaintext: str | None = None, recipient_key: bytes | None = None, signing_secret: bytes | None = None
    ) -> dict[str, object]:
        """The acknowledgment object; each argument replaces what an honest peer would use."""
        text = self.plaintext if plaintext is None else plaintext
        return {
            "method": ACK_METHOD,
            "status": "acknowledged",
            "data": seal(text, recipient_key or self.recipient_key).to_wire(),
            "signature": sign_message(text, signing_secret or self.keys.signing.secret),
        }


Render = Callable[[Answer], Canned]


def json_answer(value: object, status: int = 200) -> Canned:
    return Canned(status=status, headers={"Content-Type": "application/json"}, body=json.dumps(value).encode())


def both(answer: Answer) -> Canned:
    """The shape every release reads."""
    return json_answer(
        ack_response(
            answer.plaintext,
            recipient_key=answer.recipient_key,
            signing_secret=answer.keys.signing.secret,
            accepted=answer.accepted,
        )
    )


def nested(answer: Answer) -> Canned:
    return json_answer({"method": ACK_METHOD, "payload": answer.ack()})


def inline(answer: Answer) -> Canned:
    return json_answer(answer.ack())


def original(answer: Answer) -> Canned:
    """As the first implementation: a post's acknowledgment is signed, a follow's is not."""
    if answer.accepted is None:
        return inline(answer)
    return json_answer({"status": "acknowledged", "accepted": answer.accepted})


class Recipient(ABC):
    """What a node does with what it is sent, whatever carries it. `private_users` are acknowledged, not accepted.

    `arrived` has every verified delivery in order; `applied` the distinct ones; what did not verify is in `refused`.
    """

    def __init__(self, keys: OwnKeys, *, private_users: frozenset[str] = frozenset()) -> None:
        self.keys = keys
        self.private_users = private_users
        self.render: Render = both
        self.pings = Pings.PROVES
        self.pinged: list[Received] = []
        self.senders: dict[str, Sender] = {}
        self.arrived: list[Arrived] = []
        self.refused: list[str] = []
        self._applied: dict[tuple[str, str], Arrived] = {}

    @property
    @abstractmethod
    def url(self) -> str:
        """How senders know the node."""

    @property
    def applied(self) -> list[Arrived]:
        """Each activity once, in the order of its first arrival."""
        return list(self._applied.values())

    @property
    def replayed(self) -> int:
        """How many deliveries were repeats."""
        return len(self.arrived) - len(self._applied)

    def document(self) -> dict[str, object]:
        """What `GET /discover` answers."""
        return {
            "url": self.url,
            "publicKey": self.keys.signing.public_text,
            "encryptionPublicKey": self.keys.encryption.public_text,
            "peers": [],
        }

    def answer(self, request: Received) -> Canned:
        """Apply a delivery and acknowledge it in the shape of `render`."""
        arrived = self._read(request)
        if arrived is None:
            why = self.refused[-1]
            return json_answer({"error": why, "code": _CODES[why]}, status=400 if why == NO_POST else 403)
        self.arrived.append(arrived)
        self._applied.setdefault((arrived.sender, arrived.activity_id), arrived)
        return self.render(self._acknowledge(arrived))

    def discover(self, request: Received) -> Canned:
        if request.method == "GET":
            return json_answer(self.document())
        body = json.loads(request.body)
        self.senders[body["url"]] = Sender(
            public_key=body["publicKey"], encryption_public_key=body["encryptionPublicKey"]
        )
        return json_answer({"message": "Server registered", "echo": self.document()})

    def ping(self, request: Received) -> Canned | None:
        """The answer to a ping; None if the request is something else."""
        body = json.loads(request.body) if request.path == RELAY_PATH else {}
        if body.get("method") != TARGETED:
            return None
        try:
            text = open_envelope(Envelope.from_wire(body["payload"]), self.keys.encryption.secret)
        except EnvelopeError:
            return json_answer({"error": "", "code": DECRYPT_FAILED}, 400)
        content = json.loads(text)
        if content.get("method") != PING:
            return None
        self.pinged.append(request)
        return self._pong(request.headers["x-federation-origin"], content["nonce"])

    def _pong(self, bearer: str, nonce: str) -> Canned:
        if self.pings is Pings.UNKNOWN:
            return json_answer({}, 404)
        if bearer not in self.senders:
            return json_answer({"error": "", "code": _CODES[UNKNOWN_SENDER]}, 403)
        if self.pings is Pings.OPENS_ALL:
            return json_answer({"method": ACK_METHOD, "status": PONG, "nonce": nonce})
        if not names_first(nonce, self.url):
            return json_answer({"error": "", "code": "INVALID_TARGETED_DATA"}, 400)
        return json_answer(pong(nonce, self.keys.signing.secret))

    def _read(self, request: Received) -> Arrived | None:
        delivery = DeliveryRequest.from_wire(json.loads(request.body))
        try:
            plaintext = open_envelope(delivery.payload, self.keys.encryption.secret)
        except EnvelopeError:
            self.refused.append(ANOTHER_KEY)
            return None
        if delivery.method is ActivityMethod.FEDERATE_POST and not _is_post(plaintext):
            self.refused.append(NO_POST)
            return None
        activity = json.loads(plaintext)
        sender = self.senders.get(activity["federationUrl"])
        if sender is None:
            self.refused.append(UNKNOWN_SENDER)
        elif not verify_signature(plaintext, delivery.signature, sender.public_key):
            self.refused.append(BAD_SIGNATURE)
        else:
            return Arrived(
                sender=activity["federationUrl"],
                method=delivery.method,
                activity_id=_activity_id(activity),
                plaintext=plaintext,
            )
        return None

    def _acknowledge(self, arrived: Arrived) -> Answer:
        activity = json.loads(arrived.plaintext)
        accepted = None
        if "post" in activity:
            plaintext = post_ack(
                own_url=self.url, post_id=f"copy-of-{arrived.activity_id}", federation_post_id=arrived.activity_id
            )
        else:
            following = activity["following"]
            accepted = following["followingId"] not in self.private_users
            plaintext = follow_ack(
                sender_url=arrived.sender,
                follow_id=f"copy-of-{arrived.activity_id}",
                created_at=datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC),
                follower_id=following["followerId"],
                following_id=following["followingId"],
                accepted=accepted,
            )
        return Answer(
            plaintext=plaintext,
            keys=self.keys,
            recipient_key=decode_key(self.senders[arrived.sender].encryption_public_key, what="sender's key"),
            accepted=accepted,
        )


class Peer(Recipient):
    """A node on loopback, vector B's by default."""

    def __init__(
        self,
        keys: OwnKeys = B.keys,
        *,
        private_users: frozenset[str] = frozenset(),
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(keys, private_users=private_users)
        self.server = MisbehavingServer(ssl_context)
        self.server.routes[DISCOVER_PATH] = respond_with(self.discover)
        self.server.default = respond_with(self.answer)
        self.server.unscripted = self._unscripted

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def deliveries(self) -> list[Received]:
        """The delivery requests as they arrived, misbehaved ones included."""
        return [request for request in self.server.requests if request.path != DISCOVER_PATH]

    @property
    def discoveries(self) -> list[str]:
        """What was asked of `/discover`: `GET`, or the `method` of a POST."""
        return [_discovery_kind(request) for request in self.server.requests if request.path == DISCOVER_PATH]

    def after_applying(self, behaviour: Behaviour) -> Behaviour:
        """The delivery is applied, and then the answer goes wrong in this way."""

        async def behave(request: Received, exchange: Exchange) -> None:
            self.answer(request)
            await behaviour(request, exchange)

        return behave

    def _unscripted(self, request: Received) -> Behaviour | None:
        answer = self.ping(request)
        return None if answer is None else respond_with(lambda _: answer)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.stop()


class OriginalPeer(Peer):
    """Answers as the first implementation does: `original`, no post twice, and no unfollow at all."""

    def __init__(self) -> None:
        super().__init__()
        self.render = original

    def answer(self, request: Received) -> Canned:
        method = json.loads(request.body)["method"]
        if method == ActivityMethod.UNFOLLOW:
            return json_answer({"message": "[body.userId] Invalid input", "code": "VALIDATION_ERROR"}, status=400)
        stored = len(self._applied)
        answer = super().answer(request)
        if method == ActivityMethod.FEDERATE_POST and answer.status == 200 and len(self._applied) == stored:
            return json_answer({"error": "Post already exists", "code": "FEDERATED_POST_ALREADY_EXISTS"}, status=409)
        return answer


async def acquaint(federation: Federation, peer: Peer) -> None:
    """The peer is registered with the node, and the node with the peer."""
    await federation.registry.register(
        url=peer.url,
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )
    introduce(peer, federation.own_url or "https://a.example")


async def settle(federation: Federation, *users: str) -> None:
    """The node has the host's tables, and these users."""
    async with federation.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        for user in users:
            await session.merge(User(id=user))


def introduce(peer: Peer, url: str, keys: OwnKeys = A.keys) -> None:
    """The peer knows the server at `url`, which uses vector A's keys by default."""
    peer.senders[url] = Sender(public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text)


def _is_post(plaintext: str) -> bool:
    """Whether a node of ours would take it."""
    try:
        parse_model(PostActivity, plaintext)
    except PayloadError:
        return False
    return True


def _activity_id(activity: Mapping[str, Mapping[str, str]]) -> str:
    if "post" in activity:
        return activity["post"]["id"]
    following = activity["following"]
    return following.get("id") or f"{following['followerId']}->{following['followingId']}"


def _discovery_kind(request: Received) -> str:
    return "GET" if request.method == "GET" else str(json.loads(request.body)["method"])
