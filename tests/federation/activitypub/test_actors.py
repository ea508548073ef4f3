"""Actors of this node: whoever adds, removes and rotates them, in whatever process, at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from db import ActivityActor, ActivityKey, Database
from federation.activitypub.actors import LONGEST_ACTOR, ROTATION_AHEAD, Actor, Actors, Resealed, found_by
from federation.activitypub.keys import KeyUnreadable, NoActorKey, open_sealed
from federation.base.errors import ConfigurationError
from federation.protocol.keys import FixedKeys, KeyRing, OwnKeys, generate_own_keys
from tests.patience import until
from workers.clock import ManualClock

T = TypeVar("T")

ORIGIN: Final = "https://a.example"
ALICE: Final = f"{ORIGIN}/users/alice"
NOON: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
OURS: Final = generate_own_keys()
WAITING: Final = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def actors_of(ring: KeyRing | None = OURS, *, clock: ManualClock | None = None, url: str | None = ORIGIN) -> Actors:
    return Actors(ring=ring, bits=2048, clock=clock or ManualClock(NOON), own_url=url)


async def done(database: Database, work: Callable[[Session], T]) -> T:
    async with database.transaction() as session:
        return await session.run_sync(work)


async def stored(database: Database) -> list[ActivityKey]:
    async with database.read() as session:
        return list((await session.execute(select(ActivityKey).order_by("created_at", "key_id"))).scalars())


async def known(database: Database) -> list[ActivityActor]:
    async with database.read() as session:
        return list((await session.execute(select(ActivityActor))).scalars())


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[Database]:
    """The same database, as another process has it."""
    opened = Database(database_url)
    yield opened
    await opened.close()


def test_an_actor_is_found_by_the_end_of_its_url() -> None:
    """As it is written: nothing is decoded."""
    urls = {
        "users/Alice": "alice",
        "@Bob": "bob",
        "a/@@c": "@c",
        "users/%C3%A9": "%c3%a9",
        "actor?name=x": "actor?name=x",
    }
    assert {end: found_by(f"{ORIGIN}/{end}") for end in urls} == urls


async def test_an_actor_has_a_key_from_the_first(database: Database) -> None:
    """Of the size that is set, under its own URL; and a second call changes nothing."""
    actor = await done(database, lambda session: actors_of().add(session, ALICE, is_instance=True))
    assert (actor.id, actor.key_id) == (ALICE, f"{ALICE}#main-key")
    assert load_pem_public_key(actor.public_pem.encode()).key_size == 2048
    assert await done(database, lambda session: actors_of().add(session, ALICE)) == actor
    (row,), (key,) = await known(database), await stored(database)
    assert (row.name, row.is_instance, row.created_at, row.removed_at) == ("alice", True, NOON, None)
    assert (key.kind, key.use_from, key.retired_at) == ("rsa", NOON, None)
    assert open_sealed(key.private, [OURS.signing.secret])


async def test_what_is_rolled_back_was_never_there(database: Database) -> None:
    """The application's transaction is the actor's as well."""

    def fail(session: Session) -> None:
        actors_of().add(session, ALICE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await done(database, fail)
    assert (await known(database), await stored(database)) == ([], [])


async def both(database: Database, other: Database, work: Callable[[Session], Actor]) -> tuple[Actor, Actor]:
    """Two processes do the same: the second begins while the first has not committed."""
    async with database.transaction() as session:
        first = await session.run_sync(work)
        second = asyncio.create_task(done(other, work))
        if not database.is_sqlite:  # there nobody can look: the second does not begin
            await until(lambda: is_waiting(database))
    return first, await second


async def is_waiting(database: Database) -> bool:
    async with database.read() as session:
        return bool((await session.execute(WAITING)).scalar_one())


async def test_two_processes_add_one_key(database: Database, other: Database) -> None:
    """The second one finds the first one's."""
    first, second = await both(database, other, lambda session: actors_of().add(session, ALICE))
    assert first == second
    assert len(await stored(database)) == 1


async def test_two_processes_rotate_once(database: Database, other: Database) -> None:
    """The second one finds the key that waits for its time; only after that there is another."""
    clock = ManualClock(NOON)
    old = await done(database, lambda session: actors_of().add(session, ALICE))
    clock.advance(timedelta(hours=1))
    first, second = await both(database, other, lambda session: actors_of(clock=clock).rotate(session, ALICE))
    assert first == second
    assert first.key_id.startswith(f"{ALICE}#key-")
    assert first.public_pem != old.public_pem
    before, after = await stored(database)
    assert (before.key_id, before.retired_at) == (old.key_id, clock.now() + ROTATION_AHEAD)
    assert (after.key_id, after.use_from, after.retired_at) == (first.key_id, clock.now() + ROTATION_AHEAD, None)
    clock.advance(ROTATION_AHEAD)
    third = await done(database, lambda session: actors_of(clock=clock).rotate(session, ALICE))
    assert third.key_id not in (old.key_id, first.key_id)
    assert [key.retired_at for key in await stored(database)] == [
        NOON + timedelta(hours=1) + ROTATION_AHEAD,
        NOON + timedelta(hours=1) + 2 * ROTATION_AHEAD,
        None,
    ]


async def test_an_unknown_actor_has_nothing_to_rotate(database: Database) -> None:
    """Nor is anything made for it."""
    with pytest.raises(NoActorKey):
        await done(database, lambda session: actors_of().rotate(session, ALICE))
    assert await stored(database) == []


async def test_a_removed_actor_keeps_its_key(database: Database) -> None:
    """The news of it are signed. It is removed once, also if its key is changed, and may be added again."""
    clock = ManualClock(NOON)
    actor = await done(database, lambda session: actors_of(clock=clock).add(session, ALICE))
    await done(database, lambda session: actors_of(clock=clock).remove(session, ALICE))
    clock.advance(timedelta(hours=1))
    await done(database, lambda session: actors_of(clock=clock).remove(session, ALICE))
    await done(database, lambda session: actors_of(clock=clock).remove(session, f"{ORIGIN}/users/nobody"))
    (row,) = await known(database)
    assert row.removed_at == NOON
    await done(database, lambda session: actors_of(clock=clock).rotate(session, ALICE))
    (row,) = await known(database)
    assert row.removed_at == NOON
    assert await done(database, lambda session: actors_of(clock=clock).add(session, ALICE)) == actor
    (row,) = await known(database)
    assert row.removed_at is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://b.example/users/alice", "not on this node's own origin, https://a.example"),
        ("http://a.example/users/alice", "not on this node's own origin"),
        ("https://a.example:8443/users/alice", "not on this node's own origin"),
        ("https://a.example.evil/users/alice", "not on this node's own origin"),
        ("https://A.example/users/alice", "not on this node's own origin"),
        ("https://alice@a.example/users/alice", "not on this node's own origin"),
        ("https://a.example", "not on this node's own origin"),
        ("/users/alice", "not on this node's own origin"),
        (f"{ALICE}#me", "a fragment"),
        (f"{ORIGIN}/users/../alice", "dots"),
        (f"{ORIGIN}/./users", "dots"),
        (f"{ORIGIN}/users/..", "dots"),
        (f"{ORIGIN}/users/ålice", "characters"),
        (f"{ORIGIN}/users/al ice", "characters"),
        (f"{ORIGIN}/users/alice\n", "characters"),
        (f'{ORIGIN}/users/alice"', "characters"),
        (f"{ORIGIN}/users/%zz", "characters"),
        (f"{ORIGIN}/%40alice", "%40, which others write as @"),
        (f"{ORIGIN}/users/%7Ealice", "%7E, which others write as ~"),
        (f"{ORIGIN}/users/%c3%A5", "%c3, which others write as %C3"),
        (f"{ALICE}{'e' * LONGEST_ACTOR}", "longer than"),
    ],
)
async def test_what_is_no_actor_of_ours_is_refused(database_file: object, url: str, problem: str) -> None:
    """By an error that names it, before anything is written."""
    database = Database(f"sqlite:///{database_file}")
    with pytest.raises(ValueError, match=problem) as caught:
        await done(database, lambda session: actors_of().add(session, url))
    assert repr(url)[:50] in str(caught.value)
    assert await known(database) == []
    await database.close()


@pytest.mark.parametrize("path", ["/", "/?author=1", "/@alice", "/users/%C3%A5lice%2F%20", "/~alice/...", "/a/..b/c.d"])
async def test_actors_have_many_forms(database_file: object, path: str) -> None:
    """Other programs put them where they like."""
    database = Database(f"sqlite:///{database_file}")
    assert (await done(database, lambda session: actors_of().add(session, ORIGIN + path))).id == ORIGIN + path
    await database.close()


@pytest.mark.parametrize(("ring", "url"), [(None, ORIGIN), (OURS, None)])
async def test_a_node_without_keys_or_name_has_no_actors(
    database: Database, ring: OwnKeys | None, url: str | None
) -> None:
    """It is told which settings are missing."""
    with pytest.raises(ConfigurationError, match="not set"):
        await done(database, lambda session: actors_of(ring, url=url).add(session, ALICE))
    assert await stored(database) == []


async def test_keys_are_sealed_anew_under_the_nodes_present_pair(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, page by page; those of an unknown pair are counted, and stay. A second time does nothing."""
    monkeypatch.setattr("federation.activitypub.actors.PAGE", 1)
    new, lost = generate_own_keys(), generate_own_keys()
    for name, ring in (("a", OURS), ("b", OURS), ("c", lost), ("d", new)):
        url = f"{ORIGIN}/users/{name}"
        await done(database, lambda session, ring=ring, url=url: actors_of(ring).add(session, url))
    before = {key.key_id: open_sealed(key.private, [OURS.signing.secret]) for key in (await stored(database))[:2]}
    actors = actors_of(FixedKeys(new, OURS))
    assert await done(database, actors.reseal) == Resealed(done=2, unreadable=1)
    first, second, third, fourth = await stored(database)
    for key in (first, second):
        assert open_sealed(key.private, [new.signing.secret]) == before[key.key_id]
    assert open_sealed(third.private, [lost.signing.secret])
    assert open_sealed(fourth.private, [new.signing.secret])
    with pytest.raises(KeyUnreadable):
        open_sealed(first.private, [OURS.signing.secret])
    assert await done(database, actors.reseal) == Resealed(done=0, unreadable=1)
    assert await done(database, actors_of(None).reseal) == Resealed(done=0, unreadable=4)
