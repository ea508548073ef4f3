"""Keys of others, fetched from real servers: which are believed, how often who is asked, and what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import select

from db import Database, RemoteActorKey
from federation.activitypub.documents import ACTIVITY_JSON, LD_JSON
from federation.activitypub.key_documents import LONGEST_CONTENT_TYPE, KeyRefused
from federation.activitypub.keys import public_pem
from federation.activitypub.remote_keys import (
    KEPT,
    LOOK_AGAIN,
    MOST_NEW_PER_ORIGIN,
    MOST_OF_DOCUMENT,
    MOST_PER_CLIENT,
    MOST_PER_ORIGIN,
    MOST_WAITING,
    KeyUnavailable,
    RemoteKeys,
)
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool, PoolLimits
from tests.federation.activitypub.remote import BOB, RemoteActor, private_key, shows
from tests.misbehaving import (
    Exchange,
    MisbehavingServer,
    Received,
    hang,
    huge_body,
    redirect,
    respond,
    send_raw,
    truncate,
)
from tests.patience import until
from workers.clock import ManualClock, SystemClock

SIGNED = {"X-Signed": "yes", "Accept": ACTIVITY_JSON}


async def signer(_url: str) -> Mapping[str, str]:
    return SIGNED


@dataclass(slots=True)
class Scene:
    database: Database
    server: MisbehavingServer
    clock: ManualClock
    keys: RemoteKeys
    bob: RemoteActor
    asked: list[bool] = field(default_factory=list)

    async def admit(self, is_known: bool) -> None:
        self.asked.append(is_known)

    async def pem(
        self,
        key_id: str | None = None,
        *,
        refetch: bool = False,
        is_believed: bool = True,
        client: str | None = None,
    ) -> str:
        key = await self.keys.key(key_id or self.bob.key_id, refetch=refetch, admit=self.admit, client=client)
        if is_believed:
            await self.keys.believe(key)
        return key.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    async def rows(self) -> list[RemoteActorKey]:
        async with self.database.read() as session:
            return list((await session.execute(select(RemoteActorKey))).scalars())


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{request.getfixturevalue('database_file')}"
    return str(request.getfixturevalue("migrated_postgres_url"))


on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)


@asynccontextmanager
async def finding(
    database: Database, clock: ManualClock, allowed: str = "127.0.0.1", own_url: str = "https://a.example"
) -> AsyncIterator[RemoteKeys]:
    guard = AddressGuard(frozenset({allowed}))
    pool = ConnectionPool(guard, limits=PoolLimits(connections_per_server=MOST_PER_ORIGIN))
    async with FederationClient(guard, pool) as client:
        yield RemoteKeys(
            own_url=own_url, database=database, client=client, guard=guard, signer=signer, clock=clock, kept=KEPT
        )


@pytest.fixture
async def scene(database: Database) -> AsyncIterator[Scene]:
    clock = ManualClock(SystemClock().now())
    async with MisbehavingServer() as server, finding(database, clock) as keys:
        server.default = respond(404)
        yield Scene(database, server, clock, keys, RemoteActor(server))


@on_both_databases
async def test_a_key_is_fetched_once_and_for_all_processes(scene: Scene) -> None:
    """By a signed request; after a day it is looked at again."""
    assert await scene.pem() == await scene.pem() == public_pem(scene.bob.key)
    assert [each.path for each in scene.server.requests] == [BOB]
    assert scene.server.requests[0].headers["x-signed"] == "yes"
    async with finding(scene.database, scene.clock) as others:
        assert (await others.key(scene.bob.key_id)).owner == scene.bob.id
        assert scene.server.hits == 1
        scene.clock.advance(KEPT)
        scene.bob.key = private_key(1)
        scene.server.routes[BOB] = shows(scene.bob.document())
        assert await scene.pem() == public_pem(private_key(1))
    assert (scene.server.hits, scene.asked) == (2, [False, True])
    [row] = await scene.rows()
    assert (row.owner, row.public_pem, row.failed_at) == (scene.bob.id, public_pem(private_key(1)), None)


@on_both_databases
async def test_a_key_that_does_not_verify_is_looked_at_once_in_five_minutes(scene: Scene) -> None:
    """By one process; another finds what that one found."""
    await scene.pem()
    async with finding(scene.database, scene.clock) as others:
        await others.key(scene.bob.key_id)
        scene.bob.key = private_key(1)
        scene.server.routes[BOB] = shows(scene.bob.document())
        assert [await scene.pem(refetch=True) for _ in range(3)] == [public_pem(private_key(1))] * 3
        assert scene.server.hits == 2
        found = await others.key(scene.bob.key_id, refetch=True)
        assert found.public == (await scene.keys.key(scene.bob.key_id)).public
        await others.key(scene.bob.key_id, refetch=True)
    assert scene.server.hits == 2
    scene.clock.advance(LOOK_AGAIN)
    await scene.pem(refetch=True)
    assert scene.server.hits == 3


async def test_a_key_is_written_once_it_is_believed(scene: Scene) -> None:
    """Until then it is one process's, and its server is not known; then it is written as we would write it."""
    shown = "Comment: x\n" * 100 + public_pem(scene.bob.key)
    scene.server.routes[BOB] = shows(scene.bob.document(publicKey=scene.bob.shown_key(publicKeyPem=shown)))
    eve = RemoteActor(scene.server, "/users/eve")
    for key_id in (None, eve.key_id, None):
        await scene.pem(key_id, is_believed=False)
    await scene.pem(refetch=True, is_believed=False)
    assert (await scene.rows(), scene.asked) == ([], [False] * 3)
    scene.server.routes[BOB] = respond(500)
    scene.clock.advance(LOOK_AGAIN)
    with pytest.raises(KeyUnavailable):
        await scene.pem(refetch=True, is_believed=False)
    assert await scene.rows() == []
    await scene.pem()
    assert [row.public_pem for row in await scene.rows()] == [public_pem(scene.bob.key)]
    await scene.pem(RemoteActor(scene.server, "/users/carol").key_id)
    assert scene.asked[-1]


BAD_DOCUMENTS = {
    "id": lambda bob: bob.document(id=bob.id + "x"),
    "no id": lambda bob: {"publicKey": bob.shown_key()},
    "another key": lambda bob: bob.document(publicKey=bob.shown_key(id=bob.id + "#other")),
    "no key": lambda bob: {"id": bob.id},
    "another owner": lambda bob: bob.document(publicKey=bob.shown_key(owner="https://c.example/users/bob")),
    "an owner who lists no key": lambda bob: bob.document(publicKey=bob.shown_key(owner=bob.server.url + "/eve")),
    "an owner that is no text": lambda bob: bob.document(publicKey=bob.shown_key(owner=["x"])),
    "no PEM": lambda bob: bob.document(publicKey=bob.shown_key(publicKeyPem="PEM")),
    "a PEM that is no text": lambda bob: bob.document(publicKey=bob.shown_key(publicKeyPem=7)),
    "a long PEM": lambda bob: bob.document(publicKey=bob.shown_key(publicKeyPem=" " * 20_000 + public_pem(bob.key))),
    "a short key": lambda bob: bob.document(publicKey=bob.shown_key(publicKeyPem=short_pem())),
    "no object": lambda bob: [bob.document()],
}


def short_pem() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
async def test_a_document_that_does_not_show_the_key_of_its_owner_is_refused(scene: Scene, name: str) -> None:
    scene.server.routes["/eve"] = shows({"id": scene.server.url + "/eve"})
    scene.server.routes[BOB] = shows(BAD_DOCUMENTS[name](scene.bob))
    for _ in range(2):
        with pytest.raises(KeyRefused):
            await scene.pem()
    assert len([each for each in scene.server.requests if each.path == BOB]) <= 2, "the second time nobody is asked"
    hits = scene.server.hits
    scene.clock.advance(LOOK_AGAIN)
    with pytest.raises(KeyRefused):
        await scene.pem()
    assert scene.server.hits == 2 * hits
    assert await scene.rows() == []


@pytest.mark.parametrize(
    ("kind", "is_believed"),
    [
        (ACTIVITY_JSON, True),
        (f"{ACTIVITY_JSON}; charset=utf-8", True),
        (LD_JSON, True),
        (f"{ACTIVITY_JSON}; a={'x' * LONGEST_CONTENT_TYPE}", False),
        ("application/ld+json", False),
        ('application/ld+json; profile="https://example.com/"', False),
        ("application/json", False),
        ("text/plain", False),
        ("", False),
    ],
)
async def test_an_uploaded_file_is_no_actor(scene: Scene, kind: str, is_believed: bool) -> None:
    scene.server.routes[BOB] = shows(scene.bob.document(), kind)
    if is_believed:
        assert await scene.pem() == public_pem(scene.bob.key)
    else:
        with pytest.raises(KeyRefused):
            await scene.pem()


@pytest.mark.parametrize("form", ["a key alone", "a short actor", "a short actor at the key's own URL"])
async def test_a_key_with_a_document_of_its_own_is_the_owners_who_lists_it(scene: Scene, form: str) -> None:
    """As GoToSocial has it."""
    bob, url = scene.bob, scene.bob.id + "/main-key"
    key = bob.shown_key(id=url)
    forms = {"a key alone": key, "a short actor": {"id": bob.id, "publicKey": key}}
    scene.server.routes[BOB + "/main-key"] = shows(forms.get(form, {"id": url, "publicKey": key}))
    with pytest.raises(KeyRefused):
        await scene.pem(url)
    scene.clock.advance(LOOK_AGAIN)
    scene.server.routes[BOB] = shows(bob.document(publicKey=[{"id": "other"}, key]))
    assert await scene.pem(url) == public_pem(bob.key)
    assert (await scene.keys.key(url)).owner == bob.id


async def test_other_kinds_of_keys_are_read(scene: Scene) -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    scene.server.routes[BOB] = shows(scene.bob.document(publicKey=scene.bob.shown_key(publicKeyPem=pem)))
    assert await scene.pem() == pem


async def test_redirects_stay_on_the_origin(scene: Scene) -> None:
    """The document is that of the URL where it is in the end."""
    moved = RemoteActor(scene.server, "/ap/bob")
    key = moved.shown_key(id=scene.bob.key_id)
    scene.server.routes["/ap/bob"] = shows(moved.document(publicKey=key))
    scene.server.routes[BOB] = redirect("/hop", 302)
    scene.server.routes["/hop"] = redirect(moved.id, 301)
    await scene.pem()
    assert (await scene.keys.key(scene.bob.key_id)).owner == moved.id


@pytest.mark.parametrize("away", ["host", "port", "scheme", "endless", "none"])
async def test_redirects_elsewhere_are_not_followed(scene: Scene, away: str) -> None:
    async with MisbehavingServer() as other:
        RemoteActor(other)
        goals = {"host": f"http://localhost:{scene.server.port}{BOB}", "port": other.url + BOB, "endless": BOB}
        goals["scheme"] = f"https://127.0.0.1:{scene.server.port}{BOB}"
        scene.server.routes[BOB] = redirect(goals.get(away, ""), 302)
        with pytest.raises(KeyRefused):
            await scene.pem()
        assert (other.hits, scene.server.hits <= 3) == (0, True)


BOMB = b'{"id":' + b"[" * 200_000
FAILURES = {
    "refused": (respond(403), KeyRefused),
    "unknown": (respond(404), KeyRefused),
    "gone": (respond(410), KeyRefused),
    "busy": (respond(429), KeyUnavailable),
    "unable to verify us": (respond(401), KeyUnavailable),
    "broken": (respond(500), KeyUnavailable),
    "a page": (respond(headers={"Content-Type": "text/html; charset=utf-8"}, body=b"<p>back soon"), KeyUnavailable),
    "cut off": (truncate(), KeyUnavailable),
    "no HTTP": (send_raw(b"\x16\x03\x01"), KeyUnavailable),
    "endless": (huge_body(), KeyRefused),
    "ten gigabytes": (huge_body(announced=True), KeyRefused),
    "too long": (respond(headers={"Content-Type": ACTIVITY_JSON}, body=b" " * (MOST_OF_DOCUMENT + 1)), KeyRefused),
    "deep": (respond(headers={"Content-Type": ACTIVITY_JSON}, body=BOMB), KeyRefused),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_what_a_server_answers_instead_is_remembered(scene: Scene, name: str) -> None:
    """For five minutes, in which it is not asked again."""
    behaviour, error = FAILURES[name]
    scene.server.routes[BOB] = behaviour
    for _ in range(3):
        with pytest.raises(error):
            await scene.pem()
    assert scene.server.hits == 1
    scene.clock.advance(LOOK_AGAIN)
    RemoteActor(scene.server)
    await scene.pem()
    await scene.pem()
    assert scene.server.hits == 2


async def test_a_known_key_that_cannot_be_had_any_more_is_so_for_all_processes(scene: Scene) -> None:
    """It still counts until its day is over, whatever somebody signs badly in its name."""
    await scene.pem()
    scene.server.routes[BOB] = respond(500)
    with pytest.raises(KeyUnavailable):
        await scene.pem(refetch=True)
    await scene.pem()
    async with finding(scene.database, scene.clock) as others:
        with pytest.raises(KeyUnavailable):
            await others.key(scene.bob.key_id, refetch=True)
    assert scene.server.hits == 2


@pytest.mark.parametrize(
    "key_id",
    [
        "bob",
        "https://",
        "urn:uuid:1",
        "ftp://127.0.0.1/bob",
        "http://user@127.0.0.1/bob",
        "http://b.example/users/bob#main-key",
        "https://10.0.0.1/users/bob",
        "https://169.254.169.254/latest/meta-data",
        "https://metadata.google.internal/",
        "https://[::1]/users/bob",
        "https://b.example/" + "x" * 64 * 1024,
        "https://a.example/users/alice#main-key",
        "https://b.example/\u00e9",
    ],
)
async def test_what_may_not_be_asked_for_is_not(scene: Scene, key_id: str) -> None:
    """Plain http, private addresses, no URLs, and ourselves."""
    with pytest.raises(KeyRefused):
        await scene.pem(key_id)
    assert scene.asked == []


async def test_a_name_that_leads_to_a_private_address_is_not_dialled(database: Database) -> None:
    async with (
        MisbehavingServer() as server,
        finding(database, ManualClock(SystemClock().now()), allowed="a.example") as keys,
    ):
        with pytest.raises(KeyUnavailable):
            await keys.key(f"https://localhost:{server.port}{BOB}")
        assert server.connections == 0


async def test_one_key_is_fetched_once_whoever_waits(scene: Scene) -> None:
    """And those who wait are bounded."""
    server = scene.server
    release = held(server)
    waiting = [asyncio.create_task(scene.pem()) for _ in range(MOST_WAITING + 5)]
    await until(lambda: server.hits and sum(each.done() for each in waiting) == 5)
    release.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes.count(public_pem(scene.bob.key)) == MOST_WAITING
    assert sum(isinstance(each, KeyUnavailable) for each in outcomes) == 5
    assert (server.hits, len(scene.asked)) == (1, 1)


async def test_who_waits_for_new_keys_keeps_none_that_is_known_from_being_looked_at(scene: Scene) -> None:
    """On the same server, which hangs for all others; also if only the database knows it."""
    eve = RemoteActor(scene.server, "/users/eve")
    await scene.keys.believe(await scene.keys.key(scene.bob.key_id))
    await scene.keys.believe(await scene.keys.key(eve.key_id))
    del scene.keys._stored[eve.key_id]  # as after a restart
    scene.clock.advance(KEPT)
    new = [RemoteActor(scene.server, f"/users/{number}") for number in range(MOST_NEW_PER_ORIGIN)]
    for each in new:
        scene.server.routes[each.path] = hang()
    names = [new[number % len(new)] for number in range(MOST_WAITING)]
    waiting = [asyncio.create_task(scene.pem(each.key_id, client=each.path)) for each in names]
    await until(lambda: scene.server.hits == 2 + len(new))
    for each in (scene.bob, eve):
        assert await scene.pem(each.key_id) == public_pem(each.key)
    with pytest.raises(KeyUnavailable, match="wait"):
        await scene.pem(f"{scene.server.url}/users/another")
    await ended(waiting)


def held(server: MisbehavingServer) -> asyncio.Event:
    """Let every route of the server wait until the event, which is returned."""
    release, shown = asyncio.Event(), dict(server.routes)

    async def behave(request: Received, exchange: Exchange) -> None:
        await release.wait()
        await shown.get(request.path, respond(404))(request, exchange)

    server.routes.clear()
    server.default = behave
    return release


async def test_a_server_is_asked_for_some_keys_at_a_time(scene: Scene) -> None:
    """And while it hangs, another is asked at once."""
    actors = [RemoteActor(scene.server, f"/users/{number}") for number in range(MOST_NEW_PER_ORIGIN + 3)]
    release = held(scene.server)
    waiting = [asyncio.create_task(scene.pem(each.key_id, client=each.path)) for each in actors]
    await until(lambda: (scene.server.hits, sum(task.done() for task in waiting)) == (MOST_NEW_PER_ORIGIN, 3))
    async with MisbehavingServer() as other:
        await scene.pem(RemoteActor(other).key_id)
    release.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(each, KeyUnavailable) for each in outcomes) == 3
    assert await scene.pem(actors[-1].key_id) == public_pem(actors[-1].key), "that is not remembered"


@pytest.mark.parametrize("client", ["192.0.2.1", None])
async def test_for_one_client_five_keys_are_fetched_at_a_time(scene: Scene, client: str | None) -> None:
    """Of any servers; somebody unknown is one client for each. For others we go on, and for keys that are known."""
    await scene.pem()
    scene.clock.advance(KEPT)
    async with MisbehavingServer() as other:
        elsewhere = [RemoteActor(other), RemoteActor(other, "/users/2")]
        await scene.pem(elsewhere[1].key_id, client=client)
        scene.server.default = hang()
        names = [f"{scene.server.url}/users/{number}" for number in range(MOST_PER_CLIENT)]
        waiting = [asyncio.create_task(scene.pem(each, client=client)) for each in names]
        await until(lambda: scene.server.hits == 1 + MOST_PER_CLIENT)
        for key_id in (f"{scene.server.url}/more", *([] if client is None else [elsewhere[0].key_id])):
            with pytest.raises(KeyUnavailable):
                await scene.pem(key_id, client=client)
        await scene.pem(elsewhere[0].key_id, client=None if client is None else "192.0.2.2")
        await scene.pem(client=client)
        await ended(waiting)


async def test_keys_that_are_known_have_places_of_their_own(scene: Scene) -> None:
    """Whoever names others can only take the rest."""
    await scene.pem()
    scene.clock.advance(KEPT)
    scene.server.default = hang()
    names = [f"{scene.server.url}/users/{number}" for number in range(MOST_NEW_PER_ORIGIN)]
    waiting = [asyncio.create_task(scene.pem(each, client=each)) for each in names]
    await until(lambda: scene.server.hits == 1 + MOST_NEW_PER_ORIGIN)
    with pytest.raises(KeyUnavailable):
        await scene.pem(f"{scene.server.url}/more")
    await scene.pem()
    await ended(waiting)


async def ended(tasks: list[asyncio.Task[str]]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.timeout(60)
async def test_a_server_that_hangs_is_waited_for_for_seconds(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("federation.activitypub.remote_keys.FETCH_TIMEOUT", timedelta(milliseconds=200))
    scene.server.routes[BOB] = hang()
    with pytest.raises(KeyUnavailable):
        await scene.pem()


async def test_who_may_not_have_a_key_fetched_is_told_so(scene: Scene) -> None:
    """Nobody is asked then; what is known costs nobody anything."""

    class Spent(Exception):
        pass

    async def nobody(_is_known: bool) -> None:
        raise Spent

    with pytest.raises(Spent):
        await scene.keys.key(scene.bob.key_id, admit=nobody)
    assert scene.server.hits == 0
    await scene.pem()
    await scene.keys.key(scene.bob.key_id, admit=nobody)
