"""Somebody at another server who signs what a test says, and leaves out what it says; none of our code does it."""

from __future__ import annotations

import itertools
import json
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from hashlib import sha256
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.hashes import SHA256

from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.signatures import SignatureKind
from tests.acceptance.actors import Author
from tests.federation.activitypub.remote import RemoteActor, loaded
from workers.clock import SystemClock

COVERED = {
    SignatureKind.CAVAGE: {"method": "(request-target)", "host": "host", "date": "date", "digest": "digest"},
    SignatureKind.RFC9421: {"method": "@method", "path": "@path", "host": "@authority", "digest": "content-digest"},
}


@dataclass(slots=True)
class Stranger(RemoteActor):
    """An actor whose key is there, unless a test puts another document in its place."""

    def headers(
        self,
        kind: SignatureKind,
        url: str,
        body: bytes,
        at: datetime,
        *,
        without: str = "",
        key_id: str | None = None,
    ) -> dict[str, str]:
        """The headers of a POST of *body* to *url*, with a signature that is valid for what it covers."""
        covered = [name for what, name in COVERED[kind].items() if what != without]
        sign = self._by_cavage if kind is SignatureKind.CAVAGE else self._by_rfc9421
        return {"Content-Type": ACTIVITY_JSON} | sign(covered, url, body, at, key_id or self.key_id)

    def _by_cavage(self, covered: Iterable[str], url: str, body: bytes, at: datetime, key_id: str) -> dict[str, str]:
        date, digest = format_datetime(at, usegmt=True), f"SHA-256={encoded(sha256(body).digest())}"
        target, host = f"post {urlsplit(url).path}", urlsplit(url).netloc
        values = {"(request-target)": target, "host": host, "date": date, "digest": digest}
        signature = self._signed([f"{name}: {values[name]}" for name in covered])
        told = f'keyId="{key_id}",algorithm="rsa-sha256",headers="{" ".join(covered)}",signature="{signature}"'
        return {"Date": date, "Digest": digest, "Signature": told}

    def _by_rfc9421(self, covered: Iterable[str], url: str, body: bytes, at: datetime, key_id: str) -> dict[str, str]:
        digest, (_, host, path, *_) = f"sha-256=:{encoded(sha256(body).digest())}:", urlsplit(url)
        values = {"@method": "POST", "@path": path, "@authority": host, "content-digest": digest}
        names = " ".join(f'"{name}"' for name in covered)
        told = f'({names});created={at.timestamp():.0f};keyid="{key_id}"'
        base = [f'"{name}": {values[name]}' for name in covered] + [f'"@signature-params": {told}']
        return {
            "Content-Digest": digest,
            "Signature-Input": f"sig1={told}",
            "Signature": f"sig1=:{self._signed(base)}:",
        }

    def _signed(self, base: list[str]) -> str:
        return encoded(loaded(self.key).sign("\n".join(base).encode(), padding.PKCS1v15(), SHA256()))


class Door:
    """Posts to the inbox of an actor of ours, through a proxy: each request for another client."""

    def __init__(self, alice: Author, client: httpx.AsyncClient) -> None:
        self._own_url, self._inbox = alice.serving.url, f"{alice.id}/inbox"
        self._client = client
        self._numbers = itertools.count()
        self.last = ""

    async def post(
        self,
        who: Stranger,
        kind: SignatureKind,
        *,
        origin: str | None = None,
        at: datetime | None = None,
        drop: str = "",
        sent: bytes | None = None,
        without: str = "",
        key_id: str | None = None,
        **members: object,
    ) -> int:
        """The answer to an activity with these members, signed for *origin*, as `Host` says; its id is `last`."""
        number = next(self._numbers)
        self.last = f"{who.id}/{number}"
        body = json.dumps(who.activity(number) | members).encode()
        url = self._inbox.replace(self._own_url, origin or self._own_url)
        headers = who.headers(kind, url, body, at or SystemClock().now(), without=without, key_id=key_id)
        headers = {name: value for name, value in headers.items() if name != drop}
        headers |= {"X-Forwarded-For": f"192.0.2.{number % 250 + 1}", "Host": urlsplit(url).netloc}
        reply = await self._client.post(self._inbox, content=body if sent is None else sent, headers=headers)
        return reply.status_code


def encoded(what: bytes) -> str:
    return b64encode(what).decode()
