"""What is taken at the door, and what is refused, from a server with real keys over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from db import ActivityFollow, BlacklistedServer, Database, FollowDirection, RemoteActorKey
from federation.activitypub.inbox import MOST_OF_ACTIVITY, NOT_HIS, ActivitiesInbox
from federation.activitypub.keys import public_pem
from federation.activitypub.refused import Anybody, Asker, Refused, Why
from federation.activitypub.remote_keys import KEPT, LOOK_AGAIN, MOST_PER_CLIENT, MOST_PER_ORIGIN, RemoteKeys
from federation.activitypub.replies import Reply
from federation.activitypub.signatures import SignatureKind
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool, PoolLimits
from federation.monitoring.prometheus import ProcessMetrics
from federation.node.clients import BLAMED
from federation.servers.blacklist import Blacklist
from federation.servers.links import Links
from tests.federation.activitypub.remote import BOB, RemoteActor, private_key, shows
from tests.federation.monitoring.test_prometheus import samples
from tests.misbehaving import MisbehavingServer, hang, respond
from workers import StorageUnavailable
from workers.clock import ManualClock, SystemClock

OWN = "https://a.example"
TARGET = "/users/alice/inbox"
URL = OWN + TARGET
WINDOW = timedelta(hours=1)
KINDS = list(SignatureKind)


async def unsigned(_url: str) -> dict[str, str]:
    return {}


@dataclass(slots=True)
class Door:
    """An inbox, what it kept, and a server whose actor sends to it."""

    inbox: ActivitiesInbox
    database: Database
    clock: ManualClock
    links: Links
    server: MisbehavingServer
    bob: RemoteActor
    kept: list[dict[str, Any]] = field(default_factory=list)
    admitted: list[bool] = field(default_factory=list)
    counted: list[str | None] = field(default_factory=list)
    metrics: ProcessMetrics = field(default_factory=ProcessMetrics)

    async def keep(self, **activity: Any) -> bool:
        is_new = activity["activity_hash"] not in [each["activity_hash"] for each in self.kept]
        if is_new:
            self.kept.append(activity)
        return is_new

    async def admit(self, client: Asker, is_known: bool) -> None:
        self.admitted.append(is_known)
        self.counted.append(client.client)

    async def post(
        self,
        activity: object,
        *,
        url: str = URL,
        target: str = TARGET,
        at: datetime | None = None,
        drop: str = "",
        then: dict[str, str] | None = None,
        sent: bytes | None = None,
        actor: RemoteActor | None = None,
        **signing: Any,
    ) -> Reply:
        """Sign a POST of *activity* to *url*, and send it, changed by the rest, to *target*; a second later each."""
        self.clock.advance(timedelta(seconds=1))
        body = activity if isinstance(activity, bytes) else json.dumps(activity).encode()
        headers = (actor or self.bob).signed(url, body, at or self.clock.now(), **signing)
        headers = {name: value for name, value in headers.items() if name != drop} | (then or {})
        return await self.inbox.take(
            method="POST", target=target, headers=headers, body=body if sent is None else sent, client=Anybody()
        )


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database_file')}"
    return str(request.getfixturevalue("migrated_postgres_url"))


on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)


@asynccontextmanager
async def inbox_on(database: Database, server: MisbehavingServer) -> AsyncIterator[Door]:
    clock, guard = ManualClock(SystemClock().now()), AddressGuard(frozenset({"127.0.0.1"}))
    pool = ConnectionPool(guard, limits=PoolLimits(connections_per_server=MOST_PER_ORIGIN))
    async with FederationClient(guard, pool) as client:
        keys = RemoteKeys(own_url=OWN, database=database, client=client, guard=guard, signer=unsigned, clock=clock)
        links = Links(database, None, clock=clock)
        door: Door

        async def keep(**activity: Any) -> bool:
            return await door.keep(**activity)

        async def admit(client: Asker, is_known: bool) -> None:
            await door.admit(client, is_known)

        inbox = ActivitiesInbox(
            own_url=OWN,
            database=database,
            keys=keys,
            blacklist=Blacklist(database, check_interval=timedelta(0), clock=clock),
            links=links,
            keep=keep,
            admit=admit,
            window=WINDOW,
            clock=clock,
            meter=(metrics := ProcessMetrics()),
        )
        door = Door(inbox, database, clock, links, server, RemoteActor(server), metrics=metrics)
        yield door
        await links.close()


@pytest.fixture
async def door(database: Database) -> AsyncIterator[Door]:
    async with MisbehavingServer() as server:
        server.default = respond(404)
        async with inbox_on(database, server) as door:
            yield door


def status(reply: Reply) -> int:
    """The status; a refusal says why."""
    assert reply.status == 202 or json.loads(reply.body)["error"]
    return reply.status


@on_both_databases
@pytest.mark.parametrize("kind", KINDS)
async def test_an_activity_is_kept_once(door: Door, kind: SignatureKind) -> None:
    """With its text as it came, and the key is fetched once."""
    activity = door.bob.activity(content="\u00e4 \u2603")
    assert [status(await door.post(activity, kind=kind)) for _ in range(2)] == [202, 202]
    [kept] = door.kept
    assert (kept["activity_id"], kept["actor"], kept["type"]) == (activity["id"], door.bob.id, "Create")
    assert json.loads(kept["text"]) == activity
    assert len(kept["activity_hash"]) == 64
    assert (door.server.hits, door.admitted) == (1, [False])


async def test_without_an_id_the_body_is_what_is_known(door: Door) -> None:
    first, second = (door.bob.activity(), door.bob.activity(content="2"))
    del first["id"], second["id"]
    for activity in (first, second, first):
        assert status(await door.post(activity)) == 202
    assert len(door.kept) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", ["Follow", "Undo"])
async def test_a_follow_under_the_name_of_an_earlier_one_is_news(door: Door, kind: SignatureKind, type_: str) -> None:
    """By the time of its signature; the very request that came before is known."""
    follow, at = door.bob.activity(type=type_), door.clock.now()
    for later in (0, 0, 60):
        assert status(await door.post(follow, kind=kind, at=at + timedelta(seconds=later))) == 202
    assert [each["activity_id"] for each in door.kept] == [follow["id"]] * 2


@pytest.mark.parametrize("type_", ["Accept", "Reject", "Update"])
async def test_another_text_under_the_name_of_an_earlier_one_is_news(door: Door, type_: str) -> None:
    """As Mastodon rejects all by one name, and Friendica names all Updates of a post alike; the same text is known."""
    first, second = (door.bob.activity(type=type_, object={"id": "x", "content": text}) for text in "12")
    for activity in (first, second, first, second):
        assert status(await door.post(activity)) == 202
    assert [json.loads(each["text"]) for each in door.kept] == [first, second]


@pytest.mark.parametrize("type_", ["Add", "Remove"])
async def test_what_is_listed_again_without_a_name_is_news(door: Door, type_: str) -> None:
    """As what Mastodon pins, unpins and pins; one with a name is known."""
    named = door.bob.activity(type=type_)
    for activity in ({**named, "id": None}, named):
        door.kept.clear()
        at = door.clock.now()
        for later in (0, 0, 60):
            assert status(await door.post(activity, at=at + timedelta(seconds=later))) == 202
        assert len(door.kept) == (2 if activity["id"] is None else 1)


async def test_types_and_actors_may_be_written_otherwise(door: Door) -> None:
    activity = door.bob.activity(type=["Like", "Emoji"], actor={"id": door.bob.id, "type": "Person"})
    assert status(await door.post(activity)) == 202
    assert (door.kept[0]["type"], door.kept[0]["actor"]) == ("Like", door.bob.id)
    for number, actor in enumerate(([door.bob.id], [{"id": door.bob.id}]), start=2):
        assert status(await door.post(door.bob.activity(number, actor=actor))) == 202
    for actor in ([door.bob.id, door.bob.id], [], [[door.bob.id]], ""):
        assert status(await door.post(door.bob.activity(actor=actor))) == 400
    assert [each["actor"] for each in door.kept] == [door.bob.id] * 3


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_signed_for_us_is_refused(door: Door, kind: SignatureKind) -> None:
    """For each of these 401, nothing is kept, and nobody is asked for a key."""
    digest = "Digest" if kind is SignatureKind.CAVAGE else "Content-Digest"
    activity, hour = door.bob.activity(), WINDOW + timedelta(seconds=2)
    named = dict.fromkeys(("Signature", "Signature-Input"), "x")
    refused = [
        await door.post(activity, kind=kind, drop="Signature"),
        await door.post(activity, kind=kind, then=named),
        await door.post(activity, kind=kind, drop=digest),
        await door.post(activity, kind=kind, sent=json.dumps(door.bob.activity(2)).encode()),
        await door.post(activity, kind=kind, at=door.clock.now() - hour),
        await door.post(activity, kind=kind, at=door.clock.now() + hour),
    ]
    assert [status(each) for each in refused] == [401] * len(refused)
    assert (door.kept, door.server.hits) == ([], 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left_out", ["digest", "method", "host", "target"])
async def test_a_signature_that_leaves_out_something_is_refused(door: Door, kind: SignatureKind, left_out: str) -> None:
    covered = {
        SignatureKind.CAVAGE: {"digest": "digest", "method": "(request-target)", "host": "host"},
        SignatureKind.RFC9421: {"digest": '"content-digest" ', "method": '"@method" ', "host": '"@target-uri" '},
    }[kind]
    left_out = covered.get(left_out, covered["method"])
    body = json.dumps(door.bob.activity()).encode()
    headers = door.bob.signed(URL, body, door.clock.now(), kind=kind)
    name = "Signature" if kind is SignatureKind.CAVAGE else "Signature-Input"
    headers[name] = headers[name].replace(left_out, "", 1)
    reply = await door.inbox.take(method="POST", target=TARGET, headers=headers, body=body, client=Anybody())
    assert (status(reply), door.kept, door.server.hits) == (401, [], 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_signed_for_others_is_refused(door: Door, kind: SignatureKind) -> None:
    """Another host, whatever the header says, another path, another body of the same digest header, another method."""
    activity = door.bob.activity()
    elsewhere = await door.post(activity, kind=kind, url="https://c.example" + TARGET, then={"Host": "a.example"})
    path = await door.post(activity, kind=kind, target="/inbox")
    assert [status(elsewhere), status(path), door.kept] == [401, 401, []]


async def test_the_query_may_be_signed_or_not(door: Door) -> None:
    target = TARGET + "?a=1"
    assert status(await door.post(door.bob.activity(1), url=OWN + target, target=target)) == 202
    assert status(await door.post(door.bob.activity(2), url=URL, target=target)) == 202
    assert status(await door.post(door.bob.activity(3), url=URL, target=target, kind=SignatureKind.RFC9421)) == 401


@pytest.mark.parametrize("is_cached", [True, False])
async def test_an_actor_who_does_not_own_the_key_is_refused(door: Door, is_cached: bool) -> None:
    """Also with a cached key, and on its own server."""
    if is_cached:
        await door.post(door.bob.activity())
    before = len(door.kept)
    for actor in (door.server.url + "/users/eve", "https://c.example/users/bob", {"id": door.bob.id + "/"}):
        assert status(await door.post(door.bob.activity(2, actor=actor))) == NOT_HIS
    assert status(await door.post(door.bob.activity(3, id="https://c.example/1"))) == NOT_HIS
    assert status(await door.post(door.bob.activity(4, id=""))) == NOT_HIS
    assert status(await door.post(door.bob.activity(5, id=door.bob.id + "\0"))) == NOT_HIS
    assert len(door.kept) == before


async def test_what_somebody_forwards_is_refused_for_good(door: Door) -> None:
    """As servers do that pass on a reply: who gets 401 tries again for days, and who gets 403 often is barred."""
    for number, actor in enumerate(("https://c.example/users/carol", door.server.url + "/users/carol")):
        reply = await door.post(door.bob.activity(number, id=f"{actor}/1", actor=actor))
        assert status(reply) == NOT_HIS
        assert NOT_HIS not in BLAMED | {401, 408, 429}, "which Mastodon sends again"
    assert door.kept == []


async def test_strangers_write_no_keys(door: Door) -> None:
    """Not by a signature that does not verify; and for an actor elsewhere nobody is asked."""
    forger = RemoteActor(door.server, "/elsewhere", key=private_key(1))
    assert status(await door.post(door.bob.activity(), actor=forger, key_id=door.bob.key_id)) == 401
    hits = door.server.hits
    eve = RemoteActor(door.server, "/users/eve")
    for members in ({"actor": "https://c.example/users/eve"}, {"id": "https://c.example/1"}, {"actor": "eve"}):
        assert status(await door.post(eve.activity(**members), actor=eve)) == NOT_HIS
    assert (door.server.hits, await door.database.rows(select(RemoteActorKey.key_id))) == (hits, [])
    assert status(await door.post(door.bob.activity())) == 202
    assert await door.database.rows(select(RemoteActorKey.key_id)) == [(door.bob.key_id,)]


async def test_a_key_document_on_another_origin_is_refused(door: Door) -> None:
    """And an owner who does not list the key."""
    async with MisbehavingServer() as other:
        key = door.bob.shown_key(owner=other.url + BOB)
        other.default = shows({"id": other.url + BOB, "publicKey": key})
        door.server.routes[BOB] = shows({"id": other.url + BOB, "publicKey": key})
        assert status(await door.post(door.bob.activity(actor=other.url + BOB))) == NOT_HIS
        assert other.hits == 0
    door.clock.advance(LOOK_AGAIN)
    eve = door.server.url + "/users/eve"
    door.server.routes["/users/eve"] = shows({"id": eve, "publicKey": door.bob.shown_key(id=eve + "#main-key")})
    door.server.routes[BOB] = shows(door.bob.document(publicKey=door.bob.shown_key(owner=eve)))
    assert status(await door.post(door.bob.activity(actor=eve))) == 401
    assert door.kept == []


async def test_a_key_that_was_replaced_is_fetched_anew(door: Door) -> None:
    """Once in five minutes; a forger gets no more out of it."""
    await door.post(door.bob.activity())
    door.bob.key = private_key(1)
    assert [status(await door.post(door.bob.activity(2))) for _ in range(3)] == [401] * 3
    assert door.server.hits == 2
    door.clock.advance(LOOK_AGAIN)
    RemoteActor(door.server, key=private_key(1))
    assert status(await door.post(door.bob.activity(3))) == 202
    assert (door.server.hits, len(door.kept)) == (3, 2)


async def test_a_forged_signature_in_an_unknown_name_costs_one_fetch(door: Door) -> None:
    forger = RemoteActor(door.server, "/elsewhere", key=private_key(1))
    for number in range(3):
        assert status(await door.post(door.bob.activity(number), actor=forger, key_id=door.bob.key_id)) == 401
    assert door.server.hits == 2, "the key, and one look whether it is another by now"


async def test_a_server_that_is_away_is_told_to_come_back(door: Door) -> None:
    """In a minute; one that has no such key is refused."""
    door.server.routes[BOB] = respond(500)
    reply = await door.post(door.bob.activity())
    assert (status(reply), reply.headers["Retry-After"]) == (503, "60")
    door.clock.advance(LOOK_AGAIN)
    door.server.routes[BOB] = respond(410)
    assert status(await door.post(door.bob.activity())) == 401


async def test_a_thousand_ends_of_unknown_actors_cause_no_request(door: Door) -> None:
    """They are acknowledged and not kept."""
    for number in range(1_000):
        actor = f"{door.server.url}/users/{number}"
        delete: dict[str, Any] = {"id": f"{actor}#delete", "type": "Delete", "actor": actor, "object": actor}
        if number % 2:
            named: Any = {"type": "Tombstone", "id": actor}
            delete["object"] = [named] if number % 3 else named  # as some write it
        assert status(await door.post(delete, key_id=f"{actor}#main-key")) == 202
    assert (door.server.hits, door.kept) == (0, [])


@pytest.mark.parametrize("known_by", ["key", "follow"])
async def test_the_end_of_a_known_actor_is_verified(door: Door, known_by: str) -> None:
    delete = {"id": door.bob.id + "#delete", "type": "Delete", "actor": door.bob.id, "object": door.bob.id}
    async with door.database.transaction() as session:
        if known_by == "follow":
            follow = ActivityFollow(
                local_actor=OWN + "/users/alice",
                remote_actor=door.bob.id,
                direction=FollowDirection.FOLLOWER,
                inbox=door.bob.id + "/inbox",
                since=datetime.now(UTC),
            )
            session.add(follow)
        else:
            at = door.clock.now()
            pem = public_pem(door.bob.key)
            key = {"key_id": door.bob.key_id, "owner": door.bob.id, "public_pem": pem, "fetched_at": at}
            session.add(RemoteActorKey(**key))
    forger = RemoteActor(MisbehavingServer(), key=private_key(1))
    assert status(await door.post(delete, actor=forger, key_id=door.bob.key_id)) == 401
    assert status(await door.post(delete)) == 202
    assert [each["type"] for each in door.kept] == ["Delete"]


@pytest.mark.parametrize("answer", [404, 410, 200])
async def test_the_end_of_an_actor_is_verified_by_the_key_that_went_with_him(door: Door, answer: int) -> None:
    """Nothing else is, and not while the server is only away."""
    assert status(await door.post(door.bob.activity())) == 202
    door.clock.advance(KEPT)
    delete = door.bob.activity(2, type="Delete", object=door.bob.id)
    door.server.routes[BOB] = respond(500)
    assert status(await door.post(delete)) == 503
    door.clock.advance(LOOK_AGAIN)
    tombstone = {"id": door.bob.id, "type": "Tombstone"}  # as Friendica answers
    door.server.routes[BOB] = shows(tombstone) if answer == 200 else respond(answer)
    forger = RemoteActor(door.server, "/elsewhere", key=private_key(1))
    assert status(await door.post(delete, actor=forger, key_id=door.bob.key_id)) == 401
    assert status(await door.post(door.bob.activity(3))) == 401
    assert [status(await door.post(delete)) for _ in range(2)] == [202, 202]
    assert [each["type"] for each in door.kept] == ["Create", "Delete"]


async def test_a_delete_of_something_else_is_verified(door: Door) -> None:
    door.server.routes[BOB] = respond(404)
    assert status(await door.post(door.bob.activity(type="Delete", object=door.bob.id + "/notes/1"))) == 401


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b'"x"', b"{", b"\xff", b'{"type":"Create"}', b'{"actor":"x"}'),
        *(b'{"type":[],"actor":"x"}', b'{"type":7,"actor":"x"}', b'{"type":"Cre\\u0000ate","actor":"x"}'),
        *(b'{"type":"Create","actor":["x","y"]}', b'{"type":"Create","actor":"x","object":NaN}'),
        *(b"[" * 100_000, b'{"object":' * 100_000),
        b'{"type":"Delete","actor":"x","object":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_what_is_no_activity_is_refused_before_anybody_is_asked(door: Door, body: bytes) -> None:
    assert status(await door.post(body)) == 400
    assert door.server.hits == 0


@pytest.mark.parametrize("name", ["id", "actor"])
@pytest.mark.parametrize("url", ["/" + "x" * 64 * 1024, "/" + "\U00020000" * 600])
async def test_names_that_no_index_holds_are_refused(door: Door, name: str, url: str) -> None:
    """Counted in bytes, as the index does."""
    assert status(await door.post(door.bob.activity(**{name: door.server.url + url}))) == 400
    assert door.server.hits == 0


async def test_large_activities_cost_little(door: Door) -> None:
    """However they are filled; over a megabyte they are refused."""
    filled = door.bob.activity(object=[[]] * 250_000)
    body = json.dumps(filled).encode()
    assert len(body) < MOST_OF_ACTIVITY
    began = time.process_time()
    assert status(await door.post(body)) == 202
    assert time.process_time() - began < 2
    assert status(await door.post(body + b" " * MOST_OF_ACTIVITY)) == 413


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Type": "application/activity+jsonx"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": 'application/activity+json;a="' + ";" * 60_000}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity"}, 202),
        ({"Host": "c.example"}, 202),
    ],
)
async def test_headers_decide_first(door: Door, headers: dict[str, str], expected: int) -> None:
    assert status(await door.post(door.bob.activity(), then=headers)) == expected


@pytest.mark.parametrize(
    "kind",
    [
        'application/ld+json; profile="https://www.w3.org/ns/activitystreams"',
        "application/ld+json",
        "Application/LD+JSON ;charset=utf-8",
    ],
)
async def test_a_type_is_taken_whatever_its_parameters(door: Door, kind: str) -> None:
    assert status(await door.post(door.bob.activity(), content_type=kind)) == 202


@pytest.mark.parametrize(
    ("target", "expected"),
    [("inbox", 400), ("/in box/inbox", 400), ("/\u00e9/inbox", 400), ("/" + "x" * 64 * 1024 + "/inbox", 414)],
)
async def test_odd_targets_are_refused(door: Door, target: str, expected: int) -> None:
    assert status(await door.post(door.bob.activity(), target=target)) == expected


@pytest.mark.parametrize("key_id", ["https://b.example/" + "x" * 15_000, "bob", "https://10.0.0.1/x", OWN + "/actor#x"])
async def test_keys_that_nobody_may_name_are_refused(door: Door, key_id: str) -> None:
    assert status(await door.post(door.bob.activity(), key_id=key_id)) == NOT_HIS


async def test_a_blacklisted_server_is_turned_away(door: Door) -> None:
    async with door.database.transaction() as session:
        session.add(BlacklistedServer(server_url=door.server.url, created_at=datetime.now(UTC), reason="test"))
    assert status(await door.post(door.bob.activity())) == 403
    assert door.server.hits == 0


async def test_one_request_has_one_key_fetched(door: Door) -> None:
    """However many signatures it has; one of them has to verify."""
    eve = RemoteActor(door.server, "/users/eve", key=private_key(1))
    body = json.dumps(door.bob.activity()).encode()
    made = [
        each.signed(URL, body, door.clock.now(), kind=SignatureKind.RFC9421, key_id=key_id)
        for each, key_id in ((eve, door.server.url + "/missing"), (eve, eve.key_id), (door.bob, door.bob.key_id))
    ]
    headers = dict(made[0])
    for name in ("Signature", "Signature-Input"):
        headers[name] = ", ".join(each[name].replace("sig1", f"sig{at}", 1) for at, each in enumerate(made))

    async def post() -> int:
        return status(await door.inbox.take(method="POST", target=TARGET, headers=headers, body=body, client=Anybody()))

    assert await post() == 401
    assert door.server.hits == 1, "the others are not asked for"
    assert status(await door.post(door.bob.activity(2))) == 202, "now bob's is known"
    assert await post() == 202


async def test_whoever_is_not_known_counts_for_the_server_of_the_key(door: Door) -> None:
    """If that is known: whoever makes up others cannot shut it out."""
    for path in ("/users/1", "/users/2"):
        eve = RemoteActor(door.server, path)
        assert status(await door.post(eve.activity(), actor=eve)) == 202
    assert (door.admitted, door.counted) == ([False, True], [None, f"unknown:{door.server.url}"])


async def test_who_may_not_have_us_ask_is_told_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    async def spent(self: Door, _client: Asker, _is_known: bool) -> None:
        raise Refused(Why.LIMIT, 429, "More than that", retry_seconds=3600)

    monkeypatch.setattr(Door, "admit", spent)
    reply = await door.post(door.bob.activity())
    assert (status(reply), reply.headers["Retry-After"], door.server.hits) == (429, "3600", 0)


async def test_a_database_that_is_away_is_our_fault(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is a queue; whatever else goes wrong is no answer to come back for."""
    answers = []
    for error in (ConnectionRefusedError(), StorageUnavailable("away"), RuntimeError("a bug")):

        async def away(self: Door, *, raised: Exception = error, **_: Any) -> bool:
            raise OperationalError("insert", {}, raised) if isinstance(raised, OSError) else raised

        monkeypatch.setattr(Door, "keep", away)
        answers.append(await door.post(door.bob.activity()))
    assert [each.status for each in answers] == [503, 503, 500]
    assert [each.headers.get("Retry-After") for each in answers] == ["5", "5", None]


async def test_what_becomes_of_an_activity_is_counted(door: Door) -> None:
    """By its type, or by why it was refused: once each."""
    activity = door.bob.activity()
    for each in (activity, activity, door.bob.activity(2, type="Odd"), door.bob.activity(3, type=7)):
        await door.post(each)
    await door.post({"type": "Delete", "actor": "https://x.example/a", "object": "https://x.example/a"})
    await door.post(activity, drop="Signature")
    await door.post(activity, sent=b"{}")
    await door.post(door.bob.activity(4, actor=f"{door.server.url}/users/eve"))
    assert samples(door.metrics, "federation_activities_received_total") == {
        ("stored", "Create"): 1,
        ("known", "Create"): 1,
        ("stored", "other"): 1,
        ("ignored", "Delete"): 1,
    }
    refused = samples(door.metrics, "federation_activities_refused_total")
    assert refused == {("malformed",): 1, ("signature",): 2, ("owner",): 1}


async def test_what_is_verified_brings_the_next_look_forward(door: Door) -> None:
    """And heals nothing; what is not verified does not."""
    links = door.links.of("activitypub")
    first = door.clock.now() - timedelta(days=3)
    await links.exhausted(door.server.url, "TIMEOUT", first_attempted_at=first)
    for _ in range(8):
        await links.probe_failed(door.server.url)
    door.clock.advance(timedelta(seconds=70))
    later = (await links.find(door.server.url)).next_probe_at
    assert later is not None
    assert later > door.clock.now() + timedelta(seconds=2)
    await door.post(door.bob.activity(), at=door.clock.now() - 2 * WINDOW)
    assert (await links.find(door.server.url)).next_probe_at == later
    assert status(await door.post(door.bob.activity())) == 202
    link = await links.find(door.server.url)
    assert link.next_probe_at is not None
    assert (link.is_open, link.next_probe_at <= door.clock.now()) == (False, True)


async def test_a_host_of_keys_that_hangs_slows_nobody_else(door: Door) -> None:
    """Its requests wait, and those of others pass as if it were not there."""
    async with MisbehavingServer() as hanging:
        hanging.default = hang()
        stuck = [RemoteActor(hanging, f"/users/{number}") for number in range(50)]
        for each in stuck:
            hanging.routes[each.path] = hang()
        await door.post(door.bob.activity())
        waiting = [asyncio.create_task(door.post(each.activity(), actor=each)) for each in stuck]
        while hanging.hits < MOST_PER_CLIENT:
            assert status(await door.post(door.bob.activity(hanging.hits))) == 202
        for number in range(100, 200):
            assert status(await door.post(door.bob.activity(number))) == 202
        assert sum(not each.done() for each in waiting) == MOST_PER_CLIENT, "all the others were told at once"
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
