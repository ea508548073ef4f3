"""What is purged, and what stays; on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import insert, select, text, update
from sqlmodel import col

from db import (
    AttemptOutcome,
    BlacklistedServer,
    Database,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryLoss,
    DeliveryPayload,
    DeliveryState,
    Follow,
    LinkState,
    Post,
    RotateChallengeToken,
    Server,
    ServerHealth,
    ServerHealthEvent,
    ServerLink,
    create_host_tables,
)
from federation import retention as module
from federation.retention import Purge
from federation.sealed import purge as sealed_purge
from federation.sealed.purge import SealedPurge
from tests.federation.delivery.node import StandsStill
from tests.federation.rows_read import cost, watched
from workers.clock import Clock

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def everything(database: Database, *, clock: Clock | None = None) -> Purge:
    return Purge(database, of_wires=[SealedPurge(database)], clock=clock)


def settled(name: str, age: timedelta | None) -> DeliveryJob:
    at = None if age is None else NOW - age
    return DeliveryJob(
        id=name,
        target_url="t",
        payload="p",
        created_at=NOW - timedelta(days=400),
        settled_at=at,
        outcome=AttemptOutcome.PERMANENT,
    )


def attempt(name: str, age: timedelta, server_url: str = "https://b.example") -> DeliveryAttempt:
    return DeliveryAttempt(
        delivery_id=name,
        job_name="deliver-post",
        server_url=server_url,
        attempt=1,
        started_at=NOW - age,
        duration_ms=1,
        outcome=AttemptOutcome.DELIVERED,
    )


async def left(database: Database) -> set[str]:
    async with database.read() as session:
        rows = set((await session.execute(select(DeliveryJob.id))).scalars())  # type: ignore[call-overload] # SQLModel
        return rows | set((await session.execute(select(DeliveryAttempt.delivery_id))).scalars())  # type: ignore[call-overload] # SQLModel


async def test_settled_rows_go_after_seven_days_and_attempts_after_thirty(database: Database) -> None:
    """What is younger stays, and an open row stays for ever."""
    week, month = timedelta(days=7), timedelta(days=30)
    async with database.transaction() as session:
        session.add_all([settled("open", None), settled("fresh", week - HOUR), settled("old", week + HOUR)])
        session.add_all([attempt("recent", month - HOUR), attempt("ancient", month + HOUR)])
    purge = everything(database)
    others = (
        "rotations",
        "follow_news",
        "rules",
        "texts",
        "servers",
        "health_events",
        "actions",
        "bulk_jobs",
        "losses",
    )
    nothing_else = dict.fromkeys(others, 0)
    assert await purge() == {"deliveries": 1, "attempts": 1, **nothing_else}
    assert await left(database) == {"open", "fresh", "recent"}
    assert not any((await purge()).values())


async def test_a_row_of_a_time_to_come_goes_as_others_do(database: Database) -> None:
    """It was made before the clock was set back."""
    row = settled("old", timedelta(days=8))
    row.created_at = NOW + timedelta(days=3650)
    async with database.transaction() as session:
        session.add(row)
    assert (await everything(database)())["deliveries"] == 1


async def test_what_was_lost_is_written_down(database: Database) -> None:
    """Of each delivery that was given up: whose, how and when it ended. Kept for a year."""
    ages = {"failed": timedelta(days=8), "expired": timedelta(days=9), "former": timedelta(days=364)}
    async with database.transaction() as session:
        for name, age in ages.items():
            row = settled(name, age)
            row.server_url, row.job_name, row.error_code = f"https://{name}.example", "deliver-post", "TIMEOUT"
            row.state = DeliveryState.READY if name == "former" else DeliveryState(name)
            session.add(row)
        session.add(settled("fresh", HOUR))
    assert (await everything(database)())["deliveries"] == 3
    async with database.read() as session:
        found = (await session.execute(select(DeliveryLoss))).scalars().all()
    assert {(each.id, each.server_url, each.state, each.lost_at) for each in found} == {
        ("failed", "https://failed.example", DeliveryState.FAILED, NOW - ages["failed"]),
        ("expired", "https://expired.example", DeliveryState.EXPIRED, NOW - ages["expired"]),
        ("former", "https://former.example", DeliveryState.FAILED, NOW - ages["former"]),
    }
    assert {(each.job_name, each.error_code) for each in found} == {("deliver-post", "TIMEOUT")}
    assert not any((await everything(database)()).values())
    async with database.transaction() as session:
        await session.execute(update(DeliveryLoss).values(lost_at=NOW - timedelta(days=366)))
    assert (await everything(database)())["losses"] == 3


async def test_changes_of_health_go_after_a_year_but_the_last(database: Database) -> None:
    """It says how long a server has been as it is."""
    sick, well = ServerHealth.UNHEALTHY, ServerHealth.HEALTHY
    changes = [("a", sick, 500), ("a", well, 450), ("b", sick, 400), ("c", sick, 380), ("c", well, 300)]
    async with database.transaction() as session:
        for name, state, days in changes:
            before = well if state is sick else sick
            moment = NOW - timedelta(days=days)
            session.add(ServerHealthEvent(server_url=name, from_state=before, to_state=state, at=moment))
            await session.flush()
    assert (await everything(database)())["health_events"] == 2
    async with database.read() as session:
        rows = (await session.execute(select(ServerHealthEvent))).scalars().all()
    assert {(row.server_url, row.to_state) for row in rows} == {("a", well), ("b", sick), ("c", well)}


async def test_a_purge_goes_on_until_nothing_is_left(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, each a transaction of its own; a number that fills the last batch ends too."""
    monkeypatch.setattr(module, "BATCH", 3)
    async with database.transaction() as session:
        session.add_all([settled(f"row-{number}", timedelta(days=8)) for number in range(7)])
        session.add_all([attempt(f"attempt-{number}", timedelta(days=31)) for number in range(6)])
    found = await everything(database)()
    assert (found["deliveries"], found["attempts"]) == (7, 6)
    assert await left(database) == set()


async def test_a_purge_looks_at_nothing_that_is_held(database: Database) -> None:
    """However much that is: a look at all of it for each batch would take longer than the batch."""
    held = 5_000
    values = {"target_url": "t", "payload": "", "created_at": NOW - timedelta(days=6), "state": DeliveryState.HELD}
    async with database.transaction() as session:
        await session.execute(insert(DeliveryJob), [{"id": f"held-{number}", **values} for number in range(held)])
        session.add_all([settled(f"row-{number}", timedelta(days=8)) for number in range(3)])
        await session.flush()
        if session.get_bind().dialect.name == "postgresql":  # which analyzes by itself; SQLite does not
            await session.execute(text("ANALYZE"))
    with watched(("DELETE FROM delivery_jobs",)) as statements:
        assert (await everything(database)())["deliveries"] == 3
    assert statements
    assert await database.transact(partial(cost, queries=statements)) < held / 10


async def test_attempts_are_kept_for_as_long_as_is_asked(database: Database) -> None:
    """A node with very many of them has no room for a month of them."""
    async with database.transaction() as session:
        session.add_all([attempt("young", timedelta(days=2)), attempt("old", timedelta(days=4))])
    assert (await Purge(database, keep_attempts=timedelta(days=3))())["attempts"] == 1
    assert await left(database) == {"young"}


async def test_expired_rotations_and_rules_and_texts_nobody_refers_to_are_purged(database: Database) -> None:
    """What has not expired stays, and so do a text in use and one too young to judge."""
    day = timedelta(days=1)
    async with database.transaction() as session:
        session.add_all([rotation("over", -HOUR), rotation("under-way", HOUR)])
        session.add_all([shared("used", 2 * day), shared("unused", 2 * day), shared("young", HOUR)])
        session.add(DeliveryJob(id="row", target_url="t", payload="", created_at=NOW, payload_id="used"))
        session.add_all([rule("over", NOW - HOUR), rule("in-force", NOW + HOUR), rule("for-good", None)])
    found = await everything(database)()
    assert (found["rotations"], found["rules"], found["texts"]) == (1, 1, 1)
    async with database.read() as session:
        assert list((await session.execute(select(col(RotateChallengeToken.id)))).scalars()) == ["under-way"]
        assert set((await session.execute(select(col(DeliveryPayload.id)))).scalars()) == {"used", "young"}


def shared(name: str, age: timedelta) -> DeliveryPayload:
    return DeliveryPayload(id=name, payload="p", refs=1, created_at=NOW - age)


def rule(name: str, expires_at: datetime | None) -> BlacklistedServer:
    return BlacklistedServer(server_url=f"https://{name}.example", reason="r", created_at=NOW, expires_at=expires_at)


def rotation(name: str, expires_in: timedelta) -> RotateChallengeToken:
    return RotateChallengeToken(
        id=name,
        signing_old_token="a",
        signing_new_token="b",
        encryption_old_token="c",
        encryption_new_token="d",
        new_signing_public_key="e",
        new_encryption_public_key="f",
        server_url="https://b.example",
        created_at=NOW,
        expires_at=NOW + expires_in,
    )


USES: dict[str, Callable[[str], list[object]]] = {
    "a delivery acknowledged": lambda url: [ServerLink(server_url=url, since=NOW, acknowledged=True)],
    "held by an operator": lambda url: [ServerLink(server_url=url, since=NOW, operator_hold=True)],
    "of a known kind": lambda url: [ServerLink(server_url=url, since=NOW, profile="original")],
    "owed a delivery": lambda url: [DeliveryJob(target_url="t", payload="p", created_at=NOW, server_url=url)],
    "tried": lambda url: [attempt("d", HOUR, url)],
    "follows": lambda url: [Follow(follower_id="f", following_id="g", created_at=NOW, following_server_url=url)],
    "followed": lambda url: [Follow(follower_id="f", following_id="g", created_at=NOW, follower_server_url=url)],
    "posted": lambda url: [Post(content=[], published=NOW, created_at=NOW, federation_url=url)],
}


async def test_registrations_that_led_to_nothing_go_after_thirty_days(database: Database) -> None:
    """A server that was down all the time, too; each that was of use stays, whatever its use, and so do young ones."""
    month = timedelta(days=30)
    async with database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        session.add_all([server("unused", month + HOUR), server("down", month + HOUR), server("young", month - HOUR)])
        session.add_all([server(name, month + HOUR) for name in USES])
        await session.flush()
        session.add(ServerLink(server_url=url_of("down"), since=NOW, state=LinkState.DOWN))
        for name, rows in USES.items():
            session.add_all(rows(url_of(name)))
    assert (await everything(database)())["servers"] == 2
    assert await registered(database) == {url_of(name) for name in (*USES, "young")}


async def test_a_process_that_stands_still_in_a_purge_deletes_no_more_for_it(database: Database) -> None:
    """All that goes is too old as of the moment for which the clock was believed."""
    async with database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        session.add(server("young", timedelta(days=30) - HOUR))
    assert (await everything(database, clock=StandsStill(NOW))())["servers"] == 0


async def test_where_posts_cannot_be_seen_no_registration_goes(database: Database) -> None:
    """A server may have sent thousands: the host's tables are not there at the moment."""
    async with database.transaction() as session:
        session.add(server("unused", timedelta(days=31)))
    assert (await everything(database)())["servers"] == 0
    assert await registered(database) == {url_of("unused")}


async def test_unused_registrations_are_found_however_much_is_held(database: Database) -> None:
    """Without a walk along the list of all deliveries for each."""
    held, servers = 3_000, 100
    values = {"target_url": "t", "payload": "", "created_at": NOW, "state": DeliveryState.HELD}
    async with database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
        session.add_all([server(f"unused-{number}", timedelta(days=31)) for number in range(servers)])
        rows = [{"id": f"held-{number}", "server_url": url_of(str(number)), **values} for number in range(held)]
        await session.execute(insert(DeliveryJob), rows)
        await session.flush()
        if session.get_bind().dialect.name == "postgresql":  # which analyzes by itself; SQLite does not
            await session.execute(text("ANALYZE"))
    with watched(("SELECT server_registry.id",)) as queries:
        ids = select(col(Server.id)).where(*sealed_purge._is_unused())
        assert len(await database.rows(ids)) == servers
    assert await database.transact(partial(cost, queries=queries, work_mem="64kB")) < 10 * held


async def registered(database: Database) -> set[str]:
    async with database.read() as session:
        return set((await session.execute(select(col(Server.url)))).scalars())


def url_of(name: str) -> str:
    return f"https://{name.replace(' ', '-')}.example"


def server(name: str, age: timedelta) -> Server:
    return Server(
        url=url_of(name),
        public_key=f"p-{name}",
        encryption_public_key=f"e-{name}",
        last_seen=NOW,
        created_at=NOW - age,
        updated_at=NOW,
        is_healthy=True,
    )
