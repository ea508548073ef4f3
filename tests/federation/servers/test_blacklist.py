"""The blacklist in memory: what others change is seen, and an unreachable database changes nothing."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from structlog.testing import capture_logs

from db import BlacklistedServer, Database
from federation.servers import blacklist as module
from federation.servers.blacklist import Blacklist, load_rules
from federation.servers.blacklist_rules import RuleSet
from tests.patience import eventually

URL = "https://evil.example"
AT_ONCE = timedelta(0)
NEVER = timedelta(days=1)

# As the original implementation, and a person at a database shell, write it: without `expires_at`.
INSERT = f"""INSERT INTO blacklisted_servers (id, server_url, created_at, reason)
    VALUES ('x', '{URL}', '2025-01-01 00:00:00', 'spam')"""


@pytest.fixture
async def blacklist(database: Database) -> AsyncIterator[Blacklist]:
    opened = Blacklist(database, check_interval=timedelta(milliseconds=50))
    yield opened
    await opened.close()


async def execute(database: Database, statement: str) -> None:
    async with database.transaction() as session:
        await session.execute(text(statement))


async def becomes(blacklist: Blacklist, url: str, *, blacklisted: bool) -> None:
    """The look-up says so in the end."""
    await eventually(lambda: blacklist.covering(url), lambda rule: (rule is not None) is blacklisted)


async def test_what_another_process_changes_is_seen(blacklist: Blacklist, database: Database) -> None:
    """An insert, an update and a delete in plain SQL, each without a word to this object."""
    assert await blacklist.covering(URL) is None
    assert await blacklist.covered([URL]) == set()
    await execute(database, INSERT)
    await becomes(blacklist, URL, blacklisted=True)
    assert await blacklist.covered([URL, "https://b.example"]) == {URL}
    await execute(database, "UPDATE blacklisted_servers SET server_url = '*.spam.example'")
    await becomes(blacklist, URL, blacklisted=False)
    assert await blacklist.covering("https://a.spam.example") == "*.spam.example"
    await execute(database, "UPDATE blacklisted_servers SET expires_at = '2025-01-02 00:00:00'")
    await becomes(blacklist, "https://a.spam.example", blacklisted=False)
    await execute(database, "UPDATE blacklisted_servers SET expires_at = NULL")
    await becomes(blacklist, "https://a.spam.example", blacklisted=True)
    await execute(database, "DELETE FROM blacklisted_servers")
    await becomes(blacklist, "https://a.spam.example", blacklisted=False)


async def test_a_rule_ends_by_the_clock_alone(blacklist: Blacklist, database: Database) -> None:
    """Nobody writes anything when it does."""
    end = datetime.now(UTC) + timedelta(seconds=0.5)
    async with database.transaction() as session:
        session.add(BlacklistedServer(server_url=URL, created_at=end, reason="spam", expires_at=end))
    loaded = await load_rules(database)
    assert loaded.covering(URL, end.timestamp() - 0.1) == URL
    await becomes(blacklist, URL, blacklisted=False)


@pytest.mark.parametrize("end", ["infinity", "-infinity"])
async def test_a_rule_that_ends_at_no_time_does_not_end(migrated_postgres_url: str, end: str) -> None:
    """PostgreSQL has such times, and somebody may have written one: the other rules load, and this one holds."""
    database = Database(migrated_postgres_url)
    await execute(database, INSERT)
    await execute(database, f"UPDATE blacklisted_servers SET expires_at = '{end}'")
    await execute(database, INSERT.replace("'x'", "'y'").replace(URL, "*.spam.example"))
    rules, now = await load_rules(database), time.time()
    assert rules.covering(URL, now) == URL
    assert rules.covering("https://spam.example", now) == "*.spam.example"
    await database.close()


async def test_ends_are_read_to_the_microsecond(database: Database) -> None:
    """And in UTC."""
    end = datetime(2026, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    async with database.transaction() as session:
        session.add(BlacklistedServer(server_url=URL, created_at=end, reason='"\\é\n', expires_at=end))
    rules = await load_rules(database)
    assert rules.covering(URL, end.timestamp() - 1e-6) == URL
    assert rules.covering(URL, end.timestamp()) is None


async def test_what_was_known_changes_nothing_but_the_time_it_takes(database: Database) -> None:
    """Rules that stay, go, come, expire, or are spelled anew are the same with and without the rules before."""
    await execute(database, INSERT)
    await execute(database, INSERT.replace("'x'", "'y'").replace(URL, URL + "/"))
    await execute(database, INSERT.replace("'x'", "'z'").replace(URL, "*.spam.example"))
    known = await load_rules(database)
    await execute(database, "DELETE FROM blacklisted_servers WHERE id IN ('x', 'z')")
    await execute(database, INSERT.replace("'x'", "'w'").replace(URL, "*.a.b.example"))
    now = time.time()
    for rules in (await load_rules(database, known=known), await load_rules(database)):
        assert len(rules) == 2
        assert rules.covering(URL, now) == URL
        assert rules.covering("https://x.a.b.example", now) == "*.a.b.example"
        assert rules.covering("https://spam.example", now) is None
    await execute(database, "DELETE FROM blacklisted_servers")
    assert len(await load_rules(database, known=known)) == 0


async def test_rules_of_several_pages_are_all_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last page is exactly full."""
    monkeypatch.setattr(module, "PAGE", 5)
    now = datetime.now(UTC)
    async with database.transaction() as session:
        for number in range(10):
            session.add(BlacklistedServer(server_url=f"https://{number}.example", created_at=now, reason="spam"))
    rules = await load_rules(database)
    assert [rules.covering(f"https://{number}.example", now.timestamp()) is not None for number in range(11)] == [
        *[True] * 10,
        False,
    ]


async def test_a_fresh_list_is_not_read_again(database: Database) -> None:
    """Until the check is due nothing is asked; `recheck` makes it due."""
    blacklist = Blacklist(database, check_interval=NEVER)
    assert await blacklist.covering(URL) is None
    await execute(database, INSERT)
    assert await blacklist.covering(URL) is None
    blacklist.recheck()
    assert await blacklist.covering(URL) == URL
    await blacklist.close()


async def test_unchanged_rules_are_not_loaded_again(database: Database) -> None:
    """A check reads one row; only another revision, or the time, causes a load."""
    await execute(database, INSERT)
    blacklist = Blacklist(database, check_interval=AT_ONCE)
    assert await blacklist.covering(URL) == URL
    await execute(database, "UPDATE blacklist_revision SET revision = -1")  # from now on the number stays as it is
    assert await blacklist.covering(URL) == URL
    await drop_triggers(database)
    await execute(database, "DELETE FROM blacklisted_servers")
    assert await blacklist.covering(URL) == URL
    await blacklist.close()


async def test_a_table_without_triggers_is_read_after_a_while(database: Database) -> None:
    """A restored or rebuilt table is not believed to be unchanged for ever."""
    await drop_triggers(database)
    blacklist = Blacklist(database, check_interval=AT_ONCE, reload_interval=timedelta(milliseconds=100))
    assert await blacklist.covering(URL) is None
    await execute(database, INSERT)
    await becomes(blacklist, URL, blacklisted=True)
    await blacklist.close()


async def test_a_missing_revision_means_changed(database: Database) -> None:
    """Without the row that counts every check loads the rules."""
    await execute(database, "DELETE FROM blacklist_revision")
    blacklist = Blacklist(database, check_interval=AT_ONCE)
    assert await blacklist.covering(URL) is None
    await execute(database, INSERT)
    assert await blacklist.covering(URL) == URL
    await blacklist.close()


async def drop_triggers(database: Database) -> None:
    async with database.transaction() as session:
        if session.get_bind().dialect.name == "postgresql":
            await session.execute(text("DROP TRIGGER blacklist_changed ON blacklisted_servers"))
        else:
            for kind in ("insert", "update", "delete"):
                await session.execute(text(f"DROP TRIGGER blacklist_{kind}"))


async def test_look_ups_at_once_share_one_load(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of them that is cancelled fails nobody else."""
    loads = 0

    async def counted(database: Database, *, known: RuleSet | None) -> RuleSet:
        nonlocal loads
        loads += 1
        return await load_rules(database, known=known)

    monkeypatch.setattr(module, "load_rules", counted)
    await execute(database, INSERT)
    blacklist = Blacklist(database)
    look_ups = [asyncio.create_task(blacklist.covering(URL)) for _ in range(20)]
    await asyncio.sleep(0)
    look_ups[0].cancel()
    results = await asyncio.gather(*look_ups, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [URL] * 19
    assert loads == 1
    await blacklist.close()


async def test_a_recheck_is_not_undone_by_the_check_under_way(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that one has read may be older than the change that called for a recheck."""
    loading, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(database: Database, *, known: RuleSet | None) -> RuleSet:
        rules = await load_rules(database, known=known)
        loading.set()
        await may_go_on.wait()
        return rules

    monkeypatch.setattr(module, "load_rules", slow)
    blacklist = Blacklist(database, check_interval=NEVER)
    early = asyncio.create_task(blacklist.covering(URL))
    await loading.wait()
    await execute(database, INSERT)
    blacklist.recheck()
    monkeypatch.setattr(module, "load_rules", load_rules)
    assert await blacklist.covering(URL) == URL
    may_go_on.set()
    assert await early is None
    assert await blacklist.covering(URL) == URL
    await blacklist.close()


async def test_without_a_first_load_nothing_is_answered(tmp_path: Path) -> None:
    """A database without tables, or none at all, lets nobody through; once it is there, look-ups work."""
    path = tmp_path / "late.sqlite3"
    database = Database(f"sqlite:///{path}")
    blacklist = Blacklist(database)
    for _ in range(2):
        with pytest.raises(SQLAlchemyError):
            await blacklist.covering(URL)
    with sqlite3.connect(path) as late:
        late.execute("CREATE TABLE blacklist_revision (id integer PRIMARY KEY, revision integer)")
        late.execute("CREATE TABLE blacklisted_servers (id text, server_url text, expires_at timestamp)")
        late.execute("INSERT INTO blacklisted_servers VALUES ('x', ?, NULL)", (URL,))
    late.close()
    assert await blacklist.covering(URL) == URL
    await blacklist.close()
    await database.close()


async def test_a_database_that_goes_away_leaves_the_last_rules_in_force(database: Database) -> None:
    """That is logged once, and so is its return, with which changes are seen again."""
    await execute(database, INSERT)
    blacklist = Blacklist(database, check_interval=AT_ONCE)
    assert await blacklist.covering(URL) == URL
    with capture_logs() as lines:
        await execute(database, "ALTER TABLE blacklist_revision RENAME TO gone")
        for _ in range(5):
            assert await blacklist.covering(URL) == URL
        await execute(database, "ALTER TABLE gone RENAME TO blacklist_revision")
        assert await blacklist.covering(URL) == URL
        await execute(database, "DELETE FROM blacklisted_servers")
        assert await blacklist.covering(URL) is None
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("blacklist_behind", "error"),
        ("blacklist_current", "info"),
        ("blacklist_changed", "info"),
    ]


async def test_a_database_that_hangs_leaves_the_last_rules_in_force(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check has its time; then the look-up answers from what it knows."""
    monkeypatch.setattr(module, "CHECK_TIMEOUT", timedelta(milliseconds=50))
    database = Database(migrated_postgres_url)
    await execute(database, INSERT)
    blacklist = Blacklist(database, check_interval=AT_ONCE)
    assert await blacklist.covering(URL) == URL
    async with database.transaction() as session:
        await session.execute(text("LOCK TABLE blacklist_revision IN ACCESS EXCLUSIVE MODE"))
        with capture_logs() as lines:
            assert await blacklist.covering(URL) == URL
    assert [line["event"] for line in lines] == ["blacklist_behind"]
    await blacklist.close()
    await database.close()


async def test_rules_that_never_load_in_time_are_database_trouble(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look-up waits, but not for ever."""
    monkeypatch.setattr(module, "LOAD_TIMEOUT", timedelta(milliseconds=50))
    database = Database(migrated_postgres_url)
    blacklist = Blacklist(database)
    async with database.transaction() as session:
        await session.execute(text("LOCK TABLE blacklist_revision IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(SQLAlchemyError, match="not read within"):
            await blacklist.covering(URL)
    await blacklist.close()
    await database.close()
