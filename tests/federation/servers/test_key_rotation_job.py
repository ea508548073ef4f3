"""The recurring job: who is asked again, and when the old pair goes."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import select, update
from sqlmodel import col

from db import ActivityKey, BlacklistedServer, LinkState, Server, ServerLink
from federation.activitypub.actors import Actors
from federation.activitypub.keys import KeyUnreadable, open_sealed
from federation.admin import keys as admin
from federation.cli.output import progress
from federation.protocol.keys import OwnKeys
from federation.runtime.recurring_jobs import recurring_jobs
from tests.federation.servers.two_nodes import (
    A_URL,
    B_URL,
    Pair,
    newest,
    refuse,
    register_dead,
    ring,
)


async def test_servers_that_were_away_are_asked_when_their_link_is_back(pair: Pair) -> None:
    """Neither before, nor those that nobody has asked yet."""
    await register_dead(pair, 1)
    pair.net.before = refuse
    await admin.rotate(pair.a, only=B_URL, progress=progress)
    pair.net.before = None
    await set_link(pair, LinkState.DOWN)
    assert await pair.rotation() == {"asked": 0, "confirmed": 0}
    await set_link(pair, LinkState.UP)

    assert await pair.rotation() == {"asked": 1, "confirmed": 1}
    assert (await pair.known_by_b()).knows_key == newest(pair.a)


async def set_link(pair: Pair, state: LinkState) -> None:
    async with pair.a.database.transaction() as session:
        await session.merge(ServerLink(server_url=B_URL, state=state, since=datetime.now(UTC)))


async def test_the_old_pair_is_dropped_when_nobody_has_needed_it_for_ten_minutes(pair: Pair) -> None:
    """By the recurring job, and not before."""
    [job] = [job for job in recurring_jobs(pair.a) if job.name == "key-rotation"]
    await pair.rotate()
    assert (await job.run())["dropped"] is False
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).values(rotation_tried_at=datetime.now(UTC) - timedelta(minutes=11)))

    assert (await job.run())["dropped"] is True

    assert len(ring(pair.a).pairs(now=True)) == 1
    await pair.both_ways("after")
    assert (await job.run())["dropped"] is False


async def test_keys_of_actors_outlive_the_old_pair(pair: Pair) -> None:
    """They are sealed under the new one when that is made, and once more before the old one goes."""
    [job] = [job for job in recurring_jobs(pair.a) if job.name == "key-rotation"]
    [old] = ring(pair.a).pairs(now=True)
    await add_actor(pair, old, "alice")
    await pair.rotate()
    assert await sealed_under(pair, ring(pair.a).pairs(now=True)[0]) == ["alice"]
    await add_actor(pair, old, "bob")  # by a process that has not seen the new pair yet
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).values(rotation_tried_at=datetime.now(UTC) - timedelta(minutes=11)))

    assert (await job.run())["dropped"] is True

    [new] = ring(pair.a).pairs(now=True)
    assert await sealed_under(pair, new) == ["alice", "bob"]


async def test_keys_of_actors_outlive_an_old_pair_that_is_forgotten(pair: Pair) -> None:
    """By an operator, whoever needs it."""
    [old] = ring(pair.a).pairs(now=True)
    await pair.rotate()
    await add_actor(pair, old, "alice")
    await admin.forget_old(pair.a)
    [new] = ring(pair.a).pairs(now=True)
    assert await sealed_under(pair, new) == ["alice"]


async def add_actor(pair: Pair, keys: OwnKeys, name: str) -> None:
    actors = Actors(ring=keys, bits=2048, clock=pair.a.clock, own_url=A_URL)
    async with pair.a.database.transaction() as session:
        await session.run_sync(lambda sync: actors.add(sync, f"{A_URL}/users/{name}"))


async def sealed_under(pair: Pair, keys: OwnKeys) -> list[str]:
    """The actors whose keys are."""
    found = []
    for actor, private in await pair.a.database.rows(select(col(ActivityKey.actor_id), col(ActivityKey.private))):
        with suppress(KeyUnreadable):
            open_sealed(private, [keys.signing.secret])
            found.append(actor.rpartition("/")[2])
    return sorted(found)


async def test_a_blacklisted_server_needs_no_pair(pair: Pair) -> None:
    """It is not asked, and keeps nobody from dropping the old one."""
    async with pair.a.database.transaction() as session:
        session.add(BlacklistedServer(server_url=B_URL, created_at=datetime.now(UTC), reason="test"))
    pair.a.registry.forget(B_URL)

    state = await pair.rotate()

    assert state.waiting == []
    assert pair.net.seen == []
    assert await pair.rotation.is_over()


async def test_what_it_drops_nobody_is_asked_for_again(pair: Pair) -> None:
    """A server that was blacklisted all the time gets its next delivery signed by the pair that is left."""
    [job] = [job for job in recurring_jobs(pair.a) if job.name == "key-rotation"]
    async with pair.a.database.transaction() as session:
        session.add(BlacklistedServer(server_url=B_URL, created_at=datetime.now(UTC), reason="test"))
    pair.a.registry.forget(B_URL)
    await pair.rotate()

    assert (await job.run())["dropped"] is True
    assert (await pair.known_by_b()).knows_key == newest(pair.a)


async def test_a_rotation_knows_nothing_of_the_one_before(pair: Pair) -> None:
    """Servers that were asked in vain last time are not asked by the job while the operator tries one server."""
    await register_dead(pair, 2)
    await pair.rotate()
    await admin.forget_old(pair.a)
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).values(rotation_tried_at=datetime.now(UTC) - timedelta(hours=2)))

    await admin.rotate(pair.a, only=B_URL, progress=progress)

    assert await pair.rotation() == {"asked": 0, "confirmed": 0}


async def test_a_server_that_is_met_meanwhile_is_asked_as_well(pair: Pair) -> None:
    """It was shown the old pair, which most knew; without it the rotation could not end."""
    await register_dead(pair, 3)
    await admin.rotate(pair.a, only="https://dead-0.example", progress=progress)
    async with pair.a.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == B_URL).values(created_at=datetime.now(UTC)))

    assert await pair.rotation() == {"asked": 1, "confirmed": 1}
    assert await pair.key_at_b() == newest(pair.a)
