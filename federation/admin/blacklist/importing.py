"""Importing a blacklist: first a plan of what would change, then the change; a file for one that is exported."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from db import Database
from federation.admin.blacklist.csv_lists import LineNote, ReadRules, read_csv
from federation.admin.blacklist.rows import Entry, WantedRule, entries_by_rule, lock, replace
from federation.base.audit import UNRECORDED, Order, Record, noted


@contextmanager
def whole_file(path: Path | None) -> Iterator[IO[str]]:
    """Open a text file for writing that replaces *path* if all goes well; for None, standard output."""
    if path is None:
        with open(sys.stdout.fileno(), "w", encoding="utf-8", newline="", closefd=False) as out:
            yield out
        return
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A rule that exists and is to become different."""

    before: tuple[Entry, ...]
    after: WantedRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """What an import would do. Rules that the file does not name stay as they are."""

    added: tuple[WantedRule, ...]
    changed: tuple[Changed, ...]
    unchanged: tuple[WantedRule, ...]
    skipped: tuple[LineNote, ...]
    bad: tuple[LineNote, ...]

    @property
    def wanted(self) -> tuple[WantedRule, ...]:
        """Every rule that the file asks for."""
        return (*self.added, *(change.after for change in self.changed), *self.unchanged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """How many rules an import has added, changed, and found unchanged."""

    added: int
    changed: int
    unchanged: int


class BadRows(ValueError):
    """Rows of the file are wrong, and nothing was imported."""

    def __init__(self, bad: Sequence[LineNote]) -> None:
        first = bad[0]
        super().__init__(f"{len(bad)} bad rows, nothing was imported; the first: line {first.line}: {first.text}")
        self.bad = tuple(bad)


async def plan_import(database: Database, file: IO[bytes], *, own_url: str | None = None) -> ImportPlan:
    """Return what importing *file* would do. Nothing is written. See `read_csv` for the formats.

    Of the blacklist only the rules that the file names are read, a thousand at a time.

    Raises:
        CsvError: the file cannot be read at all.
    """
    read = await asyncio.to_thread(read_csv, file, own_url=own_url)
    async with database.read() as session:
        return _plan(read, await entries_by_rule(session, read.rules))


async def apply_import(
    database: Database,
    plan: ImportPlan,
    *,
    skip_bad: bool = False,
    order: Order | None = None,
    record: Record = UNRECORDED,
) -> Imported:
    """Put every rule of *plan* in force, in one transaction: all of them, or none if it fails.

    How many rules were changed is noted by *order* as a whole action, or added to the *record* of one under way. What
    has changed since it was planned is taken into account. Doing it again changes nothing.

    Raises:
        BadRows: the plan has bad rows and *skip_bad* is not set; nothing was imported.
    """
    if plan.bad and not skip_bad:
        raise BadRows(plan.bad)
    async with database.transaction() as session:
        await lock(session)
        rules = {wanted.rule: wanted for wanted in plan.wanted}
        current = _plan(ReadRules(rules=rules), await entries_by_rule(session, rules))
        changes: list[tuple[WantedRule, Sequence[Entry]]] = [(wanted, ()) for wanted in current.added]
        changes += [(change.after, change.before) for change in current.changed]
        await replace(session, changes)
        if order is not None:
            await session.execute(noted(order, affected=len(changes)))
        await session.run_sync(lambda opened: record.add(opened.connection(), len(changes)))
    return Imported(added=len(current.added), changed=len(current.changed), unchanged=len(current.unchanged))


def _plan(read: ReadRules, existing: Mapping[str, Sequence[Entry]]) -> ImportPlan:
    added, changed, unchanged = [], [], []
    for rule, wanted in read.rules.items():
        before = existing.get(rule, ())
        if not before:
            added.append(wanted)
        elif wanted.is_met_by(before):
            unchanged.append(wanted)
        else:
            changed.append(Changed(before=tuple(before), after=wanted))
    return ImportPlan(
        added=tuple(added),
        changed=tuple(changed),
        unchanged=tuple(unchanged),
        skipped=tuple(read.skipped),
        bad=tuple(read.bad),
    )
