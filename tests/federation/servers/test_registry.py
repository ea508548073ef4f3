"""The registry: registering, health and its history, the cache in front of it; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, delete, event, select, update
from sqlmodel import col
from structlog.testing import capture_logs

from db import BlacklistedServer, Database, Server, ServerHealthEvent, new_id
from federation.sealed.peers.registry import KeysTaken, Registry

URL = "https://b.example"


class Scheduled:
    """The probes asked for; raises instead if `broken`."""

    def __init__(self) -> None:
        self.probes: list[tuple[str, int]] = []
        self.broken = False

    async def __call__(self, server_url: str, attempt: int) -> None:
        if self.broken:
            raise ConnectionError("the queue is down")
        self.probes.append((server_url, attempt))


@pytest.fixture
def scheduled() -> Scheduled:
    return Scheduled()


@pytest.fixture
def registry(database: Database, scheduled: Scheduled) -> Registry:
    return Registry(database, schedule_health_check=scheduled)


async def register(registry: Registry, url: str = URL, key: str = "k1", encryption_key: str = "e1") -> None:
    await registry.register(url=url, public_key=key, encryption_public_key=encryption_key)


async def server(database: Database, url: str = URL) -> Server:
    async with database.read() as session:
        return (await session.execute(select(Server).where(col(Server.url) == url))).scalar_one()


async def history(database: Database) -> list[tuple[str, str, str | None]]:
    async with database.read() as session:
        events = (await session.execute(select(ServerHealthEvent).order_by(col(ServerHealthEvent.id)))).scalars()
        return [(event.from_state.value, event.to_state.value, event.reason) for event in events]


async def test_a_new_server_is_registered_healthy(registry: Registry, database: Database) -> None:
    """All columns are written, the three times are the same."""
    await register(registry)
    row = await server(database)
    assert (row.public_key, row.encryption_public_key) == ("k1", "e1")
    assert (row.is_healthy, row.health_check_attempts, row.unhealthy_reason) == (True, 0, None)
    assert row.created_at == row.updated_at == row.last_seen


async def test_servers_asked_for_together_are_read_together(registry: Registry, database: Database) -> None:
    """Fifty deliveries to as many servers cost one query, and each is told of its own."""
    urls = [f"https://{number}.example" for number in range(50)]
    for url in urls[:40]:
        await register(registry, url, key=f"k-{url}", encryption_key=f"e-{url}")
    queries: list[str] = []

    def note(*event: object) -> None:
        queries.append(str(event[2]))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        standings = await asyncio.gather(*(registry.standing(url) for url in urls))
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    keys = [standing.server.public_key if standing.server else None for standing in standings]
    assert keys == [*(f"k-{url}" for url in urls[:40]), *(None for _ in urls[40:])]
    assert len([query for query in queries if "FROM server_registry" in query]) == 1


async def test_a_known_server_is_only_seen_again(registry: Registry, database: Database) -> None:
    """Neither keys nor health change, whatever the caller brings."""
    await register(registry)
    await registry.mark_unhealthy(URL, "TIMEOUT")
    before = await server(database)
    await register(registry, key="other", encryption_key="other")
    after = await server(database)
    assert after.last_seen > before.last_seen
    assert after.updated_at > before.updated_at
    unchanged = {"id", "url", "public_key", "encryption_public_key", "created_at", "is_healthy", "unhealthy_reason"}
    assert after.model_dump(include=unchanged) == before.model_dump(include=unchanged)
    assert after.is_healthy is False


@pytest.mark.parametrize("keys", [("k1", "e2"), ("k2", "e1")])
async def test_the_key_of_another_server_is_refused(
    registry: Registry, database: Database, keys: tuple[str, str]
) -> None:
    """Either key; the first owner keeps it, and a caller's transaction can go on."""
    await register(registry)
    with pytest.raises(KeysTaken, match=r"https://c\.example"):
        await register(registry, "https://c.example", *keys)
    async with database.transaction() as session:
        with pytest.raises(KeysTaken):
            await registry.register(
                url="https://c.example", public_key=keys[0], encryption_public_key=keys[1], session=session
            )
        session.add(BlacklistedServer(server_url="https://d.example", created_at=datetime.now(UTC), reason="spam"))
    assert (await registry.standing("https://d.example")).blacklisted
    assert await registry.find("https://c.example") is None
    assert await registry.find(URL) is not None


async def test_registering_in_a_callers_transaction_is_undone_with_it(registry: Registry, database: Database) -> None:
    """A rollback leaves no server, and nobody saw one before the commit."""
    async with database.transaction() as session:
        await registry.register(url=URL, public_key="k1", encryption_public_key="e1", session=session)
        assert await registry.find(URL) is None
        await session.rollback()
    assert await registry.find(URL) is None


async def test_one_server_registered_by_many_at_once_is_registered_once(database: Database) -> None:
    """As several processes discover it; none of them fails."""

    async def one() -> None:
        await register(Registry(database, schedule_health_check=Scheduled()))

    await asyncio.gather(*(one() for _ in range(8)))
    assert (await server(database)).public_key == "k1"


async def test_a_callers_transaction_that_loses_the_race_goes_on(registry: Registry, database: Database) -> None:
    """Between its look and its insert the server is registered by somebody else: it is known, then, and no error."""
    first_inserted, second_began = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with database.transaction() as session:
            await registry.register(url=URL, public_key="k1", encryption_public_key="e1", session=session)
            first_inserted.set()
            await second_began.wait()
            await asyncio.sleep(0.05)  # long enough for the second to wait at the row; it succeeds in either order

    async def second() -> None:
        await first_inserted.wait()
        second_began.set()
        async with database.transaction() as session:
            await registry.register(url=URL, public_key="k1", encryption_public_key="e1", session=session)
            session.add(BlacklistedServer(server_url="https://d.example", created_at=datetime.now(UTC), reason="spam"))

    await asyncio.gather(first(), second())
    assert (await registry.standing("https://d.example")).blacklisted
    assert (await server(database)).public_key == "k1"


async def test_marking_an_unknown_server_does_nothing(
    registry: Registry, database: Database, scheduled: Scheduled
) -> None:
    """No row, no event, no probe."""
    await registry.mark_unhealthy(URL, "TIMEOUT")
    await registry.mark_healthy(URL, reason="probe")
    assert await registry.count_failed_probe(URL) is None
    assert await history(database) == []
    assert scheduled.probes == []


async def test_a_failure_makes_a_server_unhealthy_and_schedules_its_first_probe(
    registry: Registry, database: Database, scheduled: Scheduled
) -> None:
    """With the reason on record, the counter at 0, and one event."""
    await register(registry)
    before = await server(database)
    await registry.mark_unhealthy(URL, "CONN_REFUSED")
    row = await server(database)
    assert (row.is_healthy, row.unhealthy_reason, row.health_check_attempts) == (False, "CONN_REFUSED", 0)
    assert row.updated_at > before.updated_at
    assert row.last_seen == before.last_seen
    assert await history(database) == [("healthy", "unhealthy", "CONN_REFUSED")]
    assert scheduled.probes == [(URL, 0)]


async def test_a_further_failure_restarts_the_probes_and_is_no_event(
    registry: Registry, database: Database, scheduled: Scheduled
) -> None:
    """The reason is the newest, the counter is reset; health did not change, so history did not either."""
    await register(registry)
    await registry.mark_unhealthy(URL, "TIMEOUT")
    assert await registry.count_failed_probe(URL) == 1
    await registry.mark_unhealthy(URL, "TLS_ERROR")
    row = await server(database)
    assert (row.unhealthy_reason, row.health_check_attempts) == ("TLS_ERROR", 0)
    assert len(await history(database)) == 1
    assert scheduled.probes == [(URL, 0), (URL, 0)]


async def test_healing_clears_reason_and_counter(registry: Registry, database: Database, scheduled: Scheduled) -> None:
    """One event back to healthy; healing the healthy is none."""
    await register(registry)
    await registry.mark_unhealthy(URL, "TIMEOUT")
    await registry.count_failed_probe(URL)
    before = await server(database)
    await registry.mark_healthy(URL, reason="probe")
    await registry.mark_healthy(URL, reason="delivered")
    row = await server(database)
    assert (row.is_healthy, row.unhealthy_reason, row.health_check_attempts) == (True, None, 0)
    assert row.last_seen > before.last_seen
    assert await history(database) == [("healthy", "unhealthy", "TIMEOUT"), ("unhealthy", "healthy", "probe")]
    assert scheduled.probes == [(URL, 0)]


async def test_a_queue_that_is_down_does_not_hide_that_a_server_is_unhealthy(
    registry: Registry, database: Database, scheduled: Scheduled
) -> None:
    """What cannot be scheduled is logged; the caller hears nothing of it."""
    await register(registry)
    scheduled.broken = True
    with capture_logs() as logs:
        await registry.mark_unhealthy(URL, "TIMEOUT")
    assert (await server(database)).is_healthy is False
    assert "health_check_not_scheduled" in [entry["event"] for entry in logs]


async def test_failed_probes_are_counted_without_losing_any(registry: Registry, database: Database) -> None:
    """Counted side by side each gets a number of its own; a healthy server has none."""
    await register(registry)
    assert await registry.count_failed_probe(URL) is None
    await registry.mark_unhealthy(URL, "TIMEOUT")
    counts = await asyncio.gather(*(registry.count_failed_probe(URL) for _ in range(10)))
    assert sorted(count or 0 for count in counts) == list(range(1, 11))
    assert (await server(database)).health_check_attempts == 10


async def test_changes_side_by_side_record_each_change_once(registry: Registry, database: Database) -> None:
    """Of ten failures at once one changed the server's health."""
    await register(registry)
    await asyncio.gather(*(registry.mark_unhealthy(URL, "TIMEOUT") for _ in range(10)))
    assert await history(database) == [("healthy", "unhealthy", "TIMEOUT")]


async def test_standing_is_cached_and_find_is_not(registry: Registry, database: Database) -> None:
    """What another process writes is found at once by `find`, and by `standing` after it; a rule after `forget`."""
    await register(registry)
    assert (await registry.standing(URL)).server is not None
    async with database.transaction() as session:
        await session.execute(update(Server).values(public_key="rotated"))
        session.add(BlacklistedServer(id=new_id(), server_url=URL, created_at=datetime.now(UTC), reason="spam"))
    cached = await registry.standing(URL)
    assert cached.server is not None
    assert (cached.server.public_key, cached.blacklisted) == ("k1", False)
    found = await registry.find(URL)
    assert found is not None
    assert found.public_key == "rotated"
    assert not (await registry.standing(URL)).blacklisted
    registry.forget(URL)
    assert (await registry.standing(URL)).blacklisted
    async with database.transaction() as session:
        await session.execute(delete(Server))
    registry.forget(URL)
    assert await registry.standing(URL) != cached
    assert (await registry.standing(URL)).server is None


async def test_every_write_of_this_process_is_seen_at_once(registry: Registry) -> None:
    """Registering and each change of health drop what was cached."""
    assert (await registry.standing(URL)).server is None
    await register(registry)
    seen = [(await registry.standing(URL)).server]
    await registry.mark_unhealthy(URL, "TIMEOUT")
    seen.append((await registry.standing(URL)).server)
    await registry.count_failed_probe(URL)
    seen.append((await registry.standing(URL)).server)
    await registry.mark_healthy(URL, reason="probe")
    seen.append((await registry.standing(URL)).server)
    assert [(one.is_healthy, one.health_check_attempts) for one in seen if one] == [
        (True, 0),
        (False, 0),
        (False, 1),
        (True, 0),
    ]


async def test_servers_are_found_byte_for_byte_and_rules_in_any_spelling(
    registry: Registry, database: Database
) -> None:
    """Of registry rows the canonical spelling is the caller's affair; a rule means the server however it is written."""
    await register(registry)
    async with database.transaction() as session:
        session.add(BlacklistedServer(server_url="HTTPS://B.example:443/", created_at=datetime.now(UTC), reason="spam"))
    assert (await registry.standing(URL)).blacklisted
    slashed = await registry.standing(URL + "/")
    assert (slashed.server, slashed.blacklisted) == (None, True)
