"""Keys of `assertionMethod` (FEP-521a): which are read, whose they are, and that signatures by them are taken."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.key_documents import KeyRefused, public_key, read_document, shown_by_owner
from federation.activitypub.multikeys import MOST_CHARACTERS, pem_of
from federation.activitypub.remote_keys import LOOK_AGAIN
from federation.protocol.encodings import encode_base64
from tests.federation.activitypub.remote import RemoteActor, loaded, private_key, shows
from tests.federation.activitypub.test_inbox import Door, database_url, door, inbox_on, status  # noqa: F401 - fixtures
from tests.misbehaving import respond

URL: Final = "https://b.example/users/bob"
KEY_ID: Final = f"{URL}#ed25519-key"
NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)
OF_W3C: Final = "z6MkrJVnaZkeFzdQyMZu1cgjg7k1pZZ6pvBQ7XJPt4swbTQ2"
"""An example of W3C's Data Integrity EdDSA Cryptosuites."""
ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def base_58(data: bytes) -> str:
    """As others write it, for which there are no zeros at its beginning."""
    number, letters = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        letters = ALPHABET[digit] + letters
    return letters


def bare(public: ed25519.Ed25519PublicKey | rsa.RSAPublicKey) -> bytes:
    if isinstance(public, rsa.RSAPublicKey):
        return b"\x85\x24" + public.public_bytes(Encoding.DER, PublicFormat.PKCS1)
    return b"\xed\x01" + public.public_bytes_raw()


def multibase(public: ed25519.Ed25519PublicKey | rsa.RSAPublicKey) -> str:
    return "z" + base_58(bare(public))


def multikey(**members: object) -> dict[str, object]:
    return {"id": KEY_ID, "type": "Multikey", "controller": URL, "publicKeyMultibase": OF_W3C, **members}


def shown(keys: object, key_id: str = KEY_ID, own: Mapping[str, object] | None = None, **members: object) -> str | None:
    document = read_document(json.dumps({"id": URL, "type": "Person", "assertionMethod": keys, **members}).encode())
    first = None if own is None else read_document(json.dumps(own).encode())
    found = shown_by_owner(document, {URL}, key_id, now=NOW, own=first)
    return None if found is None else found.pem


def test_keys_are_read_as_others_write_them() -> None:
    for public in (ed25519.Ed25519PrivateKey.generate().public_key(), loaded(private_key()).public_key()):
        in_base_64 = "u" + urlsafe_b64encode(bare(public)).decode().rstrip("=")
        for text in (multibase(public), in_base_64):
            pem = pem_of(text)
            assert pem is not None
            assert public_key(pem) == public
    assert pem_of(OF_W3C) is not None


def test_what_is_no_key_is_none() -> None:
    raw = bare(ed25519.Ed25519PrivateKey.generate().public_key())
    short, p256 = raw[:-1], b"\x80\x24" + raw[2:] + b"\x02"
    for text in (None, 7, "", "z", "u", OF_W3C[1:], f"m{OF_W3C[1:]}", OF_W3C + "0", f"{OF_W3C[:-1]}l", "z" + "1" * 48):
        assert pem_of(text) is None
    for data in (short, raw + b"\0", p256, b"\x85\x24" + raw, b"\xed", b"\xed\x01"):
        assert pem_of("z" + base_58(data)) is None
        assert pem_of("u" + urlsafe_b64encode(data).decode().rstrip("=")) is None
    assert pem_of("u" + urlsafe_b64encode(raw).decode().rstrip("=") + "=") is None
    assert pem_of("z" + "z" * MOST_CHARACTERS) is None


def test_small_keys_are_refused_in_this_form_too() -> None:
    small = rsa.generate_private_key(65537, 1024).public_key()
    pem = pem_of(multibase(small))
    assert pem is not None
    with pytest.raises(KeyRefused):
        public_key(pem)


@pytest.mark.parametrize(
    "keys",
    [
        multikey(),
        [multikey()],
        [None, 7, "https://b.example/keys/1", {"id": KEY_ID}, multikey()],
        multikey(type=["Multikey"]),
        multikey(controller={"id": URL}),
        multikey(expires="2026-05-02T00:00:00Z"),
        multikey(revoked=None),
    ],
)
def test_a_key_is_shown_in_any_of_these_forms(keys: object) -> None:
    assert shown(keys) == pem_of(OF_W3C)
    assert shown(keys, publicKey={"id": f"{URL}#main-key", "owner": URL, "publicKeyPem": "PEM"}) == pem_of(OF_W3C)


@pytest.mark.parametrize(
    "keys",
    [
        multikey(controller=None),
        multikey(controller=f"{URL}/eve"),
        multikey(controller="https://c.example/"),
        multikey(controller=[URL, f"{URL}/eve"]),
        multikey(owner=URL, controller=None),
        multikey(type="JsonWebKey"),
        multikey(type=None),
        multikey(id=f"{KEY_ID}-2"),
        multikey(publicKeyMultibase=None),
        multikey(publicKeyMultibase=[OF_W3C]),
        multikey(revoked="2026-04-01T00:00:00Z"),
        multikey(expires="2026-04-30T23:59:59Z"),
        multikey(expires="2026-04-30"),
        multikey(expires="soon"),
        multikey(expires="9999-12-31T23:59:59-01:00"),
        multikey(expires=7),
        KEY_ID,
        [multikey(id=f"{URL}#{number}") for number in range(20)] + [multikey()],
    ],
)
def test_a_key_of_somebody_else_or_of_no_form_or_over_is_not_shown(keys: object) -> None:
    assert shown(keys) is None


def test_a_key_of_assertions_is_named_by_its_id_alone() -> None:
    """And who has one under a name of `publicKey` has that one."""
    assert shown(multikey(), URL) is None
    key = {"id": KEY_ID, "owner": URL, "publicKeyPem": "PEM"}
    assert shown(multikey(), publicKey=key) == "PEM"
    assert shown(multikey(id=URL), URL, publicKey={**key, "id": f"{URL}#main-key"}) == "PEM"


def test_a_key_that_its_owner_only_names_is_shown_by_its_own_document() -> None:
    alone = f"{URL}/key"
    own = multikey(id=alone)
    assert shown(alone, alone, own) == shown([alone], alone, own) == pem_of(OF_W3C)
    for other in ({**own, "controller": None}, {**own, "controller": f"{URL}/eve"}, {**own, "type": "Note"}):
        assert shown(alone, alone, other) is None
    assert shown(f"{alone}2", alone, own) is None


@dataclass(slots=True)
class Ed25519Actor(RemoteActor):
    """Signs by RFC 9421 with a key that only `assertionMethod` shows, as an actor without RSA has."""

    private: ed25519.Ed25519PrivateKey = field(default_factory=ed25519.Ed25519PrivateKey.generate, repr=False)
    expires: datetime | None = None

    def document(self, **members: object) -> dict[str, object]:
        key = multikey(id=f"{self.id}#ed25519-key", controller=self.id)
        key["publicKeyMultibase"] = multibase(self.private.public_key())
        key["expires"] = self.expires and self.expires.isoformat()
        return {"id": self.id, "type": "Person", "assertionMethod": [key], **members}

    def signed(self, url: str, body: bytes, at: datetime, **_signing: Any) -> dict[str, str]:
        digest = f"sha-256=:{encode_base64(sha256(body).digest())}:"
        parameters = (
            '("@method" "@target-uri" "content-digest");'
            f'created={int(at.timestamp())};keyid="{self.id}#ed25519-key";alg="ed25519"'
        )
        base = f'"@method": POST\n"@target-uri": {url}\n"content-digest": {digest}\n"@signature-params": {parameters}'
        signature = encode_base64(self.private.sign(base.encode()))
        return {
            "Content-Type": ACTIVITY_JSON,
            "Content-Digest": digest,
            "Signature-Input": f"sig1={parameters}",
            "Signature": f"sig1=:{signature}:",
        }


async def test_what_is_signed_by_such_a_key_is_taken(door: Door) -> None:  # noqa: F811 - the fixture
    eve = Ed25519Actor(door.server, "/users/eve")
    assert status(await door.post(eve.activity(), actor=eve)) == 202
    assert [each["actor"] for each in door.kept] == [eve.id]
    assert status(await door.post(eve.activity(2), actor=eve, sent=json.dumps(eve.activity(3)).encode())) == 401
    assert status(await door.post(door.bob.activity(), actor=eve)) == 422, "another's activity"


async def test_a_key_that_was_replaced_is_looked_at_anew(door: Door) -> None:  # noqa: F811 - the fixture
    eve = Ed25519Actor(door.server, "/users/eve")
    assert status(await door.post(eve.activity(), actor=eve)) == 202
    eve.private = ed25519.Ed25519PrivateKey.generate()
    door.server.routes["/users/eve"] = shows(eve.document())
    door.clock.advance(timedelta(minutes=6))
    assert status(await door.post(eve.activity(2), actor=eve)) == 202


@pytest.mark.parametrize("kept", ["in memory", "in the database", "by a server that is away"])
async def test_a_key_ends_when_it_says(door: Door, kept: str) -> None:  # noqa: F811 - the fixture
    """However lately it was fetched. The next one under its name counts, and the news of its owner's end does not."""
    eve = Ed25519Actor(door.server, "/users/eve", expires=door.clock.now() + timedelta(minutes=10))
    door.server.routes["/users/eve"] = shows(eve.document())
    assert status(await door.post(eve.activity(), actor=eve)) == 202
    door.clock.advance(timedelta(minutes=9))
    assert status(await door.post(eve.activity(2), actor=eve)) == 202
    assert door.server.hits == 1
    door.clock.advance(timedelta(minutes=1))
    if kept == "by a server that is away":
        door.server.routes["/users/eve"] = respond(500)
        assert status(await door.post(eve.activity(3), actor=eve)) == 503
        door.server.routes["/users/eve"] = respond(410)
    delete = eve.activity(4, type="Delete", object=eve.id)
    async with inbox_on(door.database, door.server) as other:
        other.clock.advance(door.clock.now() - other.clock.now() + LOOK_AGAIN)
        at = other if kept == "in the database" else door
        door.clock.advance(LOOK_AGAIN)
        assert [status(await at.post(each, actor=eve)) for each in (eve.activity(3), delete)] == [401, 401]
        eve.expires = at.clock.now() + timedelta(days=1)
        door.server.routes["/users/eve"] = shows(eve.document())
        at.clock.advance(LOOK_AGAIN)
        assert status(await at.post(eve.activity(5), actor=eve)) == 202
