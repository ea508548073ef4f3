"""Blacklists as CSV: what is read, what is reported, what is bounded, and that an export comes back as it was."""

from __future__ import annotations

import asyncio
import csv
import io
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlmodel import col

from db import BlacklistedServer, BlacklistRevision, Database
from federation.admin import blacklist
from federation.admin.blacklist import BadRows, CsvError, Imported, ImportPlan
from federation.admin.blacklist import csv_lists as blacklist_csv
from federation.admin.blacklist.csv_lists import read_csv, write_entry, write_header
from federation.admin.blacklist.rows import Entry, shown_reason

PAST = datetime(2025, 1, 1, tzinfo=UTC)
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
OURS = "server_url,reason,expires_at,created_at\n"
MASTODON = "#domain,#severity,#reject_media,#reject_reports,#public_comment,#obfuscate\n"


def csv_file(text: str) -> io.BytesIO:
    return io.BytesIO(text.encode())


async def rows(database: Database) -> dict[str, tuple[str, datetime | None]]:
    page = await blacklist.list_rules(database, limit=10_000)
    return {entry.server_url: (entry.reason, entry.expires_at) for entry in page.entries}


async def imported(database: Database, text: str, *, skip_bad: bool = False) -> Imported:
    plan = await blacklist.plan_import(database, csv_file(text))
    return await blacklist.apply_import(database, plan, skip_bad=skip_bad)


def summary(plan: ImportPlan) -> tuple[list[str], list[str], list[str]]:
    """The rules added, changed and unchanged."""
    changed = [change.after.rule for change in plan.changed]
    return [rule.rule for rule in plan.added], changed, [rule.rule for rule in plan.unchanged]


async def test_a_plan_says_what_would_change_and_changes_nothing(database: Database) -> None:
    """Rules that are not there, that are otherwise, and that are as they should be; then the import does just that."""
    await blacklist.add(database, "https://same.example", reason="spam")
    await blacklist.add(database, "*.other.example", reason="spam")
    await blacklist.add(database, "https://unnamed.example", reason="stays")
    text = (
        OURS + "HTTPS://Same.example:443/,spam,,\n"
        f"*.other.example,spam,{SOON.isoformat()},\n"
        'https://new.example,"a, b\nand c",,2024-05-06T07:08:09+02:00\n'
    )
    before = await rows(database)
    plan = await blacklist.plan_import(database, csv_file(text))
    assert summary(plan) == (["https://new.example"], ["*.other.example"], ["https://same.example"])
    assert await rows(database) == before
    assert await blacklist.apply_import(database, plan) == Imported(added=1, changed=1, unchanged=1)
    assert await rows(database) == {
        "https://same.example": ("spam", None),
        "*.other.example": ("spam", SOON),
        "https://new.example": ("a, b and c", None),
        "https://unnamed.example": ("stays", None),
    }
    (new,) = await blacklist.check(database, "https://new.example")
    assert new.created_at == datetime(2024, 5, 6, 5, 8, 9, tzinfo=UTC)


async def test_an_import_done_again_changes_nothing(database: Database) -> None:
    """Not even the revision, so no process reads its rules again."""
    text = OURS + "".join(f"https://{number}.example,spam,,\n" for number in range(2_500))
    assert await imported(database, text) == Imported(added=2_500, changed=0, unchanged=0)
    before = await revision(database)
    assert await imported(database, text) == Imported(added=0, changed=0, unchanged=2_500)
    assert await revision(database) == before


async def revision(database: Database) -> int:
    async with database.read() as session:
        return (await session.execute(select(col(BlacklistRevision.revision)))).scalar_one()


async def test_a_plan_that_is_outdated_is_applied_to_what_is_there(database: Database) -> None:
    """Somebody added the rule meanwhile: there is still one row of it."""
    plan = await blacklist.plan_import(database, csv_file(OURS + "https://evil.example,ours,,\n"))
    await blacklist.add(database, "https://evil.example", reason="theirs")
    assert await blacklist.apply_import(database, plan) == Imported(added=0, changed=1, unchanged=0)
    assert await rows(database) == {"https://evil.example": ("ours", None)}


async def test_imports_at_once_make_one_row_of_each_rule(database: Database) -> None:
    """Each is planned while nothing is there; one adds, the others find it done."""
    text = OURS + "".join(f"https://{number}.example,spam,,\n" for number in range(50))
    plans = [await blacklist.plan_import(database, csv_file(text)) for _ in range(4)]
    done = await asyncio.gather(*(blacklist.apply_import(database, plan) for plan in plans))
    assert sorted(one.added for one in done) == [0, 0, 0, 50]
    page = await blacklist.list_rules(database, limit=1_000)
    assert len(page.entries) == 50


async def test_mastodons_domain_blocks_cover_the_domain_and_all_below_it(database: Database) -> None:
    """What is suspended there is blocked here; what is not is reported as skipped."""
    text = (
        MASTODON + 'evil.example,suspend,TRUE,TRUE,"spam, ""really""",FALSE\n'
        "Bücher.example,suspend,FALSE,FALSE,,FALSE\n"
        "loud.example,silence,FALSE,FALSE,noisy,FALSE\n"
        "images.example,noop,TRUE,FALSE,,FALSE\n"
    )
    plan = await blacklist.plan_import(database, csv_file(text))
    assert [(note.line, note.text) for note in plan.skipped] == [
        (4, "'loud.example' is no block: severity silence"),
        (5, "'images.example' is no block: severity noop"),
    ]
    assert plan.bad == ()
    await blacklist.apply_import(database, plan)
    assert await rows(database) == {
        "*.evil.example": ('spam, "really"', None),
        "*.xn--bcher-kva.example": ("Mastodon domain block", None),
    }
    for url in ("https://evil.example", "http://a.b.evil.example:8080"):
        assert await blacklist.check(database, url)


async def test_a_list_of_domains_alone_is_one_of_blocks(database: Database) -> None:
    """As Mastodon itself takes it."""
    assert await imported(database, "\ufeff#domain\r\nevil.example\r\n") == Imported(added=1, changed=0, unchanged=0)
    assert list(await rows(database)) == ["*.evil.example"]


async def test_a_star_before_a_domain_is_a_rule(database: Database) -> None:
    """Some lists write blocks as they are here; other stars hide what was meant."""
    text = MASTODON + "*.spam.example,suspend,FALSE,FALSE,spam,FALSE\n"
    assert await imported(database, text) == Imported(added=1, changed=0, unchanged=0)
    assert await rows(database) == {"*.spam.example": ("spam", None)}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
async def test_a_plain_list_of_domains_is_read(database: Database, newline: str) -> None:
    """Without a first line that says what it is; each is blocked with all below it."""
    lines = ["\ufeffevil.example", "", " B\u00fccher.example ", "*.spam.example", "evil.example", "203.0.113.7"]
    plan = await blacklist.plan_import(database, csv_file(newline.join(lines)))
    assert summary(plan)[0] == ["*.evil.example", "*.xn--bcher-kva.example", "*.spam.example", "*.203.0.113.7"]
    assert [(note.line, note.text) for note in plan.skipped] == [(5, "*.evil.example is on line 1 already")]
    assert plan.bad == ()
    await blacklist.apply_import(database, plan)
    assert {reason for reason, _ in (await rows(database)).values()} == {"on an imported list of domains"}


@pytest.mark.parametrize(
    ("first", "row", "problem"),
    [
        ("first.example", "ev*l.ex*mple", "obfuscated"),
        ("first.example", "https://evil.example", "is no rule"),
        ("first.example", "evil.example/x", "is no rule"),
        ("first.example", "a.example,spam", "2 fields, and the first line names 1"),
        ("first.example", "own.example", "covers this server itself"),
        ("own.example", "evil.example", "covers this server itself"),
    ],
)
def test_a_bad_row_of_a_plain_list_is_told(first: str, row: str, problem: str) -> None:
    """By its line, the first as well."""
    found = read_csv(csv_file(f"{first}\n{row}\nlast.example\n"), own_url="https://own.example")
    ((line, said),) = [(note.line, note.text) for note in found.bad]
    assert (line, problem in said) == (1 if first == "own.example" else 2, True), said
    assert "*.last.example" in found.rules


def test_a_domain_that_is_no_international_name_is_a_bad_row() -> None:
    """An emoji has no place in IDNA 2008. Its ASCII form has, and the other rows are read."""
    emoji = "\U0001f4a9.example"
    text = f"{MASTODON}{emoji},suspend,,,,\n{emoji * 1_000},suspend,,,,\n"
    found = read_csv(csv_file(f"{text}xn--ls8h.example,suspend,,,,\nlast.example,suspend,,,,\n"))
    assert [note.line for note in found.bad] == [2, 3]
    assert f"'*.{emoji}' is no rule: the host is no valid international name" in found.bad[0].text
    assert all(len(note.text) < 500 for note in found.bad)
    assert list(found.rules) == ["*.xn--ls8h.example", "*.last.example"]


BAD = {
    "obfuscated": (MASTODON, "ev*l.ex*mple,suspend,FALSE,FALSE,,TRUE", "obfuscated"),
    "severity": (MASTODON, "evil.example,banish,FALSE,FALSE,,FALSE", "severity 'banish'"),
    "no-domain": (MASTODON, ",suspend,FALSE,FALSE,spam,FALSE", "is no rule"),
    "few-fields": (MASTODON, "evil.example,suspend", "2 fields, and the first line names 6"),
    "many-fields": (OURS, "https://evil.example,spam,,,,", "6 fields, and the first line names 4"),
    "bare-host": (OURS, "evil.example,spam,,", "is no rule"),
    "path": (OURS, "https://evil.example/x,spam,,", "leave out what follows"),
    "no-reason": (OURS, "https://evil.example, ,,", "needs a reason"),
    "no-time": (OURS, "https://evil.example,spam,tomorrow,", "expires_at: 'tomorrow'"),
    "no-zone": (OURS, "https://evil.example,spam,2999-01-01T00:00:00,", "time zone"),
    "off-calendar": (OURS, "https://evil.example,spam,,0001-01-01T00:00:00+14:00", "outside the calendar"),
    "stray-quote": (OURS, '"https://evil.example"x,spam,,', "no CSV"),
    "own": (OURS, "*.example,spam,,", "covers this server itself"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_row_is_reported_with_its_line_and_stops_the_import(database: Database, kind: str) -> None:
    """Unless bad rows are to be skipped: then the others are imported."""
    header, row, problem = BAD[kind]
    if header == OURS:
        text = f"{header}*.first.example,spam,,\n\n{row}\n*.last.org,spam,,\n"
    else:
        text = f"{header}first.example,suspend,,,spam,\n\n{row}\nlast.org,suspend,,,spam,\n"
    plan = await blacklist.plan_import(database, csv_file(text), own_url="https://own.example")
    ((line, said),) = [(note.line, note.text) for note in plan.bad]
    assert (line, problem in said) == (4, True), said
    with pytest.raises(BadRows, match="line 4"):
        await blacklist.apply_import(database, plan)
    assert await rows(database) == {}
    assert (await blacklist.apply_import(database, plan, skip_bad=True)).added == 2
    assert set(await rows(database)) == {"*.first.example", "*.last.org"}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "line 1"),
        (b"a,b\n1,2\n", "line 1: names neither"),
        (b"server_url;reason\n", "separated by commas"),
        (b"server_url,reason,reason\n", "line 1"),
        (b"\x00\x01\x02", "line 1"),
        (b"\xff\xfes\x00e\x00", "line 1: not UTF-8"),
        (OURS.encode() + b"https://evil.example,\xe9,,\n", "line 2: not UTF-8"),
        (OURS.encode() + b"https://evil.example," + b"x" * 20_000 + b",,\n", "line 2: longer than"),
        (OURS.encode() + b'*.a.example,"spam\n' + b"*.b.example,spam,,\n" * 5_000, "line 2: .* not end$"),
        (OURS.encode() + b'*.a.example,x,,\n*.b.example,"spam,,\n*.c.example,spam,,\n', "line 3: a quoted field"),
        (OURS.encode() + b'*.a.example,"sp\nam"x,,\n', "line 2: a quoted field"),
        (OURS.encode() + b"x,\n" * 10_001, "more than 10000 bad rows"),
        (OURS.encode() + b"x" * 1024 * 1024, "line 2: longer than"),
        (b"a.example\n" + b"x" * 1024 * 1024, "line 2: longer than"),
        (b"x." * 512 * 1024, "line 1: longer than"),
        (b"domains\nevil.example\n", "line 1: names neither"),
        (b"# evil.example\n", "line 1: names neither"),
    ],
    ids=range(17),
)
def test_a_file_that_cannot_be_read_is_refused_as_a_whole(data: bytes, problem: str) -> None:
    """Where, and why."""
    with pytest.raises(CsvError, match=problem):
        read_csv(io.BytesIO(data))


def test_a_file_over_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """However harmless its lines."""
    monkeypatch.setattr(blacklist_csv, "MAX_FILE_BYTES", 1_000)
    with pytest.raises(CsvError, match="larger than"):
        read_csv(csv_file(OURS + "\n" * 2_000))


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    """A file of gigabytes in one line costs no more than a line may have."""

    class Endless(io.RawIOBase):
        taken = 0

        def readable(self) -> bool:
            return True

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert size > 0
            self.taken += size
            return b"x" * size

    endless = Endless()
    with pytest.raises(CsvError, match="longer than"):
        read_csv(endless)  # type: ignore[arg-type] # it has what is used
    assert endless.taken < 100_000


async def test_an_expired_row_is_skipped(database: Database) -> None:
    """It would change nothing."""
    plan = await blacklist.plan_import(database, csv_file(f"{OURS}*.a.example,spam,{PAST.isoformat()},\n"))
    assert summary(plan) == ([], [], [])
    assert [note.line for note in plan.skipped] == [2]


async def test_a_row_that_repeats_another_is_skipped(database: Database) -> None:
    """In another spelling, too."""
    plan = await blacklist.plan_import(
        database, csv_file(f"{OURS}https://a.example,spam,,\nhttps://A.example/,spam,,\n")
    )
    assert summary(plan) == (["https://a.example"], [], [])
    assert [(note.line, note.text) for note in plan.skipped] == [(3, "https://a.example is on line 2 already")]


async def test_merged_lists_may_differ_in_their_comments(database: Database) -> None:
    """The first comment counts, the later end, and what was left out is told."""
    text = (
        f"{OURS}*.a.example,spam,{SOON.isoformat()},\n*.a.example,abuse,{(SOON + timedelta(days=1)).isoformat()},\n"
        f"*.b.example,spam,,\n*.b.example,spam,{SOON.isoformat()},\n"
        f"*.c.example,spam,{SOON.isoformat()},\n*.C.example,abuse,,\n"
    )
    plan = await blacklist.plan_import(database, csv_file(text))
    assert plan.bad == ()
    differs = "already, with another reason or end: the first reason counts, and the later end"
    assert [(note.line, note.text) for note in plan.skipped] == [
        (3, f"*.a.example is on line 2 {differs}"),
        (5, f"*.b.example is on line 4 {differs}"),
        (7, f"*.c.example is on line 6 {differs}"),
    ]
    await blacklist.apply_import(database, plan)
    assert await rows(database) == {
        "*.a.example": ("spam", SOON + timedelta(days=1)),
        "*.b.example": ("spam", None),
        "*.c.example": ("spam", None),
    }


async def test_merged_lists_of_mastodon_may_differ_in_their_comments(database: Database) -> None:
    """And in how much they say of a domain."""
    text = f"{MASTODON}evil.example,suspend,,,spam,\nevil.example,silence,,,,\nevil.example,suspend,,,abuse,\n"
    assert await imported(database, text) == Imported(added=1, changed=0, unchanged=0)
    assert await rows(database) == {"*.evil.example": ("spam", None)}


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", "'=1", "''@x", '=HYPERLINK("http://x","y")', "'quoted'"]


async def test_an_export_holds_no_formula_and_comes_back(database: Database) -> None:
    """A spreadsheet sees texts; an import finds everything unchanged."""
    async with database.transaction() as session:
        for number, reason in enumerate([*FORMULAS, "", "two\nlines", "x" * 3_000, "plain"]):
            url = f"*.{number}x.example"
            session.add(BlacklistedServer(server_url=url, reason=reason, created_at=PAST, expires_at=SOON))
        session.add(BlacklistedServer(server_url="*.gone.example", reason="r", created_at=PAST, expires_at=PAST))
        session.add(BlacklistedServer(server_url="=cmd", reason="r", created_at=PAST))
    out = io.StringIO(newline="")
    assert await blacklist.export_csv(database, out) == 15
    cells = [cell for row in csv.reader(io.StringIO(out.getvalue(), newline="")) for cell in row]
    assert [cell for cell in cells if cell.lstrip()[:1] in set("=+-@")] == []
    plan = await blacklist.plan_import(database, csv_file(out.getvalue()))
    assert [note.text[:6] for note in plan.bad] == ["'=cmd'"]
    # What no reason of ours looks like, none and one that is too long, comes back mended.
    assert [change.after.rule for change in plan.changed] == ["*.10x.example", "*.12x.example"]
    assert (len(plan.unchanged), plan.added) == (12, ())


async def test_an_export_can_include_what_has_expired(database: Database) -> None:
    """Asked for, every row is there, in the order of the rules."""
    async with database.transaction() as session:
        for url, end in (("*.c.example", None), ("*.a.example", PAST), ("*.b.example", SOON)):
            session.add(BlacklistedServer(server_url=url, reason="r", created_at=PAST, expires_at=end))
    out = io.StringIO(newline="")
    assert await blacklist.export_csv(database, out, expired=True) == 3
    lines = out.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["server_url", "*.a.example", "*.b.example", "*.c.example"]
    assert lines[1] == "*.a.example,r,2025-01-01T00:00:00Z,2025-01-01T00:00:00Z"


REASONS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.text(alphabet="'=+-@ \t\n\",x", min_size=1, max_size=12),
).filter(shown_reason)


@given(REASONS, st.one_of(st.none(), st.just(SOON)))
def test_any_reason_survives_the_way_out_and_in(reason: str, end: datetime | None) -> None:
    """As it is shown; and its cell is no formula."""
    rule = "https://evil.example"
    out = io.StringIO(newline="")
    write_header(out)
    write_entry(out, Entry(id="x", rule=rule, server_url=rule, reason=reason, created_at=PAST, expires_at=end))
    found = read_csv(csv_file(out.getvalue()))
    assert (found.bad, found.skipped) == ([], [])
    wanted = found.rules[rule]
    assert (wanted.reason, wanted.expires_at, wanted.created_at) == (shown_reason(reason), end, PAST)
    (_, row) = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert row[1].lstrip()[0] not in "=+-@"


@given(st.binary(max_size=300), st.sampled_from([b"", OURS.encode(), MASTODON.encode()]))
def test_no_bytes_break_the_reader(data: bytes, header: bytes) -> None:
    """Whatever a file holds, it is read, reported by line, or refused."""
    with suppress(CsvError):
        found = read_csv(io.BytesIO(header + data))
        assert all(note.line >= 1 for note in [*found.bad, *found.skipped])
