"""A remote server as its peers see it: it seals and signs deliveries, and reads what comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from federation.protocol.acks import FollowAck, PostAck, find_ack, parse_ack_body
from federation.protocol.activities import (
    ActivityMethod,
    DeliveryRequest,
    delivery_headers,
    follow_activity,
    post_activity,
)
from federation.protocol.encodings import dump_json, parse_model
from federation.protocol.keys import OwnKeys, sign_message
from federation.protocol.relaying import proxy_request, targeted_request
from federation.protocol.sealing import seal

WRITTEN_AT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """A server called *url*."""

    url: str
    keys: OwnKeys

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Origin": self.url, "X-Federation-Origin": self.url}

    def delivery(self, plaintext: str, method: str, to: OwnKeys, *, signature: str | None = None) -> bytes:
        """The body of a delivery of *plaintext*, signed by us unless a *signature* is given."""
        return DeliveryRequest(
            method=ActivityMethod(method),
            payload=seal(plaintext, to.encryption.public),
            signature=sign_message(plaintext, self.keys.signing.secret) if signature is None else signature,
        ).to_bytes()

    def relayed(self, url: str, body: bytes | str, /, **changes: object) -> str:
        """The text that, sealed, stands for a delivery of *body* to *url*; *changes* replace members."""
        request = {
            "targetUrl": url,
            "method": "POST",
            "headers": delivery_headers(own_url=self.url, target_url=url),
            "body": body if isinstance(body, str) else body.decode(),
        }
        return dump_json({**request, **changes})

    def targeted(self, text: str, to: OwnKeys) -> bytes:
        """The body that carries a relayed request to its target."""
        return targeted_request(seal(text, to.encryption.public))

    def proxied(self, text: str, target: str, to: OwnKeys, **changes: object) -> bytes:
        """The body that asks a relay to pass a relayed request on; *changes* replace members."""
        body = proxy_request(text, target=target, target_key=to.encryption.public, keys=self.keys)
        return dump_json({**json.loads(body), **changes}).encode()

    def follow(self, follower: str = "user-a", followed: str = "user-b") -> str:
        return follow_activity(
            federation_url=self.url,
            follow_id="follow-1",
            created_at=WRITTEN_AT,
            follower_id=follower,
            following_id=followed,
            follower_server_url=None,
        )

    def post(self, post_id: str = "post-1", text: str = "hello", published: datetime = WRITTEN_AT) -> str:
        return post_activity(
            federation_url=self.url,
            post_id=post_id,
            content=[{"type": "text", "value": text}, {"type": "image", "url": "https://x/y", "size": 1.5, "index": 0}],
            author_id="user-a",
            published=published,
            is_private=False,
        )

    def identity(self) -> dict[str, str]:
        return {
            "url": self.url,
            "publicKey": self.keys.signing.public_text,
            "encryptionPublicKey": self.keys.encryption.public_text,
        }

    def document(self) -> bytes:
        return dump_json({**self.identity(), "peers": []}).encode()

    def register(self, **changes: object) -> bytes:
        return dump_json({"method": "REGISTER", **self.identity(), **changes}).encode()

    def read_ack(self, response: httpx.Response, by: OwnKeys) -> str:
        """The plaintext of the acknowledgment in *response*, which is there inline and nested, signed by *by*."""
        assert response.status_code == 200, response.text
        body = parse_ack_body(response.content)
        assert isinstance(body, dict)
        inline = {name: value for name, value in body.items() if name != "payload"}
        texts = set()
        for shape in (inline, {"payload": body["payload"]}):
            ack = find_ack(shape)
            text = ack.open(self.keys)
            assert ack.is_signed(text, by.signing.public)
            texts.add(text)
        assert len(texts) == 1
        return texts.pop()

    def read_follow_ack(self, response: httpx.Response, by: OwnKeys) -> FollowAck:
        ack = parse_model(FollowAck, self.read_ack(response, by))
        assert response.json()["accepted"] is ack.following.accepted
        return ack

    def read_post_ack(self, response: httpx.Response, by: OwnKeys) -> PostAck:
        return parse_model(PostAck, self.read_ack(response, by))
