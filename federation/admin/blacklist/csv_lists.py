"""Blacklists as CSV: reads and writes our own format, and reads Mastodon's domain blocks and plain lists of domains.

Files come from strangers, so there are bounds on lines, records, the file and the number of bad rows. A bad row is
reported with its line, and the others are read. If it cannot be told where a row ends, the file is refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import IO, Final, TypeAlias

from federation.admin.blacklist.rows import (
    MAX_REASON_CHARACTERS,
    Entry,
    RuleError,
    WantedRule,
    checked_reason,
    checked_rule,
    shown_reason,
)
from federation.protocol.errors import UrlError
from federation.servers.blacklist_rules import STAR, canonical_rule

COLUMNS: Final = ("server_url", "reason", "expires_at", "created_at")

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
MAX_LINE_BYTES: Final = 16 * 1024
MAX_RECORD_BYTES: Final = 64 * 1024
MAX_BAD_ROWS: Final = 10_000

_MASTODON_REASON: Final = "Mastodon domain block"
_LIST_REASON: Final = "on an imported list of domains"
_NO_REASON: Final = "no reason given"
_DOMAIN: Final = "domain"
_NO_BLOCK: Final = frozenset({"silence", "noop"})

# A text that a spreadsheet would take for a formula, and the form in which such a text is exported.
_FORMULA = re.compile(r"'*\s*[=+\-@]")
_GUARDED_FORMULA = re.compile(r"'+\s*[=+\-@]")


class CsvError(ValueError):
    """The file as a whole cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineNote:
    """A remark about the row that begins on *line*."""

    line: int
    text: str


@dataclass(slots=True, kw_only=True)
class ReadRules:
    """What a file asks for: rules by their canonical spelling, rows left out for a reason, and rows that are wrong."""

    rules: dict[str, WantedRule] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    skipped: list[LineNote] = field(default_factory=list)
    bad: list[LineNote] = field(default_factory=list)


class LineSkipped(Exception):
    """The row is valid and asks for nothing."""


ReadRow: TypeAlias = Callable[[Mapping[str, str]], WantedRule]


def read_csv(file: IO[bytes], *, own_url: str | None = None) -> ReadRules:
    """Return the rules in *file*. The first line tells the formats apart. Rules that cover *own_url* are bad rows.

    Raises:
        CsvError: not UTF-8, over a bound, without a first line we know, with a quote that has no end, or with more bad
            rows than anybody would read about.
    """
    found, now = ReadRules(), datetime.now(UTC)
    records = _records(file, found.bad)
    line, header = next(records, (1, []))
    columns = [name.strip().lower().removeprefix("#") for name in header]
    if is_plain := _is_domain(header):
        columns, records = [_DOMAIN], chain([(line, header)], records)
    read_row = _reader_for(columns, own_url, is_plain=is_plain)
    for line, fields in records:
        try:
            if len(fields) != len(columns):
                raise RuleError(f"{len(fields)} fields, and the first line names {len(columns)}")
            wanted = read_row(dict(zip(columns, fields, strict=True)))
            if wanted.expires_at is not None and wanted.expires_at <= now:
                raise LineSkipped(f"{wanted.rule} expired at {wanted.expires_at.isoformat()}")
            _take(found, wanted, line)
        except RuleError as error:
            found.bad.append(LineNote(line=line, text=str(error)))
        except LineSkipped as reason:
            found.skipped.append(LineNote(line=line, text=str(reason)))
        if len(found.bad) > MAX_BAD_ROWS:
            raise CsvError(f"line {line}: more than {MAX_BAD_ROWS} bad rows by here; is this a blacklist?")
    return found


def write_header(file: IO[str]) -> None:
    """Write the first line of our format to *file*, which was opened with `newline=""`."""
    csv.writer(file, lineterminator="\n").writerow(COLUMNS)


def write_entry(file: IO[str], entry: Entry) -> None:
    """Write the row to *file*. No cell of it is a formula to a spreadsheet, and `read_csv` restores what it was.

    A reason as other processes may have written it is brought into our form.
    """
    reason = shown_reason(entry.reason)[:MAX_REASON_CHARACTERS] or _NO_REASON
    ends = _time_text(entry.expires_at) if entry.expires_at else ""
    cells = (_guarded(entry.server_url), _guarded(reason), ends, _time_text(entry.created_at))
    csv.writer(file, lineterminator="\n").writerow(cells)


def _take(found: ReadRules, wanted: WantedRule, line: int) -> None:
    earlier = found.rules.get(wanted.rule)
    if earlier is None:
        found.rules[wanted.rule], found.lines[wanted.rule] = wanted, line
        return
    note = f"{wanted.rule} is on line {found.lines[wanted.rule]} already"
    if (earlier.reason, earlier.expires_at) != (wanted.reason, wanted.expires_at):
        # Lists that were merged agree on the block, if not on why and until when.
        found.rules[wanted.rule] = replace(earlier, expires_at=_later(earlier.expires_at, wanted.expires_at))
        note += ", with another reason or end: the first reason counts, and the later end"
    raise LineSkipped(note)


def _later(one: datetime | None, other: datetime | None) -> datetime | None:
    """Return the later of two ends; None stands for never."""
    return None if one is None or other is None else max(one, other)


def _is_domain(header: list[str]) -> bool:
    """Tell whether the first line is no header, but the first of a plain list of domains."""
    if len(header) != 1 or "." not in header[0]:
        return False
    try:
        canonical_rule(STAR + header[0].strip().removeprefix(STAR))
    except UrlError:
        return False
    return True


def _reader_for(columns: list[str], own_url: str | None, *, is_plain: bool) -> ReadRow:
    if is_plain:
        return lambda row: _domain_row(row[_DOMAIN], _LIST_REASON, own_url)
    if len(set(columns)) == len(columns):
        if {"server_url", "reason"} <= set(columns):
            return lambda row: _our_row(row, own_url)
        if _DOMAIN in columns:
            return lambda row: _mastodon_row(row, own_url)
    raise CsvError(
        "line 1: names neither our columns (server_url,reason, perhaps expires_at,created_at) nor Mastodon's "
        "(#domain,#severity,#reject_media,#reject_reports,#public_comment,#obfuscate), separated by commas, "
        "and is no domain of a plain list"
    )


def _our_row(row: Mapping[str, str], own_url: str | None) -> WantedRule:
    return WantedRule(
        rule=checked_rule(_unguarded(row["server_url"]), own_url),
        reason=checked_reason(_unguarded(row["reason"])),
        expires_at=_time(row.get("expires_at", ""), "expires_at"),
        created_at=_time(row.get("created_at", ""), "created_at"),
    )


def _mastodon_row(row: Mapping[str, str], own_url: str | None) -> WantedRule:
    domain = row[_DOMAIN].strip()
    severity = row.get("severity", "suspend").strip().lower()
    if severity in _NO_BLOCK:
        raise LineSkipped(f"{domain[:200]!r} is no block: severity {severity}")
    if severity != "suspend":
        raise RuleError(f"severity {severity[:40]!r} is none of suspend, silence and noop")
    return _domain_row(domain, row.get("public_comment", "").strip() or _MASTODON_REASON, own_url)


def _domain_row(text: str, reason: str, own_url: str | None) -> WantedRule:
    """Convert a blocked domain.

    In Mastodon a block covers the domain and all below it, with any scheme and port: a star rule here, and some write
    the star.
    """
    domain = text.strip().removeprefix(STAR)
    if "*" in domain:
        raise RuleError(f"{domain[:200]!r} is obfuscated: the domain it stands for cannot be told")
    return WantedRule(rule=checked_rule(STAR + domain, own_url), reason=checked_reason(reason), expires_at=None)


def _records(file: IO[bytes], bad: list[LineNote]) -> Iterator[tuple[int, list[str]]]:
    """Yield each record and the line that it begins on; note in *bad* each line that is no CSV."""
    lines = _BoundedLines(file)
    reader = csv.reader(lines, strict=True)
    while True:
        start = lines.begin_record()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.number > start:
                raise CsvError(f"line {start}: a quoted field begins there and does not end well: {error}") from None
            bad.append(LineNote(line=start, text=f"no CSV: {error}"))
            continue
        if any(field.strip() for field in fields):
            yield start, fields


class _BoundedLines:
    """The lines of a file as text; iteration ends with `CsvError` at the first line that is too long or no UTF-8."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._file_bytes = 0
        self._record_bytes = 0
        self._record_line = 1
        self.number = 0

    def begin_record(self) -> int:
        """Begin a record, and return the number of the line that comes next."""
        self._record_bytes = 0
        self._record_line = self.number + 1
        return self._record_line

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_LINE_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._file_bytes += len(line)
        self._record_bytes += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise CsvError(f"line {self.number}: longer than {MAX_LINE_BYTES} bytes")
        if self._record_bytes > MAX_RECORD_BYTES:
            raise CsvError(f"line {self._record_line}: a quoted field begins there and does not end")
        if self._file_bytes > MAX_FILE_BYTES:
            raise CsvError(f"line {self.number}: the file is larger than {MAX_FILE_BYTES} bytes")
        try:
            return line.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise CsvError(f"line {self.number}: not UTF-8") from None


def _time(text: str, column: str) -> datetime | None:
    if not text.strip():
        return None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise RuleError(f"{column}: {text[:40]!r} is no time such as 2026-01-02T03:04:05Z") from None
    if time.tzinfo is None:
        raise RuleError(f"{column}: {text[:40]!r} names no time zone; write Z at its end for UTC")
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise RuleError(f"{column}: {text[:40]!r} lies outside the calendar") from None


def _time_text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _guarded(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) else text


def _unguarded(text: str) -> str:
    return text[1:] if _GUARDED_FORMULA.match(text) else text
