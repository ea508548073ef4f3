"""What an administrator does with the blacklist: add, remove, list and look up rules, move them in and out as CSV.

Theory of operation. A rule is named by its canonical spelling; rows that spell it otherwise, as another process may
write them, are the same rule here. A change of rules locks the revision row first, so checking and writing is one step
even for two administrators at once, and every process sees the change within two seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import IO

from sqlalchemy import or_
from sqlmodel import col

from db import BlacklistedServer, Database
from federation.admin.blacklist.csv_lists import write_entry, write_header
from federation.admin.blacklist.rows import (
    ALL_ROWS,
    SCAN_PAGE,
    Entry,
    RuleError,
    WantedRule,
    checked_reason,
    checked_rule,
    delete_rows,
    entries_of,
    entry_of,
    lock,
    replace,
)
from federation.base.audit import Order, noted
from federation.protocol.errors import UrlError
from federation.servers.blacklist_rules import canonical_rule, rules_covering


class Change(StrEnum):
    """What became of a rule that was added."""

    ADDED = "added"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Part of a list; `after` continues it, None at its end."""

    entries: tuple[Entry, ...]
    after: tuple[str, str] | None


async def add(
    database: Database,
    rule: str,
    *,
    reason: str,
    expires_at: datetime | None = None,
    own_url: str | None = None,
    order: Order | None = None,
) -> tuple[Change, Entry]:
    """Put *rule* (`https://evil.example`, or `*.evil.example` with all below it) in force until *expires_at*.

    It replaces rows of the same rule that say otherwise, but keeps the time at which the rule was first made.

    Raises:
        RuleError: no rule, one that covers *own_url*, no reason, or an end that is past or without a time zone.
    """
    wanted = WantedRule(rule=checked_rule(rule, own_url), reason=checked_reason(reason), expires_at=expires_at)
    if expires_at is not None and (expires_at.tzinfo is None or expires_at <= datetime.now(UTC)):
        raise RuleError(f"the end {expires_at.isoformat()} must lie in the future and name its time zone")
    async with database.transaction() as session:
        await lock(session)
        before = await entries_of(session, {wanted.rule})
        if wanted.is_met_by(before):
            return Change.UNCHANGED, before[0]
        (entry,) = await replace(session, [(wanted, before)])
        if order is not None:
            await session.execute(noted(order, affected=1))
    return (Change.CHANGED if before else Change.ADDED), entry


async def remove(database: Database, rule: str, *, order: Order | None = None) -> tuple[Entry, ...]:
    """Delete every row of *rule*, in whatever spelling. Return the deleted rows, which may be none."""
    name = _name_of(rule)
    async with database.transaction() as session:
        await lock(session)
        gone = await entries_of(session, {name})
        await delete_rows(session, [entry.id for entry in gone])
        if gone and order is not None:
            await session.execute(noted(order, affected=len(gone)))
    return tuple(gone)


async def check(database: Database, url: str) -> tuple[Entry, ...]:
    """Return the rows in force whose rule covers *url*, which may be a bare host name.

    Without any, it is not blacklisted.
    """
    now = datetime.now(UTC)
    covering = {url, *rules_covering(url if "://" in url else f"https://{url}")}
    async with database.read() as session:
        return tuple(entry for entry in await entries_of(session, covering) if entry.in_force(now))


async def list_rules(database: Database, *, limit: int = 100, after: tuple[str, str] | None = None) -> Page:
    """Return up to *limit* rows in the order of their rules, expired ones included, from where the last page ended."""
    query = ALL_ROWS.order_by(col(BlacklistedServer.server_url), col(BlacklistedServer.id)).limit(limit + 1)
    if after is not None:
        url, row = after
        same = (col(BlacklistedServer.server_url) == url) & (col(BlacklistedServer.id) > row)
        query = query.where(or_(col(BlacklistedServer.server_url) > url, same))
    async with database.read() as session:
        found = [entry_of(*row) for row in await session.execute(query)]
    last = found[limit - 1] if len(found) > limit else None
    return Page(entries=tuple(found[:limit]), after=(last.server_url, last.id) if last else None)


async def export_csv(database: Database, file: IO[str], *, expired: bool = False) -> int:
    """Write the rules in force, or with *expired* all rows, to *file* (opened with `newline=""`). Return how many.

    They follow the order of the rules, so that two exports can be compared. The file can be imported again, and opened
    in a spreadsheet: no reason is a formula there.
    """
    now, count = datetime.now(UTC), 0
    write_header(file)
    after: tuple[str, str] | None = None
    while True:
        page = await list_rules(database, limit=SCAN_PAGE, after=after)
        for entry in page.entries:
            if expired or entry.in_force(now):
                write_entry(file, entry)
                count += 1
        if page.after is None:
            return count
        after = page.after


def _name_of(rule: str) -> str:
    try:
        return canonical_rule(rule.strip())
    except UrlError:
        return rule
