"""Where actors of others take activities, in the forms in which their documents say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.outbound import Recipient
from federation.activitypub.remote_actors import ActorUnavailable, RemoteActors, recipient_of
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from tests.misbehaving import Behaviour, MisbehavingServer, redirect, respond

BOB: Final = "https://b.example/users/bob"
INBOX: Final = f"{BOB}/inbox"


def read(members: Mapping[str, object], actor: str = BOB) -> Recipient | None:
    return recipient_of(json.dumps({"id": actor, "inbox": INBOX, **members}).encode(), actor)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"id": 1}', b"[" * 100_000, b"\xff"])
def test_a_document_that_is_none_shows_nobody(body: bytes) -> None:
    assert recipient_of(body, BOB) is None


@pytest.mark.parametrize(
    ("told", "inbox"),
    [
        (INBOX, INBOX),
        ([INBOX], INBOX),
        ({"id": INBOX, "type": "OrderedCollection"}, INBOX),
        ("https://B.Example:443/users/bob/inbox", INBOX),
        (f"{BOB}/inb\u00f6x", f"{BOB}/inb%C3%B6x"),
        (f"{INBOX}?a=1#here", f"{INBOX}?a=1"),
        ([INBOX, INBOX], None),
        ("https://victim.example/inbox", None),
        ("http://b.example/users/bob/inbox", None),
        ("https://b.example:8443/inbox", None),
        ("https://bob@b.example/inbox", None),
        (f"{BOB}/in box", None),
        (7, None),
        (None, None),
    ],
)
def test_an_inbox_is_spelt_as_it_is_sent_to(told: object, inbox: str | None) -> None:
    """On the actor's own origin, however the document writes it."""
    assert read({"inbox": told}) == (None if inbox is None else Recipient(id=BOB, inbox=inbox))


@pytest.mark.parametrize(
    ("told", "shared"),
    [
        ("https://b.example/inbox", "https://b.example/inbox"),
        ("https://B.example/inbox", "https://b.example/inbox"),
        (["https://b.example/inbox"], "https://b.example/inbox"),
        ("https://victim.example/inbox", None),
        ("", None),
        (1, None),
        (None, None),
    ],
)
def test_a_shared_inbox_elsewhere_is_left_out(told: object, shared: str | None) -> None:
    """Nobody may have us post to a third party; the actor is reached by its own, as blogs with domains of their own."""
    expected = Recipient(id=BOB, inbox=INBOX, shared_inbox=shared)
    assert read({"endpoints": {"sharedInbox": told}}) == read({"endpoints": [{"sharedInbox": told}]}) == expected
    assert read({"endpoints": "https://b.example/endpoints"}) == Recipient(id=BOB, inbox=INBOX)


def actor(url: str) -> Behaviour:
    return respond(200, {"Content-Type": ACTIVITY_JSON}, json.dumps({"id": url, "inbox": f"{url}/inbox"}).encode())


async def test_redirects_on_the_origin_are_followed_and_signed_anew() -> None:
    """To where the actor is shown under the URL that it has; not elsewhere, and not for ever."""
    guard, asked = AddressGuard(frozenset({"127.0.0.1"})), []

    async def sign(url: str) -> dict[str, Any]:
        asked.append(url)
        return {"X-Signed": url}

    async with MisbehavingServer() as server, MisbehavingServer() as other:
        bob = f"{server.url}/users/bob"
        other.default = actor(bob)
        async with FederationClient(guard, ConnectionPool(guard)) as client:
            remote = RemoteActors(client, sign=sign)
            server.routes["/users/bob"] = redirect("/users/bob/", 301)
            server.routes["/users/bob/"] = actor(bob)
            assert await remote.recipient(bob) == Recipient(id=bob, inbox=f"{bob}/inbox")
            assert asked == [each.headers["x-signed"] for each in server.requests] == [bob, f"{bob}/"]
            server.routes["/users/bob/"] = actor(f"{bob}/")
            assert await remote.recipient(bob) is None
            for away in (f"{other.url}/users/bob", bob):
                server.routes["/users/bob"] = redirect(away, 302)
                with pytest.raises(ActorUnavailable):
                    await remote.recipient(bob)
        assert (other.hits, server.hits) == (0, 8)
