"""Rules are found by an index, whatever their spelling and however many there are; on both databases."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from functools import partial
from itertools import product

import pytest
from sqlalchemy import insert

from db import BlacklistedServer, Database
from federation.admin import blacklist
from federation.admin.blacklist import rows as blacklist_rows
from federation.admin.blacklist.rows import ALL_ROWS, entries_of, entry_of
from federation.protocol.errors import UrlError
from federation.servers.blacklist_rules import canonical_rule
from tests.federation.rows_read import MANY, cost, watched

NOW = datetime.now(UTC)
MOST_READ = 1_000

HOSTS = (
    *("evil.example", "Evil.Example", "evil.example.", "7.example", "a.7", "evil", "xn--bcher-kva.example"),
    *("127.0.0.1", "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "0x7f000001", "1.2.3.a", "x.a.1", "a_b.example"),
    *(
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::FFFF:1.2.3.4]",
        "[64:ff9b::1.2.3.4]",
        "-.example",
        "a..b",
        "",
        "fa\u00df.de",
        "b\u00fccher.example",
    ),
    *("\uff11\uff12\uff17.0.0.1", "a.\uff45xample"),  # digits and a letter in full width
)
BEFORE = ("https://", "http://", "HTTPS://", "*.", "")
BEHIND = ("", "/", "//", ":443", ":80", ":8080", ":0443", ":", "/x", "?", "#", ".", "/.", "?a=b")
SPELLINGS = ["".join(each) for each in product(BEFORE, HOSTS, BEHIND)]


async def store(database: Database, *urls: str) -> None:
    rows = [
        {"id": f"r{number}", "server_url": url, "reason": "spam", "created_at": NOW} for number, url in enumerate(urls)
    ]
    await database.transact(lambda connection: connection.execute(insert(BlacklistedServer), rows))


def rule_of(text: str) -> str:
    try:
        return canonical_rule(text)
    except UrlError:
        return text


async def test_every_spelling_is_found(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the index, in several steps, as by reading all."""
    monkeypatch.setattr(blacklist_rows, "BATCH", 100)
    await store(database, *SPELLINGS)
    rules = {rule_of(text) for text in SPELLINGS}
    async with database.read() as session:
        everything = [entry_of(*row) for row in await session.execute(ALL_ROWS)]
        found = {entry.id for entry in await entries_of(session, rules)}
    # Whatever is spelt as its own rule is found by that; the others have to be among those that are looked at.
    assert [entry.server_url for entry in everything if entry.id not in found] == []
    assert {entry.rule for entry in everything} == rules


async def adds(database: Database) -> object:
    return await blacklist.add(database, "*.new.example", reason="spam")


async def removes(database: Database) -> object:
    return await blacklist.remove(database, "https://n77.example")


async def checks(database: Database) -> object:
    return await blacklist.check(database, "https://a.b.c.n77.example/inbox")


async def plans(database: Database) -> object:
    return await blacklist.plan_import(database, listing("https://n77.example", "*.new.example"))


def listing(*rules: str) -> io.BytesIO:
    return io.BytesIO(("server_url,reason\n" + "".join(f"{rule},spam\n" for rule in rules)).encode())


async def test_few_rows_are_read(database: Database) -> None:
    """Among twenty thousand, some of which are spelt as others wrote them."""
    plain = [f"https://n{number}.example" for number in range(MANY)]
    await store(database, *plain, *(f"https://Odd{number}.example/" for number in range(300)))
    if not database.is_sqlite:
        await database.transact(lambda connection: connection.exec_driver_sql("ANALYZE blacklisted_servers"))
    for asks in (checks, plans, adds, removes):
        with watched() as queries:
            await asks(database)
        of_rules = [(query, values) for query, values in queries if "blacklisted_servers" in query]
        assert len(of_rules) >= 2, asks.__name__
        assert await database.transact(partial(cost, queries=of_rules)) < MOST_READ, asks.__name__


async def test_a_long_list_is_compared_step_by_step(database: Database) -> None:
    """No step reads more than a thousand rows, and none of them what the list does not name."""
    plain = [f"https://n{number}.example" for number in range(MANY)]
    await store(database, *plain, *(f"https://Odd{number}.example/" for number in range(1_200)))
    if not database.is_sqlite:
        await database.transact(lambda connection: connection.exec_driver_sql("ANALYZE blacklisted_servers"))
    with watched() as queries:
        plan = await blacklist.plan_import(database, listing(*plain[:2_500], "https://odd7.example", "*.new.example"))
    assert (len(plan.unchanged), len(plan.changed), len(plan.added)) == (2_500, 1, 1)
    read = [await database.transact(partial(cost, queries=[each])) for each in queries]
    assert len(read) == 2 + 3
    assert max(read) <= MOST_READ


async def test_a_name_that_no_database_stores_has_no_rule(database: Database) -> None:
    """Instead of an error of the database."""
    assert await blacklist.check(database, "https://evil\x00.example") == ()
    assert await blacklist.check(database, "https://evil\ud800.example") == ()
