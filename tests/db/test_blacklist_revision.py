"""The blacklist's revision: every change by anybody raises it, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import delete, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import BlacklistedServer, BlacklistRevision, Database
from db.migrate import upgrade

# As the original implementation writes: it does not know `expires_at`.
INSERT = """INSERT INTO blacklisted_servers (id, server_url, created_at, reason)
    VALUES (:id, 'https://evil.example', '2025-01-01 00:00:00', 'spam')"""


@pytest.fixture
async def migrated_postgres(postgres_url: str) -> AsyncIterator[Database]:
    upgrade(postgres_url)
    database = Database(postgres_url)
    yield database
    await database.close()


async def revision_in(session: AsyncSession) -> int:
    return (await session.execute(select(col(BlacklistRevision.revision)))).scalar_one()


async def revision(database: Database) -> int:
    async with database.read() as session:
        return await revision_in(session)


async def change(database: Database, statement: str) -> bool:
    """Whether the statement, in a transaction of its own, raised the revision."""
    before = await revision(database)
    async with database.transaction() as session:
        await session.execute(text(statement), {"id": "x"} if ":id" in statement else {})
    return await revision(database) > before


@pytest.mark.parametrize("kind", ["update", "delete"])
async def test_a_change_of_one_row_raises_it(database: Database, kind: str) -> None:
    """By plain SQL, as another implementation or a person at a database shell writes it."""
    assert await revision(database) == 0
    assert await change(database, INSERT)
    statements = {
        "update": "UPDATE blacklisted_servers SET expires_at = '2025-01-02 00:00:00'",
        "delete": "DELETE FROM blacklisted_servers",
    }
    assert await change(database, statements[kind])


async def test_a_read_and_a_write_elsewhere_leave_it(database: Database) -> None:
    """Only the blacklist counts."""
    assert not await change(database, "SELECT * FROM blacklisted_servers")
    assert not await change(database, "UPDATE server_registry SET is_healthy = false")


async def test_a_truncation_raises_it(database: Database) -> None:
    """Where there is one; SQLite has only DELETE."""
    await change(database, INSERT)
    async with database.transaction() as session:
        name = session.get_bind().dialect.name
    emptied = "TRUNCATE blacklisted_servers" if name == "postgresql" else "DELETE FROM blacklisted_servers"
    assert await change(database, emptied)


async def test_what_is_rolled_back_leaves_it(database: Database) -> None:
    """Also to a savepoint, after which the transaction's next change counts."""
    async with database.transaction() as session:
        await session.execute(text(INSERT), {"id": "x"})
        await session.rollback()
    assert await revision(database) == 0
    async with database.transaction() as session:
        savepoint = await session.begin_nested()
        await session.execute(text(INSERT), {"id": "x"})
        await savepoint.rollback()
        assert await revision_in(session) == 0
        await session.execute(text(INSERT), {"id": "y"})
    assert await revision(database) > 0


async def test_ten_thousand_inserts_of_one_transaction_are_no_burden(database: Database) -> None:
    """One by one, as a stranger's loop may do it; on PostgreSQL they count as one change."""
    async with database.transaction() as session:
        rows = [{"id": str(number)} for number in range(10_000)]
        await session.execute(text(INSERT), rows)
        is_postgres = session.get_bind().dialect.name == "postgresql"
    assert await revision(database) == (1 if is_postgres else 10_000)
    assert await change(database, "DELETE FROM blacklisted_servers")


async def test_a_role_that_may_not_touch_our_table_may_write_the_blacklist(migrated_postgres: Database) -> None:
    """The original may have a role of its own, with rights on its own tables."""
    async with migrated_postgres.transaction() as session:
        role = f"node_{(await session.execute(text('SELECT current_database()'))).scalar_one()}"
        await session.execute(text(f"CREATE ROLE {role}"))
        await session.execute(text(f"GRANT INSERT ON blacklisted_servers TO {role}"))
        await session.execute(text(f"SET LOCAL ROLE {role}"))
        await session.execute(text(INSERT), {"id": "x"})
        await session.execute(text("RESET ROLE"))
        await session.execute(text(f"DROP OWNED BY {role}"))
        await session.execute(text(f"DROP ROLE {role}"))
    assert await revision(migrated_postgres) == 1


async def test_writers_that_change_it_at_once_wait_for_each_other(database: Database) -> None:
    """None is turned away for a deadlock, and all are counted."""
    await change(database, INSERT)
    before = await revision(database)

    async def write(number: int) -> None:
        async with database.transaction() as session:
            await session.execute(update(BlacklistedServer).values(reason=str(number)))
            await session.execute(text(INSERT), {"id": str(number)})
            await session.execute(delete(BlacklistedServer).where(col(BlacklistedServer.id) == str(number)))

    await asyncio.gather(*(write(number) for number in range(10)))
    assert await revision(database) >= before + 10
