"""What servers of the fediverse verify with takes what we sign, and refuses it when it was tampered with."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

import pytest
from cryptography.hazmat.primitives.serialization import load_der_private_key

from federation.activitypub.keys import make_private_key, public_pem
from federation.activitypub.signatures import SignatureKind, SigningKey, sign
from federation.protocol.urls import canonical_origin
from tests.interop.activitypub.peer import node_program

KEY_ID: Final = "https://a.example/users/alice#main-key"
URL: Final = "https://b.example/inbox"
SPECS: Final = {
    SignatureKind.CAVAGE: "draft-cavage-http-signatures-12",
    SignatureKind.RFC9421: "rfc9421",
}
"""As Fedify calls them."""
READERS: Final = [
    ("fedify", SignatureKind.CAVAGE),
    ("fedify", SignatureKind.RFC9421),
    ("peertube", SignatureKind.CAVAGE),
]
NO_QUERY: Final = ("fedify", SignatureKind.CAVAGE)
"""It takes the target to have been signed without its query."""
INBOXES: Final = [
    "https://b.example/",
    "https://b.example/inbox",
    "http://b.example:8080/users/bob/inbox",
    "https://b.example:8443/@bob?a=1&b=%2F&c=",
    "https://b.example/inbox?",
    "https://[2001:db8::1]/inbox",
    "https://[2001:db8::1]:3000/inbox?x=y",
    "https://192.0.2.7/inbox",
    "https://b.example/b%C3%B6b/%2e%2f/in;box,(1)!$&*+=:@~_-.",
    "https://xn--bb-fka.example/inbox",
]


@cache
def der() -> bytes:
    return make_private_key(2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as it arrives."""

    url: str
    headers: Mapping[str, str]
    body: bytes

    def to_node(self, kind: SignatureKind) -> dict[str, object]:
        host = canonical_origin(self.url).partition("://")[2]
        return {
            "method": "POST",
            "url": self.url,
            "headers": {"Host": host, **self.headers},
            "body": base64.b64encode(self.body).decode(),
            "pem": public_pem(der()),
            "keyId": KEY_ID,
            "spec": SPECS[kind],
        }


def signed(
    kind: SignatureKind, *, url: str = URL, body: bytes = b'{"type":"Create"}', ago: timedelta = timedelta(0)
) -> Sent:
    key = SigningKey(KEY_ID, load_der_private_key(der(), password=None))
    at = datetime.now(UTC) - ago
    headers = sign(kind, method="POST", url=url, body=body, content_type="application/activity+json", at=at, key=key)
    return Sent(url=url, headers=headers, body=body)


def tampered(kind: SignatureKind) -> Iterator[tuple[str, Sent]]:
    """Requests that nobody signed, by what is wrong with each."""
    request, other = signed(kind), b'{"type":"Delete"}'
    digests = {name: value for name, value in signed(kind, body=other).headers.items() if "Digest" in name}
    yield "another body", replace(request, body=other)
    yield "body and digest", replace(request, body=other, headers={**request.headers, **digests})
    yield "another host", replace(request, url=URL.replace("b.example", "c.example"))
    yield "another path", replace(request, url=URL.replace("inbox", "outbox"))
    yield "two hours old", signed(kind, ago=timedelta(hours=2))
    yield "two hours ahead", signed(kind, ago=timedelta(hours=-2))


@pytest.mark.parametrize(("reader", "kind"), READERS)
async def test_what_we_sign_is_verified(reader: str, kind: SignatureKind) -> None:
    """For inboxes of every form, and bodies of any bytes."""
    async with node_program("verify.mjs") as node:
        for url in (each for each in INBOXES if "?" not in each or (reader, kind) != NO_QUERY):
            for body in (b"{}", "æ✓".encode() * 1_000):
                found = await node.call(reader, signed(kind, url=url, body=body).to_node(kind))
                assert found == KEY_ID, (url, body[:2])


@pytest.mark.parametrize(("reader", "kind"), READERS)
async def test_what_was_tampered_with_is_refused(reader: str, kind: SignatureKind) -> None:
    """Each in its own way; and the untouched one is not."""
    async with node_program("verify.mjs") as node:
        verdicts = {what: await node.call(reader, request.to_node(kind)) for what, request in tampered(kind)}
        assert await node.call(reader, signed(kind).to_node(kind)) == KEY_ID
    assert verdicts == dict.fromkeys(verdicts)


async def test_an_inbox_with_a_query_needs_a_second_knock_at_fedify() -> None:
    """Both kinds cover the query, of which Fedify knows in one of them alone."""
    url = f"{URL}?shared=1"
    async with node_program("verify.mjs") as node:
        found = [await node.call("fedify", signed(kind, url=url).to_node(kind)) for kind in SPECS]
    assert found == [None, KEY_ID]
