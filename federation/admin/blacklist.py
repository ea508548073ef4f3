"""What an administrator does with the blacklist: add, remove, list and look up rules, move them in and out as CSV.

Theory of operation. A rule is named by its canonical spelling; rows that spell it otherwise, as another process may
write them, are the same rule here. Who changes rules takes the lock of the revision row first, so checking and writing
is one step even for two administrators at once, and every process sees the change within two seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import delete, or_
from sqlmodel import col

from db import BlacklistedServer, Database
from federation.admin.blacklist_rows import (
    ALL_ROWS,
    Entry,
    WantedRule,
    delete_rows,
    entries_in,
    entry_of,
    lock,
    replace,
    shown_reason,
)
from federation.protocol.errors import UrlError
from federation.servers.rules import canonical_rule, rules_covering

MAX_REASON_CHARACTERS: Final = 2_000


class RuleError(ValueError):
    """This cannot be a rule; the message says why, and what to write instead."""


class Change(StrEnum):
    """What became of a rule that was asked for."""

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
) -> tuple[Change, Entry]:
    """*rule* (`https://evil.example`, or `*.evil.example` with all below it) is in force, for that reason, until then.

    What said otherwise of the same rule is replaced; it keeps the time it was first made.

    Raises:
        RuleError: no rule, one that covers *own_url*, no reason, or an end that is past or without a time zone.
    """
    wanted = WantedRule(rule=checked_rule(rule, own_url), reason=checked_reason(reason), expires_at=expires_at)
    if expires_at is not None and (expires_at.tzinfo is None or expires_at <= datetime.now(UTC)):
        raise RuleError(f"the end {expires_at.isoformat()} must lie in the future and name its time zone")
    async with database.transaction() as session:
        await lock(session)
        before = [entry async for entry in entries_in(session) if entry.rule == wanted.rule]
        if wanted.is_met_by(before):
            return Change.UNCHANGED, before[0]
        (entry,) = await replace(session, [(wanted, before)])
    return (Change.CHANGED if before else Change.ADDED), entry


async def remove(database: Database, rule: str) -> tuple[Entry, ...]:
    """Every row of *rule* is gone, in whatever spelling; returns what they were, nothing if there were none."""
    name = _name_of(rule)
    async with database.transaction() as session:
        await lock(session)
        gone = [entry async for entry in entries_in(session) if name in (entry.rule, entry.server_url)]
        await delete_rows(session, [entry.id for entry in gone])
    return tuple(gone)


async def check(database: Database, url: str) -> tuple[Entry, ...]:
    """The rows in force whose rule covers *url*, which may be a bare host name; nothing: it is not blacklisted."""
    now = datetime.now(UTC)
    covering = set(rules_covering(url if "://" in url else f"https://{url}"))
    async with database.read() as session:
        return tuple([entry async for entry in entries_in(session) if entry.rule in covering and entry.in_force(now)])


async def list_rules(database: Database, *, limit: int = 100, after: tuple[str, str] | None = None) -> Page:
    """Up to *limit* rows in the order of their rules, expired ones included, from where the page before ended."""
    query = ALL_ROWS.order_by(col(BlacklistedServer.server_url), col(BlacklistedServer.id)).limit(limit + 1)
    if after is not None:
        url, row = after
        same = (col(BlacklistedServer.server_url) == url) & (col(BlacklistedServer.id) > row)
        query = query.where(or_(col(BlacklistedServer.server_url) > url, same))
    async with database.read() as session:
        found = [entry_of(*row) for row in await session.execute(query)]
    last = found[limit - 1] if len(found) > limit else None
    return Page(entries=tuple(found[:limit]), after=(last.server_url, last.id) if last else None)


async def purge_expired(database: Database, *, before: datetime | None = None) -> int:
    """Rows that expired before *before*, by default now, are gone; how many.

    Processes of the original know no expiry: for them a rule ends when its row goes.
    """
    expired = col(BlacklistedServer.expires_at) < (before or datetime.now(UTC))
    async with database.transaction() as session:
        rows = delete(BlacklistedServer).where(expired).returning(col(BlacklistedServer.id))
        return len((await session.execute(rows)).all())


def checked_rule(text: str, own_url: str | None) -> str:
    """The canonical spelling of the rule *text*.

    Raises:
        RuleError: it is none, or it covers *own_url*.
    """
    try:
        rule = canonical_rule(text.strip())
    except UrlError as error:
        raise RuleError(
            f"{text[:200]!r} is no rule: {error}; write https://evil.example for that server alone, or *.evil.example "
            "for the domain and everything below it"
        ) from None
    if own_url is not None and rule in rules_covering(own_url):
        raise RuleError(f"{rule} covers this server itself, {own_url}")
    return rule


def checked_reason(text: str) -> str:
    """The reason in one line, fit to be shown anywhere.

    Raises:
        RuleError: nothing is left of it, or it is too long.
    """
    reason = shown_reason(text)
    if not reason:
        raise RuleError("a rule needs a reason: say why, for whoever asks in a year")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise RuleError(f"the reason is longer than {MAX_REASON_CHARACTERS} characters")
    return reason


def _name_of(rule: str) -> str:
    try:
        return canonical_rule(rule.strip())
    except UrlError:
        return rule
