"""What reads of ActivityPub's strangers: activities, signatures, keys, actors' documents, headers, refusals."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Final

from federation.activitypub.answers import failure_of, followed, reason_of
from federation.activitypub.documents import ACTIVITY_JSON, accepted
from federation.activitypub.handlers import IncomingActivity
from federation.activitypub.key_documents import (
    KeyRefused,
    is_activity,
    is_on_origin,
    is_posted,
    owner_named,
    public_key,
    read_document,
    shown_by_owner,
)
from federation.activitypub.keys import public_pem
from federation.activitypub.multikeys import MOST_CHARACTERS, pem_of
from federation.activitypub.posted import NoActivity, read_posted
from federation.activitypub.remote_actors import recipient_of
from federation.activitypub.replies import Wanted
from federation.activitypub.signature_fields import BadSignature
from federation.activitypub.signatures import SignatureKind, SigningKey, claims_in, sign, verify
from federation.http.messages import Response
from tests.federation.activitypub.remote import loaded, private_key
from tests.security.reading import NOW, Reader, text_of

_ACTOR: Final = "https://b.example/users/bob"
_KEY: Final = f"{_ACTOR}#main-key"
_INBOX: Final = "https://a.example/inbox"
_OWN: Final = "https://a.example"
_BODY: Final = json.dumps({"id": f"{_ACTOR}/1", "type": "Follow", "actor": _ACTOR, "object": f"{_OWN}/alice"}).encode()
_WINDOW: Final = timedelta(hours=1)
_PRIVATE: Final = loaded(private_key())
_PUBLIC: Final = _PRIVATE.public_key()
_PEM: Final = public_pem(private_key())


def _activity(data: bytes) -> None:
    posted = read_posted(data)
    activity = IncomingActivity.of(data.decode(), posted.actor_id)
    assert activity.types[:1] == (posted.kind,)
    assert activity.id == posted.id
    assert activity.object_id is None or isinstance(activity.object_id, str)
    assert posted.ends_its_actor <= (activity.object_id == activity.actor)
    activity.vouches(activity.object)


def _headers(data: bytes) -> dict[str, str]:
    """One a line, as a server hands them over: bytes of latin-1, without NUL."""
    lines = data.decode("latin-1").replace("\0", "").splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _signature(data: bytes) -> None:
    """It verifies if what is signed and the signature were left alone."""
    headers = _headers(data)
    for claim in claims_in(headers):
        assert claim.key_id
    key_id = verify(method="POST", url=_INBOX, headers=headers, body=_BODY, public=_PUBLIC, now=NOW, window=_WINDOW)
    assert any(key_id in value for value in headers.values())


def _signed(kind: SignatureKind) -> bytes:
    key = SigningKey(_KEY, _PRIVATE)
    made = sign(kind, method="POST", url=_INBOX, body=_BODY, content_type=ACTIVITY_JSON, at=NOW, key=key)
    return "".join(f"{name}: {value}\n" for name, value in {"host": "a.example", **made}.items()).encode()


def _key_document(data: bytes) -> None:
    document = read_document(data)
    shown = shown_by_owner(document, {_ACTOR}, _KEY, now=NOW)
    if shown is not None:
        public_key(shown.pem)
    assert is_on_origin(owner_named(document, _KEY), "https://b.example")


def _public_key(data: bytes) -> None:
    public_key(text_of(data))


def _actor(data: bytes) -> None:
    found = recipient_of(data, _ACTOR)
    assert found is None or is_on_origin(found.inbox, "https://b.example")


def _redirect(data: bytes) -> None:
    answer = Response(status=308, headers={"location": data.decode("latin-1")}, body=b"")
    to = followed(answer, _INBOX)
    assert to is None or is_on_origin(to, _OWN)
    failure_of(answer, _INBOX, NOW, reason=None, ours="https://c.example")


def _reason(data: bytes) -> None:
    reason = reason_of(data)
    assert reason is None or (reason.isprintable() and len(reason) <= 80)


def _accept(data: bytes) -> None:
    accepted(data.decode("latin-1"))


def _content_type(data: bytes) -> None:
    text = data.decode("latin-1")
    is_activity(text)
    is_posted(text)


def _target(data: bytes) -> None:
    wanted = Wanted.of("GET", data.decode("latin-1"), {"Accept": "*/*"}, mount="/ap")
    if wanted.refusal() is None:
        assert wanted.path.startswith("/")
        assert wanted.base in ("", "/ap")


def _multikey(data: bytes) -> None:
    pem = pem_of(text_of(data))
    if pem is None:
        raise KeyRefused
    assert len(pem) < MOST_CHARACTERS


_DOCUMENT: Final = json.dumps(
    {
        "id": _ACTOR,
        "type": "Person",
        "inbox": f"{_ACTOR}/inbox",
        "endpoints": {"sharedInbox": "https://b.example/inbox"},
        "publicKey": {"id": _KEY, "owner": _ACTOR, "publicKeyPem": _PEM},
    }
).encode()
_MULTIKEY: Final = "z6MkrJVnaZkeFzdQyMZu1cgjg7k1pZZ6pvBQ7XJPt4swbTQ2"
_KEYS_AS_MULTIKEYS: Final = json.dumps(
    {
        "id": _ACTOR,
        "assertionMethod": [
            {
                "id": _KEY,
                "type": "Multikey",
                "controller": _ACTOR,
                "publicKeyMultibase": _MULTIKEY,
                "expires": "2030-01-01",
            }
        ],
    }
).encode()

ACTIVITY_READERS: Final = {
    "activity": Reader(_activity, (_BODY,), (NoActivity,)),
    "http signature": Reader(
        _signature, (_signed(SignatureKind.CAVAGE), _signed(SignatureKind.RFC9421)), (BadSignature,), costly=True
    ),
    "key document": Reader(_key_document, (_DOCUMENT, _KEYS_AS_MULTIKEYS), (KeyRefused,)),
    "multikey": Reader(_multikey, (_MULTIKEY.encode(),), (KeyRefused,), costly=True),
    "public key": Reader(_public_key, (_PEM.encode(),), (KeyRefused,), costly=True),
    "actor": Reader(_actor, (_DOCUMENT,)),
    "redirect": Reader(_redirect, (b"https://a.example/inbox/", b"//a.example:443/x?y#z", b"inbox2")),
    "reason": Reader(_reason, (b'{"error": "Not a valid signature"}',)),
    "accept": Reader(_accept, (b'application/ld+json; profile="https://www.w3.org/ns/activitystreams", */*;q=0.1',)),
    "content type": Reader(_content_type, (b'application/ld+json; profile="https://www.w3.org/ns/activitystreams"',)),
    "target": Reader(_target, (b"/.well-known/webfinger?resource=acct:alice@a.example", b"/ap/users/alice")),
}
