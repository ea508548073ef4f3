"""The administrator's hand on the blacklist: add, remove, check, list, purge; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from db import BlacklistedServer, Database
from federation.admin import blacklist
from federation.admin.blacklist import Change, Entry, RuleError
from federation.servers.blacklist import load_rules

EVIL = "https://evil.example"
PAST = datetime(2025, 1, 1, tzinfo=UTC)
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


async def everything(database: Database) -> list[Entry]:
    return list((await blacklist.list_rules(database, limit=1_000)).entries)


async def stored(database: Database, *rows: tuple[str, datetime | None]) -> None:
    """Rows as another process writes them."""
    async with database.transaction() as session:
        for server_url, expires_at in rows:
            row = BlacklistedServer(server_url=server_url, reason="theirs", created_at=PAST, expires_at=expires_at)
            session.add(row)


async def test_an_added_rule_is_stored_in_its_one_spelling(database: Database) -> None:
    """With its reason in one line, and in force for the workers."""
    change, entry = await blacklist.add(database, " HTTPS://Evil.example:443/ ", reason=" spam,\n\x1b[31mand more ")
    assert change is Change.ADDED
    assert (entry.rule, entry.server_url, entry.reason, entry.expires_at) == (EVIL, EVIL, "spam, [31mand more", None)
    assert await everything(database) == [entry]
    assert (await load_rules(database)).covering(EVIL, datetime.now(UTC).timestamp()) == EVIL


async def test_adding_a_rule_again_changes_what_differs(database: Database) -> None:
    """Reason and end; the time it was first made stays, and there is one row."""
    _, first = await blacklist.add(database, "*.evil.example", reason="spam")
    assert await blacklist.add(database, "*.EVIL.example", reason="spam") == (Change.UNCHANGED, first)
    change, second = await blacklist.add(database, "*.evil.example", reason="worse", expires_at=SOON)
    assert (change, second.reason, second.expires_at) == (Change.CHANGED, "worse", SOON)
    assert second.created_at == first.created_at
    assert await everything(database) == [second]


async def test_adding_a_rule_replaces_it_in_other_spellings(database: Database) -> None:
    """A row without end that another process wrote would otherwise outlive the end given here."""
    await stored(database, (EVIL, None), (EVIL + "/", None), (EVIL + ":443", PAST), ("http://evil.example", None))
    change, entry = await blacklist.add(database, EVIL, reason="spam", expires_at=SOON)
    assert (change, entry.created_at) == (Change.CHANGED, PAST)
    assert {row.server_url: row.expires_at for row in await everything(database)} == {
        EVIL: SOON,
        "http://evil.example": None,
    }


WRAPPED = ("https://[::ffff:cb00:7107]", "https://[::ffff:203.0.113.7]", "https://[64:ff9b::cb00:7107]")


@pytest.mark.parametrize("spelling", WRAPPED)
@pytest.mark.parametrize("url", [*WRAPPED, "https://203.0.113.7"])
async def test_an_address_is_one_however_it_is_wrapped(database: Database, spelling: str, url: str) -> None:
    """A row that was stored by its IPv6 spelling is in force, is found, and is the rule that is changed or lifted."""
    await stored(database, (spelling, None), ("https://203.0.113.8", None))
    assert (await load_rules(database)).covering(url, datetime.now(UTC).timestamp()) is not None
    assert [entry.server_url for entry in await blacklist.check(database, url)] == [spelling]
    change, entry = await blacklist.add(database, url, reason="spam")
    assert (change, entry.rule) == (Change.CHANGED, "https://203.0.113.7")
    assert [entry.rule for entry in await blacklist.remove(database, spelling)] == ["https://203.0.113.7"]
    assert [entry.rule for entry in await everything(database)] == ["https://203.0.113.8"]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("evil.example", "write https://evil.example for that server alone"),
        ("*", "no rule"),
        ("https://evil.example/@spammer", "whole server"),
        ("https://own.example", "this server itself"),
        ("*.example", "this server itself"),
        ("https://[::ffff:203.0.113.7]", "this server itself"),
    ],
)
async def test_what_is_no_rule_is_refused(database: Database, rule: str, why: str) -> None:
    """With what to write instead; nothing is stored."""
    own_url = "https://203.0.113.7" if "[" in rule else "https://own.example"
    with pytest.raises(RuleError, match=why):
        await blacklist.add(database, rule, reason="spam", own_url=own_url)
    assert await everything(database) == []


async def test_a_rule_without_a_reason_or_a_proper_end_is_refused(database: Database) -> None:
    """Blank, endless, past, or of an unknown time zone."""
    for reason in ("", " \n\t", "x" * 2_001):
        with pytest.raises(RuleError, match="reason"):
            await blacklist.add(database, EVIL, reason=reason)
    for end in (PAST, datetime(2999, 1, 1)):  # noqa: DTZ001 -- the naive one is the point
        with pytest.raises(RuleError, match="future"):
            await blacklist.add(database, EVIL, reason="spam", expires_at=end)
    assert await everything(database) == []


async def test_removing_a_rule_takes_every_spelling(database: Database) -> None:
    """And no other rule; expired rows go as well. A second removal finds nothing."""
    await stored(database, (EVIL, None), (EVIL + "/", PAST), ("*.evil.example", None), ("HTTPS://EVIL.example", None))
    gone = await blacklist.remove(database, "https://EVIL.example/")
    assert sorted(entry.server_url for entry in gone) == ["HTTPS://EVIL.example", EVIL, EVIL + "/"]
    assert [entry.server_url for entry in await everything(database)] == ["*.evil.example"]
    assert await blacklist.remove(database, EVIL) == ()


async def test_a_row_that_is_no_rule_can_be_removed(database: Database) -> None:
    """By its text."""
    await stored(database, ("https://evil.example/users/x", None), ("evil", None))
    assert len(await blacklist.remove(database, "evil")) == 1
    assert len(await blacklist.remove(database, "https://evil.example/users/x")) == 1
    assert await everything(database) == []


@pytest.mark.parametrize("url", ["https://a.evil.example/inbox", "a.evil.example", "HTTPS://A.Evil.example."])
async def test_a_check_names_every_rule_in_force(database: Database, url: str) -> None:
    """With its reason; a bare name is a server as well."""
    rules = ("*.evil.example", None), ("https://a.evil.example/", SOON), ("*.example", PAST), ("*.b.example", None)
    await stored(database, *rules)
    found = await blacklist.check(database, url)
    assert {(entry.rule, entry.reason) for entry in found} == {
        ("*.evil.example", "theirs"),
        ("https://a.evil.example", "theirs"),
    }
    assert await blacklist.check(database, "https://good.example") == ()


async def test_a_list_comes_in_pages(database: Database) -> None:
    """In the order of the rules, each row once, also where one server has several."""
    await stored(database, *((f"https://{number:02}.example", None) for number in range(7)), (EVIL, None), (EVIL, PAST))
    pages, after = [], None
    while True:
        page = await blacklist.list_rules(database, limit=3, after=after)
        pages.append(page.entries)
        if (after := page.after) is None:
            break
    assert [len(entries) for entries in pages] == [3, 3, 3]
    listed = [entry for entries in pages for entry in entries]
    assert [entry.rule for entry in listed] == [*(f"https://{number:02}.example" for number in range(7)), EVIL, EVIL]
    assert len({entry.id for entry in listed}) == 9


async def test_expired_rows_can_be_purged(database: Database) -> None:
    """Only those; with a time given, those that expired before it."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    await stored(database, (EVIL, None), ("*.a.example", SOON), ("*.b.example", PAST), ("*.c.example", yesterday))
    assert await blacklist.purge_expired(database, before=yesterday - timedelta(days=1)) == 1
    assert await blacklist.purge_expired(database) == 1
    assert [entry.rule for entry in await everything(database)] == ["*.a.example", EVIL]


async def test_administrators_who_add_the_same_rule_at_once_make_one_row(database: Database) -> None:
    """One adds, the others find it."""
    outcomes = await asyncio.gather(*(blacklist.add(database, EVIL, reason="spam") for _ in range(8)))
    assert sorted(change.value for change, _ in outcomes) == ["added", *["unchanged"] * 7]
    assert len(await everything(database)) == 1
