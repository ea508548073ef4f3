"""What is answered, from real rows: actors, those removed, accounts, and what strangers make up."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import Connection, insert
from structlog.testing import capture_logs

from db import ActivityActor, ActivityFollow, Database, FollowDirection, FollowState
from federation.activitypub.actors import found_by
from federation.activitypub.documents import ACTIVITY_JSON, COLLECTIONS, LD_JSON, Software, Usage
from federation.activitypub.follows import FollowTotals
from federation.activitypub.keys import ActorKeys
from federation.activitypub.replies import MAX_ACCEPT_CHARACTERS, Reply
from federation.activitypub.serving import Serving
from federation.protocol.urls import MAX_URL_CHARACTERS
from tests.federation.activitypub.stored import add_actor, change_key
from tests.federation.conftest import alter
from tests.federation.rows_read import MANY, cost, watched
from workers.clock import ManualClock

OWN_URL = "https://a.example"
ALICE = f"{OWN_URL}/users/alice"
BOB = f"{OWN_URL}/@bob"
NODE = f"{OWN_URL}/actor"


@dataclass(slots=True)
class Site:
    """A node's answers, with everything that they are made of."""

    database: Database
    clock: ManualClock
    keys: ActorKeys
    totals: FollowTotals
    functions: dict[str, Any] = field(default_factory=dict)

    async def add(self, url: str, *, is_instance: bool = False, removed: timedelta | None = None) -> None:
        now = self.clock.now()
        await add_actor(
            self.database, url, at=now, is_instance=is_instance, removed_at=None if removed is None else now - removed
        )

    async def add_follow(
        self, other: str, way: FollowDirection, state: FollowState = FollowState.ACCEPTED, *, actor: str = ALICE
    ) -> None:
        remote = f"https://b.example/users/{other}"
        async with self.database.transaction() as session:
            session.add(
                ActivityFollow(
                    local_actor=actor,
                    remote_actor=remote,
                    direction=way,
                    state=state,
                    inbox=f"{remote}/inbox",
                    since=self.clock.now(),
                )
            )

    async def ask(self, target: str, *, method: str = "GET", accept: str | None = None) -> Reply:
        serving = Serving(
            own_url=OWN_URL,
            keys=self.keys,
            database=self.database,
            clock=self.clock,
            software=Software(name="notes", version="1"),
            follows=self.totals.count,
            **self.functions,
        )
        return await serving.answer(method, target, {} if accept is None else {"aCCept": accept}, b"ignored")

    async def finger(self, resource: str) -> Reply:
        return await self.ask(f"/.well-known/webfinger?resource={quote(resource, safe='')}")


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    """An SQLite file; a test marked `on_both_databases` runs on PostgreSQL as well."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database_file')}"
    return str(request.getfixturevalue("migrated_postgres_url"))


on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
async def site(database: Database) -> AsyncIterator[Site]:
    """A node with two users and an actor of its own. No key of its own is needed in order to serve."""
    clock = ManualClock()
    site = Site(database, clock, ActorKeys(database, None, clock), FollowTotals(database))
    await site.add(ALICE)
    await site.add(BOB)
    await site.add(NODE, is_instance=True)
    yield site
    await site.keys.close()
    await site.totals.close()


def read(reply: Reply) -> dict[str, Any]:
    """The JSON of an answer whose length is as it says."""
    assert reply.headers["Content-Length"] == str(len(reply.body))
    value = json.loads(reply.body)
    assert isinstance(value, dict)
    return value


@on_both_databases
async def test_an_actor_is_shown_with_its_key(site: Site) -> None:
    """A minimal document, as no application says more."""
    reply = await site.ask("/users/alice", accept=ACTIVITY_JSON)
    assert (reply.status, reply.headers["Content-Type"]) == (200, ACTIVITY_JSON)
    assert (reply.headers["Vary"], reply.headers["Cache-Control"]) == ("Accept", "public, max-age=180")
    document = read(reply)
    assert (document["id"], document["type"], document["preferredUsername"]) == (ALICE, "Person", "alice")
    assert document["publicKey"] == {
        "id": f"{ALICE}#main-key",
        "owner": ALICE,
        "publicKeyPem": f"PEM of {ALICE}#main-key",
    }
    assert read(await site.ask("/actor"))["type"] == "Application"


@pytest.mark.parametrize(("accept", "kind"), [(LD_JSON, LD_JSON), (None, ACTIVITY_JSON), ("*/*", ACTIVITY_JSON)])
async def test_the_form_is_negotiated(site: Site, accept: str | None, kind: str) -> None:
    assert (await site.ask("/users/alice", accept=accept)).headers["Content-Type"] == kind


async def test_the_nodes_own_actor_is_shown_though_the_application_knows_none(site: Site) -> None:
    """It may have been made to sign what we ask for."""
    site.functions["actor"] = lambda url: None
    assert read(await site.ask("/actor"))["type"] == "Application"
    assert (await site.ask("/users/alice")).status == 404


async def test_who_takes_none_of_our_forms_is_told_them(site: Site) -> None:
    """And where there is no actor, that."""
    reply = await site.ask("/users/alice", accept="text/html")
    assert (reply.status, reply.headers["Vary"], reply.headers["Cache-Control"]) == (406, "Accept", "no-store")
    assert (await site.ask("/users/carol", accept="text/html")).status == 404


async def test_a_key_about_to_change_is_not_cached(site: Site) -> None:
    """Until it has."""
    now = site.clock.now()
    await change_key(site.database, ALICE, now=now, at=now + timedelta(minutes=10))
    for key, age in (("main-key", 0), ("key-2", 180)):
        reply = await site.ask("/users/alice")
        assert read(reply)["publicKey"]["id"] == f"{ALICE}#{key}"
        assert reply.headers["Cache-Control"] == f"public, max-age={age}"
        site.clock.advance(timedelta(minutes=10))


async def test_the_application_says_what_an_actor_is(site: Site) -> None:
    """The key and its context are ours."""
    site.functions["actor"] = {ALICE: {"@context": [], "id": ALICE, "name": "Älice", "publicKey": "no"}}.get
    document = read(await site.ask("/users/alice"))
    assert (document["name"], document["publicKey"]["owner"]) == ("Älice", ALICE)
    assert document["@context"] == ["https://w3id.org/security/v1"]
    assert (await site.ask("/@bob")).status == 404  # the application does not know him


async def test_a_function_runs_in_a_thread_and_a_coroutine_here(site: Site) -> None:
    threads: list[int] = []

    def plain(url: str) -> Mapping[str, object]:
        threads.append(threading.get_ident())
        return {"id": url}

    async def waiting(url: str) -> Mapping[str, object]:
        return plain(url)

    for function in (plain, waiting):
        site.functions["actor"] = function
        assert read(await site.ask("/users/alice"))["id"] == ALICE
    here = threading.get_ident()
    assert [each == here for each in threads] == [False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _: 1 / 0,
        lambda _: "text",
        lambda _: {"summary": {1, 2}},
        lambda _: {"summary": float("nan")},
        lambda _: {"summary": "\ud800"},
    ],
    ids=["raises", "text", "set", "nan", "surrogate"],
)
async def test_an_application_that_fails_gives_nothing_away(site: Site, wrong: object) -> None:
    """The log has the stack without a message."""
    site.functions |= {"actor": wrong, "find": lambda _: 1 / 0}
    finger = f"/.well-known/webfinger?resource=acct:{'alice@a.example'}"
    for target in ("/users/alice", finger):
        with capture_logs() as logs:
            reply = await site.ask(target)
        assert (reply.status, read(reply), reply.headers["Cache-Control"]) == (
            500,
            {"error": "Internal error"},
            "no-store",
        )
        assert [(line["event"], line["path"]) for line in logs] == [("inbound_failed", target.partition("?")[0])]
        assert logs[0]["stack"]
    assert (await site.ask("/users/alice", method="HEAD")).body == b""


@on_both_databases
@pytest.mark.parametrize(("days", "status"), [(0, 200), (29, 200), (30, 410), (31, 410)])
async def test_a_removed_actor_is_shown_for_a_month(site: Site, days: int, status: int) -> None:
    """With what verifies its Delete, whatever the application says; its account is gone at once."""
    site.functions["actor"] = lambda url: {"id": url, "name": "still here"}
    url = f"{OWN_URL}/users/dora"
    await site.add(url, removed=timedelta(days=days))
    reply = await site.ask("/users/dora")
    assert reply.status == status
    if status == 200:
        assert set(read(reply)) == {"@context", "id", "type", "inbox", "publicKey"}
    for resource in ("acct:dora@a.example", url):
        assert (await site.finger(resource)).status == 404


async def test_head_is_a_get_without_its_body(site: Site) -> None:
    """Everywhere, refusals too."""
    site.functions["actor"] = lambda url: {"id": url}
    for target in (
        "/users/alice",
        "/users/carol",
        "/users/alice/followers",
        "/nodeinfo/2.1",
        "/.well-known/webfinger",
        "/.well-known/host-meta",
    ):
        get, head = await site.ask(target), await site.ask(target, method="HEAD")
        assert (head.status, head.headers, head.body) == (get.status, get.headers, b"")
        assert get.body


@pytest.mark.parametrize("target", ["/users/alice", "/nodeinfo/2.1", "/nothing"])
async def test_only_get_and_head_are_answered(site: Site, target: str) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "get", "TRACE", "", "\x00"):
        reply = await site.ask(target, method=method)
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD"), method


@pytest.mark.parametrize(
    "resource",
    [
        "acct:alice@a.example",
        "ACCT:alice@A.example",
        ALICE,
        "acct:Alice@a.example",
        "acct:@alice@a.example",
        "alice@a.example",
        "@ALICE@a.example",
    ],
)
async def test_an_account_and_a_url_lead_to_the_actor(site: Site, resource: str) -> None:
    """Askers write them so. The account is that of the actor, whatever the case in which it was asked for."""
    reply = await site.finger(resource)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/jrd+json")
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    found = read(reply)
    assert found["subject"] == "acct:alice@a.example"
    assert found["links"][0]["href"] == ALICE


STRANGERS = [
    "acct:carol@a.example",
    "acct:alice@b.example",
    "acct:alice@a.example:444",
    "acct:lice@a.example",
    "acct:%@a.example",
    "acct:_____@a.example",
    "acct:al_ce@a.example",
    "https://b.example/users/alice",
    "https://a.example/users/carol",
    "https://a.example/users/../users/alice",
    "http://a.example/users/alice",
    f"{ALICE}#main-key",
]


@on_both_databases
async def test_who_is_not_here_is_unknown(site: Site) -> None:
    """No pattern is one."""
    for resource in STRANGERS:
        assert (await site.finger(resource)).status == 404, resource


NOBODY = [
    "",
    "?resource=",
    "?resource",
    "?rel=self",
    "?resource=alice",
    "?resource=@alice",
    "?resource=@@alice@a.example",
    "?resource=acct:alice",
    "?resource=acct:@a.example",
    "?resource=acct:alice@",
    "?resource=acct:users/alice@a.example",
    "?resource=acct:a@alice@a.example",
    "?resource=acct:alice%00@a.example",
    "?resource=acct:alice%0A@a.example",
    "?resource=mailto:alice@a.example",
    "?resource=https:alice",
    "?resource=acct:alice@a.example&resource=acct:bob@a.example",
]


async def test_webfinger_for_nothing_in_particular_is_refused(site: Site) -> None:
    for query in NOBODY:
        assert (await site.ask(f"/.well-known/webfinger{query}")).status == 400, query


@on_both_databases
async def test_the_first_of_namesakes_has_the_account(site: Site) -> None:
    """An `@` before the name is none of it."""
    site.clock.advance(timedelta(seconds=1))
    await site.add(f"{OWN_URL}/groups/alice")
    assert read(await site.finger("acct:alice@a.example"))["links"][0]["href"] == ALICE
    assert read(await site.finger("acct:bob@a.example"))["links"][0]["href"] == BOB
    await site.add(f"{OWN_URL}/users/Bob")
    for name, url in (("bob", BOB), ("Bob", f"{OWN_URL}/users/Bob"), ("BOB", BOB)):
        assert read(await site.finger(f"acct:{name}@a.example"))["links"][0]["href"] == url


@on_both_databases
async def test_a_strangers_account_reads_few_of_many_actors(site: Site) -> None:
    """Neither where nobody has the name, nor where all have it but for its case."""
    now = site.clock.now()
    rows = [
        {"id": f"{OWN_URL}/{number}/{end}", "name": found_by(end), "created_at": now, "is_instance": False}
        for number in range(MANY // 2)
        for end in (f"u{number}", "@Same")
    ]

    def fill(connection: Connection) -> None:
        connection.execute(insert(ActivityActor), rows)
        connection.exec_driver_sql("ANALYZE activitypub_actors")

    await site.database.transact(fill)
    with watched() as queries:
        for name, status in (("nobody", 404), ("SAME", 200)):
            assert (await site.finger(f"acct:{name}@a.example")).status == status
    assert len(queries) == 3
    assert await site.database.transact(lambda connection: cost(connection, queries=queries)) <= 1_000


async def test_the_application_knows_accounts(site: Site) -> None:
    """Also of another host, for which it may speak; an actor that is not here it cannot invent."""
    known = {"al@brand.example": ALICE, "x@a.example": f"{OWN_URL}/users/x"}
    site.functions["find"] = known.get
    found = read(await site.finger("acct:al@brand.example"))
    assert (found["subject"], found["links"][0]["href"]) == ("acct:al@brand.example", ALICE)
    for account in ("alice@a.example", "x@a.example"):
        assert (await site.finger(f"acct:{account}")).status == 404


async def test_the_account_of_a_url_has_the_name_of_the_document(site: Site) -> None:
    """As receivers compare the two."""
    site.functions["actor"] = {ALICE: {"id": ALICE, "preferredUsername": "Alicia"}, BOB: {"id": BOB}}.get
    assert read(await site.finger(ALICE))["subject"] == "acct:Alicia@a.example"
    assert read(await site.finger(BOB))["subject"] == "acct:bob@a.example"
    await site.add(f"{OWN_URL}/users/carol")
    assert (await site.finger(f"{OWN_URL}/users/carol")).status == 404  # the application does not know her


async def test_the_nodes_own_actor_is_found_though_the_application_does_not_know_it(site: Site) -> None:
    """Mastodon looks up by WebFinger whoever signs what we ask for, and shows nothing to who is not found."""
    site.functions |= {"find": {}.get, "actor": {}.get}
    name = read(await site.ask("/actor"))["preferredUsername"]
    for resource in (f"acct:{name}@a.example", "acct:Actor@A.example", NODE):
        found = read(await site.finger(resource))
        assert (found["links"][0]["href"], found["subject"].lower()) == (NODE, "acct:actor@a.example")
    for other in ("acct:alice@a.example", "acct:actor@b.example", ALICE):
        assert (await site.finger(other)).status == 404
    site.functions["find"] = {"actor@a.example": ALICE}.get
    assert read(await site.finger("acct:actor@a.example"))["links"][0]["href"] == ALICE


async def test_nodeinfo_and_host_meta(site: Site) -> None:
    index = read(await site.ask("/.well-known/nodeinfo"))
    (link,) = index["links"]
    info = await site.ask(link["href"].removeprefix(OWN_URL))
    assert read(info)["software"] == {"name": "notes", "version": "1"}
    assert (await site.ask("/.well-known/host-meta")).headers["Content-Type"].startswith("application/xrd+xml")


@on_both_databases
async def test_collections_say_how_much_is_in_them(site: Site) -> None:
    """Whoever was accepted is counted, each way; of its posts an actor's node knows nothing."""
    await site.add_follow("bob", FollowDirection.FOLLOWER)
    await site.add_follow("carol", FollowDirection.FOLLOWER, FollowState.PENDING)
    await site.add_follow("bob", FollowDirection.FOLLOWING)
    await site.add_follow("carol", FollowDirection.FOLLOWING)
    await site.add_follow("dora", FollowDirection.FOLLOWING, FollowState.REJECTED)
    shown = read(await site.ask("/users/alice"))
    for name, total in (("followers", 1), ("following", 2)):
        reply = await site.ask(shown[name].removeprefix(OWN_URL), accept=LD_JSON)
        assert (reply.headers["Content-Type"], reply.headers["Vary"]) == (LD_JSON, "Accept")
        assert read(reply) == {
            "@context": "https://www.w3.org/ns/activitystreams",
            "id": f"{ALICE}/{name}",
            "type": "OrderedCollection",
            "totalItems": total,
        }
        assert (await site.ask(f"/users/alice/{name}", accept="text/html")).status == 406
    assert (await site.ask("/users/alice/outbox")).status == 404
    assert read(await site.ask("/@bob/followers"))["totalItems"] == 0


async def test_followers_are_counted_once_a_minute(site: Site) -> None:
    """Strangers may ask as often as they like, of an actor with many."""
    with watched() as queries:
        for _ in range(3):
            assert (await site.ask("/users/alice/followers")).status == 200
    assert sum("count(" in query for query, _ in queries) == 1


async def test_the_application_says_how_much_is_in_a_collection(site: Site) -> None:
    """Where it says nothing those who follow are counted; also in the outbox of whom it knows."""
    await site.add_follow("bob", FollowDirection.FOLLOWER)
    site.functions["total"] = lambda url, name: {(ALICE, "outbox"): 3, (ALICE, "following"): 0}.get((url, name))
    totals = [read(await site.ask(f"/users/alice/{name}"))["totalItems"] for name in COLLECTIONS]
    assert dict(zip(COLLECTIONS, totals, strict=True)) == {"outbox": 3, "followers": 1, "following": 0}
    assert (await site.ask("/@bob/outbox")).status == 404


@pytest.mark.parametrize("wrong", ["3", -1, True, 1.5])
async def test_no_number_is_shown_that_is_none(site: Site, wrong: object) -> None:
    site.functions |= {"total": lambda url, name: wrong, "usage": lambda: wrong}
    for target in ("/users/alice/outbox", "/nodeinfo/2.1"):
        with capture_logs() as logs:
            assert (await site.ask(target)).status == 500
        assert [line["event"] for line in logs] == ["inbound_failed"]


async def test_only_who_is_shown_has_collections(site: Site) -> None:
    """The node's own actor is, though the application does not know it; nobody is who was removed."""
    await site.add(f"{OWN_URL}/users/dora", removed=timedelta(0))
    site.functions |= {"actor": {BOB: {"id": BOB}}.get, "total": lambda url, name: 1}
    asked = ("/users/alice", "/@bob", "/actor", "/users/dora", "/users/carol", "")
    statuses = [(await site.ask(f"{path}/followers")).status for path in asked]
    assert statuses == [404, 200, 200, 404, 404, 404]
    await site.add(f"{ALICE}/followers")
    site.functions["actor"] = lambda url: {"id": url}
    assert read(await site.ask("/users/alice/followers"))["publicKey"]["owner"] == f"{ALICE}/followers"


async def test_nodeinfo_counts_what_the_application_says(site: Site) -> None:
    async def usage() -> Usage:
        return Usage(users=2, local_posts=7)

    site.functions["usage"] = usage
    assert read(await site.ask("/nodeinfo/2.1"))["usage"] == {"users": {"total": 2}, "localPosts": 7}
    site.functions["usage"] = lambda: Usage(active_month=1)
    assert read(await site.ask("/nodeinfo/2.1"))["usage"] == {"users": {"activeMonth": 1}}


NOWHERE = [
    "/users/../users/alice",
    "/users/%2e%2e/users/alice",
    "/users%2Falice",
    "/users/al%69ce",
    "/users/alice/",
    "/users/alice%00",
    "/users/alice?",
    "/users/alice?x=1",
    "/users/alice#main-key",
    "/users/alice/inbox",
    "//users/alice",
    "//b.example/users/alice",
    "/.well-known/",
    "/.well-known/webfinger/",
    "/nodeinfo/2.0",
    "/",
    "/%F0%28%8C%28",
    "/" + "%" * 100,
    "/'; DROP TABLE activitypub_actors; --".replace(" ", "+"),
]


@on_both_databases
async def test_a_target_is_an_actor_or_nothing(site: Site) -> None:
    """Nothing of it is decoded."""
    for target in NOWHERE:
        assert (await site.ask(target)).status == 404, target


NO_TARGETS = [
    ("", 400),
    ("*", 400),
    ("users/alice", 400),
    (ALICE, 400),
    ("https://b.example/users/alice", 400),
    ("/users/alice\x00", 400),
    ("/users/alice\n", 400),
    ("/users/al ice", 400),
    ("/users/älice", 400),
    ("/users/\ud800", 400),
    ("/" * (MAX_URL_CHARACTERS + 1), 414),
    ("/users/" + "a" * 65536, 414),
    ("/.well-known/webfinger?resource=" + "a" * 65536, 414),
]


async def test_what_is_no_target_is_not_looked_up(site: Site) -> None:
    for target, status in NO_TARGETS:
        reply = await site.ask(target)
        assert (reply.status, len(reply.body) < 200) == (status, True), target[:80]


async def test_a_long_accept_is_not_read(site: Site) -> None:
    for longer, status in ((0, 200), (1, 431)):
        accept = f"*/*,{'x' * (MAX_ACCEPT_CHARACTERS - 4 + longer)}"
        assert (await site.ask("/users/alice", accept=accept)).status == status


async def test_a_database_without_its_tables_is_no_traceback(site: Site, database_url: str) -> None:
    """But ours to repair, as the log says."""
    alter(database_url, "DROP TABLE activitypub_actors")
    events: list[MutableMapping[str, Any]]
    with capture_logs() as events:
        reply = await site.ask("/users/alice")
    assert (reply.status, read(reply)) == (500, {"error": "Internal error"})
    assert [line["event"] for line in events] == ["inbound_failed"]


async def test_a_database_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    (tmp_path / "a-folder").mkdir()
    database = Database(f"sqlite:///{tmp_path / 'a-folder'}")
    site = Site(database, ManualClock(), ActorKeys(database, None, ManualClock()), FollowTotals(database))
    with capture_logs() as events:
        reply = await site.ask("/users/alice")
    await database.close()
    assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
    assert [line["event"] for line in events] == ["inbound_database_unavailable"]
