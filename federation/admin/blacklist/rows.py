"""The rows of the blacklist, as administration reads and replaces them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

from sqlalchemy import Row, Select, delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import BlacklistedServer, BlacklistRevision, new_id
from db.servers import SPELT_OTHERWISE_ON_POSTGRES, SPELT_OTHERWISE_ON_SQLITE
from federation.protocol.errors import UrlError
from federation.servers.blacklist_rules import canonical_rule, rules_covering

BATCH: Final = 1_000
SCAN_PAGE: Final = 5_000
MAX_REASON_CHARACTERS: Final = 2_000

EntryRow: TypeAlias = Row[str, str, str, datetime, datetime | None]
EntryQuery: TypeAlias = Select[str, str, str, datetime, datetime | None]

ALL_ROWS: Final = select(
    col(BlacklistedServer.id),
    col(BlacklistedServer.server_url),
    col(BlacklistedServer.reason),
    col(BlacklistedServer.created_at),
    col(BlacklistedServer.expires_at),
)

# White space, and characters that control a terminal or reverse the text; surrogates fit into no database.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_UNSHOWABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")


class RuleError(ValueError):
    """This cannot be a rule; the message says why, and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row: the rule in canonical spelling (as stored, if it has none), the reason, and the end (None for none)."""

    id: str
    rule: str
    server_url: str
    reason: str
    created_at: datetime
    expires_at: datetime | None

    def in_force(self, now: datetime) -> bool:
        return self.expires_at is None or self.expires_at > now


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRule:
    """A rule as it is to become, in canonical spelling, its reason fit to be shown."""

    rule: str
    reason: str
    expires_at: datetime | None
    created_at: datetime | None = None

    def is_met_by(self, entries: Sequence[Entry]) -> bool:
        """Tell whether the rows of this rule say just that, in one row and one spelling."""
        return len(entries) == 1 and (self.rule, self.reason, self.expires_at) == (
            entries[0].server_url,
            shown_reason(entries[0].reason),
            entries[0].expires_at,
        )


def checked_rule(text: str, own_url: str | None) -> str:
    """Return the canonical spelling of the rule *text*.

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
    """Return the reason in one line, fit to be shown anywhere.

    Raises:
        RuleError: nothing is left of it, or it is too long.
    """
    reason = shown_reason(text)
    if not reason:
        raise RuleError("a rule needs a reason: say why, for whoever asks in a year")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise RuleError(f"the reason is longer than {MAX_REASON_CHARACTERS} characters")
    return reason


def shown_reason(text: str) -> str:
    """Return *text* in one line, without control characters."""
    return _UNSHOWABLE.sub(" ", text).strip()


async def lock(session: AsyncSession) -> None:
    """Keep everybody else from changing the blacklist until the transaction ends."""
    # On SQLite every writing transaction has the whole file to itself from its first statement on.
    await session.execute(select(col(BlacklistRevision.id)).with_for_update())


async def entries_of(session: AsyncSession, rules: Collection[str]) -> list[Entry]:
    """Return the rows of these rules, in whatever spelling."""
    found = await entries_by_rule(session, rules)
    return [entry for entries in found.values() for entry in entries]


async def entries_by_rule(session: AsyncSession, rules: Collection[str]) -> dict[str, list[Entry]]:
    """Return the rows of these rules, in whatever spelling, by rule.

    Of other rules only rows that may be spelt otherwise than these are read. Each query looks for a thousand.
    """
    found: dict[str, dict[str, Entry]] = {}
    async for row in _rows_of(session, rules):
        entry = entry_of(*row)
        if entry.rule in rules:
            found.setdefault(entry.rule, {})[entry.id] = entry
    return {rule: [*entries.values()] for rule, entries in found.items()}


async def _rows_of(session: AsyncSession, rules: Collection[str]) -> AsyncIterator[EntryRow]:
    """Yield every row that may be of one of these rules, some of them twice."""
    last: str | None = None
    while True:
        odd = (await session.execute(_spelt_otherwise(session, behind=last))).all()
        for row in odd:
            yield row
        if len(odd) < BATCH:
            break
        last = odd[-1].id
    storable = [rule for rule in rules if not _UNSTORABLE.search(rule)]
    for start in range(0, len(storable), BATCH):
        named = ALL_ROWS.where(col(BlacklistedServer.server_url).in_(storable[start : start + BATCH]))
        for row in (await session.execute(named)).all():
            yield row


def _spelt_otherwise(session: AsyncSession, *, behind: str | None) -> EntryQuery:
    """Return the query for further rows that may be spelt otherwise than their rule, by an index that has only them."""
    row_id = col(BlacklistedServer.id)
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    condition = SPELT_OTHERWISE_ON_SQLITE if is_sqlite else SPELT_OTHERWISE_ON_POSTGRES
    query = ALL_ROWS.where(text(f"({condition})"))
    return (query if behind is None else query.where(row_id > behind)).order_by(row_id).limit(BATCH)


async def replace(session: AsyncSession, changes: Sequence[tuple[WantedRule, Sequence[Entry]]]) -> list[Entry]:
    """Write each wanted rule as one row, in place of the rows given with it. The time the rule was first made stays."""
    now = datetime.now(UTC)
    await delete_rows(session, [entry.id for _, before in changes for entry in before])
    entries = [
        Entry(
            id=new_id(),
            rule=wanted.rule,
            server_url=wanted.rule,
            reason=wanted.reason,
            created_at=min((entry.created_at for entry in before), default=wanted.created_at or now),
            expires_at=wanted.expires_at,
        )
        for wanted, before in changes
    ]
    for start in range(0, len(entries), BATCH):
        rows = [
            {
                "id": entry.id,
                "server_url": entry.server_url,
                "reason": entry.reason,
                "created_at": entry.created_at,
                "expires_at": entry.expires_at,
            }
            for entry in entries[start : start + BATCH]
        ]
        await session.execute(insert(BlacklistedServer), rows)
    return entries


async def delete_rows(session: AsyncSession, ids: Sequence[str]) -> None:
    """Delete the rows with these ids."""
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        await session.execute(delete(BlacklistedServer).where(col(BlacklistedServer.id).in_(batch)))


def entry_of(row_id: str, server_url: str, reason: str, created_at: datetime, expires_at: datetime | None) -> Entry:
    """Build the entry of a row of `ALL_ROWS`."""
    try:
        rule = canonical_rule(server_url)
    except UrlError:
        rule = server_url
    return Entry(
        id=row_id, rule=rule, server_url=server_url, reason=reason, created_at=created_at, expires_at=expires_at
    )
