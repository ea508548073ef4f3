"""`federation blacklist`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from federation.cli.lists import print_list
from federation.cli.options import AsJson, Columns, Limit, ServerUrl, Wide, group
from federation.cli.orders import order
from federation.cli.output import lasting, print_json, print_lines
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_database, with_node

if TYPE_CHECKING:
    from federation.admin.blacklist import Entry, Imported, ImportPlan
    from federation.runtime.composition import Federation

app = group("Refused servers: add, remove, check, list, import, export.")

MAX_SHOWN = 20

Rule: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="RULE", help="https://evil.example, or *.evil.example with all below it (quote the star).",
                   show_default=False),
]  # fmt: skip


@app.command("add")
def add(
    rule: Rule,
    reason: Annotated[str, typer.Option("--reason", help="Why; shown wherever the rule is.", show_default=False)],
    lasts: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long, as 12h or 30d; without it, for good.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a server or a domain, in every process within two seconds."""
    from federation.admin import blacklist
    from federation.base.settings.types import parse_duration

    try:
        expires_at = datetime.now(UTC) + parse_duration(lasts) if lasts else None
        change, entry = with_node(
            lambda federation: blacklist.add(
                federation.database,
                rule,
                reason=reason,
                expires_at=expires_at,
                own_url=federation.own_url,
                order=order("blacklist add", rule=rule, reason=reason, lasts=lasts),
            )
        )
    except ValueError as error:  # not a rule, or not a duration
        fail(str(error))
    if as_json:
        print_json({"change": change, "entry": entry})
    else:
        print_lines([f"{change.value}: {_told(entry)}"])


@app.command("remove")
def remove(rule: Rule, as_json: AsJson = False) -> None:
    """Lift a rule, in whatever spelling it is stored."""
    from federation.admin import blacklist

    asked = order("blacklist remove", rule=rule)
    gone = with_database(lambda database: blacklist.remove(database, rule, order=asked))
    if not gone:
        fail(f"there is no rule {rule}; `federation blacklist check URL` tells which rules cover a server",
             status=NOT_FOUND)  # fmt: skip
    if as_json:
        print_json(gone)
    else:
        print_lines(f"removed: {_told(entry)}" for entry in gone)


@app.command("check")
def check(url: ServerUrl, as_json: AsJson = False) -> None:
    """Tell which rules cover a server. Exit status 1 if there is one."""
    from federation.admin import blacklist

    found = with_database(lambda database: blacklist.check(database, url))
    if as_json:
        print_json(found)
    else:
        print_lines([_told(entry) for entry in found] or [f"{url} is not blacklisted"])
    if found:
        raise typer.Exit(NOT_FOUND)


@app.command("list")
def list_rules(
    limit: Limit = 100,
    after: Annotated[
        str | None, typer.Option("--after", metavar="CURSOR", help="Go on where the list before ended.")
    ] = None,
    wide: Wide = False,
    columns: Columns = None,
    as_json: AsJson = False,
) -> None:
    """List the rules, expired ones included."""
    from federation.admin import blacklist

    start = _cursor(after)
    page = with_database(lambda database: blacklist.list_rules(database, limit=limit, after=start))
    if as_json:
        print_json({"entries": page.entries, "after": " ".join(page.after) if page.after else None})
        return
    rows = ((e.rule, e.expires_at or "for good", e.created_at, e.reason) for e in page.entries)
    print_list(("RULE", "UNTIL", "SINCE", "REASON"), rows, few=("RULE", "UNTIL", "REASON"), wide=wide, chosen=columns)
    if page.after:
        print_lines([f"more: --after '{' '.join(page.after)}'"])


@app.command("import")
def import_rules(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False,
                                         help="An export of ours, Mastodon's domain blocks, or a list of domains.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Import the rest where rows are wrong.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Add the rules in a file, a CSV or a list.

    Rules that it does not name stay. All or nothing: with a wrong row nothing is imported unless --skip-bad, and the
    exit status is 1.
    """
    from federation.admin import blacklist

    async def plan(federation: Federation) -> ImportPlan:
        with file.open("rb") as opened:
            return await blacklist.plan_import(federation.database, opened, own_url=federation.own_url)

    try:
        with lasting("reading the rules"):
            planned = with_node(plan)
    except blacklist.CsvError as error:
        fail(f"{file}: {error}")
    refused = bool(planned.bad) and not skip_bad
    imported: Imported | None = None
    if not as_json:
        _print_plan(planned)
    if not dry_run and not refused:
        asked = order("blacklist import", file=file.name, skip_bad=skip_bad)
        with lasting("importing the rules"):
            imported = with_database(
                lambda database: blacklist.apply_import(database, planned, skip_bad=skip_bad, order=asked)
            )
    if as_json:
        print_json({"plan": planned, "imported": imported})
    elif imported is not None:
        print_lines(
            [f"imported: {imported.added} added, {imported.changed} changed, {imported.unchanged} as they were"]
        )
    elif refused:
        fail("nothing was imported; mend the rows, or leave them out with --skip-bad", status=NOT_FOUND)
    if refused:
        raise typer.Exit(NOT_FOUND)


@app.command("export")
def export(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here instead of to standard output.")
    ] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Include rules that are no longer in force.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the rules as CSV. A file is replaced in one step.

    With --json the CSV needs a file, and the document says what is in it; `blacklist list --json` prints the rules.
    """
    from federation.admin import blacklist
    from federation.admin.blacklist.importing import whole_file

    if as_json and output is None:
        fail("say where the CSV goes: --output FILE; for the rules as JSON there is `federation blacklist list --json`")
    with whole_file(output) as file:
        number = with_database(lambda database: blacklist.export_csv(database, file, expired=expired))
    if as_json:
        print_json({"file": str(output), "rules": number})


def _print_plan(plan: ImportPlan) -> None:
    from federation.admin.words import counted

    lines = [f"+ {wanted.rule}: {wanted.reason}" for wanted in plan.added]
    lines += [f"~ {change.after.rule}: {change.after.reason}" for change in plan.changed]
    print_lines(lines[:MAX_SHOWN])
    if len(lines) > MAX_SHOWN:
        print_lines([f"  and {len(lines) - MAX_SHOWN} more"])
    for kind, notes in (("left out", plan.skipped), ("wrong", plan.bad)):
        print_lines(f"{kind}: line {note.line}: {note.text}" for note in notes[:MAX_SHOWN])
        if len(notes) > MAX_SHOWN:
            print_lines([f"{kind}: and {counted(len(notes) - MAX_SHOWN, 'more line')}"])
    counts = f"{len(plan.added)} new, {len(plan.changed)} changed, {len(plan.unchanged)} as they are"
    print_lines([f"{counts}, {len(plan.skipped)} left out, {len(plan.bad)} wrong"])


def _told(entry: Entry) -> str:
    until = f"until {entry.expires_at:%Y-%m-%d %H:%M} UTC" if entry.expires_at else "for good"
    return f"{entry.rule}, {until}: {entry.reason}"


def _cursor(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    url, _, row = text.rpartition(" ")
    return url, row
