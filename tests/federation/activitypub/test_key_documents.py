"""The forms in which others show keys: which are read, and that none lets anybody show a key for somebody else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from db import Database
from federation.activitypub.key_documents import (
    KeyGone,
    KeyRefused,
    ShownKey,
    is_same,
    owner_named,
    read_document,
    shown_by_owner,
)
from federation.activitypub.remote_keys import RemoteKeys
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from tests.federation.activitypub.remote import BOB, RemoteActor, shows
from tests.misbehaving import MisbehavingServer, redirect, respond
from workers.clock import SystemClock

URL: Final = "https://b.example/users/bob"
KEY_ID: Final = f"{URL}#main-key"
ALONE: Final = f"{URL}/main-key"
NOW: Final = datetime(2026, 5, 1, tzinfo=UTC)
KEY: Final = {"id": KEY_ID, "owner": URL, "publicKeyPem": "PEM"}


def actor(key: object, **members: object) -> dict[str, object]:
    return {"id": URL, "type": "Person", "publicKey": key, **members}


def shown(document: Mapping[str, object], key_id: str = KEY_ID, own: Mapping[str, object] | None = None) -> str | None:
    """The text of the key, as the document at the actor's URL shows it."""
    first = None if own is None else read_document(json.dumps(own).encode())
    found = shown_by_owner(read_document(json.dumps(document).encode()), {URL}, key_id, now=NOW, own=first)
    assert found is None or found == ShownKey(URL, found.pem)
    return None if found is None else found.pem


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        [KEY],
        [{"id": "other", "owner": "https://c.example/"}, KEY],
        ["https://b.example/keys/1", None, 7, [], KEY],
        {"id": KEY_ID, "controller": URL, "publicKeyPem": "PEM"},
        {"id": KEY_ID, "owner": {"id": URL, "type": "Person"}, "publicKeyPem": "PEM"},
        {"id": KEY_ID, "owner": [URL], "publicKeyPem": "PEM"},
        {"id": KEY_ID, "publicKeyPem": "PEM"},
    ],
)
def test_a_key_is_shown_in_any_of_these_forms(key: object) -> None:
    """One that names no owner is that of the actor whose document it is in."""
    assert shown(actor(key)) == "PEM"


@pytest.mark.parametrize(
    "key",
    [
        {**KEY, "owner": "https://b.example/users/eve"},
        {**KEY, "owner": ""},
        {**KEY, "owner": [URL, "https://b.example/users/eve"]},
        {**KEY, "owner": {}},
        {**KEY, "owner": False},
        {"id": KEY_ID, "controller": "https://b.example/users/eve", "publicKeyPem": "PEM"},
        {**KEY, "owner": "https://b.example/users/eve", "controller": URL},
        {**KEY, "id": [KEY_ID]},
        {**KEY, "publicKeyPem": ["PEM"]},
        {"id": KEY_ID, "owner": URL},
        KEY_ID,
        {"@graph": [KEY]},
        [[KEY]],
    ],
)
def test_a_key_of_somebody_else_or_of_no_form_is_not_shown(key: object) -> None:
    assert shown(actor(key)) is None


def test_an_actors_only_key_may_be_named_by_the_actor() -> None:
    """As relays name theirs; which of two that would be, nobody knows. And the document is that of the actor."""
    assert shown(actor(KEY), URL) == shown(actor([None, KEY]), URL) == "PEM"
    for document in (actor([KEY, {**KEY, "id": f"{URL}#2"}]), actor([]), actor({**KEY, "owner": f"{URL}/eve"})):
        assert shown(document, URL) is None
    assert shown(actor(KEY), f"{URL}#other") is None
    assert shown(actor(KEY, id=f"{URL}/other"), f"{URL}/other") is None, "it is not where it says"


def test_a_key_that_its_owner_only_names_is_shown_by_its_own_document() -> None:
    """If that names the owner, and is that key's."""
    own: dict[str, Any] = {"id": ALONE, "type": "CryptographicKey", "owner": URL, "publicKeyPem": "PEM"}
    assert owner_named(read_document(json.dumps(own).encode()), ALONE) == URL
    for named in (ALONE, [ALONE], ["https://b.example/keys/1", ALONE], {"id": ALONE}):
        assert shown(actor(named), ALONE, own) == "PEM"
    assert shown(actor(f"{ALONE}2"), ALONE, own) is None
    for other in ({**own, "owner": f"{URL}/eve"}, {**own, "id": KEY_ID}, {**own, "owner": None}, {"id": ALONE}, None):
        assert shown(actor(ALONE), ALONE, other) is None
    theirs = {**own, "publicKeyPem": "another"}
    assert shown(actor({"id": ALONE, "publicKeyPem": "PEM"}), ALONE, theirs) == "PEM", "the owner's word counts"


@pytest.mark.parametrize("kind", ["Tombstone", ["Person", "Tombstone"]])
def test_a_tombstone_is_what_is_no_more(kind: object) -> None:
    """Though it is answered with 200, as Friendica does; one that shows its key still is an actor's document."""
    with pytest.raises(KeyGone):
        owner_named(read_document(json.dumps({"id": URL, "type": kind}).encode()), KEY_ID)
    assert shown(actor(KEY, type=kind)) == "PEM"
    with pytest.raises(KeyRefused) as refused:
        owner_named(read_document(json.dumps({"id": URL, "type": "Person"}).encode()), KEY_ID)
    assert not isinstance(refused.value, KeyGone)


@dataclass(slots=True)
class Found:
    keys: RemoteKeys
    server: MisbehavingServer
    bob: RemoteActor


@pytest.fixture
async def found(database: Database) -> AsyncIterator[Found]:
    async def unsigned(_url: str) -> dict[str, str]:
        return {}

    guard = AddressGuard(frozenset({"127.0.0.1"}))
    async with MisbehavingServer() as server, FederationClient(guard, ConnectionPool(guard)) as client:
        server.default = respond(404)
        keys = RemoteKeys(
            own_url="https://a.example",
            database=database,
            client=client,
            guard=guard,
            signer=unsigned,
            clock=SystemClock(),
        )
        yield Found(keys, server, RemoteActor(server))


async def test_an_actor_whose_server_leads_elsewhere_keeps_its_name(found: Found) -> None:
    """Such as to the same path with a slash. The name is that which was asked for, and no third one."""
    found.server.routes[BOB] = redirect(f"{BOB}/", 301)
    found.server.routes[f"{BOB}/"] = shows(found.bob.document())
    assert (await found.keys.key(found.bob.key_id)).owner == found.bob.id
    eve = RemoteActor(found.server, "/users/eve")
    found.server.routes["/users/eve"] = redirect("/elsewhere", 302)
    found.server.routes["/elsewhere"] = shows(
        eve.document(id=f"{eve.id}/", publicKey=eve.shown_key(owner=f"{eve.id}/"))
    )
    with pytest.raises(KeyRefused):
        await found.keys.key(eve.key_id)


async def test_a_key_with_a_document_of_its_own_may_be_listed_by_its_url(found: Found) -> None:
    key_id = f"{found.bob.id}/main-key"
    found.server.routes[BOB] = shows(found.bob.document(publicKey=[key_id]))
    found.server.routes[f"{BOB}/main-key"] = shows(found.bob.shown_key(id=key_id, type="CryptographicKey"))
    assert (await found.keys.key(key_id)).owner == found.bob.id


async def test_an_actor_with_a_fragment_has_the_keys_of_its_document(found: Found) -> None:
    """Both are parts of one document."""
    owner = f"{found.bob.id}#this"
    found.server.routes[BOB] = shows(found.bob.document(id=owner, publicKey=found.bob.shown_key(owner=owner)))
    assert (await found.keys.key(found.bob.key_id)).owner == owner


@pytest.mark.parametrize("name", ["/users/b%C3%B6b", "/users/b\u00f6b"])
async def test_an_actor_whose_id_is_not_ascii_has_keys(found: Found, name: str) -> None:
    """A header takes only ASCII, so the key is named by escapes, also where the document writes none."""
    path, key_id = "/users/b%C3%B6b", f"{found.server.url}/users/b%C3%B6b#main-key"
    actor = f"{found.server.url}/users/b\u00f6b"
    key = found.bob.shown_key(id=f"{found.server.url}{name}#main-key", owner=actor)
    found.server.routes[path] = shows({"id": actor, "type": "Person", "publicKey": key})
    assert (await found.keys.key(key_id)).owner == actor


def test_what_is_not_ascii_may_be_escaped() -> None:
    """Where one asks for it by the same request. A fragment is none of that, but names another thing."""
    told = "https://b\u00fccher.example/b\u00f6b"
    assert is_same(told, "https://xn--bcher-kva.example/b%C3%B6b")
    assert is_same(f"{told}#key", "https://xn--bcher-kva.example/b%C3%B6b#key")
    for other in ("/b%C3%B6b/", "/b%c3%b6b2", "/b%F6b", "/bob", "/b%C3%B6b#key", "/B%C3%B6b"):
        assert not is_same(told, f"https://xn--bcher-kva.example{other}")
    for told in ("https://b\u00fccher.example:99999/", "b\u00f6b", "", "https://b\u00f6\ud800b.example/"):
        assert not is_same(told, "https://xn--bcher-kva.example/b%C3%B6b")
    assert not is_same("https://B.example/", "https://b.example/")


async def test_a_tombstone_with_200_is_the_end_of_an_actor(found: Found) -> None:
    found.server.routes[BOB] = shows({"id": found.bob.id, "type": "Tombstone", "formerType": "Person"})
    with pytest.raises(KeyGone):
        await found.keys.key(found.bob.key_id)
