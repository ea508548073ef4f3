"""A remote server of the fediverse: it shows its actors, verifies what it is sent, and signs what it sends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_der_private_key

from db import new_timed_id
from federation.activitypub.activities import follow
from federation.activitypub.documents import ACTIVITY_CONTEXT, ACTIVITY_JSON, JRD, WEBFINGER_PATH, webfinger
from federation.activitypub.inbox import is_inbox
from federation.activitypub.key_documents import KeyRefused, public_key, read_document, shown_by_owner
from federation.activitypub.keys import make_private_key, public_pem
from federation.activitypub.outbound import Recipient
from federation.activitypub.signature_fields import BadSignature
from federation.activitypub.signatures import SignatureKind, SigningKey, claims_in, sign, verify
from federation.protocol.urls import canonical_origin
from federation.testing.door import NotTaken, ask
from federation.testing.loopback import RemoteAnswer, RemoteRequest, Trouble
from federation.testing.node import LocalNode
from federation.testing.server import LocalServer, status_of

BOB: Final = "bob"
"""Who acts at a remote server where a test names nobody."""
WINDOW: Final = timedelta(hours=1)
KEY_BITS: Final = 2048


@dataclass(frozen=True, slots=True)
class RemoteActor:
    """An actor of a remote server."""

    server_url: str
    name: str

    @property
    def id(self) -> str:
        """Its URL."""
        return f"{self.server_url}/users/{self.name}"

    @property
    def inbox(self) -> str:
        return f"{self.id}/inbox"

    @property
    def recipient(self) -> Recipient:
        """What `activitypub.send` takes."""
        return Recipient(id=self.id, inbox=self.inbox, shared_inbox=f"{self.server_url}/inbox")

    def document(self) -> dict[str, Any]:
        """Return what the server shows of it, with its key."""
        key = {"id": f"{self.id}#main-key", "owner": self.id, "publicKeyPem": public_pem(_private_key())}
        return {
            "@context": [ACTIVITY_CONTEXT, "https://w3id.org/security/v1"],
            "id": self.id,
            "type": "Person",
            "preferredUsername": self.name,
            "inbox": self.inbox,
            "outbox": f"{self.id}/outbox",
            "endpoints": {"sharedInbox": f"{self.server_url}/inbox"},
            "publicKey": key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What was posted to an inbox of a remote server.

    `refused` says why the server does not believe it, and is None if it does. `status` is that of its answer, None if
    it gave none.
    """

    inbox: str
    activity: Mapping[str, Any]
    signature: SignatureKind | None
    refused: str | None
    status: int | None

    @property
    def type(self) -> str:
        return str(self.activity.get("type"))

    @property
    def actor(self) -> str:
        return str(self.activity.get("actor"))

    @property
    def is_taken(self) -> bool:
        """Whether it was believed, and the sender was told so."""
        return self.refused is None and self.status is not None and 200 <= self.status <= 299


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """A signed POST to an inbox of the node, for a test that sends it by the client of its framework."""

    url: str
    headers: Mapping[str, str]
    content: bytes = field(repr=False)

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


class ActivityServer(LocalServer):
    """What a `FakeRemote` is, but for what waits."""

    def __init__(self, node: LocalNode) -> None:
        super().__init__(node)
        self.requests: list[Arrival] = []
        """All that was posted to its inboxes, also what it did not believe or take."""
        self._refused: set[SignatureKind] = set()
        self._actors: dict[str, RemoteActor] = {}

    @property
    def received(self) -> list[Arrival]:
        """The activities that it has taken, in the order of their arrival."""
        return [each for each in self.requests if each.is_taken]

    def actor(self, name: str = BOB) -> RemoteActor:
        """Return the actor of this name, which the server shows from now on."""
        return self._actors.setdefault(name, RemoteActor(self.url, name))

    def refuses(self, *kinds: SignatureKind | str) -> None:
        """Answer 401 to signatures of these kinds from now on: `cavage` or `rfc9421`; without any, to none."""
        self._refused = {SignatureKind(kind) for kind in kinds}

    def signed(
        self,
        activity: Mapping[str, Any],
        *,
        by: RemoteActor | None = None,
        inbox: str | None = None,
        signature: SignatureKind | str = SignatureKind.CAVAGE,
    ) -> SignedRequest:
        """Return the request by which `send` posts an activity."""
        signer = by or self.actor()
        made = {
            "@context": ACTIVITY_CONTEXT,
            "id": f"{signer.id}/activities/{new_timed_id()}",
            "actor": signer.id,
            **activity,
        }
        url, body = inbox or f"{self._node.url}/inbox", json.dumps(made).encode()
        key = SigningKey(f"{signer.id}#main-key", _loaded_key())
        headers = sign(
            SignatureKind(signature),
            method="POST",
            url=url,
            body=body,
            content_type=ACTIVITY_JSON,
            at=self._node.clock.now(),
            key=key,
        )
        return SignedRequest(url=url, headers=headers, content=body)

    async def _send(self, request: SignedRequest) -> None:
        target = request.url.removeprefix(self._node.url)
        answer = await self._ask("POST", target, request.headers, request.content)
        if answer.status != 202:
            raise NotTaken(answer.status, answer.body.decode(errors="replace")[:500])

    def _follow(self, followed: str, by: RemoteActor | None) -> SignedRequest:
        follower = by or self.actor()
        following = follow(follower.id, followed, activity_id=f"{follower.id}/follows/{new_timed_id()}")
        return self.signed(following, by=follower)

    async def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> RemoteAnswer:
        node = self._node.engine.node
        return await ask(node, self._node.app, method=method, target=target, headers=headers, body=body)

    async def _respond(self, request: RemoteRequest) -> RemoteAnswer | Trouble:
        if not is_inbox(request.method, request.path):
            return self._shown(request)
        if request.path not in ("/inbox", *(urlsplit(actor.inbox).path for actor in self._actors.values())):
            return RemoteAnswer(404)
        refused = await self._refusal(request)
        answer = self._told_or(RemoteAnswer(202) if refused is None else RemoteAnswer(401, {}, refused.encode()))
        received = Arrival(
            inbox=self.url + request.path,
            activity=_activity(request.body),
            signature=_kind(request),
            refused=refused,
            status=status_of(answer),
        )
        self.requests.append(received)
        return answer

    def _shown(self, request: RemoteRequest) -> RemoteAnswer:
        """Show an actor, or where it is."""
        if request.path == WEBFINGER_PATH:
            asked = parse_qs(urlsplit(request.target).query).get("resource", [""])[0]
            name = asked.removeprefix("acct:").partition("@")[0]
            found = self._actors.get(name)
            return RemoteAnswer(404) if found is None else _json(JRD, webfinger(asked, found.id))
        shown = next((each for each in self._actors.values() if each.id == self.url + request.path), None)
        return RemoteAnswer(404) if shown is None else _json(ACTIVITY_JSON, shown.document())

    async def _refusal(self, request: RemoteRequest) -> str | None:
        """Return why the request is not believed; None if it is."""
        try:
            claim = claims_in(request.headers)[0]
            if claim.kind in self._refused:
                return f"signatures by {claim.kind} are refused, as the test wants it"
            url = claim.key_id.partition("#")[0]
            if canonical_origin(url) != self._node.url:
                return "the key is not one of the node's"
            verify(
                method=request.method,
                url=self.url + request.target,
                headers=request.headers,
                body=request.body,
                public=public_key(await self._pem(url, claim.key_id)),
                now=self._node.clock.now(),
                window=WINDOW,
            )
        except (BadSignature, KeyRefused, ValueError) as error:
            return str(error)
        return None if _activity(request.body).get("actor") == url else "the actor is not the owner of the key"

    async def _pem(self, url: str, key_id: str) -> str:
        """Return a key of the node's, as its owner's document shows it to everybody."""
        answer = await self._ask("GET", url.removeprefix(self._node.url), {"Accept": ACTIVITY_JSON})
        if answer.status != 200:
            advice = "does the application serve its actors, by `activitypub.asgi` or `respond`?"
            raise KeyRefused(f"{url} is answered with {answer.status}: {advice}")
        shown = shown_by_owner(read_document(answer.body), {url}, key_id, now=self._node.clock.now())
        if shown is None:
            raise KeyRefused(f"the document of {url} does not show the key {key_id}")
        return shown.pem


def _activity(body: bytes) -> Mapping[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise TypeError("the node has posted what is no activity")
    return found


def _kind(request: RemoteRequest) -> SignatureKind | None:
    try:
        return claims_in(request.headers)[0].kind
    except BadSignature:
        return None


def _json(kind: str, document: Mapping[str, object]) -> RemoteAnswer:
    return RemoteAnswer(200, {"Content-Type": kind}, json.dumps(document).encode())


@cache
def _private_key() -> bytes:
    """Return the key of all remote actors of this process: to make one takes its time."""
    return make_private_key(KEY_BITS)


@cache
def _loaded_key() -> rsa.RSAPrivateKey:
    loaded = load_der_private_key(_private_key(), password=None)
    assert isinstance(loaded, rsa.RSAPrivateKey), "it was made as one"
    return loaded
