"""Somebody at another server who signs what a test says, and leaves out what it says; none of our code does it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from hashlib import sha256
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.hashes import SHA256

from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.signatures import SignatureKind
from tests.federation.activitypub.remote import RemoteActor, loaded

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


def encoded(what: bytes) -> str:
    return b64encode(what).decode()
