"""`POST /proxy`: pass on what is sealed to others, and accept what others passed on to us.

A delivery that came through a relay (`TARGETED`) is opened and accepted as if it had come directly. The relay itself is
not believed: the author inside must be registered and have signed the activity, and the header inside must name that
same author. Repeats are acknowledged with what is stored, as they are without a relay.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.responses import Response

from federation.node.follows import FOLLOW_MODELS, FOLLOWS_PATH, USER_BLOCKED, FollowsInbox
from federation.node.forwarding import Forwarder
from federation.node.front import Inbound
from federation.node.inbox import Inbox
from federation.node.posts import POST_MODELS, POSTS_PATH, PostsInbox, malformed_post
from federation.node.refusals import Refusal, invalid_proxy_data, json_response
from federation.protocol.acks import ACK_METHOD
from federation.protocol.activities import DELIVERY_MEMBERS, MAX_REQUEST_BYTES, ActivityMethod
from federation.protocol.encodings import MAX_PAYLOAD_BYTES, WireModel, dump_json, validate
from federation.protocol.errors import EnvelopeError, NotJson, PayloadError, UrlError
from federation.protocol.keys import OwnKeys
from federation.protocol.possession import DECRYPT_FAILED, PONG, asks_for_possession, names_first, pong
from federation.protocol.relaying import (
    ORIGIN_HEADER,
    PING,
    PROXY,
    TARGET_HEADER,
    TARGETED,
    Ping,
    ProxyRequest,
    RelayedRequest,
    SealedPayload,
    TargetedRequest,
)
from federation.protocol.sealing import Envelope
from federation.protocol.skimming import members_of, skim
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.registry import KnownServer

_MEMBERS: Final = members_of(RelayedRequest) | members_of(Ping)
_RELAYED_CODES: Final = frozenset({USER_BLOCKED})


class TargetedInbox:
    """Callable with a `TARGETED` request."""

    def __init__(self, *, own_url: str, inbox: Inbox, follows: FollowsInbox, posts: PostsInbox) -> None:
        self._own_url = own_url
        self._inbox = inbox
        self._follows = follows
        self._posts = posts

    async def __call__(self, request: TargetedRequest, *, bearer_url: str) -> Response:
        """Store the sealed activity, and acknowledge it to its author; or answer a ping.

        Raises:
            Refusal: nothing was changed.
        """
        content, opened_with = self._open(request.payload)
        if isinstance(content, dict) and content.get("method") == PING:
            return await self._pong(content, bearer_url, opened_with)
        relayed, body = _read(content)
        claimed = relayed.header(ORIGIN_HEADER)
        await self._inbox.require_welcome(claimed)
        sender = await self._inbox.registered(claimed)
        return await self._take(relayed.target_url, body, sender)

    def _open(self, payload: SealedPayload) -> tuple[object, OwnKeys]:
        try:
            text, pair = self._inbox.unseal(Envelope.from_wire(payload.to_wire()))
        except EnvelopeError as error:
            raise Refusal(400, f"payload: {error}", code=DECRYPT_FAILED) from None
        try:
            return skim(text, _MEMBERS, limit=MAX_PAYLOAD_BYTES), pair
        except NotJson as error:
            raise _invalid(str(error)) from None

    async def _pong(self, content: dict[object, object], bearer_url: str, opened_with: OwnKeys) -> Response:
        await self._inbox.registered(bearer_url)
        try:
            ping = validate(Ping, content)
            if isinstance(ping.nonce, str) and asks_for_possession(ping.nonce):
                return self._prove(ping.nonce, opened_with)
            nonce = {"nonce": ping.nonce} if "nonce" in content else {}
            answer = {"method": ACK_METHOD, "status": PONG, **nonce}
            dump_json(answer).encode("utf-8")
        except (ValueError, RecursionError):  # a number or text that cannot be written again, or nested too deeply
            raise _invalid("nonce: not a value we can send back") from None
        return json_response(answer)

    def _prove(self, nonce: str, pair: OwnKeys) -> Response:
        """Prove that we hold this pair.

        The nonce has to name us: otherwise another server could use our answer to prove that our keys are its own.
        """
        if not names_first(nonce, self._own_url):
            text = "nonce: asks another server for possession of its keys, or is malformed"
            raise Refusal(400, text, code="INVALID_TARGETED_DATA", reason="POSSESSION_OF_ANOTHER")
        return json_response(pong(nonce, pair.signing.secret))

    async def _take(self, target_url: str, body: object, sender: KnownServer) -> Response:
        method = body.get("method") if isinstance(body, dict) else None
        if FOLLOWS_PATH in target_url and isinstance(method, str) and method in FOLLOW_MODELS:
            follow = await self._inbox.open_relayed(body, FOLLOW_MODELS, _malformed_follow, sender=sender)
            return await _with_status(self._follows.apply(follow, relayed=True))
        if POSTS_PATH in target_url and method == ActivityMethod.FEDERATE_POST:
            post = await self._inbox.open_relayed(body, POST_MODELS, malformed_post, sender=sender)
            return await _with_status(self._posts.apply(post))
        raise Refusal(400, "targetUrl and the method of its body fit no endpoint here", code="INVALID_PAYLOAD")


def _read(content: object) -> tuple[RelayedRequest, object]:
    """Return the relayed request, and the JSON value of its body.

    Raises:
        Refusal: it has another shape, or is not meant for the server that it names as its target.
    """
    try:
        relayed = validate(RelayedRequest, content)
        if not all(relayed.header(name) for name in (TARGET_HEADER, ORIGIN_HEADER, "Origin")):
            raise _invalid(f"headers: {TARGET_HEADER}, {ORIGIN_HEADER} and Origin are required")
        if canonical_origin(relayed.header(TARGET_HEADER)) != canonical_origin(relayed.target_url):
            raise _invalid(f"headers: {TARGET_HEADER} names another server than targetUrl")
        return relayed, skim(relayed.body, DELIVERY_MEMBERS, limit=MAX_REQUEST_BYTES)
    except (PayloadError, UrlError) as error:
        raise _invalid(str(error)) from None
    except NotJson as error:
        raise _invalid(f"body: {error}") from None


def _invalid(problem: str) -> Refusal:
    return Refusal(400, problem, code="INVALID_TARGETED_DATA")


def _malformed_follow(where: str, problem: str) -> Refusal:
    return Refusal(400, f"[{where}] {problem}", code="INVALID_FOLLOW_PAYLOAD")


async def _with_status(applied: Awaitable[Response]) -> Response:
    """Repeat the status in a refusal's body, and add a code where only relayed requests get one."""
    try:
        return await applied
    except Refusal as refusal:
        code = refusal.code or (refusal.reason if refusal.reason in _RELAYED_CODES else None)
        raise Refusal(
            refusal.status, refusal.text, code=code, reason=refusal.reason, members={"status": refusal.status}
        ) from None


ModelT = TypeVar("ModelT", bound=WireModel)


class ProxyEndpoint:
    """Callable with a request to `/proxy` that was admitted (see `ProxyAdmission`)."""

    def __init__(self, *, forwarder: Forwarder, targeted: TargetedInbox) -> None:
        self._forwarder = forwarder
        self._targeted = targeted

    async def __call__(self, inbound: Inbound) -> Response:
        """Do what the request asks for.

        Raises:
            Refusal: it is not done.
        """
        bearer = inbound.headers.get(ORIGIN_HEADER, "")
        match inbound.value:
            case {"method": str(method)} if method == PROXY:
                request = _parse(ProxyRequest, inbound.value)
                return await self._forwarder(request, sender_url=bearer, source=inbound.source)
            case {"method": str(method)} if method == TARGETED:
                return await self._targeted(_parse(TargetedRequest, inbound.value), bearer_url=bearer)
            case NotJson() as error:
                raise invalid_proxy_data(f"body: {error}")
            case _:
                raise invalid_proxy_data(f"method: expected {PROXY} or {TARGETED}")


def _parse(model: type[ModelT], value: object) -> ModelT:
    try:
        return validate(model, value)
    except PayloadError as error:
        raise invalid_proxy_data(str(error)) from None
